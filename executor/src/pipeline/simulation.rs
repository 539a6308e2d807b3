//! Pass times in a step, by stage and microbatch, and a step's simulation from them.

use std::collections::BTreeMap;
use std::ops::Range;

use dflop_balancer::schedule::{Part, Pass, PassKind, ScheduleKind};
use dflop_balancer::{Communication, StageTimes};

use super::job::Job;
use super::topology::{RankPasses, Topology};
use crate::error::{Error, Result};

/// Pipeline rank, pass, and time range in nanoseconds.
pub(crate) type Simulated = (usize, Pass, Range<u64>);

/// Simulates the action lists of all ranks; messages and gradient sums have zero duration.
///
/// - `microbatches`: number of microbatches per LLM DP rank
/// - returns the end time of the last rank in nanoseconds, and all passes
pub(crate) fn simulate(job: &Job, microbatches: usize, times: &PassTimes) -> Result<(u64, Vec<Simulated>)> {
    let topology = Topology::new(job, microbatches)?;
    if let Some(passes) = topology.shared() {
        return simulate_shared(job, &topology, passes, times);
    }
    let layout = topology.layout();
    let lists = layout.schedule(topology.schedule())?;
    let free = Communication::free(layout.stages(), layout.microbatches());
    let (mut makespan_ns, mut passes) = (0, Vec::new());
    for replica in 0..topology.replicas() {
        let part_ns = |cell: usize| {
            let (stage, inside) = (cell / layout.microbatches(), cell % layout.microbatches());
            // Modules with fewer replicas have fewer microbatches; the remaining cells stay empty.
            if inside < layout.stage_microbatches(stage) {
                let microbatch = topology.outside(inside as u32, replica);
                times.part_ns(Part { microbatch, stage: stage as u16 })
            } else {
                [0, 0]
            }
        };
        // Without a measured part, the balancer splits the backward pass in half.
        let weight_ns = |cell: usize| {
            let (stage, inside) = (cell / layout.microbatches(), cell % layout.microbatches());
            if inside >= layout.stage_microbatches(stage) {
                return Some(0);
            }
            let part = Part { microbatch: topology.outside(inside as u32, replica), stage: stage as u16 };
            times.weight_ns(part)
        };
        let cells = 0..layout.stages() * layout.microbatches();
        let (forward_ns, backward_ns) =
            cells.map(part_ns).map(|[forward, backward]| (forward, backward)).unzip();
        let mut stage_times =
            StageTimes::new(layout.stages(), layout.microbatches(), forward_ns, backward_ns)?;
        let measured: Option<Vec<u64>> =
            (0..layout.stages() * layout.microbatches()).map(weight_ns).collect();
        if let Some(measured) = measured {
            stage_times = stage_times.weight_ns(measured)?;
        }
        let simulation = layout.simulate(&lists, &stage_times, &free)?;
        makespan_ns = makespan_ns.max(simulation.makespan_ns);
        passes.extend(simulation.events.into_iter().map(|event| {
            let microbatch = topology.outside(event.microbatch, replica);
            let part = Part { microbatch, stage: event.stage as u16 };
            let rank = event.rank + replica * layout.ranks();
            (rank, Pass { kind: event.kind, part }, event.start_ns..event.end_ns)
        }));
    }
    Ok((makespan_ns, passes))
}

/// Simulates passes on ranks that several modules share: each rank runs passes in order, and tensor-parallel
/// ranks start passes together.
fn simulate_shared(
    job: &Job,
    topology: &Topology,
    ranks: &RankPasses,
    times: &PassTimes,
) -> Result<(u64, Vec<Simulated>)> {
    let (mut next, mut free_ns) = (vec![0; ranks.len()], vec![0_u64; ranks.len()]);
    // End times of forward passes, and of passes that compute the input gradient.
    let mut done_ns: BTreeMap<(bool, Part), u64> = BTreeMap::new();
    let mut passes = Vec::new();
    loop {
        let before = passes.len();
        for rank in 0..ranks.len() {
            while let Some(&pass) = ranks[rank].get(next[rank]) {
                let pipeline_rank = topology.rank(pass.part);
                let members = job.world_ranks(pipeline_rank);
                let is_next = |member: &usize| ranks[*member].get(next[*member]) == Some(&pass);
                let is_forward = pass.kind == PassKind::Forward;
                let (inputs, _) = topology.neighbors(pass);
                let mut inputs = inputs.iter().map(|part| done_ns.get(&(is_forward, *part)).copied());
                let ready = inputs.try_fold(0, |latest: u64, end| end.map(|end| latest.max(end)));
                let Some(ready_ns) = ready.filter(|_| members.iter().all(is_next)) else { break };
                let start_ns = members.iter().map(|member| free_ns[*member]).fold(ready_ns, u64::max);
                let end_ns = start_ns + pass_ns(times, pass);
                for &member in members {
                    (next[member], free_ns[member]) = (next[member] + 1, end_ns);
                }
                if pass.kind != PassKind::BackwardWeight {
                    done_ns.insert((is_forward, pass.part), end_ns);
                }
                passes.push((pipeline_rank, pass, start_ns..end_ns));
            }
        }
        if passes.len() == before {
            break;
        }
    }
    if let Some(rank) = (0..ranks.len()).find(|&rank| next[rank] < ranks[rank].len()) {
        let action = ranks[rank][next[rank]].to_string();
        return Err(Error::Balancer(dflop_balancer::Error::Deadlock { rank, action }));
    }
    Ok((free_ns.into_iter().max().unwrap_or(0), passes))
}

/// Returns a pass time; without a measured part, half of a backward pass is for weights.
fn pass_ns(times: &PassTimes, Pass { kind, part }: Pass) -> u64 {
    let [forward_ns, backward_ns] = times.part_ns(part);
    let weight_ns = times.weight_ns(part).unwrap_or(backward_ns / 2);
    match kind {
        PassKind::Forward => forward_ns,
        PassKind::Backward => backward_ns,
        PassKind::BackwardInput => backward_ns - weight_ns,
        PassKind::BackwardWeight => weight_ns,
    }
}

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
    use dflop_balancer::schedule::ScheduleKind;
    use dflop_models::encoder::EncoderConfig;
    use dflop_models::{FrozenModules, LlmConfig, ModelConfig, ModuleKind};
    use dflop_planner::Placement;

    use super::*;
    use crate::pipeline::ModuleParallelism;
    use std::sync::Arc;

    const SIMPLE: ScheduleKind = ScheduleKind::OneForwardOneBackward;

    /// Two encoder layers, four LLM layers.
    fn model() -> ModelConfig {
        let text = serde_json::json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48});
        let vision = serde_json::json!({"model_type": "qwen2_vl", "text_config": text, "vision_config": {"depth": 2,
            "embed_dim": 16, "hidden_act": "quick_gelu", "hidden_size": 16, "in_channels": 3, "mlp_ratio": 2,
            "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}});
        ModelConfig {
            vision: EncoderConfig::vision(&vision).unwrap(),
            audio: None,
            llm: LlmConfig::from_config(&text).unwrap(),
            frozen: Arc::default(),
        }
    }

    fn job(placement: Placement, modules: &[ModuleParallelism; 2], schedule: ScheduleKind) -> Job {
        Job::placed(placement, model(), FrozenModules::default(), modules.to_vec(), schedule).unwrap()
    }

    fn module(module: ModuleKind, ends: &[usize]) -> ModuleParallelism {
        let starts = std::iter::once(&0).chain(ends);
        ModuleParallelism::new(module, starts.zip(ends).map(|(start, end)| *start..*end).collect())
    }

    fn makespan_ns(job: &Job, rounds: usize, part_ns: impl Fn(Part) -> [u64; 2]) -> u64 {
        let times = PassTimes::zero(job, rounds).fill(|part| Ok::<_, Error>(part_ns(part))).unwrap();
        simulate(job, rounds, &times).unwrap().0
    }

    #[test]
    fn a_joint_rank_runs_the_passes_of_its_modules_one_after_the_other() {
        let modules = [module(ModuleKind::Vision, &[2, 2]), module(ModuleKind::Llm, &[1, 4])];
        for (schedule, expected_ns) in
            [(SIMPLE, 24), (ScheduleKind::GPipe, 24), (ScheduleKind::ZeroBubble, 20)]
        {
            let job = job(Placement::Joint, &modules, schedule);
            // The encoder and the first LLM stage together take as long as the second stage.
            let part_ns = |part: Part| if part.stage == 2 { [2, 4] } else { [1, 2] };
            assert_eq!(makespan_ns(&job, 3, part_ns), expected_ns, "{schedule}");
        }
    }

    #[test]
    fn a_group_waits_for_the_largest_share_of_its_media() {
        let modules = [module(ModuleKind::Vision, &[2]), module(ModuleKind::Llm, &[4]).tp_size(2).dp_size(2)];
        let job = job(Placement::Joint, &modules, SIMPLE);
        // Encoder replica 3 is the second rank in the second group.
        let part_ns = |part: Part| match (part.stage, part.microbatch % 4) {
            (0, 3) => [7, 0],
            (0, _) => [1, 0],
            _ => [2, 4],
        };
        assert_eq!(makespan_ns(&job, 1, part_ns), 7 + 2 + 4);
        let (_, passes) = simulate(&job, 1, &PassTimes::zero(&job, 1)).unwrap();
        assert_eq!(passes.len(), 2 * (4 + 2), "each pass once, whatever the number of ranks");
    }

    #[test]
    fn a_colocated_encoder_runs_before_and_after_the_llm() {
        let modules = [module(ModuleKind::Vision, &[2]).dp_size(2), module(ModuleKind::Llm, &[2, 4])];
        let job = job(Placement::Colocated, &modules, SIMPLE);
        let part_ns = |part: Part| if part.stage == 0 { [5, 9] } else { [1, 2] };
        // Two encoder microbatches on each rank, then (2 + 1) of 3 ns.
        assert_eq!(makespan_ns(&job, 2, part_ns), 10 + 9 + 18);
    }
}

#[cfg(test)]
mod pass_times_tests {
    use dflop_models::{FrozenModules, ModelConfig, ModuleKind};

    use super::*;
    use crate::pipeline::{ModuleParallelism, simulate};

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
