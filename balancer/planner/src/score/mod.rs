//! Scores a plan on sampled batches: each batch is balanced, assigned to slots and simulated.
//!
//! Describes a plan's step for the pipeline search: sample times, stages, and memory limits.

pub(super) mod batch_balance;
pub(super) mod encoder_shares;
mod link_times;
mod ordered_timeline;
pub(super) mod slot_assignment;
pub(super) mod step_timeline;
mod step_times;

use super::cluster::Placement;
use super::costs::StageBytes;
use super::space::memory::{self, MemoryRequirement};
use super::space::shape::StageShape;
use super::space::{Candidate, SearchSpace};
use super::workload::ItemSize;
use batch_balance::balance_batch;
use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{
    Budget, Caps, Instance, PipelineConfig, PipelineMemoryLimits, Result, StageMemoryLimit, Strategy, balance,
};
use dflop_costmodel::nearest_rank;
use encoder_shares::{MediaTimes, StageLoad, UnitTimes};
use rayon::prelude::*;
use slot_assignment::{Order, SlotAssignment, cells_of_groups, greedy_groups};
use std::ops::Range;

/// Work units for balancing one batch for a finalist.
const SEARCH_WORK: u64 = 400;
/// Maximum product of samples and groups for a search on a finalist; the first partition's time is
/// proportional.
const SEARCH_CELLS_MAX: usize = 4_000_000;

/// Required memory divided by the budget, up to which a search may make a batch fit.
const NEARLY: f64 = 1.1;

/// The same, above which no order is tried that needs less.
const HOPELESS: f64 = 1.6;

/// Slowdown factor beyond which a plan is discarded early; batch-to-batch noise is about 1 %.
pub(super) const FAR_BEHIND: f64 = 1.05;

/// A plan's makespans and memory requirements, in batch order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Score {
    pub(super) makespans_ns: Vec<u64>,
    requirements: Vec<MemoryRequirement>,
}

impl Score {
    /// Adds the scores for more batches.
    pub(super) fn append(&mut self, mut more: Self) {
        self.makespans_ns.append(&mut more.makespans_ns);
        self.requirements.append(&mut more.requirements);
    }

    /// Whether this score is worse than `other` on the same first batches by more than the noise.
    pub(super) fn is_far_behind(&self, other: &Self) -> bool {
        self.is_slower_by(FAR_BEHIND, other)
    }

    /// Whether this score is worse than `other` by a factor, on the first batches of both, if there are any.
    pub(super) fn is_slower_by(&self, factor: f64, other: &Self) -> bool {
        let batches = 0..self.makespans_ns.len().min(other.makespans_ns.len());
        !batches.is_empty() && self.range(batches.clone()).mean_ns() > factor * other.range(batches).mean_ns()
    }

    /// Returns the score on a batch range, cut to the scored batches.
    pub(super) fn range(&self, batches: Range<usize>) -> Self {
        let batches = batches.start..batches.end.min(self.makespans_ns.len());
        Self {
            makespans_ns: self.makespans_ns[batches.clone()].to_vec(),
            requirements: self.requirements[batches].to_vec(),
        }
    }

    /// Returns the maximum memory requirement over all batches.
    pub(super) fn requirement(&self) -> MemoryRequirement {
        self.requirements.iter().copied().fold(MemoryRequirement::default(), MemoryRequirement::max)
    }

    pub(super) fn mean_ns(&self) -> f64 {
        let sum: u128 = self.makespans_ns.iter().map(|ns| u128::from(*ns)).sum();
        sum as f64 / self.makespans_ns.len().max(1) as f64
    }

    /// Returns the smallest makespan that 95 % of the batches do not exceed.
    pub(super) fn p95_ns(&self) -> u64 {
        let mut sorted = self.makespans_ns.clone();
        sorted.sort_unstable();
        nearest_rank(&sorted, 95).unwrap_or(0)
    }
}

impl FromIterator<(u64, MemoryRequirement)> for Score {
    fn from_iter<T: IntoIterator<Item = (u64, MemoryRequirement)>>(batches: T) -> Self {
        let (makespans_ns, requirements) = batches.into_iter().unzip();
        Self { makespans_ns, requirements }
    }
}

/// Plan with its score.
#[derive(Debug, Clone)]
pub(super) struct ScoredPlan {
    pub(super) candidate: Candidate,
    pub(super) score: Score,
}

/// Scores a plan on some batches, balanced greedily; `None` if a batch is far from fitting into memory, or
/// the longest sample overall does not fit, which may not be in the batches.
///
/// A batch that nearly fits uses the minimum memory over all orders: a search may make it fit.
pub(super) fn score(space: &SearchSpace<'_>, candidate: &Candidate, batches: Range<usize>) -> Option<Score> {
    if !memory::may_fit(space, &candidate.family, candidate.microbatches, candidate.microbatches) {
        return None;
    }
    let score = |batch: &Vec<ItemSize>| {
        let (assignment, required) = greedy_that_fits(space, candidate, batch);
        let fits = required.most() <= NEARLY * space.budget_bytes;
        fits.then(|| (makespan_ns(space, candidate, &assignment), required))
    };
    let scored = space.workload.batches()[batches].par_iter().map(score);
    scored.collect::<Option<Vec<_>>>().map(Score::from_iter)
}

/// Balances a batch greedily in the first order that fits, or in the order with the minimum memory.
fn greedy_that_fits(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> (SlotAssignment, MemoryRequirement) {
    let by = |sizes: &[u64], group_of: &[u32], order| {
        let assignment = assign_slots(space, candidate, batch, sizes, group_of, order);
        let required = assignment.requirement(space, candidate);
        (assignment, required)
    };
    let sizes_ns = item_times(space, candidate, batch).sums_ns();
    let group_of = greedy_groups(&sizes_ns, candidate.groups());
    let mut least = by(&sizes_ns, &group_of, Order::Peak);
    let is_done = |required: MemoryRequirement| {
        required.most() <= space.budget_bytes || required.most() > HOPELESS * space.budget_bytes
    };
    let keep_less = |least: &mut (SlotAssignment, MemoryRequirement), other: (_, MemoryRequirement)| {
        if other.1.most() < least.1.most() {
            *least = other;
        }
    };
    if !is_done(least.1) {
        keep_less(&mut least, by(&sizes_ns, &group_of, Order::Even));
    }
    // Even tokens in an even order use the least memory.
    if !is_done(least.1) {
        let tokens: Vec<u64> = batch.iter().map(|item| u64::from(item.tokens)).collect();
        let group_of = greedy_groups(&tokens, candidate.groups());
        for order in [Order::Peak, Order::Even] {
            if !is_done(least.1) {
                keep_less(&mut least, by(&tokens, &group_of, order));
            }
        }
    }
    least
}

/// Scores a plan on some batches with the best balancing for each, from scratch; also if a batch does not
/// fit.
///
/// # Errors
/// [`dflop_balancer::Error`] if times overflow.
pub(super) fn refined(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batches: Range<usize>,
) -> Result<Score> {
    let refine = |batch: &Vec<ItemSize>| {
        let found = balance_batch(space, candidate, batch)?;
        Ok((found.makespan_ns, found.requirement))
    };
    let refined = space.workload.batches()[batches].par_iter().map(refine);
    refined.collect::<Result<Vec<_>>>().map(Score::from_iter)
}

/// Replaces greedy scores on some batches by [`Strategy::SEARCH`] scores, if these are better and fit, and by
/// the best balancing where a batch does not fit.
///
/// # Errors
/// [`dflop_balancer::Error`] if times overflow.
pub(super) fn improve(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batches: Range<usize>,
    score: &mut Score,
) -> Result<()> {
    let improve = |batch: &Vec<ItemSize>, greedy: (u64, MemoryRequirement)| {
        if greedy.1.most() > space.budget_bytes {
            let found = balance_batch(space, candidate, batch)?;
            return Ok((found.makespan_ns, found.requirement));
        }
        let searched = balance_by_search(space, candidate, batch)?;
        let searched = searched.and_then(|assignment| fitting(space, candidate, assignment));
        let searched =
            searched.map(|(assignment, required)| (makespan_ns(space, candidate, &assignment), required));
        // The greedy assignment stays if the search is not better.
        Ok(searched.filter(|(makespan_ns, _)| *makespan_ns < greedy.0).unwrap_or(greedy))
    };
    let own = score.makespans_ns[batches.clone()].par_iter().zip(&score.requirements[batches.clone()]);
    let own = own.zip(&space.workload.batches()[batches.clone()]);
    let improved = own.map(|((makespan_ns, required), batch)| improve(batch, (*makespan_ns, *required)));
    let improved: Vec<(u64, MemoryRequirement)> = improved.collect::<Result<_>>()?;
    for (at, better) in batches.zip(improved) {
        (score.makespans_ns[at], score.requirements[at]) = better;
    }
    Ok(())
}

/// Returns a slot assignment with its memory requirement, if it fits.
fn fitting(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    assignment: SlotAssignment,
) -> Option<(SlotAssignment, MemoryRequirement)> {
    let required = assignment.requirement(space, candidate);
    (required.most() <= space.budget_bytes).then_some((assignment, required))
}

/// Balances a batch greedily by the sum over all modules' times, the longest samples first.
pub(super) fn balance_greedily(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> SlotAssignment {
    balance_by(space, candidate, batch, &item_times(space, candidate, batch).sums_ns(), Order::Peak)
}

fn balance_by(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    sizes: &[u64],
    order: Order,
) -> SlotAssignment {
    assign_slots(space, candidate, batch, sizes, &greedy_groups(sizes, candidate.groups()), order)
}

/// Balances a batch by [`Strategy::SEARCH`]; `None` if that would take too long or there is no choice.
pub(super) fn balance_by_search(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> Result<Option<SlotAssignment>> {
    let groups = candidate.groups();
    if groups >= batch.len() || batch.len() * groups > SEARCH_CELLS_MAX {
        return Ok(None);
    }
    let sizes = item_times(space, candidate, batch);
    let sums_ns = sizes.sums_ns();
    let instance = sizes.instance(groups)?;
    let found = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(SEARCH_WORK))?;
    let mut group_of = vec![0; batch.len()];
    for (group, items) in found.groups.iter().enumerate() {
        for &item in items {
            group_of[item as usize] = group as u32;
        }
    }
    Ok(Some(assign_slots(space, candidate, batch, &sums_ns, &group_of, Order::Peak)))
}

pub(super) fn makespan_ns(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    assignment: &SlotAssignment,
) -> u64 {
    let pipeline_ns = step_timeline::makespan_ns(&assignment.times(space, candidate));
    match candidate.family.placement {
        Placement::Disaggregated | Placement::Joint => pipeline_ns,
        Placement::Colocated => {
            pipeline_ns
                + assignment.phases_ns(space, candidate)
                + link_times::phase_reduce_ns(space, candidate)
        }
    }
}

/// Sample times in each module, for one batch, in nanoseconds.
#[derive(Debug, Clone)]
pub(super) struct ItemTimes {
    /// Number of modules.
    modules: usize,
    /// Times by sample and module.
    ns: Vec<u64>,
}

impl ItemTimes {
    /// Returns each sample's sum over all modules.
    pub(super) fn sums_ns(&self) -> Vec<u64> {
        self.ns.chunks(self.modules).map(|of_item| of_item.iter().sum()).collect()
    }

    /// Returns the partition problem for a number of groups.
    ///
    /// # Errors
    /// [`dflop_balancer::Error`] if times overflow.
    pub(super) fn instance(&self, groups: usize) -> Result<Instance> {
        Instance::new(groups, self.modules, self.ns.clone())
    }
}

/// Estimates the time that a sample adds to each module's slowest stage; encoder ranks serve all LLM ranks.
/// For joint plans: to the stage with the most encoder work, if it is not the slowest, and to the slowest.
pub(super) fn item_times(space: &SearchSpace<'_>, candidate: &Candidate, batch: &[ItemSize]) -> ItemTimes {
    let family = &candidate.family;
    let units = UnitTimes::new(space, candidate);
    let samples_ns = space.llm_times(family).samples_ns(space.workload, batch);
    if family.placement == Placement::Joint {
        let stages = units.stages_of_joint(space, family);
        let busiest = joint_stages(space, candidate, &stages);
        let times = |(item, sample_ns): (&ItemSize, &f64)| {
            busiest.map(|stage| stage.map_or(0, |stage| units.of(&stages[stage], item, *sample_ns)))
        };
        return ItemTimes { modules: 2, ns: batch.iter().zip(samples_ns.iter()).flat_map(times).collect() };
    }
    let llm_stage = units.llm_stage(space.llm_shape(family));
    let is_stage = family.placement == Placement::Disaggregated;
    let media = |(encoder, shape): (usize, &StageShape)| {
        // A group belongs to one LLM rank, but all encoder ranks share its tiles.
        let ranks = f64::from(family.llm_dp) / f64::from(family.encoders[encoder].dp);
        let stage = if is_stage { units.encoder_stage(encoder, shape) } else { MediaTimes::default() };
        MediaTimes { unit_ns: stage.unit_ns * ranks, pair_ns: stage.pair_ns * ranks }
    };
    let media: Vec<MediaTimes> = space.encoder_shapes(family).enumerate().map(media).collect();
    let mut ns = Vec::with_capacity(batch.len() * (media.len() + 1));
    for (item, sample_ns) in batch.iter().zip(samples_ns.iter()) {
        ns.extend(media.iter().zip(item.all_media()).map(|(times, media)| times.of(media) as u64));
        ns.push(units.of(&llm_stage, item, *sample_ns));
    }
    ItemTimes { modules: media.len() + 1, ns }
}

/// Returns the stage with the most media work and the stage with the most work for the mean batch; the first
/// only if they differ.
fn joint_stages(space: &SearchSpace<'_>, candidate: &Candidate, stages: &[StageLoad]) -> [Option<usize>; 2] {
    let (workload, times) = (space.workload, space.llm_times(&candidate.family));
    let layer_ns = times.layer.at(workload.batch_tokens / candidate.groups() as f64)
        * candidate.groups() as f64
        + times.samples_ns;
    let units_of = |stage: &StageLoad, encoder: usize| {
        stage.media[encoder].unit_ns * workload.media(encoder).batch_units
    };
    let encoders = 0..candidate.family.encoders.len();
    let units = |stage: &StageLoad| encoders.clone().map(|encoder| units_of(stage, encoder)).sum::<f64>();
    let all = |stage: &StageLoad| {
        let media = |encoder: usize| {
            let pairs_ns = stage.media[encoder].pair_ns * workload.media(encoder).batch_pairs;
            units_of(stage, encoder) + pairs_ns
        };
        let media: f64 = encoders.clone().map(media).sum();
        media + stage.layers * layer_ns + stage.tokens * workload.batch_tokens
    };
    let most = |of: &dyn Fn(&StageLoad) -> f64| {
        (0..stages.len())
            .max_by(|one, other| of(&stages[*one]).total_cmp(&of(&stages[*other])).then(other.cmp(one)))
    };
    let slowest = most(&all);
    [most(&units).filter(|stage| Some(*stage) != slowest), slowest]
}

fn assign_slots(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    sums_ns: &[u64],
    group_of: &[u32],
    order: Order,
) -> SlotAssignment {
    let mut group_ns = vec![0; candidate.groups()];
    for (&group, &sum_ns) in group_of.iter().zip(sums_ns) {
        group_ns[group as usize] += sum_ns;
    }
    let cell_of = cells_of_groups(&group_ns, candidate.family.llm_dp as usize, order);
    SlotAssignment::new(space, candidate, batch, |item| cell_of[group_of[item] as usize], space.encoder_split)
}

/// Describes a batch and the pipelines for a plan without colocated encoders.
///
/// - `sizes`: times that each sample adds to each module's slowest stage
///
/// # Errors
/// [`dflop_balancer::Error`] if times overflow.
fn describe(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    sizes: &ItemTimes,
) -> Result<(Instance, PipelineConfig)> {
    // With split backward passes, stages are as busy and hold as many microbatches as under 1F1B.
    let kind = match candidate.family.schedule {
        ScheduleKind::ZeroBubble => ScheduleKind::OneForwardOneBackward,
        other => other,
    };
    let (instance, config) = match candidate.family.placement {
        Placement::Joint => joint(space, candidate, batch)?,
        _ => beside_encoders(space, candidate, batch, sizes)?,
    };
    Ok((instance, config.schedule(kind)))
}

/// Describes a step whose encoders have separate GPUs.
fn beside_encoders(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    sizes: &ItemTimes,
) -> Result<(Instance, PipelineConfig)> {
    let family = &candidate.family;
    let ranks = family.llm_dp as usize;
    let encoders = family.encoders.len();
    let dp_sizes: Vec<usize> = family.encoders.iter().map(|part| part.dp as usize).chain([ranks]).collect();
    // A partition uses an encoder's time over its ranks; here the time is for a single rank.
    let alone = |(at, ns): (usize, &u64)| match at % (encoders + 1) {
        module if module < encoders => ns.saturating_mul(dp_sizes[module] as u64) / ranks as u64,
        _ => *ns,
    };
    let times_ns = sizes.ns.iter().enumerate().map(alone).collect();
    let instance = Instance::new(candidate.groups(), encoders + 1, times_ns)?;
    let step = space.step_shape(family, candidate.microbatches);
    let mut stages = Vec::new();
    let mut add = |module: usize, shape: &StageShape, dp: u32, first: usize| {
        let sharers = space.optimizer_ranks(dp);
        stages.extend(shape.memory.iter().map(|(stage, bytes)| {
            let mut parts = vec![StageBytes::default(); encoders + 1];
            parts[module] = bytes.shared_by(sharers);
            limit(space, &parts, step.in_flight(first + *stage as usize))
        }));
    };
    for (encoder, (first, _)) in step.encoders.each().enumerate() {
        add(encoder, space.encoder_shape(family, encoder), family.encoders[encoder].dp, first);
    }
    let llm = space.llm_shape(family);
    add(encoders, llm, family.llm_dp, step.encoder_stages());
    let units = batch.iter().flat_map(|item| item_units(item, encoders)).collect();
    let shapes = space.encoder_shapes(family).chain([llm]);
    let config = PipelineConfig::new(ranks, shapes.map(|shape| shape.pp as usize).collect())
        .module_dp_sizes(dp_sizes)
        .memory(PipelineMemoryLimits { units, stages });
    let config = if encoders > 1 { config.parallel_encoders() } else { config };
    Ok((instance, config))
}

/// Lists a sample's units in each encoder and in the LLM.
fn item_units(item: &ItemSize, encoders: usize) -> impl Iterator<Item = u64> {
    let media = (0..encoders).map(|encoder| u64::from(item.media(encoder).units));
    media.chain([u64::from(item.tokens)])
}

/// Describes a step with joint stages: neighbors with equal work form one module.
fn joint(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> Result<(Instance, PipelineConfig)> {
    let family = &candidate.family;
    let units = UnitTimes::new(space, candidate);
    let loads = units.stages_of_joint(space, family);
    let modules: Vec<&[StageLoad]> = loads.chunk_by(|one, other| one == other).collect();
    let samples_ns = space.llm_times(family).samples_ns(space.workload, batch);
    let times = |(item, sample_ns): (&ItemSize, &f64)| {
        modules.iter().map(|stages| units.of(&stages[0], item, *sample_ns)).collect::<Vec<u64>>()
    };
    let times_ns = batch.iter().zip(samples_ns.iter()).flat_map(times).collect();
    let instance = Instance::new(candidate.groups(), modules.len(), times_ns)?;
    let stages: Vec<usize> = modules.iter().map(|stages| stages.len()).collect();
    let firsts: Vec<usize> = (0..stages.len()).map(|module| stages[..module].iter().sum()).collect();
    let config = PipelineConfig::new(family.llm_dp as usize, stages);
    Ok((instance, config.memory(joint_memory(space, candidate, batch, &firsts))))
}

/// Limits the memory of joint stages, whose media and tokens are the first modules' units. If there are fewer
/// modules than unit kinds, each module has a single unit kind: a sample's bytes in the module's first stage.
fn joint_memory(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    modules: &[usize],
) -> PipelineMemoryLimits {
    let family = &candidate.family;
    let (llm, encoders) = (space.llm_shape(family), family.encoders.len());
    let joint = &space.joint[family.llm];
    let step = space.step_shape(family, candidate.microbatches);
    let llm_ranks = space.optimizer_ranks(family.llm_dp);
    let of_stage = |stage: usize| {
        let share = 1.0 / f64::from(llm.tp);
        let of_encoder = |encoder: usize| {
            let bytes = joint.encoder_memory(encoder, stage);
            StageBytes {
                kept_per_unit: bytes.kept_per_unit * share,
                working_per_unit: bytes.working_per_unit * share,
                ..bytes.shared_by(space.optimizer_ranks(family.encoders[encoder].dp))
            }
        };
        let parts = (0..encoders).map(of_encoder).chain([joint.llm_memory(stage).shared_by(llm_ranks)]);
        limit(space, &parts.collect::<Vec<StageBytes>>(), step.in_flight(stage))
    };
    let stages: Vec<StageMemoryLimit> = (0..step.stages).map(of_stage).collect();
    let kinds = encoders + 1;
    if modules.len() < kinds {
        let firsts: Vec<&StageMemoryLimit> = modules.iter().map(|first| &stages[*first]).collect();
        let bytes = |item: &ItemSize, limit: &StageMemoryLimit| {
            let factors = limit.kept.iter().zip(&limit.working).map(|(kept, working)| kept + working);
            item_units(item, encoders).zip(factors).map(|(units, bytes)| units * bytes).sum::<u64>()
        };
        let units = batch.iter().flat_map(|item| firsts.iter().map(|limit| bytes(item, limit))).collect();
        let of = |(module, limit): (usize, &&StageMemoryLimit)| {
            let mut kept = vec![0; firsts.len()];
            kept[module] = 1;
            StageMemoryLimit { kept, working: vec![0; firsts.len()], ..(*limit).clone() }
        };
        return PipelineMemoryLimits { units, stages: firsts.iter().enumerate().map(of).collect() };
    }
    let rest = modules.len() - kinds;
    let pad = |factors: Vec<u64>| factors.into_iter().chain(std::iter::repeat_n(0, rest)).collect();
    let widen = |limit: StageMemoryLimit| StageMemoryLimit {
        kept: pad(limit.kept),
        working: pad(limit.working),
        ..limit
    };
    let of = |item| item_units(item, encoders).chain(std::iter::repeat_n(0, rest));
    PipelineMemoryLimits {
        units: batch.iter().flat_map(of).collect(),
        stages: stages.into_iter().map(widen).collect(),
    }
}

/// Limits a stage's microbatches to the memory that remains after its state.
fn limit(space: &SearchSpace<'_>, parts: &[StageBytes], in_flight: usize) -> StageMemoryLimit {
    let fixed: f64 = parts.iter().map(|part| part.fixed + part.optimizer).sum();
    let factors = |of: fn(&StageBytes) -> f64| parts.iter().map(|part| of(part).ceil() as u64).collect();
    StageMemoryLimit {
        in_flight,
        kept: factors(|part| part.kept_per_unit),
        working: factors(|part| part.working_per_unit),
        // Casts of negative numbers give 0: nothing fits.
        bytes_max: (space.budget_bytes - fixed) as u64,
    }
}
