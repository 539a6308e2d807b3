//! Collects the findings of a check and prints them as lines or as one JSON object.

use std::io::Write;

use serde::Serialize;

use crate::failure::{Failure, escape_controls};
use crate::output::{Output, write_json};

/// Columns of status and subject, so that findings are below each other.
const STATUS_COLUMNS: usize = 8;
const SUBJECT_COLUMNS: usize = 14;

/// Outcome of one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    Ok,
    /// The run would fail, or not do what its configuration asks for.
    Wrong,
    /// Worth knowing, and no fault.
    Note,
    /// Does not apply, or could not be checked for a reason that is found elsewhere.
    Skipped,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Wrong => "wrong",
            Self::Note => "note",
            Self::Skipped => "skipped",
        }
    }
}

/// One check and its finding.
#[derive(Debug, Clone, Serialize)]
struct Check {
    status: Status,
    subject: &'static str,
    finding: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// Findings of a rank, in the order in which they were made.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    rank: usize,
    /// Number of wrong findings.
    wrong: usize,
    checks: Vec<Check>,
}

impl Report {
    pub(super) fn new(rank: usize) -> Self {
        Self { rank, wrong: 0, checks: Vec::new() }
    }

    pub(super) fn ok(&mut self, subject: &'static str, finding: impl Into<String>) {
        self.add(Status::Ok, subject, finding.into(), None);
    }

    pub(super) fn note(&mut self, subject: &'static str, finding: impl Into<String>) {
        self.add(Status::Note, subject, finding.into(), None);
    }

    pub(super) fn skipped(&mut self, subject: &'static str, finding: impl Into<String>) {
        self.add(Status::Skipped, subject, finding.into(), None);
    }

    /// Adds a fault and what to do about it.
    pub(super) fn wrong(
        &mut self,
        subject: &'static str,
        finding: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(Status::Wrong, subject, finding.into(), Some(advice.into()));
    }

    /// Adds a fault whose message names what to do.
    pub(super) fn failed(&mut self, subject: &'static str, failure: impl Into<Failure>) {
        let message = failure.into().into_refusal().message.replace("\n  because: ", ": ");
        self.add(Status::Wrong, subject, message, None);
    }

    fn add(&mut self, status: Status, subject: &'static str, finding: String, advice: Option<String>) {
        self.wrong += usize::from(status == Status::Wrong);
        self.checks.push(Check { status, subject, finding, advice });
    }

    /// Prints the findings: rank 0 all of them, other ranks those that are wrong.
    ///
    /// # Errors
    /// [`Failure::Failed`] if a finding is wrong.
    pub(super) fn print(mut self, out: &mut Output, is_json: bool) -> Result<(), Failure> {
        if self.rank > 0 {
            self.checks.retain(|check| check.status == Status::Wrong);
        }
        let is_silent = self.rank > 0 && self.wrong == 0;
        match is_json {
            true if !is_silent => write_json(out, &self)?,
            true => {}
            false => self.checks.iter().try_for_each(|check| self.line(out, check))?,
        }
        match self.wrong {
            0 => Ok(()),
            1 => Err(Failure::Failed(format!("the check of rank {} found 1 fault", self.rank))),
            wrong => Err(Failure::Failed(format!("the check of rank {} found {wrong} faults", self.rank))),
        }
    }

    fn line(&self, out: &mut Output, check: &Check) -> Result<(), Failure> {
        let Check { status, subject, finding, advice } = check;
        let rank = if self.rank > 0 { format!("rank {}: ", self.rank) } else { String::new() };
        let advice = advice.as_ref().map_or_else(String::new, |advice| format!("; {advice}"));
        // A message of several lines, such as a place in the configuration, goes on below its start.
        let indent = format!("\n{}", " ".repeat(STATUS_COLUMNS + SUBJECT_COLUMNS + 2));
        let lines: Vec<_> = finding.lines().map(escape_controls).collect();
        let (status, finding) = (status.name(), lines.join(&indent));
        writeln!(out, "{status:<STATUS_COLUMNS$} {subject:<SUBJECT_COLUMNS$} {rank}{finding}{advice}")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Sink;

    fn printed(rank: usize, is_json: bool) -> (String, Result<(), Failure>) {
        let mut report = Report::new(rank);
        report.ok("ranks", "2 ranks");
        report.wrong("token", "is not set", "set it");
        report.failed("model", Failure::Misuse("line 2\n| x".to_owned()));
        let mut out = Output::new(Sink::Memory(Vec::new()));
        let done = report.print(&mut out, is_json);
        let Ok(Sink::Memory(bytes)) = out.into_inner() else { panic!("the output is in memory") };
        (String::from_utf8(bytes).unwrap(), done)
    }

    #[test]
    fn rank_0_prints_all_and_other_ranks_their_faults() {
        let (text, done) = printed(0, false);
        let lines = [
            "ok       ranks          2 ranks\n",
            "wrong    token          is not set; set it\n",
            "wrong    model          line 2\n                        | x\n",
        ];
        assert_eq!(text, lines.concat());
        assert!(
            matches!(done, Err(Failure::Failed(message)) if message == "the check of rank 0 found 2 faults")
        );
        assert!(printed(3, false).0.starts_with("wrong    token          rank 3: is not set; set it\n"));
    }

    #[test]
    fn json_is_one_object_with_a_count() {
        let value: serde_json::Value = serde_json::from_str(&printed(0, true).0).unwrap();
        assert_eq!((&value["rank"], &value["wrong"]), (&0.into(), &2.into()));
        assert_eq!(value["checks"][0]["status"], "ok");
        assert_eq!(value["checks"][1]["advice"], "set it");
        assert_eq!(value["checks"].as_array().map(Vec::len), Some(3));
        let mut out = Output::new(Sink::Memory(Vec::new()));
        Report::new(1).print(&mut out, true).unwrap();
        assert!(out.buffer().is_empty(), "a rank without faults is silent");
    }
}
