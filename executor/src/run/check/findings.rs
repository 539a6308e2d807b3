//! Check findings.

use serde::Serialize;

use crate::Error;

/// Check outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As the run needs it.
    Ok,
    /// The run would fail, or not do what the configuration requests.
    Wrong,
    /// Worth knowing, and no fault.
    Note,
    /// Does not apply, or could not be checked for a reason that another finding names.
    Skipped,
}

impl Status {
    /// Returns the name, as JSON has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Wrong => "wrong",
            Self::Note => "note",
            Self::Skipped => "skipped",
        }
    }
}

/// A check and its finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Outcome.
    pub status: Status,
    /// Checked subject, such as `shards`.
    pub subject: &'static str,
    /// What was found; several lines for a place in a file.
    pub finding: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// Findings on a rank, in check order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Rank of this process, 0 without a launcher.
    pub rank: usize,
    /// Number of wrong findings.
    pub wrong: usize,
    /// All findings.
    pub checks: Vec<Finding>,
}

impl Findings {
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

    /// Adds a fault and the remedy.
    pub(super) fn wrong(
        &mut self,
        subject: &'static str,
        finding: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(Status::Wrong, subject, finding.into(), Some(advice.into()));
    }

    /// Adds a fault whose message names the remedy.
    pub(super) fn failed(&mut self, subject: &'static str, error: impl Into<Error>) {
        self.add(Status::Wrong, subject, error.into().in_one_line(), None);
    }

    fn add(&mut self, status: Status, subject: &'static str, finding: String, advice: Option<String>) {
        self.wrong += usize::from(status == Status::Wrong);
        self.checks.push(Finding { status, subject, finding, advice });
    }
}
