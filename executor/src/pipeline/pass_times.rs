//! Pass times in a step, by stage and microbatch.

use dflop_balancer::schedule::{Part, Pass, PassKind, ScheduleKind};

use super::job::Job;

/// Count of numbers per part.
const NUMBERS: usize = 3;

/// Forward and backward times for every microbatch in every stage of a job, in nanoseconds.
///
/// Times are predicted or measured; the step simulation accepts both.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PassTimes {
    /// Index of the first part in every stage, then the number of parts.
    starts: Vec<usize>,
    /// Forward time, backward time, and the weight gradient part of backward where a schedule splits it, part
    /// by part, in nanoseconds.
    ns: Vec<u64>,
    /// Whether the third number is known for every part.
    has_weights: bool,
}

impl PassTimes {
    /// Lists the passes in a step, all with time 0, to which measured times are added.
    ///
    /// - `rounds`: number of microbatches per LLM DP rank
    #[must_use]
    pub fn zero(job: &Job, rounds: usize) -> Self {
        let mut starts = vec![0];
        for stage in job.stages() {
            let microbatches = rounds * job.modules()[stage.module()].dp_size;
            starts.push(starts[starts.len() - 1] + microbatches);
        }
        let ns = vec![0; NUMBERS * starts[starts.len() - 1]];
        // A run measures the parts of backward passes if its schedule splits them.
        Self { starts, ns, has_weights: job.schedule() == ScheduleKind::ZeroBubble }
    }

    /// Sets the forward and backward time of every part.
    ///
    /// # Errors
    /// The first error from `part_ns`.
    pub fn fill<E>(self, mut part_ns: impl FnMut(Part) -> Result<[u64; 2], E>) -> Result<Self, E> {
        let filled =
            self.fill_split(|part| part_ns(part).map(|[forward, backward]| [forward, backward, 0]))?;
        Ok(Self { has_weights: false, ..filled })
    }

    /// Sets the times of every part: forward, backward, and the backward part that computes weight gradients.
    ///
    /// # Errors
    /// The first error from `part_ns`.
    pub(crate) fn fill_split<E>(
        mut self,
        mut part_ns: impl FnMut(Part) -> Result<[u64; NUMBERS], E>,
    ) -> Result<Self, E> {
        self.has_weights = true;
        for stage in 0..self.starts.len().saturating_sub(1) {
            for microbatch in 0..self.starts[stage + 1] - self.starts[stage] {
                let part = Part { microbatch: microbatch as u32, stage: stage as u16 };
                let at = self.at(part);
                self.ns[at..at + NUMBERS].copy_from_slice(&part_ns(part)?);
            }
        }
        Ok(self)
    }

    /// Returns the forward and backward time of a part, 0 for a part that does not exist.
    #[must_use]
    pub fn part_ns(&self, part: Part) -> [u64; 2] {
        let stage = usize::from(part.stage);
        let exists = stage + 1 < self.starts.len()
            && self.starts[stage] + (part.microbatch as usize) < self.starts[stage + 1];
        if exists { [self.ns[self.at(part)], self.ns[self.at(part) + 1]] } else { [0, 0] }
    }

    /// Returns the time of the backward part that computes weight gradients, if it is known.
    pub(crate) fn weight_ns(&self, part: Part) -> Option<u64> {
        let [_, backward] = self.part_ns(part);
        self.has_weights.then(|| if backward > 0 { self.ns[self.at(part) + 2] } else { 0 })
    }

    /// Adds to a pass time; both halves of a split backward pass count as backward.
    pub(crate) fn add(&mut self, pass: Pass, ns: u64) {
        let at = self.at(pass.part);
        self.ns[at + usize::from(pass.kind != PassKind::Forward)] += ns;
        if pass.kind == PassKind::BackwardWeight {
            self.ns[at + 2] += ns;
        }
    }

    /// Returns all times as a slice, to sum them over ranks.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u64] {
        &mut self.ns
    }

    fn at(&self, part: Part) -> usize {
        NUMBERS * (self.starts[usize::from(part.stage)] + part.microbatch as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ModuleParallelism, simulate};
    use super::*;
    use dflop_models::{FrozenModules, ModelConfig, ModuleKind};

    fn job(schedule: ScheduleKind, stages: usize, dp_size: usize) -> Job {
        let document = serde_json::json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48});
        let model = ModelConfig::from_config(&document).unwrap();
        let layout = ModuleParallelism::even(ModuleKind::Llm, 4, stages).dp_size(dp_size);
        Job::new(model, FrozenModules::default(), vec![layout], schedule).unwrap()
    }

    fn makespan_ns(job: &Job, rounds: usize, part_ns: impl Fn(Part) -> [u64; 2]) -> u64 {
        let times = PassTimes::zero(job, rounds).fill(|part| Ok::<_, crate::Error>(part_ns(part))).unwrap();
        simulate(job, rounds, &times).unwrap().0
    }

    #[test]
    fn each_pass_takes_its_own_time() {
        let job = job(ScheduleKind::OneForwardOneBackward, 2, 1);
        assert_eq!(makespan_ns(&job, 3, |_| [1, 2]), 12, "(3 + 1) microbatches of 3 ns");
        // Forward in stage 0 takes longer before the pipeline is full, backward after the last one.
        assert_eq!(
            makespan_ns(&job, 3, |part| if part.stage == 0 { [5, 2] } else { [1, 2] }),
            5 + 5 + 2 + 5 + 1 + 2 + 2
        );
    }

    #[test]
    fn the_slowest_replica_ends_the_step() {
        for schedule in [ScheduleKind::GPipe, ScheduleKind::Interleaved { chunks: 2 }] {
            let job = job(schedule, 4, 2);
            let even = makespan_ns(&job, 4, |_| [1, 2]);
            let slow = makespan_ns(&job, 4, |part| if part.microbatch % 2 == 1 { [2, 4] } else { [1, 2] });
            assert_eq!(slow, 2 * even, "{schedule}");
        }
    }

    #[test]
    fn measured_passes_add_up_by_part() {
        let job = job(ScheduleKind::ZeroBubble, 2, 2);
        let mut times = PassTimes::zero(&job, 2);
        let part = Part { microbatch: 3, stage: 1 };
        for (kind, ns) in
            [(PassKind::Forward, 4), (PassKind::BackwardInput, 5), (PassKind::BackwardWeight, 6)]
        {
            times.add(Pass { kind, part }, ns);
        }
        assert_eq!(times.part_ns(part), [4, 11]);
        assert_eq!(times.part_ns(Part { microbatch: 4, ..part }), [0, 0], "there is no such part");
        assert_eq!(times.weight_ns(part), Some(6));
        assert_eq!(times.as_mut_slice().iter().sum::<u64>(), 4 + 11 + 6);
    }
}
