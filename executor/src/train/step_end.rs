//! Ends a step: exchanges rank reports, stop requests and save progress, and logs skipped samples.

use crate::checkpoint::SaveProgress;
use crate::inputs::{InputsAhead, StepInputs};
use dflop_device::Device;
use dflop_loader::BalancedLoader;
use std::fmt;

/// Number of words in a report.
pub(super) const WORDS: usize = 5;

/// Reason that a run ends before the last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// `SIGINT`, such as Ctrl-C.
    Interrupt,
    /// `SIGTERM`, such as a scheduler request.
    Terminate,
    /// The run output has no reader any more, or the caller requested the end.
    OutputClosed,
}

impl StopReason {
    const ALL: [Self; 3] = [Self::Interrupt, Self::Terminate, Self::OutputClosed];

    /// Returns the reason for a termination signal; `None` for other signals.
    #[must_use]
    pub fn from_signal(signal: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.signal() == Some(signal))
    }

    /// Returns the signal number.
    #[must_use]
    pub const fn signal(self) -> Option<i32> {
        match self {
            Self::Interrupt => Some(2),
            Self::Terminate => Some(15),
            Self::OutputClosed => None,
        }
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::OutputClosed => "closed output",
        })
    }
}

/// Rank report at the end of a step, or the sum over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StepEnd {
    /// Number of ranks requesting a stop, by reason.
    stops: [u64; 3],
    pub(super) save: SaveProgress,
}

impl StepEnd {
    pub(super) fn new(stop: Option<StopReason>, save: SaveProgress) -> Self {
        Self { stops: StopReason::ALL.map(|reason| u64::from(stop == Some(reason))), save }
    }

    /// Returns the first stop reason requested by any rank; the same on all ranks.
    pub(super) fn stop(&self) -> Option<StopReason> {
        let place = self.stops.iter().position(|&ranks| ranks > 0)?;
        Some(StopReason::ALL[place])
    }

    pub(super) fn words(self) -> [u64; WORDS] {
        let ([interrupt, terminate, closed], save) = (self.stops, self.save);
        [interrupt, terminate, closed, save.done, save.failed]
    }

    pub(super) fn from_words([interrupt, terminate, closed, done, failed]: [u64; WORDS]) -> Self {
        Self { stops: [interrupt, terminate, closed], save: SaveProgress { done, failed } }
    }
}

/// Numbers of skipped samples in a loader, seen and logged so far.
#[derive(Debug, Default, Clone)]
struct Seen {
    listed: usize,
    unlisted: u64,
}

/// Numbers of skipped samples in a rank's loaders, seen and logged so far.
#[derive(Debug, Default)]
pub(super) struct SkipWarnings(Vec<Seen>);

impl SkipWarnings {
    /// Starts after the samples already skipped by the index, which are the same for all loaders; rank 0's
    /// first loader logs the index skips too.
    pub(super) fn new<D: Device>(rank: usize, inputs: &InputsAhead<D>) -> Self {
        let seen = |(number, loader): (usize, &BalancedLoader)| {
            let is_first = rank == 0 && number == 0;
            Seen { listed: if is_first { 0 } else { loader.skipped().len() }, unlisted: 0 }
        };
        Self(inputs.loaders().enumerate().map(seen).collect())
    }

    /// Logs the samples that this rank's loaders skipped since the last call, and, on rank 0, the samples
    /// left out of the step.
    pub(super) fn step<D: Device>(
        &mut self,
        rank: usize,
        inputs: &InputsAhead<D>,
        step_inputs: &StepInputs<D>,
    ) {
        for (loader, seen) in inputs.loaders().zip(&mut self.0) {
            seen.warn(loader);
        }
        for skipped in step_inputs.skipped.iter().filter(|_| rank == 0) {
            // All ranks have the same list, so one of them logs it.
            let row = inputs.planner().row(step_inputs.plan.samples[skipped.index as usize]);
            let (step, key, reason) = (step_inputs.plan.step, row.key(), &skipped.reason);
            tracing::warn!(step, key, reason, "a sample is left out of a step");
        }
    }
}

impl Seen {
    fn warn(&mut self, loader: &BalancedLoader) {
        let skipped = loader.skipped();
        for skipped in skipped.iter().skip(self.listed) {
            let (key, field) = (skipped.key.as_deref(), skipped.field.as_deref());
            let (shard, reason) = (&skipped.shard, &skipped.reason);
            tracing::warn!(shard, key, field, reason, "a sample cannot be used");
        }
        self.listed = skipped.len();
        // The account lists the first samples only, and each once; the others are numbers.
        let unlisted = loader.skip_log().skipped_samples() - skipped.len() as u64;
        if unlisted > self.unlisted {
            tracing::warn!(
                samples = unlisted,
                "more samples cannot be used, or were skipped again in a later epoch"
            );
            self.unlisted = unlisted;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_ranks_add_up_to_one_decision() {
        let reports = [
            StepEnd::new(None, SaveProgress { done: 1, failed: 0 }),
            StepEnd::new(Some(StopReason::OutputClosed), SaveProgress { done: 0, failed: 1 }),
            StepEnd::new(Some(StopReason::Terminate), SaveProgress { done: 1, failed: 0 }),
        ];
        let mut sum = [0; WORDS];
        for report in reports {
            sum.iter_mut().zip(report.words()).for_each(|(sum, word)| *sum += word);
        }
        let all = StepEnd::from_words(sum);
        assert_eq!(
            (all.stop(), all.save),
            (Some(StopReason::Terminate), SaveProgress { done: 2, failed: 1 })
        );
        assert_eq!(StepEnd::default().stop(), None);
    }
}
