//! Divides a method's GPU time into computing and idle time by cause.
//!
//! The parts are differences between the makespan and successively weaker lower bounds, in this order:
//!
//! | bound | made from the one before | the difference is the wait for |
//! | --- | --- | --- |
//! | makespan | | |
//! | free links | no messages and no sums of gradients | messages |
//! | equal ranks | every rank takes the mean of all ranks, slot by slot | the slowest rank |
//! | equal slots | every slot takes the mean of its stage, where that is shorter | unequal microbatches |
//! | slowest stage | nothing but the passes of the stage with the most work | fill and drain |
//! | slowest module | the mean of the stages of the module with the most work | the slowest stage |
//! | computing | the mean of all GPUs of the plan | the LLM or the encoder, by GPUs of the other |
//!
//! Every bound is at most the previous bound, so no part is negative, and computing and all parts add up to
//! the makespan. Equal ranks are no slower because a makespan is a maximum over sums, hence convex, and does
//! not depend on rank numbers. Equal slots may be slower: short microbatches at both ends shorten fill and
//! drain. An encoder rank computes as long as the busiest rank in the slot, and transfers inside a
//! tensor-parallel group count as computing, as in the idle fraction.

use super::data_blind::alone;
use super::outcome::Outcome;
use crate::cluster::Placement;
use crate::score::slot_assignment::SlotAssignment;
use crate::score::step_timeline::{self, ChainTimes, StepTimes};
use crate::space::{Candidate, SearchSpace};
use dflop_balancer::schedule::{EncoderChain, StepShape};
use std::ops::AddAssign;

/// Idle times summed over batches, in nanoseconds of makespan.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WaitTimes([f64; 7]);

impl AddAssign for WaitTimes {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, ns)| *sum += ns);
    }
}

impl WaitTimes {
    /// Returns the idle times as fractions of the same batches' makespans.
    pub(super) fn over(self, makespans_ns: f64) -> IdleBreakdown {
        let fraction = |ns: f64| if makespans_ns > 0.0 { ns / makespans_ns } else { 0.0 };
        let [messages, rank, microbatches, fill, stage, llm, encoder] = self.0.map(fraction);
        IdleBreakdown {
            messages_fraction: messages,
            slowest_rank_fraction: rank,
            unequal_microbatches_fraction: microbatches,
            fill_and_drain_fraction: fill,
            slowest_stage_fraction: stage,
            llm_fraction: llm,
            encoder_fraction: encoder,
        }
    }
}

/// Returns the idle times for a batch whose LLM ranks form one job.
pub(super) fn for_job(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    assignment: &SlotAssignment,
    outcome: &Outcome,
) -> WaitTimes {
    let phase_ns = match candidate.family.placement {
        Placement::Colocated => assignment.phases_ns(space, candidate),
        Placement::Disaggregated | Placement::Joint => 0,
    };
    let step = RunStep {
        jobs: vec![assignment.times(space, candidate)],
        phase_ns,
        makespan_ns: outcome.makespan_ns,
        computing_ns: outcome.busy_ns / f64::from(space.gpus(&candidate.family)),
    };
    step.waits()
}

/// Returns the idle times for a batch whose DP ranks are separate pipelines.
pub(super) fn for_pipelines(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    pipelines: &[SlotAssignment],
    outcome: &Outcome,
) -> WaitTimes {
    let alone = alone(candidate);
    let step = RunStep {
        jobs: pipelines.iter().map(|assignment| assignment.times(space, &alone)).collect(),
        phase_ns: 0,
        makespan_ns: outcome.makespan_ns,
        computing_ns: outcome.busy_ns / f64::from(space.gpus(&candidate.family)),
    };
    step.waits()
}

/// Step with a simulated makespan.
struct RunStep {
    /// Times of concurrent jobs with equal stages, slots and ranks.
    jobs: Vec<StepTimes>,
    /// Colocated encoder time before and after the pipeline.
    phase_ns: u64,
    makespan_ns: u64,
    /// Computing time, mean over the plan's GPUs.
    computing_ns: f64,
}

impl RunStep {
    fn waits(mut self) -> WaitTimes {
        let phase_ns = self.phase_ns as f64;
        let mut free_ns = 0;
        for job in &mut self.jobs {
            free_links(job);
            free_ns = free_ns.max(step_timeline::makespan_ns(job));
        }
        let free_ns = free_ns as f64 + phase_ns;
        let MeanChain { mut chain, stage_ns } = MeanChain::new(&self.jobs);
        let of_encoder = |(first, encoder): (usize, EncoderChain)| {
            mean(&stage_ns[first..first + usize::from(encoder.stages)])
        };
        let encoder_ns = chain.shape.encoders.each().map(of_encoder).fold(0.0, f64::max);
        let stage_ns = rank_ns(&chain.shape, &stage_ns);
        let llm_ns = mean(&stage_ns[chain.shape.encoder_stages()..]);
        let slowest_ns = stage_ns.iter().copied().fold(0.0, f64::max) + phase_ns;
        // Means are rounded down; the slowest stage's work is not.
        let run = |chain: &StepTimes| (step_timeline::makespan_ns(chain) as f64 + phase_ns).max(slowest_ns);
        let equal_ranks_ns = run(&chain).min(free_ns);
        equalize_slots(&mut chain);
        let equal_slots_ns = run(&chain).min(equal_ranks_ns);
        let module_ns = encoder_ns.max(llm_ns) + phase_ns;
        let other_ns = (module_ns - self.computing_ns).max(0.0);
        let is_for_encoder = self.phase_ns > 0 || encoder_ns > llm_ns;
        WaitTimes([
            self.makespan_ns as f64 - free_ns,
            free_ns - equal_ranks_ns,
            equal_ranks_ns - equal_slots_ns,
            equal_slots_ns - slowest_ns,
            (slowest_ns - module_ns).max(0.0),
            if is_for_encoder { 0.0 } else { other_ns },
            if is_for_encoder { other_ns } else { 0.0 },
        ])
    }
}

/// Removes messages and gradient sums.
fn free_links(step: &mut StepTimes) {
    for chain in step.encoders.iter_mut().chain([&mut step.llm]) {
        chain.hop_ns.clear();
        chain.out_hop_ns.clear();
    }
    step.reduce_ns.clear();
    step.gather_ns.clear();
}

/// Single-rank step with mean times over all ranks and jobs.
struct MeanChain {
    chain: StepTimes,
    /// Work per stage over all slots, mean over the ranks.
    stage_ns: Vec<f64>,
}

impl MeanChain {
    fn new(jobs: &[StepTimes]) -> Self {
        let first = &jobs[0];
        let mut stage_ns = Vec::new();
        let mut of_module = |chains: Vec<&ChainTimes>| {
            let (mean, own_ns) = mean_chain(&chains);
            stage_ns.extend(own_ns);
            mean
        };
        let encoder = |at: usize| of_module(jobs.iter().map(|job| &job.encoders[at]).collect());
        let encoders = (0..first.encoders.len()).map(encoder).collect();
        let llm = of_module(jobs.iter().map(|job| &job.llm).collect());
        Self { chain: StepTimes { encoders, llm, ..StepTimes::new(first.shape, 1) }, stage_ns }
    }
}

/// Returns a module's mean over all ranks and jobs, rounded down, and each stage's exact work.
fn mean_chain(chains: &[&ChainTimes]) -> (ChainTimes, Vec<f64>) {
    let (first, lanes) = (chains[0], chains[0].lanes);
    let count = (chains.len() * lanes) as u64;
    let sums: Vec<[Vec<u64>; 2]> = (0..first.rows_ns.len())
        .map(|row| [0, 1].map(|way| sum_ranks(chains.iter().map(|chain| &chain.rows_ns[row][way]), lanes)))
        .collect();
    let row_ns: Vec<f64> =
        sums.iter().map(|row| row.iter().flatten().sum::<u64>() as f64 / count as f64).collect();
    let stage_ns = first.stages.iter().map(|row| row_ns[*row]).collect();
    let divided = |ns: Vec<u64>| -> Vec<u64> { ns.iter().map(|ns| ns / count).collect() };
    let means = sums.into_iter().map(|row| row.map(divided)).collect();
    let weights = (0..first.weights_ns.len())
        .map(|row| divided(sum_ranks(chains.iter().map(|chain| &chain.weights_ns[row]), lanes)));
    let weights_ns = weights.collect();
    (ChainTimes { weights_ns, ..ChainTimes::new(1, (first.stages.clone(), means)) }, stage_ns)
}

/// Adds the times of all stages on a rank.
fn rank_ns(shape: &StepShape, stage_ns: &[f64]) -> Vec<f64> {
    let ranks = (0..shape.stages).map(|stage| shape.first_of_rank(stage) + 1).max().unwrap_or(0);
    let mut sums = vec![0.0; ranks];
    stage_ns.iter().enumerate().for_each(|(stage, ns)| sums[shape.first_of_rank(stage)] += ns);
    sums
}

/// Adds the times over all ranks and jobs, slot by slot.
fn sum_ranks<'a>(jobs_ns: impl Iterator<Item = &'a Vec<u64>>, ranks: usize) -> Vec<u64> {
    let mut sums = Vec::new();
    for job_ns in jobs_ns {
        sums.resize(job_ns.len() / ranks, 0);
        for (sum, of_slot) in sums.iter_mut().zip(job_ns.chunks_exact(ranks)) {
            *sum += of_slot.iter().sum::<u64>();
        }
    }
    sums
}

/// Replaces a stage's forward times by the forward mean, and backward times by the backward mean.
fn equalize_slots(chain: &mut StepTimes) {
    for module in chain.encoders.iter_mut().chain([&mut chain.llm]) {
        for pass_ns in module.rows_ns.iter_mut().flatten().chain(&mut module.weights_ns) {
            let mean_ns = pass_ns.iter().sum::<u64>() / pass_ns.len().max(1) as u64;
            pass_ns.fill(mean_ns);
        }
    }
}

fn mean(stage_ns: &[f64]) -> f64 {
    stage_ns.iter().sum::<f64>() / stage_ns.len().max(1) as f64
}

/// Fractions of GPU time in a method's steps that GPUs wait, by cause, each in `0..=1`.
///
/// The fractions add up to the idle fraction.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct IdleBreakdown {
    /// Exposed communication: messages between stages, gradient sums and weight gathers, as far as no pass
    /// hides them.
    pub messages_fraction: f64,
    /// Ranks with less work in a slot wait for the rank with the most work, directly or through a shared
    /// encoder.
    pub slowest_rank_fraction: f64,
    /// Stages wait because microbatches take unequal times.
    pub unequal_microbatches_fraction: f64,
    /// Stages wait while a pipeline fills and drains, or while the encoder runs no further ahead.
    pub fill_and_drain_fraction: f64,
    /// Stages in a module wait for the stage with the most work in a step.
    pub slowest_stage_fraction: f64,
    /// Encoder GPUs wait for the LLM, which has more work per GPU.
    pub llm_fraction: f64,
    /// LLM GPUs wait for the encoder, which has more work per GPU; with a colocated encoder, GPUs without an
    /// encoder rank.
    pub encoder_fraction: f64,
}

impl IdleBreakdown {
    /// Lists causes with fractions, the largest first; ties in field order.
    #[must_use]
    pub fn largest_first(&self) -> [(&'static str, f64); 7] {
        let mut all = [
            ("messages", self.messages_fraction),
            ("the slowest rank", self.slowest_rank_fraction),
            ("unequal microbatches", self.unequal_microbatches_fraction),
            ("fill and drain", self.fill_and_drain_fraction),
            ("the slowest stage", self.slowest_stage_fraction),
            ("the LLM", self.llm_fraction),
            ("the encoder", self.encoder_fraction),
        ];
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_balancer::schedule::{EncoderChains, ScheduleKind};
    use proptest::prelude::*;

    const KINDS: [ScheduleKind; 4] = [
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::GPipe,
        ScheduleKind::EncoderAhead { rounds: 1 },
        ScheduleKind::ZeroBubble,
    ];

    /// Jobs whose stages all have separate rows, with times drawn from `times` in turn; the encoder has one
    /// lane or the LLM's lanes.
    fn jobs(
        kind: ScheduleKind,
        [encoder, lanes, llm, slots, ranks, jobs]: [usize; 6],
        times: &[u64],
    ) -> Vec<StepTimes> {
        let mut drawn = times.iter().copied().cycle();
        let mut draw = |count: usize| -> Vec<u64> { drawn.by_ref().take(count).collect() };
        let stages = encoder + llm;
        let shape = StepShape { kind, encoders: EncoderChains::one(encoder), stages, slots };
        let mut chain = |stages: usize, lanes: usize| {
            let rows_ns = (0..stages).map(|_| [draw(slots * lanes), draw(slots * lanes)]).collect();
            let chain = ChainTimes::new(lanes, ((0..stages).collect(), rows_ns));
            ChainTimes { hop_ns: draw(slots * lanes), out_hop_ns: draw(slots * lanes), ..chain }
        };
        let mut job = || StepTimes {
            encoders: (0..encoder.min(1)).map(|_| chain(encoder, lanes)).collect(),
            llm: chain(llm, ranks),
            reduce_ns: times[..stages].to_vec(),
            layers: vec![2; stages],
            ..StepTimes::new(shape, ranks)
        };
        (0..jobs).map(|_| job()).collect()
    }

    /// Runs jobs with the given number of GPUs per encoder and LLM stage on each rank.
    fn run(jobs: Vec<StepTimes>, [encoder_gpus, llm_gpus]: [f64; 2]) -> RunStep {
        let makespan_ns = jobs.iter().map(step_timeline::makespan_ns).max().unwrap();
        let (mut busy_ns, mut gpus) = (0.0, 0.0);
        for job in &jobs {
            let modules =
                job.encoders.iter().map(|chain| (chain, encoder_gpus)).chain([(&job.llm, llm_gpus)]);
            for (chain, own) in modules {
                busy_ns += chain.busy_ns() * own;
                gpus += (chain.stages.len() * chain.lanes) as f64 * own;
            }
        }
        RunStep { jobs, phase_ns: 0, makespan_ns, computing_ns: busy_ns / gpus }
    }

    fn waits(step: RunStep) -> IdleBreakdown {
        let makespan_ns = step.makespan_ns as f64;
        step.waits().over(makespan_ns)
    }

    /// Job with one encoder stage and at least one LLM stage, without links.
    fn plain(encoder_ns: &[u64], llm_ns: &[&[u64]], ranks: usize) -> StepTimes {
        let slots = llm_ns[0].len() / ranks;
        let encoder = usize::from(!encoder_ns.is_empty());
        let mut job =
            jobs(ScheduleKind::OneForwardOneBackward, [encoder, 1, llm_ns.len(), slots, ranks, 1], &[0; 9])
                .pop()
                .unwrap();
        free_links(&mut job);
        if let Some(encoder) = job.encoders.first_mut() {
            encoder.rows_ns = vec![[encoder_ns.to_vec(), encoder_ns.to_vec()]];
        }
        job.llm.rows_ns = llm_ns.iter().map(|ns| [ns.to_vec(), ns.to_vec()]).collect();
        job
    }

    fn assert_only(found: &IdleBreakdown, name: &str, fraction: f64) {
        let [largest, rest @ ..] = found.largest_first();
        assert_eq!(largest.0, name, "{found:?}");
        assert!((largest.1 - fraction).abs() < 1e-9, "{found:?}");
        assert!(rest.iter().all(|(_, other)| other.abs() < 1e-9), "{found:?}");
    }

    proptest! {
        #[test]
        fn computing_and_waits_are_the_whole_step(
            kind in prop::sample::select(KINDS.to_vec()), encoder in 0usize..3, llm in 1usize..4,
            slots in 1usize..7, ranks in 1usize..4, is_shared in any::<bool>(), count in 1usize..4, phase_ns in 0u64..500,
            times in prop::collection::vec(0u64..1000, 200), gpus in (1u32..9, 1u32..9),
        ) {
            let lanes = if is_shared { 1 } else { ranks };
            let jobs = jobs(kind, [encoder, lanes, llm, slots, ranks, count], &times);
            let mut step = run(jobs, [f64::from(gpus.0), f64::from(gpus.1)]);
            // A colocated encoder is no stage; half the GPUs have an encoder rank.
            if encoder == 0 {
                step.phase_ns = phase_ns;
                step.makespan_ns += phase_ns;
                step.computing_ns += phase_ns as f64 / 2.0;
            }
            let (makespan_ns, computing_ns) = (step.makespan_ns as f64, step.computing_ns);
            prop_assume!(makespan_ns > 0.0);
            let found = waits(step);
            let all = found.largest_first();
            prop_assert!(all.iter().all(|(_, fraction)| (0.0..=1.0).contains(fraction)), "{found:?}");
            let sum: f64 = all.iter().map(|(_, fraction)| fraction).sum();
            prop_assert!((sum + computing_ns / makespan_ns - 1.0).abs() < 1e-9, "{found:?}");
        }

        #[test]
        fn free_links_leave_no_wait_for_messages(
            kind in prop::sample::select(KINDS.to_vec()), times in prop::collection::vec(1u64..1000, 50),
        ) {
            let mut jobs = jobs(kind, [1, 1, 2, 4, 2, 2], &times);
            prop_assert!(waits(run(jobs.clone(), [1.0, 1.0])).messages_fraction > 0.0);
            jobs.iter_mut().for_each(free_links);
            prop_assert!(waits(run(jobs, [1.0, 1.0])).messages_fraction.abs() < f64::EPSILON);
        }
    }

    /// One stage with forward 30 and backward 30, then a gradient sum taking 40.
    #[test]
    fn sums_of_gradients_are_messages() {
        let mut step = plain(&[], &[&[30]], 1);
        (step.reduce_ns, step.layers) = (vec![40], vec![1]);
        assert_only(&waits(run(vec![step], [1.0, 1.0])), "messages", 0.4);
    }

    /// One rank of four takes 40, three take 20: the mean is 25.
    #[test]
    fn one_slow_rank_makes_the_others_wait() {
        let step = plain(&[], &[&[40, 20, 20, 20]], 4);
        assert_only(&waits(run(vec![step], [1.0, 1.0])), "the slowest rank", 15.0 / 40.0);
        let alone = [40, 20, 20, 20].map(|ns| plain(&[], &[&[ns]], 1));
        assert_only(&waits(run(alone.to_vec(), [1.0, 1.0])), "the slowest rank", 15.0 / 40.0);
    }

    /// Two stages and four microbatches taking 10 each way: 2 (4 + 1) passes of 10; each stage runs 8.
    #[test]
    fn equal_microbatches_wait_for_fill_and_drain() {
        let step = plain(&[], &[&[10; 4], &[10; 4]], 1);
        assert_only(&waits(run(vec![step], [1.0, 1.0])), "fill and drain", 0.2);
    }

    /// The long microbatch is first: both stages wait for it, once before and once after it.
    #[test]
    fn a_long_microbatch_at_the_start_is_waited_for() {
        let unequal = waits(run(vec![plain(&[], &[&[40, 10, 10, 10], &[40, 10, 10, 10]], 1)], [1.0, 1.0]));
        assert!(unequal.unequal_microbatches_fraction > 0.1, "{unequal:?}");
        let middle = waits(run(vec![plain(&[], &[&[10, 40, 10, 10], &[10, 40, 10, 10]], 1)], [1.0, 1.0]));
        assert!(middle.unequal_microbatches_fraction < unequal.unequal_microbatches_fraction, "{middle:?}");
    }

    /// A stage taking 10 before a stage taking 30: 60 a round, where both have 40 in the mean.
    #[test]
    fn a_slow_stage_makes_the_others_wait() {
        let found = waits(run(vec![plain(&[], &[&[10; 8], &[30; 8]], 1)], [1.0, 1.0]));
        assert_eq!(found.largest_first()[0].0, "the slowest stage");
        // A makespan of 500: eight rounds of 60, and the faster stage's first and last pass.
        assert!((found.slowest_stage_fraction - (480.0 - 320.0) / 500.0).abs() < 1e-9, "{found:?}");
        assert!((found.fill_and_drain_fraction - 20.0 / 500.0).abs() < 1e-9, "{found:?}");
    }

    /// An encoder on one GPU and an LLM on three; either the encoder's passes take 10 and the LLM's 30, or
    /// the reverse.
    #[test]
    fn the_module_with_less_work_waits_for_the_other() {
        let [for_llm, for_encoder] = [(10, 30), (30, 10)].map(|(encoder_ns, llm_ns)| {
            waits(run(vec![plain(&[encoder_ns; 20], &[&[llm_ns; 20]], 1)], [1.0, 3.0]))
        });
        // The mean GPU computes 50 in a round of 60. The encoder's first and last pass are extra.
        let expected = 20.0 * (60.0 - 50.0) / (20.0 * 60.0 + 20.0);
        assert!((for_llm.llm_fraction - expected).abs() < 1e-9, "{for_llm:?}");
        assert!(for_llm.encoder_fraction.abs() + for_llm.slowest_stage_fraction.abs() < 1e-9, "{for_llm:?}");
        // The mean GPU computes 30 in a round of 60. The LLM's last passes run concurrently with an encoder
        // pass.
        assert_only(&for_encoder, "the encoder", 20.0 * (60.0 - 30.0) / (20.0 * 60.0));
    }

    /// A colocated encoder taking 100 on half the GPUs: the remaining half waits.
    #[test]
    fn gpus_without_an_encoder_rank_wait_for_it() {
        let mut step = run(vec![plain(&[], &[&[50]], 1)], [1.0, 1.0]);
        (step.phase_ns, step.makespan_ns) = (100, step.makespan_ns + 100);
        step.computing_ns += 50.0;
        assert_only(&waits(step), "the encoder", 50.0 / 200.0);
    }
}
