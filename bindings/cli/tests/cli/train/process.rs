//! Starts a run and watches the output and the ranks, which are processes.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::config::Job;
use crate::command::Run;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A run under way.
pub(crate) struct Watched {
    child: Child,
    stdout: BufReader<ChildStdout>,
    /// Lines that were read.
    pub(crate) lines: Vec<Value>,
    read: String,
}

impl Watched {
    pub(crate) fn start(job: &Job, args: &[&str]) -> Self {
        let mut command = job.command(args);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
        let stdout = BufReader::new(child.stdout.take().expect("standard output is piped"));
        Self { child, stdout, lines: Vec::new(), read: String::new() }
    }

    /// Waits for this many more lines.
    pub(crate) fn wait_for(&mut self, lines: usize) {
        for _ in 0..lines {
            let mut line = String::new();
            self.stdout.read_line(&mut line).expect("standard output can be read");
            let Ok(object) = serde_json::from_str(&line) else { panic!("`{line}`: {}", self.said()) };
            self.lines.push(object);
            self.read.push_str(&line);
        }
    }

    fn said(&mut self) -> String {
        let mut said = String::new();
        drop(self.child.stderr.as_mut().map(|stderr| stderr.read_to_string(&mut said)));
        said
    }

    /// Sends a signal to the command, which started the ranks or is all of them.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(pid(self.child.id()), signal).expect("the command runs");
    }

    /// Closes the reading end of the command's standard output.
    pub(crate) fn close_output(self) -> Unread {
        let ranks = children(self.child.id());
        Unread { child: self.child, ranks }
    }

    /// Rank process.
    pub(crate) fn rank(&self, rank: usize) -> Pid {
        let is_rank = |pid: &u32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let variable = format!("RANK={rank}");
            environment.split(|&byte| byte == 0).any(|own| own == variable.as_bytes())
        };
        let mut children = children(self.child.id());
        children.retain(is_rank);
        assert_eq!(children.len(), 1, "one process is rank {rank}");
        pid(children[0])
    }

    /// Ends the launcher as a machine crash would, and waits until the ranks are gone too.
    pub(crate) fn kill(mut self) -> Vec<Value> {
        let ranks = children(self.child.id());
        assert!(!ranks.is_empty(), "ranks are processes");
        self.child.kill().expect("the launcher can be killed");
        self.child.wait().expect("the launcher ends");
        let start = Instant::now();
        while ranks.iter().any(|&rank| is_running(rank)) {
            assert!(start.elapsed() < PATIENCE, "a rank outlives its launcher");
            std::thread::sleep(Duration::from_millis(5));
        }
        // A line may be cut where the launcher was killed.
        let rest =
            self.stdout.lines().map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok());
        self.lines.extend(rest);
        self.lines
    }

    /// Waits for the end; how long it took.
    pub(crate) fn end(mut self) -> (Run, Duration) {
        let start = Instant::now();
        self.stdout.read_to_string(&mut self.read).expect("standard output can be read");
        let stderr = self.said();
        let status = self.child.wait().expect("the command ends").code();
        (Run { status, stdout: self.read, stderr }, start.elapsed())
    }
}

/// A run whose output nobody reads.
pub(crate) struct Unread {
    child: Child,
    ranks: Vec<u32>,
}

impl Unread {
    /// Waits for the end, after which no rank may be running.
    pub(crate) fn end(mut self) -> Run {
        let mut stderr = String::new();
        let pipe = self.child.stderr.as_mut().expect("standard error is piped");
        pipe.read_to_string(&mut stderr).expect("standard error can be read");
        let status = self.child.wait().expect("the command ends").code();
        assert!(!self.ranks.iter().any(|&rank| is_running(rank)), "a rank outlives its launcher");
        Run { status, stdout: String::new(), stderr }
    }
}

pub(crate) fn kill(rank: Pid) {
    kill_process(rank, Signal::KILL).expect("the rank runs");
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(number.try_into().expect("a process number")).expect("not 0")
}

/// Parent and state of a process.
fn stat(process: u32) -> Option<(u32, char)> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // After the name, which may contain spaces.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((fields.next()?.parse().ok()?, state))
}

/// Neither gone nor waiting for its parent to collect the exit status.
fn is_running(process: u32) -> bool {
    stat(process).is_some_and(|(_, state)| !matches!(state, 'Z' | 'X'))
}

fn children(parent: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("processes are listed");
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers.filter(|&process| stat(process).is_some_and(|(its, _)| its == parent)).collect()
}
