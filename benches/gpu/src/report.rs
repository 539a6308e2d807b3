//! Results as JSON lines.
//!
//! Operation times from device events.

use super::Result;
use dflop_device::{Device, Dtype, Lane};
use serde_json::{Value, json};
use std::io::Write;

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

/// Prints a part summary and returns the outcome.
///
/// - `figure`: the measured figure, for the table
/// - `asked`: the required bound
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

/// Prints a line immediately: an interrupted run has reported all earlier results.
fn print(value: &Value) {
    let mut out = std::io::stdout().lock();
    // a closed pipe must not hide the exit status
    let _ = writeln!(out, "{value}").and_then(|()| out.flush());
}

/// Calls that are not timed: they compile kernels, choose algorithms and fill caches.
const WARM_UP_CALLS: usize = 3;

/// Returns the median seconds per call, over calls that the device runs in sequence.
///
/// All calls are queued before the first is waited for, so that the device does not wait for the host between
/// them.
pub(crate) fn median_seconds<D: Device>(
    device: &D,
    rounds: usize,
    mut call: impl FnMut(usize) -> dflop_device::Result<()>,
) -> Result<f64> {
    for round in 0..WARM_UP_CALLS {
        call(round)?;
    }
    wait(device)?;
    let mut events = vec![device.mark(Lane::Compute)?];
    for round in 0..rounds {
        call(round)?;
        events.push(device.mark(Lane::Compute)?);
    }
    wait(device)?;
    let nanoseconds = |pair: &[D::Event]| device.busy_ns(&pair[0], &pair[1]) as f64;
    // clocks in a stand-in may be too coarse for a small operation
    Ok((median(events.windows(2).map(nanoseconds).collect()) * 1e-9).max(1e-9))
}

/// Waits for all work in the compute lane.
pub(crate) fn wait<D: Device>(device: &D) -> Result<()> {
    device.read(&device.zeros_as(Dtype::F64, 1)?)?;
    Ok(())
}

/// Returns the median, 0 for an empty list.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match (values.len(), values.len() / 2) {
        (0, _) => 0.0,
        (len, middle) if len % 2 == 0 => f64::midpoint(values[middle - 1], values[middle]),
        (_, middle) => values[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_device::Cpu;

    #[test]
    fn medians_are_in_the_middle() {
        assert!((median(vec![5.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median(vec![4.0, 1.0, 2.0, 9.0]) - 3.0).abs() < 1e-12);
        assert!(median(Vec::new()).abs() < 1e-12);
    }

    #[test]
    fn calls_of_warm_up_and_rounds_are_made() {
        let mut calls = 0;
        let mut call = |_| {
            calls += 1;
            Ok(())
        };
        median_seconds(&Cpu::new(1).unwrap(), 4, &mut call).unwrap();
        assert_eq!(calls, WARM_UP_CALLS + 4);
    }
}
