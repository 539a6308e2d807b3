//! The record of a run, a file of JSON lines: what the run is, then a line for each step, and how it ended.
//!
//! Writes the record of a run.
//!
//! `dflop train` and the Python package write it, `dflop top` and `dflop report` read it. A resumed run
//! appends another heading; a line that a killed process cut is the last one, and is left out.

mod line;

use dflop_loader::files::open_own;
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufRead, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;

pub use line::{EndLine, EvaluationLine, Follower, Heading, Line, Outcome, StepLine, unix_seconds};

/// Name of the record in the directory of a run.
pub const FILE_NAME: &str = "steps.jsonl";
/// Longest line that is read; one of a step has a few hundred bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Reads the next line of a file into `line`, with its end if it is complete; returns its length.
///
/// # Errors
/// [`ErrorKind::InvalidData`] for a line that is too long to be one of a step; of the file.
pub fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<usize> {
    line.clear();
    let bytes = reader.take(LINE_BYTES_MAX).read_until(b'\n', line)?;
    if bytes as u64 == LINE_BYTES_MAX && line.last() != Some(&b'\n') {
        let reason = format!("expected lines of steps, found one of more than {LINE_BYTES_MAX} bytes");
        return Err(io::Error::new(ErrorKind::InvalidData, reason));
    }
    Ok(bytes)
}

/// Writes the record of a run. A line that cannot be written, as on a full disk, ends the record with a
/// warning, and not the run.
#[derive(Debug)]
pub struct StepRecorder(Option<File>);

/// A step with the time at which it ended.
#[derive(Serialize)]
struct Timed<'a, T> {
    #[serde(flatten)]
    step: &'a T,
    time: f64,
}

impl StepRecorder {
    /// Opens the record that the user named and writes its heading. A run that starts with step 0 replaces
    /// the contents; a resumed one keeps the lines before the first line of its first step or a later one.
    ///
    /// # Errors
    /// Of the file system.
    pub fn open(path: &Path, heading: &Heading) -> io::Result<Self> {
        Self::start(path, heading, |path| File::options().create(true).write(true).truncate(false).open(path))
    }

    /// Opens the record in a directory of the run, as [`Self::open`] does, but no link or device.
    ///
    /// # Errors
    /// Of the file system, and if a link or a device has the name.
    pub fn open_own(path: &Path, heading: &Heading) -> io::Result<Self> {
        Self::start(path, heading, open_own)
    }

    fn start(
        path: &Path,
        heading: &Heading,
        open: impl FnOnce(&Path) -> io::Result<File>,
    ) -> io::Result<Self> {
        let mut file = open(path)?;
        let kept = match heading.first_step {
            0 => 0,
            first => kept_bytes(path, first)?,
        };
        if file.metadata()?.is_file() {
            file.set_len(kept)?;
            file.seek(SeekFrom::End(0))?;
        }
        write_line(&mut file, heading)?;
        Ok(Self(Some(file)))
    }

    /// Records a step; `step` serializes as an object.
    pub fn step(&mut self, step: &impl Serialize) {
        self.write(&Timed { step, time: unix_seconds() });
    }

    /// Records the end of the run.
    pub fn end(&mut self, outcome: Outcome, reason: &str) {
        self.write(&EndLine::new(outcome, reason.to_owned()));
    }

    fn write(&mut self, line: &impl Serialize) {
        let Some(file) = &mut self.0 else { return };
        if let Err(error) = write_line(file, line) {
            tracing::warn!(%error, "the record of steps ends here");
            self.0 = None;
        }
    }
}

/// Writes a line in one piece, so that a killed process cuts at most the last one.
fn write_line(file: &mut File, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)
}

/// Returns the length of the lines before the first one of step `first` or a later one.
fn kept_bytes(path: &Path, first: u64) -> io::Result<u64> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        bytes => bytes?,
    };
    let is_kept = |line: &&[u8]| {
        let text = String::from_utf8_lossy(line);
        line.ends_with(b"\n")
            && !matches!(Line::parse(&text), Ok(Some(Line::Step(step))) if step.step >= first)
    };
    Ok(bytes.split_inclusive(|byte| *byte == b'\n').take_while(is_kept).map(|line| line.len() as u64).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn heading(first: u64) -> Heading {
        Heading::new("run".to_owned(), first, None, Vec::new())
    }

    fn steps(recorder: &mut StepRecorder, steps: std::ops::Range<u64>) {
        steps.for_each(|step| recorder.step(&json!({"step": step, "seconds": 1.0})));
    }

    /// Steps by number, and `H` and `E` for headings and ends.
    fn kinds(path: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap();
        let kind = |line: &str| {
            let value: Value = serde_json::from_str(line).unwrap();
            assert!(value["time"].as_f64().unwrap() > 1e9, "{line}");
            let step = value["step"].as_u64().map(|step| step.to_string());
            step.unwrap_or_else(|| if value["end"].is_string() { "E" } else { "H" }.to_owned())
        };
        text.lines().map(kind).collect()
    }

    #[test]
    fn a_resumed_run_follows_the_steps_that_it_keeps() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("steps.jsonl");
        let mut recorder = StepRecorder::open(&path, &heading(0)).unwrap();
        steps(&mut recorder, 0..4);
        recorder.end(Outcome::Failed, "no space");
        assert_eq!(kinds(&path), ["H", "0", "1", "2", "3", "E"]);
        steps(&mut StepRecorder::open(&path, &heading(4)).unwrap(), 4..6);
        assert_eq!(kinds(&path), ["H", "0", "1", "2", "3", "E", "H", "4", "5"]);
        File::options().append(true).open(&path).unwrap().write_all(b"{\"step\":6,\"sec").unwrap();
        steps(&mut StepRecorder::open(&path, &heading(2)).unwrap(), 2..3);
        assert_eq!(kinds(&path), ["H", "0", "1", "H", "2"]);
        steps(&mut StepRecorder::open(&path, &heading(0)).unwrap(), 0..1);
        assert_eq!(kinds(&path), ["H", "0"]);
        assert!(StepRecorder::open(&directory.path().join("none/steps.jsonl"), &heading(0)).is_err());
    }

    #[test]
    fn a_full_disk_ends_the_record_and_not_the_run() {
        if let Ok(full) = File::options().write(true).open("/dev/full") {
            let mut recorder = StepRecorder(Some(full));
            steps(&mut recorder, 0..2);
            assert!(recorder.0.is_none());
        }
    }
}
