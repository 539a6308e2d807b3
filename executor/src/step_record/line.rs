//! Lines of a record.
//!
//! Reads a record while it grows.

use super::read_line;
use dflop_loader::store::file;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Name of the format in a heading.
const FORMAT: &str = "dflop-steps";
/// Version of the format.
const VERSION: u64 = 1;

/// Description of a run, before its first step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Heading {
    format: String,
    version: u64,
    /// What runs, such as the name of the model.
    pub title: String,
    /// Number of the first step that follows.
    pub first_step: u64,
    /// Number of the step after the last one of the run; `None` if it has no end.
    pub end_step: Option<u64>,
    /// Facts for the reader, such as the number of ranks and the schedule.
    pub about: Vec<String>,
    /// When the run began, in seconds since 1970.
    pub time: f64,
}

impl Heading {
    /// Describes a run that begins now.
    #[must_use]
    pub fn new(title: String, first_step: u64, end_step: Option<u64>, about: Vec<String>) -> Self {
        let time = unix_seconds();
        Self { format: FORMAT.to_owned(), version: VERSION, title, first_step, end_step, about, time }
    }
}

/// A step; what its writer does not know is missing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct StepLine {
    /// Number of the step, from 0.
    pub step: u64,
    /// When it ended, in seconds since 1970.
    #[serde(default)]
    pub time: Option<f64>,
    /// Time of the step.
    pub seconds: f64,
    /// Mean loss over the target tokens.
    #[serde(default)]
    pub loss: Option<f64>,
    /// Number of samples trained on.
    #[serde(default)]
    pub samples: Option<u64>,
    /// Number of tokens, media included.
    #[serde(default)]
    pub tokens: Option<u64>,
    /// Number of samples that all ranks skipped.
    #[serde(default, rename = "dropped_samples")]
    pub skipped_samples: u64,
    /// Model FLOPs utilization, 0 to 1.
    #[serde(default)]
    pub mfu: Option<f64>,
    /// Time of passes. Earlier records lack it and the other parts of a step.
    #[serde(default)]
    pub pass_seconds: Option<f64>,
    /// Share of the step in which a pipeline's stages wait; in records without parts, all time without a
    /// pass.
    #[serde(default)]
    pub bubble_fraction: Option<f64>,
    /// Wait for samples.
    #[serde(default)]
    pub data_wait_seconds: f64,
    /// Wait for inputs packed from samples.
    #[serde(default)]
    pub input_seconds: f64,
    /// Checks and plan on the host.
    #[serde(default)]
    pub plan_seconds: f64,
    /// Optimizer update.
    #[serde(default)]
    pub update_seconds: f64,
    /// Transfer of loss and gradient norm to the host.
    #[serde(default)]
    pub result_seconds: f64,
    /// Exchange of measured times, records and output.
    #[serde(default)]
    pub report_seconds: f64,
    /// Copies for a checkpoint.
    #[serde(default)]
    pub checkpoint_seconds: f64,
    /// Communication that computation does not hide.
    #[serde(default)]
    pub exposed_communication_seconds: Option<f64>,
    /// Tokens of a microbatch below which launches limit a module, if they do.
    #[serde(default)]
    pub launch_limit_tokens: Option<u64>,
    /// Evaluation after the step, if there was one.
    #[serde(default)]
    pub evaluation: Option<EvaluationLine>,
}

/// Evaluation after a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationLine {
    /// Mean loss over the target tokens of the held-out samples; `None` if it was not finite.
    pub loss: Option<f64>,
    /// Time of the evaluation, which no step contains.
    #[serde(default)]
    pub seconds: f64,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// After its last step.
    Completed,
    /// Before it, in order: by a signal, or because nobody reads its output.
    Stopped,
    /// By an error.
    Failed,
}

/// End of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EndLine {
    /// How the run ended.
    pub end: Outcome,
    /// Signal or error; empty for a completed run.
    #[serde(default)]
    pub reason: String,
    /// End time, in seconds since 1970.
    #[serde(default)]
    pub time: f64,
}

impl EndLine {
    /// Describes an end that comes now.
    #[must_use]
    pub fn new(end: Outcome, reason: String) -> Self {
        Self { end, reason, time: unix_seconds() }
    }
}

/// A line that was read.
#[derive(Debug, Clone, PartialEq)]
pub enum Line {
    /// Description of the run.
    Heading(Heading),
    /// Step.
    Step(StepLine),
    /// End of the run.
    End(EndLine),
}

impl Line {
    /// Parses a line; `None` if it is of another kind, as later versions may add.
    ///
    /// # Errors
    /// The reason, if the record is of another version.
    pub fn parse(text: &str) -> Result<Option<Self>, String> {
        if let Ok(step) = serde_json::from_str(text) {
            return Ok(Some(Self::Step(step)));
        }
        if let Ok(end) = serde_json::from_str(text) {
            return Ok(Some(Self::End(end)));
        }
        match serde_json::from_str::<Heading>(text) {
            Ok(heading) if heading.format != FORMAT => Ok(None),
            Ok(heading) if heading.version != VERSION => {
                Err(format!("expected a record of version {VERSION}, found version {}", heading.version))
            }
            Ok(heading) => Ok(Some(Self::Heading(heading))),
            Err(_) => Ok(None),
        }
    }
}

/// Returns the time in seconds since 1970, in whole milliseconds, which JSON gives back as they are.
#[must_use]
pub fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_millis() as f64 / 1e3)
}

/// Reads the lines of a record as they are written.
#[derive(Debug)]
pub struct Follower {
    path: PathBuf,
    /// Inode of the file that was read.
    inode: u64,
    /// Length of the complete lines that were read.
    read_bytes: u64,
    /// The last of these lines, which a resumed run may have replaced.
    last: Vec<u8>,
}

/// What a [`Follower`] found.
#[derive(Debug, Default)]
pub struct News {
    /// Whether lines that were read before are gone: the lines that follow are all there are.
    pub is_restarted: bool,
    pub lines: Vec<Line>,
}

impl Follower {
    /// Follows a file, which need not exist yet.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), inode: 0, read_bytes: 0, last: Vec::new() }
    }

    /// Returns the complete lines since the last call; none if there is no file.
    ///
    /// # Errors
    /// Of the file system; [`io::ErrorKind::InvalidData`] for a record of another version.
    pub fn read(&mut self) -> io::Result<News> {
        let mut news = News::default();
        let file = match file::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(news),
            file => file?,
        };
        let about = file.metadata()?;
        if about.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let mut reader = BufReader::with_capacity(1 << 16, file);
        if !self.goes_on(&about, &mut reader)? {
            news.is_restarted = self.read_bytes > 0;
            (self.inode, self.read_bytes) = (about.ino(), 0);
        }
        reader.seek(SeekFrom::Start(self.read_bytes))?;
        let mut line = Vec::new();
        loop {
            let bytes = read_line(&mut reader, &mut line)?;
            if line.last() != Some(&b'\n') {
                return Ok(news);
            }
            self.read_bytes += bytes as u64;
            self.last.clone_from(&line);
            let parsed = Line::parse(&String::from_utf8_lossy(&line));
            news.lines.extend(parsed.map_err(|reason| io::Error::new(io::ErrorKind::InvalidData, reason))?);
        }
    }

    /// Checks that the lines that were read are still there: a new run replaces the file, a resumed one cuts
    /// it.
    fn goes_on(&self, about: &fs::Metadata, reader: &mut BufReader<File>) -> io::Result<bool> {
        if self.inode != about.ino() || about.len() < self.read_bytes {
            return Ok(false);
        }
        reader.seek(SeekFrom::Start(self.read_bytes - self.last.len() as u64))?;
        let mut line = vec![0; self.last.len()];
        io::Read::read_exact(reader, &mut line)?;
        Ok(line == self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_are_told_apart_by_their_fields() {
        let heading = Heading::new("qwen2".to_owned(), 4, Some(9), vec!["2 ranks".to_owned()]);
        let text = serde_json::to_string(&heading).unwrap();
        assert_eq!(Line::parse(&text), Ok(Some(Line::Heading(heading))));
        let other = text.replace("\"version\":1", "\"version\":3");
        assert_eq!(Line::parse(&other).unwrap_err(), "expected a record of version 1, found version 3");
        let Ok(Some(Line::Step(step))) = Line::parse(r#"{"step":7,"seconds":0.5,"new_field":[1]}"#) else {
            panic!("expected a step");
        };
        assert_eq!((step.step, step.seconds, step.loss, step.data_wait_seconds), (7, 0.5, None, 0.0));
        let end = EndLine::new(Outcome::Stopped, "SIGTERM".to_owned());
        let text = serde_json::to_string(&end).unwrap();
        assert!(text.contains("\"end\":\"stopped\""), "{text}");
        assert_eq!(Line::parse(&text), Ok(Some(Line::End(end))));
        for other in ["{}", "[1]", "{\"step\":1", "", "{\"later\":1}"] {
            assert_eq!(Line::parse(other), Ok(None), "{other}");
        }
    }

    fn steps(news: &News) -> Vec<u64> {
        let step = |line: &Line| if let Line::Step(step) = line { Some(step.step) } else { None };
        news.lines.iter().filter_map(step).collect()
    }

    #[test]
    fn lines_are_read_once_complete_and_again_after_they_were_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("steps.jsonl");
        let mut follower = Follower::new(&path);
        assert!(follower.read().unwrap().lines.is_empty());
        let mut file = File::create(&path).unwrap();
        let line = |step: u64| format!("{{\"step\":{step},\"seconds\":1.0}}\n");
        file.write_all((line(0) + &line(1) + "{\"step\":2,").as_bytes()).unwrap();
        let news = follower.read().unwrap();
        assert_eq!((steps(&news), news.is_restarted), (vec![0, 1], false));
        file.write_all(b"\"seconds\":1.0}\n").unwrap();
        assert_eq!(steps(&follower.read().unwrap()), [2]);
        assert!(follower.read().unwrap().lines.is_empty());
        // cut by a resumed run, and longer again before it is looked at
        fs::write(
            &path,
            line(0) + &line(1).replace("1.0", "2.5") + &line(2).replace("1.0", "7.5") + &line(3),
        )
        .unwrap();
        let news = follower.read().unwrap();
        assert_eq!((steps(&news), news.is_restarted), (vec![0, 1, 2, 3], true));
        fs::remove_file(&path).unwrap();
        fs::write(&path, line(0)).unwrap();
        let news = follower.read().unwrap();
        assert_eq!((steps(&news), news.is_restarted), (vec![0], true));
        fs::write(&path, "{\"format\":\"dflop-steps\",\"version\":9}\n").unwrap();
        assert!(follower.read().unwrap_err().to_string().contains("found version 9"));
        assert!(Follower::new(directory.path()).read().is_err());
        fs::write(&path, line(0) + &"x".repeat(3 << 20)).unwrap();
        let error = Follower::new(&path).read().unwrap_err().to_string();
        assert_eq!(error, "expected lines of steps, found one of more than 1048576 bytes");
    }
}
