//! Times of all passes of a step, by stage and microbatch.

use dflop_balancer::schedule::{Part, Pass, PassKind};

use super::job::Job;

/// Forward and backward times of every microbatch in every stage of a job, in nanoseconds.
///
/// Times are predicted or measured; the simulation of a step takes either.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PassTimes {
    /// Index of the first part of every stage, then the number of parts.
    starts: Vec<usize>,
    /// Forward, then backward, part by part.
    ns: Vec<u64>,
}

impl PassTimes {
    /// Lists the passes of a step, all with time 0.
    ///
    /// - `rounds`: microbatches per DP rank of the LLM
    #[must_use]
    pub fn zero(job: &Job, rounds: usize) -> Self {
        let mut starts = vec![0];
        for stage in job.stages() {
            let microbatches = rounds * job.modules()[stage.module()].dp_size;
            starts.push(starts[starts.len() - 1] + microbatches);
        }
        let ns = vec![0; 2 * starts[starts.len() - 1]];
        Self { starts, ns }
    }

    /// Sets the time of every part: forward and backward.
    ///
    /// # Errors
    /// The first error of `part_ns`.
    pub fn fill<E>(mut self, mut part_ns: impl FnMut(Part) -> Result<[u64; 2], E>) -> Result<Self, E> {
        for stage in 0..self.starts.len().saturating_sub(1) {
            for microbatch in 0..self.starts[stage + 1] - self.starts[stage] {
                let part = Part { microbatch: microbatch as u32, stage: stage as u16 };
                let at = self.at(part);
                self.ns[at..at + 2].copy_from_slice(&part_ns(part)?);
            }
        }
        Ok(self)
    }

    /// Returns forward and backward of a part, 0 for a part that does not exist.
    #[must_use]
    pub fn part_ns(&self, part: Part) -> [u64; 2] {
        let stage = usize::from(part.stage);
        let exists = stage + 1 < self.starts.len()
            && self.starts[stage] + (part.microbatch as usize) < self.starts[stage + 1];
        if exists { [self.ns[self.at(part)], self.ns[self.at(part) + 1]] } else { [0, 0] }
    }

    /// Adds to the time of a pass; both halves of a split backward pass count as backward.
    pub(crate) fn add(&mut self, pass: Pass, ns: u64) {
        let at = self.at(pass.part) + usize::from(pass.kind != PassKind::Forward);
        self.ns[at] += ns;
    }

    /// Returns all times as one slice, to sum them over ranks.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u64] {
        &mut self.ns
    }

    fn at(&self, part: Part) -> usize {
        2 * (self.starts[usize::from(part.stage)] + part.microbatch as usize)
    }
}
