//! Exchanges rank reports at the end of a step: stop requests and save progress.

use std::fmt;

use crate::checkpoint::SaveProgress;

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
