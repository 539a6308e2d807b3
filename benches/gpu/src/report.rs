//! Results as JSON lines.

use std::io::Write;

use serde_json::{Value, json};

/// Part outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Everything is right, and no bound was missed.
    Passed,
    /// Something is wrong.
    Failed,
    /// Everything is right, but a bound on speed was missed.
    Missed,
    /// There was nothing to do it with.
    Skipped,
}

impl Outcome {
    const fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Missed => "missed",
            Self::Skipped => "skipped",
        }
    }
}

/// Prints a result: an object with the part name.
pub(crate) fn result(part: &str, mut fields: Value) {
    fields["part"] = part.into();
    print(&fields);
}

/// Prints the part summary and returns the outcome.
///
/// - `figure`: result for the table
/// - `asked`: the bound on it
pub(crate) fn summary(part: &str, outcome: Outcome, figure: &str, asked: &str) -> Outcome {
    eprintln!("{part}: {}: {figure} (asked: {asked})", outcome.name());
    // in this order, with quotes that a shell script can find; the texts have none
    let text = |text: &str| text.replace(['"', '\\', '\n'], " ");
    let (figure, asked) = (text(figure), text(asked));
    print(&json!({"part": part, "summary": outcome.name(), "figure": figure, "asked": asked}));
    outcome
}

/// Prints the summary for a part that an error ended.
pub(crate) fn failure(part: &str, error: &dyn std::error::Error) -> Outcome {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    summary(part, Outcome::Failed, &text, "no error")
}

/// Prints a line at once: an interrupted run has reported its results so far.
fn print(value: &Value) {
    let mut out = std::io::stdout().lock();
    // a closed pipe must not hide the exit status
    let _ = writeln!(out, "{value}").and_then(|()| out.flush());
}
