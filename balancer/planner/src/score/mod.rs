//! Scores a plan on sampled batches: each batch is balanced, assigned to slots and simulated.

pub(super) mod batch_balance;
pub(super) mod encoder_shares;
mod link_times;
mod pipelines;
pub(super) mod slot_assignment;
pub(super) mod step_timeline;
mod step_times;

use super::cluster::Placement;
use super::space::memory::MemoryRequirement;
use super::space::shape::StageShape;
use super::space::{Candidate, SearchSpace};
use super::workload::ItemSize;
use batch_balance::balance_batch;
use dflop_balancer::{Budget, Caps, Instance, Result, Strategy, balance};
use dflop_costmodel::nearest_rank;
use encoder_shares::{MediaTimes, StageLoad, UnitTimes};
use slot_assignment::{Order, SlotAssignment, cells_of_groups, greedy_groups};
use std::ops::Range;
use step_timeline::StepTimeline;

/// Work units for balancing one batch for a finalist.
const SEARCH_WORK: u64 = 400;
/// Maximum product of samples and groups for a search on a finalist; the first partition's time is
/// proportional.
const SEARCH_CELLS_MAX: usize = 4_000_000;

/// Required memory divided by the budget, up to which a search may make a batch fit.
const NEARLY: f64 = 1.1;

/// Slowdown factor beyond which a plan is discarded early; batch-to-batch noise is about 1 %.
const FAR_BEHIND: f64 = 1.05;

/// A plan's makespans and memory requirements, in batch order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Score {
    pub(super) makespans_ns: Vec<u64>,
    requirements: Vec<MemoryRequirement>,
}

impl Score {
    /// Adds the score for one more batch.
    pub(super) fn push(&mut self, makespan_ns: u64, required: MemoryRequirement) {
        self.makespans_ns.push(makespan_ns);
        self.requirements.push(required);
    }

    /// Adds the scores for more batches.
    pub(super) fn append(&mut self, mut more: Self) {
        self.makespans_ns.append(&mut more.makespans_ns);
        self.requirements.append(&mut more.requirements);
    }

    /// Whether this score is worse than `other` on the same first batches by more than the noise.
    pub(super) fn is_far_behind(&self, other: &Self) -> bool {
        let batches = 0..self.makespans_ns.len().min(other.makespans_ns.len());
        self.range(batches.clone()).mean_ns() > FAR_BEHIND * other.range(batches).mean_ns()
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

/// Plan with its score.
#[derive(Debug, Clone)]
pub(super) struct ScoredPlan {
    pub(super) candidate: Candidate,
    pub(super) score: Score,
}

/// Scores a plan on some batches, balanced greedily; `None` if a batch is far from fitting into memory.
///
/// A batch that nearly fits uses the minimum memory over all orders: a search may make it fit.
pub(super) fn score(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batches: Range<usize>,
    timeline: &mut StepTimeline,
) -> Option<Score> {
    let mut score = Score::default();
    for batch in &space.workload.batches()[batches] {
        let (assignment, required) = greedy_that_fits(space, candidate, batch);
        if required.most() > NEARLY * space.budget_bytes {
            return None;
        }
        score.push(makespan_ns(space, candidate, &assignment, timeline), required);
    }
    Some(score)
}

/// Balances a batch greedily in the first order that fits, or in the order with the minimum memory.
fn greedy_that_fits(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> (SlotAssignment, MemoryRequirement) {
    let sizes_ns = item_times(space, candidate, batch).sums_ns();
    let by = |sizes: &[u64], order| {
        let assignment = balance_by(space, candidate, batch, sizes, order);
        let required = assignment.requirement(space, candidate);
        (assignment, required)
    };
    let mut least = by(&sizes_ns, Order::Peak);
    // Even tokens in an even order use the least memory.
    let tokens: Vec<u64> = batch.iter().map(|item| u64::from(item.tokens)).collect();
    for (sizes, order) in [(&sizes_ns, Order::Even), (&tokens, Order::Peak), (&tokens, Order::Even)] {
        if least.1.most() <= space.budget_bytes {
            break;
        }
        let other = by(sizes, order);
        if other.1.most() < least.1.most() {
            least = other;
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
    timeline: &mut StepTimeline,
) -> Result<Score> {
    let mut score = Score::default();
    for batch in &space.workload.batches()[batches] {
        let found = balance_batch(space, candidate, batch, timeline)?;
        score.push(found.makespan_ns, found.requirement);
    }
    Ok(score)
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
    timeline: &mut StepTimeline,
) -> Result<()> {
    for at in batches {
        if score.requirements[at].most() > space.budget_bytes {
            let found = balance_batch(space, candidate, &space.workload.batches()[at], timeline)?;
            (score.makespans_ns[at], score.requirements[at]) = (found.makespan_ns, found.requirement);
            continue;
        }
        let searched = balance_by_search(space, candidate, &space.workload.batches()[at])?;
        let Some((assignment, required)) =
            searched.and_then(|assignment| fitting(space, candidate, assignment))
        else {
            continue;
        };
        let makespan_ns = makespan_ns(space, candidate, &assignment, timeline);
        // The greedy assignment stays if the search is not better.
        if makespan_ns < score.makespans_ns[at] {
            (score.makespans_ns[at], score.requirements[at]) = (makespan_ns, required);
        }
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
    timeline: &mut StepTimeline,
) -> u64 {
    let pipeline_ns = timeline.makespan_ns(&assignment.times(space, candidate));
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
    if family.placement == Placement::Joint {
        let stages = units.stages_of_joint(space, family);
        let busiest = joint_stages(space, candidate, &stages);
        let times =
            |item: &ItemSize| busiest.map(|stage| stage.map_or(0, |stage| units.of(&stages[stage], item)));
        return ItemTimes { modules: 2, ns: batch.iter().flat_map(times).collect() };
    }
    let llm = space.llm_shape(family);
    let llm_stage = StageLoad { layers: llm.inner.max(llm.last), ..StageLoad::default() };
    let is_stage = family.placement == Placement::Disaggregated;
    let media = |(encoder, shape): (usize, &StageShape)| {
        // A group belongs to one LLM rank, but all encoder ranks share its tiles.
        let ranks = f64::from(family.llm_dp) / f64::from(family.encoders[encoder].dp);
        let layers = if is_stage { shape.inner.max(shape.last) } else { 0.0 };
        let MediaTimes { unit_ns, pair_ns } = units.media[encoder];
        MediaTimes { unit_ns: layers * unit_ns * ranks, pair_ns: layers * pair_ns * ranks }
    };
    let media: Vec<MediaTimes> = space.encoder_shapes(family).enumerate().map(media).collect();
    let mut ns = Vec::with_capacity(batch.len() * (media.len() + 1));
    for item in batch {
        ns.extend(media.iter().zip(item.all_media()).map(|(times, media)| times.of(media) as u64));
        ns.push(units.of(&llm_stage, item));
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
