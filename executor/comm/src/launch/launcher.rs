//! Starts all ranks in a job on this machine, passes their output on line by line, and ends them together.
//!
//! Turns `SIGINT` and `SIGTERM` into stop requests, of which a second ends the process, and ends a rank whose
//! launcher was killed.

use crate::error::{EXIT_SECONDARY, Error, Result};
use crate::rendezvous::{JobToken, RendezvousServer};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::ffi::OsString;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Starts several processes with the same command as the ranks of a job.
///
/// # Examples
/// ```no_run
/// use dflop_comm::launch::Launcher;
///
/// let outcome = Launcher::new("dflop", 4)?.args(["train", "train.toml"]).run()?;
/// assert!(outcome.is_success(), "{outcome:?}");
/// # Ok::<(), dflop_comm::Error>(())
/// ```
#[derive(Debug)]
pub struct Launcher {
    program: OsString,
    args: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    ranks: usize,
    listen: IpAddr,
    grace: Duration,
    is_first_plain: bool,
}

/// Job outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobOutcome {
    /// Rank that failed first, if any. Ranks that ended because another rank failed come last.
    pub failed: Option<RankStatus>,
    /// Signal that asked the job to stop: Ctrl-C, or a termination request, sent to the launcher or to a
    /// rank. Ranks that stop in order end with success, or with 128 plus the signal number.
    pub interrupted: Option<i32>,
    /// Exit status for every rank, in rank order.
    pub ranks: Vec<RankStatus>,
}

impl JobOutcome {
    /// Returns whether every rank succeeded without an interruption.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.failed.is_none() && self.interrupted.is_none()
    }
}

impl Launcher {
    const POLL: Duration = Duration::from_millis(5);
    /// Time in which a killed rank must end.
    const KILLED: Duration = Duration::from_secs(10);
    /// Time after a first failure in which other ranks may end and report whether they caused the failure.
    const SETTLE: Duration = Duration::from_millis(500);

    /// Prepares a job with `ranks` processes running a program.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if `ranks` is 0.
    pub fn new(program: impl Into<OsString>, ranks: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::InvalidSetting {
                setting: "local ranks",
                reason: "must be at least 1".into(),
            });
        }
        Ok(Self {
            program: program.into(),
            args: Vec::new(),
            variables: Vec::new(),
            ranks,
            listen: Ipv4Addr::LOCALHOST.into(),
            grace: Duration::from_secs(3),
            is_first_plain: false,
        })
    }

    /// Adds arguments, the same for every rank.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to the environment of every rank.
    #[must_use]
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Passes standard output from rank 0 on unchanged, for programs that read it. Output from other ranks,
    /// and standard error from all ranks, keeps the rank prefix in every line.
    #[must_use]
    pub fn first_rank_prints_plainly(mut self) -> Self {
        self.is_first_plain = true;
        self
    }

    /// Sets the address that the rendezvous server and all ranks listen on. Default: 127.0.0.1.
    #[must_use]
    pub fn listen(mut self, address: IpAddr) -> Self {
        self.listen = address;
        self
    }

    /// Sets the time that ranks have between `SIGTERM` and being killed. Default: 3 s.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Runs the job to completion. Output from all ranks appears on the output of this process, with `[rank]`
    /// before every line.
    ///
    /// Hosts the rendezvous server on a free port and draws the job token. When a rank fails, the remaining
    /// ranks have half a second to end on their own, then receive `SIGTERM`, then are killed. `SIGINT` and
    /// `SIGTERM` are passed on to all ranks, which may take as long as they need to end, for example to save
    /// their state; a second signal, a second or more after the first, kills them. When standard output is
    /// closed, the output pipe from a rank that prints plainly is also closed. No rank outlives this call.
    ///
    /// # Errors
    /// [`Error::Listen`] if the rendezvous server cannot listen; [`Error::Io`] if a process cannot be
    /// started.
    pub fn run(&self) -> Result<JobOutcome> {
        let signals = StopSignals::register()?;
        let token = JobToken::random()?;
        let host = RendezvousServer::start(&[SocketAddr::new(self.listen, 0)], self.ranks, token.clone())?;
        let mut processes = RankProcesses { ranks: Vec::new(), printers: Vec::new(), ended: Vec::new() };
        for rank in 0..self.ranks {
            processes.start(rank, self.command(rank, host.address(), &token), self.is_first_plain)?;
        }
        let mut interrupted: Option<(Signal, Instant)> = None;
        let is_refused = loop {
            processes.collect()?;
            let has_failed = processes.ended.iter().any(RankStatus::is_failed);
            if has_failed || processes.is_over() {
                break false;
            }
            match (signals.take(), interrupted) {
                (Some(signal), None) => {
                    interrupted = Some((signal, Instant::now()));
                    processes.send(signal);
                }
                (Some(_), Some((_, first))) if first.elapsed() >= SAME_REQUEST => break true,
                _ => {}
            }
            std::thread::sleep(Self::POLL);
        };
        if is_refused {
            processes.kill()?;
        } else {
            processes.wait(Self::SETTLE)?;
            processes.end(self.grace)?;
        }
        Ok(processes.outcome(interrupted.map(|(signal, _)| signal.as_raw())))
    }

    fn command(&self, rank: usize, store: SocketAddr, token: &JobToken) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", self.ranks.to_string()).env("LOCAL_WORLD_SIZE", self.ranks.to_string());
        command.env("MASTER_ADDR", store.ip().to_string()).env("DFLOP_PORT", store.port().to_string());
        command.env("DFLOP_STORE", "launcher").env("DFLOP_JOB_TOKEN", token.secret());
        command.env("DFLOP_LISTEN", self.listen.to_string());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

/// Job processes. Running processes are killed on drop.
struct RankProcesses {
    ranks: Vec<Option<Child>>,
    printers: Vec<JoinHandle<()>>,
    /// Ranks in the order in which they ended.
    ended: Vec<RankStatus>,
}

impl RankProcesses {
    fn start(&mut self, rank: usize, mut command: Command, is_first_plain: bool) -> Result<()> {
        let mut child = command.spawn().map_err(|source| {
            let program = command.get_program().to_string_lossy();
            Error::Io { action: format!("start `{program}` as rank {rank}"), source }
        })?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        // It is ended with the remaining ranks if no thread reads its output.
        self.ranks.push(Some(child));
        let unread = |source| Error::Io { action: format!("read the output of rank {rank}"), source };
        if let Some(output) = output {
            // prefixed lines are not parseable as JSON
            let is_plain = rank == 0 && is_first_plain;
            let before = if is_plain { String::new() } else { prefix(rank) };
            // the closed output tells the rank that nobody reads it any more
            let when_closed = if is_plain { WhenClosed::Close } else { WhenClosed::Discard };
            let printer = pass_on(before, output, when_closed, || Box::new(io::stdout()));
            self.printers.push(printer.map_err(unread)?);
        }
        if let Some(errors) = errors {
            let to = || -> Box<dyn io::Write> { Box::new(io::stderr()) };
            let printer = pass_on(prefix(rank), errors, WhenClosed::Discard, to);
            self.printers.push(printer.map_err(unread)?);
        }
        Ok(())
    }

    /// Collects ranks that have ended. Among ranks found at the same time, a rank that was ended by a signal
    /// comes first: the remaining ranks noticed its death.
    fn collect(&mut self) -> Result<()> {
        let mut found = Vec::new();
        for (rank, slot) in self.ranks.iter_mut().enumerate() {
            let Some(child) = slot else { continue };
            let failed = |source| Error::Io { action: format!("wait for rank {rank}"), source };
            if let Some(status) = child.try_wait().map_err(failed)? {
                found.push(RankStatus { rank, status });
                *slot = None;
            }
        }
        // `false` sorts first: ranks that ended by a signal have no code
        found.sort_by_key(|ended| ended.status.code().is_some());
        self.ended.append(&mut found);
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.ranks.iter().all(Option::is_none)
    }

    /// Waits for the ranks to end, at most this long.
    fn wait(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while !self.is_over() && Instant::now() < deadline {
            std::thread::sleep(Launcher::POLL);
            self.collect()?;
        }
        Ok(())
    }

    /// Sends a signal to the running ranks.
    fn send(&self, signal: Signal) {
        for child in self.ranks.iter().flatten() {
            // the process was not reaped yet, so its id cannot belong to another process
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, signal);
            }
        }
    }

    /// Ends the running ranks: asks, waits, kills.
    fn end(&mut self, grace: Duration) -> Result<()> {
        self.send(Signal::TERM);
        self.wait(grace)?;
        self.kill()
    }

    /// Kills the running ranks.
    fn kill(&mut self) -> Result<()> {
        for child in self.ranks.iter_mut().flatten() {
            // killing a process that has just ended is not an error
            let _ = child.kill();
        }
        self.wait(Launcher::KILLED)?;
        let stays = |(rank, slot): (usize, &Option<Child>)| slot.as_ref().map(|child| (rank, child.id()));
        match self.ranks.iter().enumerate().find_map(stays) {
            None => Ok(()),
            Some((rank, process)) => {
                let action = format!("end rank {rank}: process {process} was killed but does not end");
                Err(Error::Io { action, source: io::ErrorKind::TimedOut.into() })
            }
        }
    }

    fn outcome(mut self, interrupted: Option<i32>) -> JobOutcome {
        for printer in self.printers.drain(..) {
            // do not wait for output from grandchildren that still hold the pipe
            let deadline = Instant::now() + Duration::from_millis(200);
            while !printer.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Launcher::POLL);
            }
        }
        let failures = || self.ended.iter().filter(|ended| ended.is_failed());
        let failed = failures().find(|ended| !ended.is_secondary()).or_else(|| failures().next()).copied();
        let failed = failed.filter(|_| interrupted.is_none());
        let stopped = || self.ended.iter().find_map(RankStatus::stopped_by);
        let interrupted = interrupted.or_else(stopped).filter(|_| failed.is_none());
        let mut ranks = std::mem::take(&mut self.ended);
        ranks.sort_by_key(|ended| ended.rank);
        JobOutcome { failed, interrupted, ranks }
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        for child in self.ranks.iter_mut().flatten() {
            let _ = child.kill();
        }
        // a process that waits inside the kernel ends later, or never
        let _ = self.wait(Launcher::KILLED);
    }
}

/// Maximum line length in bytes that is kept together; longer lines are split.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Returns the prefix for every line from a rank.
pub(super) fn prefix(rank: usize) -> String {
    format!("[{rank}] ")
}

/// Handling of rank output when the output of this process is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WhenClosed {
    /// Read and discard it: the rank must not stop because nobody reads the output any more.
    Discard,
    /// Close it as well.
    Close,
}

/// Copies lines from a rank to this process until the rank closes the pipe.
///
/// # Errors
/// If the system has no thread for it.
pub(super) fn pass_on(
    prefix: String,
    from: impl Read + Send + 'static,
    when_closed: WhenClosed,
    to: impl Fn() -> Box<dyn Write> + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("rank-output".into()).spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = prefix.into_bytes();
        let prefix_bytes = line.len();
        loop {
            line.truncate(prefix_bytes);
            // bounded: a rank that prints no newline must not fill the launcher's memory
            let read = (&mut from).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
            if !read.is_ok_and(|bytes| bytes > 0) {
                return;
            }
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            let mut to = to();
            let written = to.write_all(&line).and_then(|()| to.flush());
            if written.is_err() && when_closed == WhenClosed::Close {
                return;
            }
        }
    })
}

/// Exit status of a rank process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankStatus {
    /// Rank number.
    pub rank: usize,
    /// Exit status, or the signal that ended the rank.
    pub status: ExitStatus,
}

impl RankStatus {
    /// Returns whether the rank reported that it ended because another rank failed.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        self.status.code() == Some(i32::from(EXIT_SECONDARY))
    }

    /// Returns the signal on which the rank stopped in order: it ended with 128 plus the signal number.
    #[must_use]
    pub fn stopped_by(&self) -> Option<i32> {
        let signals = [Signal::INT, Signal::TERM].map(Signal::as_raw);
        signals.into_iter().find(|signal| self.status.code() == Some(128 + signal))
    }

    /// Returns whether the rank neither succeeded nor stopped in order.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        !self.status.success() && self.stopped_by().is_none()
    }
}

impl fmt::Display for RankStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ended with {}", self.rank, self.status)
    }
}

/// Time after a first signal within which further signals are the same request: `timeout` and terminals
/// signal both a process and the process group.
pub(super) const SAME_REQUEST: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(50);

/// `SIGINT` and `SIGTERM` handlers, while they exist. Dropping them restores the default effect.
#[derive(Debug)]
pub struct StopSignals {
    received: Arc<AtomicUsize>,
    ids: Vec<signal_hook::SigId>,
    /// Restores the default effect of signals once set.
    is_default: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
}

impl StopSignals {
    /// Registers handlers that record a signal and do nothing else.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn register() -> Result<Self> {
        let (received, is_default, is_over) = (Arc::default(), Arc::<AtomicBool>::default(), Arc::default());
        let mut signals = Self { received, ids: Vec::new(), is_default, is_over };
        let failed = |source| Error::Io { action: "register signal handlers".into(), source };
        for signal in [SIGINT, SIGTERM] {
            // first, so that the signal which sets the flag is not affected by it
            flag::register_conditional_default(signal, signals.is_default.clone()).map_err(failed)?;
            let id = flag::register_usize(signal, signals.received.clone(), signal as usize);
            signals.ids.push(id.map_err(failed)?);
        }
        Ok(signals)
    }

    /// Lets a signal that arrives a second or more after the first signal end this process at once.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread can be started.
    pub fn second_ends_process(self) -> Result<Self> {
        let (received, is_default) = (self.received.clone(), self.is_default.clone());
        let is_over = self.is_over.clone();
        let watch = move || {
            while received.load(Ordering::Relaxed) == 0 && !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(POLL);
            }
            std::thread::sleep(SAME_REQUEST);
            is_default.store(true, Ordering::Relaxed);
        };
        let thread = std::thread::Builder::new().name("stop-signals".into()).spawn(watch);
        thread.map_err(|source| Error::Io { action: "watch for signals".into(), source })?;
        Ok(self)
    }

    /// Returns the last signal that was received, if any.
    #[must_use]
    pub fn received(&self) -> Option<Signal> {
        named(self.received.load(Ordering::Relaxed))
    }

    /// Returns the last signal and forgets it.
    pub(super) fn take(&self) -> Option<Signal> {
        named(self.received.swap(0, Ordering::Relaxed))
    }
}

fn named(signal: usize) -> Option<Signal> {
    [Signal::INT, Signal::TERM].into_iter().find(|own| own.as_raw() as usize == signal)
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
        self.is_over.store(true, Ordering::Relaxed);
        self.is_default.store(true, Ordering::Relaxed);
    }
}

/// Returns whether a [`Launcher`](super::Launcher) started this process: it passes signals on, and kills a
/// rank that does not end.
#[must_use]
pub fn has_launcher() -> bool {
    std::env::var_os("DFLOP_STORE").is_some_and(|store| store == "launcher")
}

/// Requests that the system ends this process when the parent dies for any reason.
///
/// Only takes effect in ranks that [`Launcher`](super::Launcher) started, which have `DFLOP_STORE=launcher`
/// set. Linux only; on other systems ranks continue to the end after the launcher is killed.
///
/// # Errors
/// [`Error::Io`] if the system refuses, or the launcher is already dead.
pub fn end_with_launcher() -> Result<()> {
    #[cfg(target_os = "linux")]
    if has_launcher() {
        use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
        let failed = |source| Error::Io { action: "tie this rank to its launcher".into(), source };
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| failed(error.into()))?;
        // the launcher may have died before the request above took effect
        if getppid() == Some(Pid::INIT) {
            return Err(failed(std::io::Error::other("the launcher died")));
        }
    }
    Ok(())
}
