//! Pass times.

use crate::error::{Error, Result};
use crate::schedule::{Pass, PassKind};

/// Computing times for every microbatch in every stage, checked once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageTimes {
    stages: usize,
    microbatches: usize,
    forward_ns: Vec<u64>,
    backward_ns: Vec<u64>,
    /// Weight halves of the backward times; empty if each is half the backward time.
    weight_ns: Vec<u64>,
}

impl StageTimes {
    /// Checks given times for both passes.
    ///
    /// - `forward_ns`, `backward_ns`: `[stages * microbatches]`, row-major by stage, nanoseconds
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Config`] if there is no stage, or the sum over all times does not fit 63
    /// bits.
    pub fn new(
        stages: usize,
        microbatches: usize,
        forward_ns: Vec<u64>,
        backward_ns: Vec<u64>,
    ) -> Result<Self> {
        let expected = stages.saturating_mul(microbatches);
        for (field, times) in [("forward_ns", &forward_ns), ("backward_ns", &backward_ns)] {
            if times.len() != expected {
                return Err(Error::Length { field, found: times.len(), expected });
            }
        }
        if stages == 0 {
            return Err(Error::Config { setting: "stages", reason: "expected at least one".to_owned() });
        }
        // No makespan exceeds the sum over all times, so none can overflow.
        check_sum("stage times", forward_ns.iter().chain(&backward_ns))?;
        Ok(Self { stages, microbatches, forward_ns, backward_ns, weight_ns: Vec::new() })
    }

    /// Splits combined forward and backward times, one to two.
    ///
    /// - `times_ns`: `[stages * microbatches]`, row-major by stage, nanoseconds
    ///
    /// # Errors
    /// The errors of [`StageTimes::new`].
    pub fn split(stages: usize, microbatches: usize, times_ns: &[u64]) -> Result<Self> {
        let (forward_ns, backward_ns) = times_ns.iter().map(|time| split_time(*time)).unzip();
        Self::new(stages, microbatches, forward_ns, backward_ns)
    }

    /// Sets the part of every backward pass that computes the weight gradient. Default: half, rounded down.
    ///
    /// - `weight_ns`: `[stages * microbatches]`, row-major by stage, nanoseconds
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Config`] if a part is longer than the whole backward pass.
    pub fn weight_ns(mut self, weight_ns: Vec<u64>) -> Result<Self> {
        let (found, expected) = (weight_ns.len(), self.backward_ns.len());
        if found != expected {
            return Err(Error::Length { field: "weight_ns", found, expected });
        }
        if let Some(at) = (0..expected).find(|&at| weight_ns[at] > self.backward_ns[at]) {
            let (stage, microbatch) = (at / self.microbatches, at % self.microbatches);
            let reason =
                format!("microbatch {microbatch} in stage {stage} takes longer than its backward pass");
            return Err(Error::Config { setting: "weight_ns", reason });
        }
        self.weight_ns = weight_ns;
        Ok(self)
    }

    /// Returns the number of stages, at least 1.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Returns the number of microbatches.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Returns a pass's duration, nanoseconds.
    ///
    /// # Panics
    /// If the part does not exist.
    #[must_use]
    pub fn pass_ns(&self, pass: Pass) -> u64 {
        let cell = pass.part.stage as usize * self.microbatches + pass.part.microbatch as usize;
        match pass.kind {
            PassKind::Forward => self.forward_ns[cell],
            PassKind::Backward => self.backward_ns[cell],
            PassKind::BackwardInput => self.backward_ns[cell] - self.cell_weight_ns(cell),
            PassKind::BackwardWeight => self.cell_weight_ns(cell),
        }
    }

    /// Returns the forward times, `[stages * microbatches]`.
    pub(crate) fn forward_ns(&self) -> &[u64] {
        &self.forward_ns
    }

    /// Returns the backward times, `[stages * microbatches]`.
    pub(crate) fn backward_ns(&self) -> &[u64] {
        &self.backward_ns
    }

    /// Returns a backward pass's weight part; 0 for a pass that does not exist.
    pub(crate) fn cell_weight_ns(&self, cell: usize) -> u64 {
        let half = || weight_part(self.backward_ns.get(cell).copied().unwrap_or(0));
        self.weight_ns.get(cell).copied().unwrap_or_else(half)
    }
}

/// Splits a combined forward and backward time: a third, rounded down, and the rest.
#[must_use]
pub fn split_time(time_ns: u64) -> (u64, u64) {
    (time_ns / 3, time_ns - time_ns / 3)
}

/// Returns a backward pass's default weight part.
///
/// Both gradients of a linear layer are one matrix product each, with the same size.
pub(crate) fn weight_part(backward_ns: u64) -> u64 {
    backward_ns / 2
}

/// Checks that no sum over these times overflows.
pub(super) fn check_sum<'a>(setting: &'static str, times: impl Iterator<Item = &'a u64>) -> Result<()> {
    let sum = times.fold(0_u64, |sum, time| sum.saturating_add(*time));
    if i64::try_from(sum).is_err() {
        return Err(Error::Config { setting, reason: "their sum must be below 2^63".to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Part;

    #[test]
    fn wrong_lengths_are_errors() {
        assert!(StageTimes::split(2, 2, &[1; 3]).is_err());
        assert!(StageTimes::split(0, 0, &[]).is_err());
        assert!(StageTimes::split(1, 2, &[u64::MAX; 2]).is_err());
    }

    #[test]
    fn a_third_rounded_down_is_forward() {
        assert_eq!([0, 1, 2, 3, 8].map(split_time), [(0, 0), (0, 1), (0, 2), (1, 2), (2, 6)]);
    }

    #[test]
    fn weights_take_half_of_a_backward_pass_unless_said() {
        let times = StageTimes::new(1, 2, vec![1, 1], vec![5, 7]).unwrap();
        let of = |times: &StageTimes, kind| {
            [0, 1].map(|microbatch| times.pass_ns(Pass { kind, part: Part { stage: 0, microbatch } }))
        };
        assert_eq!(of(&times, PassKind::BackwardInput), [3, 4]);
        assert_eq!(of(&times, PassKind::BackwardWeight), [2, 3]);
        let said = times.clone().weight_ns(vec![0, 7]).unwrap();
        assert_eq!(of(&said, PassKind::BackwardInput), [5, 0]);
        assert!(times.clone().weight_ns(vec![0]).is_err());
        let error = times.weight_ns(vec![0, 8]).unwrap_err().to_string();
        assert!(error.contains("microbatch 1 in stage 0"), "{error}");
    }
}
