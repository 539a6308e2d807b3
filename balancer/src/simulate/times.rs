//! Times for passes, messages, gradient sums and weight gathers.

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

/// Times for all messages, sums and gathers between ranks, in nanoseconds; all 0 by default.
///
/// A message leaves when the sending pass ends, takes the message time (latency plus bytes over bandwidth,
/// computed by the caller) and occupies neither rank. Messages between the same two ranks in the same
/// direction form a lane and run sequentially; lanes are independent. Stages on the same rank exchange no
/// messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Communication {
    stages: usize,
    microbatches: usize,
    /// Message times, `[stages * microbatches]`, by the stage nearer to the input.
    pub(crate) activation_ns: Vec<u64>,
    pub(crate) gradient_ns: Vec<u64>,
    /// Sum times, `[stages]`.
    pub(crate) reduce_ns: Vec<u64>,
    pub(crate) is_overlapped: bool,
    /// Gather times, `[stages]`.
    pub(crate) gather_ns: Vec<u64>,
}

impl Communication {
    /// Creates communication that takes no time.
    #[must_use]
    pub fn free(stages: usize, microbatches: usize) -> Self {
        let messages = vec![0; stages * microbatches];
        Self {
            stages,
            microbatches,
            activation_ns: messages.clone(),
            gradient_ns: messages,
            reduce_ns: vec![0; stages],
            is_overlapped: false,
            gather_ns: vec![0; stages],
        }
    }

    /// Sets the message times between each stage and the next; the last stage's times are ignored.
    ///
    /// - `activation_ns`, `gradient_ns`: `[stages]` if all microbatches are equal, otherwise
    ///   `[stages * microbatches]`, row-major by stage; a gradient is in the receiving stage's row
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Config`] if the sum of all times does not fit 63 bits.
    pub fn messages(mut self, activation_ns: &[u64], gradient_ns: &[u64]) -> Result<Self> {
        self.activation_ns = self.rows("activation_ns", activation_ns)?;
        self.gradient_ns = self.rows("gradient_ns", gradient_ns)?;
        check_sum("message times", self.activation_ns.iter().chain(&self.gradient_ns))?;
        Ok(self)
    }

    /// Sets the time to sum each stage's gradients over the ranks that hold it.
    ///
    /// - `reduce_ns`: `[stages]`; a stage with 0 has nothing to sum
    /// - `is_overlapped`: false if the ranks idle meanwhile, from the last rank's arrival; true if they
    ///   continue to compute, and the sum starts with the last rank's last backward pass
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Config`] if the sum of all times does not fit 63 bits.
    pub fn reduce_grads(mut self, reduce_ns: Vec<u64>, is_overlapped: bool) -> Result<Self> {
        let (found, expected) = (reduce_ns.len(), self.stages);
        if found != expected {
            return Err(Error::Length { field: "reduce_ns", found, expected });
        }
        check_sum("reduce times", reduce_ns.iter())?;
        (self.reduce_ns, self.is_overlapped) = (reduce_ns, is_overlapped);
        Ok(self)
    }

    /// Sets the time to gather each stage's updated weights from the ranks that hold it (ZeRO): gathers start
    /// with the step, and a stage's first forward pass waits for the stage's gather.
    ///
    /// - `gather_ns`: `[stages]`; a stage with 0 has nothing to gather
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Config`] if the sum of all times does not fit 63 bits.
    pub fn gather_weights(mut self, gather_ns: Vec<u64>) -> Result<Self> {
        let (found, expected) = (gather_ns.len(), self.stages);
        if found != expected {
            return Err(Error::Length { field: "gather_ns", found, expected });
        }
        check_sum("gather times", gather_ns.iter())?;
        self.gather_ns = gather_ns;
        Ok(self)
    }

    /// Checks that these times match the number of stages and microbatches.
    pub(crate) fn check(&self, stages: usize, microbatches: usize) -> Result<()> {
        let (found, expected) = (self.activation_ns.len(), stages * microbatches);
        if self.stages != stages || self.microbatches != microbatches {
            return Err(Error::Length { field: "communication", found, expected });
        }
        Ok(())
    }

    fn rows(&self, field: &'static str, times_ns: &[u64]) -> Result<Vec<u64>> {
        let expected = self.stages * self.microbatches;
        if times_ns.len() == expected {
            return Ok(times_ns.to_vec());
        }
        if times_ns.len() != self.stages {
            return Err(Error::Length { field, found: times_ns.len(), expected });
        }
        Ok(times_ns.iter().flat_map(|time| std::iter::repeat_n(*time, self.microbatches)).collect())
    }
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
