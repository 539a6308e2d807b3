//! Times for messages, gradient sums and weight gathers.

use super::times::check_sum;
use crate::error::{Error, Result};

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
