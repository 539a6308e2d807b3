//! `dflop top`: shows how a training run goes on.

mod screen;
mod state;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use dflop_executor::comm::launch::StopSignals;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Output, write_json};
use dflop_executor::step_record::{FILE_NAME, Follower, unix_seconds};
use screen::lines;
use state::{Phase, RunLines, RunState};

/// Line width without a terminal.
const WIDTH: usize = 100;
/// Time between two looks at the record.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between looks for a signal.
const POLL: Duration = Duration::from_millis(50);

/// Show the progress of a run: steps, time left, loss, speed, and the bottleneck.
///
/// RUN is the checkpoint directory from `dflop train`, which keeps `steps.jsonl` there, or such a file;
/// `dflop.monitor.Record` in the Python package writes such a file for any training loop. On a terminal the
/// lines are drawn again until the run ends, or Ctrl-C; elsewhere they are printed once.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Run directory or run record.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Print the state once, also on a terminal.
    #[arg(long)]
    once: bool,
    /// Print the state once, as a JSON object.
    #[arg(long)]
    json: bool,
}

/// Run state with the last checkpoint.
#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    state: &'a RunState,
    /// Directory name of the last checkpoint.
    checkpoint: Option<String>,
    checkpoint_age_seconds: Option<f64>,
}

pub(crate) fn run(args: &TopArgs, out: &mut Output) -> Result<(), Failure> {
    let is_directory = args.run.is_dir();
    let record = if is_directory { args.run.join(FILE_NAME) } else { args.run.clone() };
    let is_live = !args.once && !args.json && std::io::stdout().is_terminal();
    // A run may be about to write its record into a directory that is there.
    let may_come = is_live && is_directory;
    if !record.exists() && !may_come {
        return Err(Failure::Failed(format!(
            "expected a directory with `{FILE_NAME}`, which `dflop train` writes into its directory of checkpoints, or \
             such a file; found none"
        ))
        .in_file(&args.run));
    }
    let mut watched = Watched { follower: Follower::new(&record), run: RunLines::default(), record };
    if is_live {
        return watch(&mut watched, out);
    }
    let state = watched.look()?;
    let saved = watched.saved();
    if args.json {
        let (checkpoint, checkpoint_age_seconds) = saved.unzip();
        return write_json(out, &Answer { state: &state, checkpoint, checkpoint_age_seconds });
    }
    for line in lines(&watched.run, &state, saved, WIDTH) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Draws the state until the run ends or a signal comes.
fn watch(watched: &mut Watched, out: &mut Output) -> Result<(), Failure> {
    let signals = StopSignals::register().map_err(dflop_executor::Error::from)?;
    let mut drawn = 0;
    loop {
        let state = watched.look()?;
        // Asked for each time: a window changes its size.
        let columns = rustix::termios::tcgetwinsize(std::io::stdout()).map_or(0, |size| size.ws_col);
        let width = if columns == 0 { WIDTH } else { usize::from(columns) - 1 };
        let lines = lines(&watched.run, &state, watched.saved(), width);
        // Over the previous lines, in one write: no flicker, and the text above stays.
        if drawn > 0 {
            write!(out, "\x1b[{drawn}A")?;
        }
        for line in &lines {
            writeln!(out, "{line}\x1b[K")?;
        }
        write!(out, "\x1b[J")?;
        out.flush()?;
        drawn = lines.len();
        if matches!(state.phase, Phase::Completed | Phase::Stopped | Phase::Failed) {
            return Ok(());
        }
        let next = Instant::now() + INTERVAL;
        while Instant::now() < next {
            if signals.received().is_some() {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
    }
}

/// A run that is looked at.
struct Watched {
    record: PathBuf,
    follower: Follower,
    run: RunLines,
}

impl Watched {
    /// Reads new lines, and returns the state.
    fn look(&mut self) -> Result<RunState, Failure> {
        let news = self.follower.read().map_err(|error| Failure::from(error).in_file(&self.record))?;
        if news.is_restarted {
            self.run = RunLines::default();
        }
        self.run.add(news.lines);
        Ok(self.run.state(unix_seconds()))
    }

    /// Returns the name and the age in seconds for the last complete checkpoint next to the record.
    fn saved(&self) -> Option<(String, f64)> {
        let directory = self.record.parent().filter(|parent| !parent.as_os_str().is_empty());
        let entries = std::fs::read_dir(directory.unwrap_or(Path::new("."))).ok()?;
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().ok();
        let is_state = |name: &String| {
            name.strip_prefix("step-").is_some_and(|step| step.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let last = entries.filter_map(Result::ok).filter_map(name).filter(is_state).max()?;
        let manifest = directory.unwrap_or(Path::new(".")).join(&last).join("manifest.json");
        let written = std::fs::metadata(manifest).and_then(|about| about.modified()).ok()?;
        let age = written.elapsed().map_or(0.0, |age| age.as_secs_f64());
        Some((last, age))
    }
}
