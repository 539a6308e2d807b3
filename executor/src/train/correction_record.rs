//! Records a run's correction tables in a JSON Lines file, which a later run can replay.
//!
//! The first line describes the run: model, layout and time predictor. Each following line is a step, with
//! the table learned from the step's measured times, if any. Each line is written as a single block, so a
//! killed process can truncate only the last line, which readers ignore.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use dflop_costmodel::correction::CorrectionTable;
use dflop_loader::files::open_own;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};

/// Format version.
const FORMAT: u64 = 1;

/// Subject that correction tables belong to: tables are factors on times from a given predictor, model and
/// layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CorrectionSubject {
    /// Digest over the model dimensions.
    pub model: String,
    /// Stages, DP size and TP size for every module.
    pub layout: Value,
    /// Device preset name or profile digest that the predicted times come from.
    pub predictor: String,
}

/// First line in a record.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Heading {
    format: u64,
    /// First recorded step number.
    first_step: u64,
    #[serde(rename = "run")]
    subject: CorrectionSubject,
}

/// Step line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StepLine<T> {
    step: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    table: Option<T>,
}

/// Correction tables read from a record.
#[derive(Debug, Clone)]
pub struct RecordedCorrections {
    path: PathBuf,
    subject: CorrectionSubject,
    first_step: u64,
    /// Step number after the last recorded step.
    end_step: u64,
    tables: Vec<CorrectionTable>,
    /// Length in bytes: first line, then each step's line.
    line_bytes: Vec<u64>,
}

impl RecordedCorrections {
    /// Reads a record.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read, [`Error::CorrectionRecord`] with the malformed line.
    pub fn read(path: &Path) -> Result<Self> {
        let failed = |source| Error::File { action: "read", path: path.to_owned(), source };
        let text = fs::read_to_string(path).map_err(failed)?;
        let refused = |line: usize, problem: String| Error::CorrectionRecord {
            path: path.to_owned(),
            problem: format!("line {line}: {problem}"),
        };
        let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let first = lines.next().ok_or_else(|| refused(1, "expected a description of the run".to_owned()))?;
        let heading: Heading = serde_json::from_str(first).map_err(|error| refused(1, error.to_string()))?;
        if heading.format != FORMAT {
            return Err(refused(1, format!("expected format {FORMAT}, found {}", heading.format)));
        }
        let Heading { first_step, subject, .. } = heading;
        let line_bytes = vec![first.len() as u64];
        let mut record = Self {
            path: path.to_owned(),
            subject,
            first_step,
            end_step: first_step,
            tables: Vec::new(),
            line_bytes,
        };
        for (index, line) in lines.enumerate() {
            record.add(line).map_err(|problem| refused(index + 2, problem))?;
        }
        Ok(record)
    }

    fn add(&mut self, line: &str) -> Result<(), String> {
        let StepLine { step, table }: StepLine<CorrectionTable> =
            serde_json::from_str(line).map_err(|error| error.to_string())?;
        if step != self.end_step {
            return Err(format!("expected step {}, found step {step}", self.end_step));
        }
        if let (Some(table), Some(last)) = (&table, self.tables.last())
            && (table.version() <= last.version() || table.effective_step() <= last.effective_step())
        {
            let (version, last) = (table.version(), last.version());
            return Err(format!("table {version} does not follow table {last}"));
        }
        if let Some(table) = table.as_ref().filter(|table| table.effective_step() <= step) {
            let effective = table.effective_step();
            return Err(format!(
                "the table of step {step} is in force from step {effective}, which is not after it"
            ));
        }
        self.tables.extend(table);
        self.end_step += 1;
        self.line_bytes.push(line.len() as u64);
        Ok(())
    }

    /// Checks that the record has the same model, layout and predictor, and every step before `steps`.
    ///
    /// # Errors
    /// [`Error::CorrectionRecord`] with the first difference.
    pub fn check(&self, subject: &CorrectionSubject, steps: u64) -> Result<()> {
        let refused = |problem: String| Err(Error::CorrectionRecord { path: self.path.clone(), problem });
        for (what, own, expected) in [
            ("model", &Value::from(self.subject.model.as_str()), &Value::from(subject.model.as_str())),
            ("layout", &self.subject.layout, &subject.layout),
            ("predictor", &Value::from(self.subject.predictor.as_str()), &subject.predictor.as_str().into()),
        ] {
            if own != expected {
                return refused(format!(
                    "was recorded with another {what}: expected {expected}, found {own}"
                ));
            }
        }
        if self.first_step > 0 {
            return refused(format!("starts at step {}, expected step 0", self.first_step));
        }
        if self.end_step < steps {
            let end = self.end_step;
            return refused(format!(
                "ends after {end} steps, but the run has {steps}; end the run with `--steps {end}`"
            ));
        }
        Ok(())
    }

    /// Returns the tables, in the order they take effect.
    #[must_use]
    pub fn tables(&self) -> &[CorrectionTable] {
        &self.tables
    }
}

/// Writer for a run's correction record.
#[derive(Debug)]
pub struct CorrectionRecorder {
    path: PathBuf,
    file: File,
}

impl CorrectionRecorder {
    /// Starts a record at a step; truncates an existing file.
    ///
    /// # Errors
    /// [`Error::File`], also if the path is a link or a device.
    pub fn create(path: &Path, subject: &CorrectionSubject, first_step: u64) -> Result<Self> {
        let heading = Heading { format: FORMAT, first_step, subject: subject.clone() };
        let start = || {
            let mut file = open_own(path)?;
            file.set_len(0)?;
            writeln(&mut file, &heading)?;
            Ok(file)
        };
        Ok(Self { file: start().map_err(failed(path))?, path: path.to_owned() })
    }

    /// Continues a record at a step, without lines for this and later steps. If the record is missing, ends
    /// earlier or belongs to a different run, a new record is started at this step, with a warning.
    ///
    /// # Errors
    /// [`Error::File`], also if the path is a link, a pipe or a device.
    pub fn resume(path: &Path, subject: &CorrectionSubject, step: u64) -> Result<Self> {
        if path.symlink_metadata().is_ok() {
            // A link or a pipe is refused before it is read.
            open_own(path).map_err(failed(path))?;
        }
        let kept = match RecordedCorrections::read(path) {
            Ok(record) if record.subject != *subject => Err("it is of another run".to_owned()),
            Ok(record) if !(record.first_step..=record.end_step).contains(&step) => {
                Err(format!("it has steps {} to {}", record.first_step, record.end_step))
            }
            Ok(record) => {
                let lines = 1 + (step - record.first_step) as usize;
                Ok(record.line_bytes[..lines].iter().sum::<u64>())
            }
            Err(error) => Err(error.to_string()),
        };
        match kept {
            Ok(bytes) => {
                let reopen = || {
                    let mut file = open_own(path)?;
                    file.set_len(bytes)?;
                    io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
                    Ok(file)
                };
                Ok(Self { file: reopen().map_err(failed(path))?, path: path.to_owned() })
            }
            Err(reason) => {
                tracing::warn!(path = %path.display(), step, reason, "the record of corrections starts at this step");
                Self::create(path, subject, step)
            }
        }
    }

    /// Records a step, with the table learned from the step's measured times.
    pub(super) fn step(&mut self, step: u64, table: Option<&CorrectionTable>) -> Result<()> {
        writeln(&mut self.file, &StepLine { step, table }).map_err(failed(&self.path))
    }
}

/// Writes a line in a single call, so that a killed process truncates at most the last line.
fn writeln(file: &mut File, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action: "write", path: path.clone(), source }
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::Module;
    use dflop_costmodel::correction::FACTOR_ONE;
    use serde_json::json;

    use super::*;

    fn subject() -> CorrectionSubject {
        CorrectionSubject { model: "m".to_owned(), layout: json!([{"dp": 1}]), predictor: "cpu".to_owned() }
    }

    fn table(version: u64, step: u64) -> CorrectionTable {
        CorrectionTable::new(version, step, [(Module::Llm, 1000, 2 * FACTOR_ONE)]).unwrap()
    }

    /// Records steps up to an end; every fourth has a table.
    fn record(recorder: &mut CorrectionRecorder, steps: std::ops::Range<u64>) {
        for step in steps {
            let table = (step % 4 == 3).then(|| table(1 + step / 4, step + 9));
            recorder.step(step, table.as_ref()).unwrap();
        }
    }

    #[test]
    fn a_record_round_trips_and_a_resumed_one_has_the_bytes_of_one_without_a_break() {
        let directory = tempfile::tempdir().unwrap();
        let (straight, broken) = (directory.path().join("straight"), directory.path().join("broken"));
        record(&mut CorrectionRecorder::create(&straight, &subject(), 0).unwrap(), 0..12);
        let read = RecordedCorrections::read(&straight).unwrap();
        assert_eq!(read.tables(), [table(1, 12), table(2, 16), table(3, 20)]);
        read.check(&subject(), 12).unwrap();

        record(&mut CorrectionRecorder::create(&broken, &subject(), 0).unwrap(), 0..9);
        // what a killed process leaves of the line of step 9
        let mut file = File::options().append(true).open(&broken).unwrap();
        file.write_all(b"{\"step\":9,\"tab").unwrap();
        record(&mut CorrectionRecorder::resume(&broken, &subject(), 6).unwrap(), 6..12);
        assert_eq!(fs::read(&broken).unwrap(), fs::read(&straight).unwrap());
    }

    #[test]
    fn a_record_that_does_not_reach_the_step_is_started_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        record(&mut CorrectionRecorder::create(&path, &subject(), 0).unwrap(), 0..3);
        record(&mut CorrectionRecorder::resume(&path, &subject(), 5).unwrap(), 5..6);
        let error = RecordedCorrections::read(&path).unwrap().check(&subject(), 6).unwrap_err().to_string();
        assert!(error.ends_with("starts at step 5, expected step 0"), "{error}");
    }

    #[test]
    fn records_that_do_not_fit_are_refused_by_what_differs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        record(&mut CorrectionRecorder::create(&path, &subject(), 0).unwrap(), 0..5);
        let read = RecordedCorrections::read(&path).unwrap();
        let problem =
            |subject: &CorrectionSubject, steps| read.check(subject, steps).unwrap_err().to_string();
        let model = problem(&CorrectionSubject { model: "n".to_owned(), ..subject() }, 5);
        assert!(model.contains("another model: expected \"n\", found \"m\""), "{model}");
        let layout = problem(&CorrectionSubject { layout: json!([{"dp": 2}]), ..subject() }, 5);
        assert!(layout.contains("another layout: expected [{\"dp\":2}], found [{\"dp\":1}]"), "{layout}");
        let predictor = problem(&CorrectionSubject { predictor: "h100".to_owned(), ..subject() }, 5);
        assert!(predictor.contains("another predictor"), "{predictor}");
        let short = problem(&subject(), 6);
        assert!(
            short.contains("ends after 5 steps, but the run has 6; end the run with `--steps 5`"),
            "{short}"
        );
    }

    #[test]
    fn malformed_records_are_refused_by_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        record(&mut CorrectionRecorder::create(&path, &subject(), 0).unwrap(), 0..5);
        let good = fs::read_to_string(&path).unwrap();
        for (from, to, expected) in [
            ("\"format\":1", "\"format\":2", "line 1: expected format 1, found 2"),
            ("{\"step\":2}", "{\"step\":3}", "line 4: expected step 2, found step 3"),
            ("{\"step\":2}", "{\"step\":", "line 4: EOF"),
            ("131072", "131073", "line 5: "),
            ("\"predictor\":\"cpu\"", "\"predictors\":\"cpu\"", "line 1: "),
        ] {
            assert!(good.contains(from), "{good}");
            fs::write(&path, good.replace(from, to)).unwrap();
            let error = RecordedCorrections::read(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("record"), "{error}");
        }
        fs::write(&path, "").unwrap();
        let error = RecordedCorrections::read(&path).unwrap_err().to_string();
        assert!(error.contains("line 1: expected a description of the run"), "{error}");
    }
}
