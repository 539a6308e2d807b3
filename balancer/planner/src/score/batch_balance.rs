//! Balances one batch for a plan: tries several partitions and orders, and keeps the fastest that fits.
//!
//! | partition | order |
//! | --- | --- |
//! | greedy, on the sum of all modules' times | peaks in the middle, or even |
//! | min-max search | peaks, even, as numbered, arbitrary |
//! | LPT | as numbered, arbitrary |
//! | search for the makespan | its own |
//! | greedy, on tokens | peaks, even |
//! | round robin, in an arbitrary order | its own |
//!
//! Orders with peaks in the middle shorten fill and drain, but keep the largest microbatches in flight
//! together; even orders spread them, and are tried if peaked orders do not fit into memory.

use super::slot_assignment::{Order, SlotAssignment, cells_of_groups, greedy_groups};
use super::step_timeline::StepTimeline;
use super::{ItemTimes, describe, item_times, makespan_ns};
use crate::cluster::Placement;
use crate::space::memory::MemoryRequirement;
use crate::space::{Candidate, SearchSpace};
use crate::workload::ItemSize;
use dflop_balancer::{Budget, Caps, Result, Strategy, balance, search_pipeline};
use dflop_costmodel::random::{SplitMix64, seed_from};

/// Work units per search for a batch.
pub(crate) const WORK: u64 = 5_000;

/// Maximum product of samples and groups for a makespan search: the fixed search cost grows with both.
const MAKESPAN_CELLS_MAX: usize = 1 << 18;

/// Batch assigned to slots, with makespan and memory requirement.
#[derive(Debug, Clone)]
pub(crate) struct BalancedBatch {
    pub(crate) assignment: SlotAssignment,
    pub(crate) requirement: MemoryRequirement,
    pub(crate) makespan_ns: u64,
}

/// Balances a batch; the result fits into memory if any tried balancing does.
///
/// # Errors
/// [`dflop_balancer::Error`] if times overflow.
pub(crate) fn balance_batch(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    timeline: &mut StepTimeline,
) -> Result<BalancedBatch> {
    let balancer = Balancer { space, candidate, batch, sizes: item_times(space, candidate, batch) };
    let mut found = balancer.judge(balancer.greedy(Order::Peak), timeline);
    for assignment in balancer.searched()? {
        balancer.keep_better(&mut found, assignment, timeline);
    }
    if !balancer.fits(&found) {
        for assignment in balancer.spread()? {
            balancer.keep_better(&mut found, assignment, timeline);
        }
    }
    Ok(found)
}

/// Order for a partition's microbatches, over slots and LLM ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupOrder {
    /// Shuffled by a seed from the batch: a partition has no order.
    Arbitrary,
    /// Strategy numbering: about by size, so microbatches in the same slot are similar.
    Sorted,
}

/// Returns each item's cell, with one group per cell.
pub(crate) fn cells(mut groups: Vec<Vec<u32>>, batch: &[ItemSize], order: GroupOrder) -> Vec<u32> {
    if order == GroupOrder::Arbitrary {
        let count = groups.len();
        batch_rng(batch).shuffle_front(&mut groups, count);
    }
    let mut cell_of = vec![0; batch.len()];
    for (cell, group) in groups.iter().enumerate() {
        for &item in group {
            cell_of[item as usize] = cell as u32;
        }
    }
    cell_of
}

/// Returns a random number generator seeded by the batch.
pub(crate) fn batch_rng(batch: &[ItemSize]) -> SplitMix64 {
    SplitMix64::new(seed_from(
        batch.iter().flat_map(|item| [u64::from(item.media(0).units), u64::from(item.tokens)]),
    ))
}

/// Balancer for one batch and plan.
struct Balancer<'a> {
    space: &'a SearchSpace<'a>,
    candidate: &'a Candidate,
    batch: &'a [ItemSize],
    sizes: ItemTimes,
}

impl Balancer<'_> {
    fn judge(&self, assignment: SlotAssignment, timeline: &mut StepTimeline) -> BalancedBatch {
        let requirement = assignment.requirement(self.space, self.candidate);
        let makespan_ns = makespan_ns(self.space, self.candidate, &assignment, timeline);
        BalancedBatch { assignment, requirement, makespan_ns }
    }

    fn fits(&self, batch: &BalancedBatch) -> bool {
        batch.requirement.most() <= self.space.budget_bytes
    }

    /// Keeps the faster assignment among assignments that fit, and prefers any that fits.
    fn keep_better(
        &self,
        found: &mut BalancedBatch,
        assignment: SlotAssignment,
        timeline: &mut StepTimeline,
    ) {
        let other = self.judge(assignment, timeline);
        let rank = |batch: &BalancedBatch| (!self.fits(batch), batch.makespan_ns);
        if rank(&other) < rank(found) {
            *found = other;
        }
    }

    fn in_cells(&self, cell_of: &[u32]) -> SlotAssignment {
        let cell = |item: usize| cell_of[item];
        SlotAssignment::new(self.space, self.candidate, self.batch, cell, self.space.encoder_split)
    }

    /// Assigns groups evenly to ranks, in an order.
    fn in_order(&self, group_of: &[u32], order: Order) -> SlotAssignment {
        let mut group_ns = vec![0; self.candidate.groups()];
        for (&group, size_ns) in group_of.iter().zip(self.sizes.sums_ns()) {
            group_ns[group as usize] += size_ns;
        }
        let cell_of = cells_of_groups(&group_ns, self.candidate.family.llm_dp as usize, order);
        self.in_cells(&group_of.iter().map(|group| cell_of[*group as usize]).collect::<Vec<u32>>())
    }

    fn greedy(&self, order: Order) -> SlotAssignment {
        self.in_order(&greedy_groups(&self.sizes.sums_ns(), self.candidate.groups()), order)
    }

    /// Lists the partitions from searches and from LPT.
    fn searched(&self) -> Result<Vec<SlotAssignment>> {
        let groups = self.candidate.groups();
        if groups > self.batch.len() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for strategy in [Strategy::SEARCH, Strategy::LPT] {
            let partition = self.partition(strategy)?;
            let by_number = cells(partition.clone(), self.batch, GroupOrder::Sorted);
            if strategy == Strategy::SEARCH {
                found.push(self.in_order(&by_number, Order::Peak));
            }
            found.push(self.in_cells(&cells(partition, self.batch, GroupOrder::Arbitrary)));
            found.push(self.in_cells(&by_number));
        }
        let is_small = self.batch.len() * groups <= MAKESPAN_CELLS_MAX;
        if is_small && self.candidate.family.placement != Placement::Colocated {
            found.push(self.for_makespan()?);
        }
        Ok(found)
    }

    /// Deals samples in an arbitrary order, as a data-blind loader does.
    fn dealt(&self) -> SlotAssignment {
        let (ranks, slots) = (self.candidate.family.llm_dp as usize, self.candidate.microbatches as usize);
        let mut order: Vec<u32> = (0..self.batch.len() as u32).collect();
        batch_rng(self.batch).shuffle_front(&mut order, self.batch.len());
        let mut cell_of = vec![0; self.batch.len()];
        for (place, item) in order.into_iter().enumerate() {
            cell_of[item as usize] = (place / ranks % slots * ranks + place % ranks) as u32;
        }
        self.in_cells(&cell_of)
    }

    /// Lists assignments that may need less memory: even orders, even tokens, and dealt samples.
    fn spread(&self) -> Result<Vec<SlotAssignment>> {
        let tokens: Vec<u64> = self.batch.iter().map(|item| u64::from(item.tokens)).collect();
        let even = greedy_groups(&tokens, self.candidate.groups());
        let mut found = vec![
            self.greedy(Order::Even),
            self.in_order(&even, Order::Peak),
            self.in_order(&even, Order::Even),
            self.dealt(),
        ];
        if self.candidate.groups() <= self.batch.len() {
            let partition = self.partition(Strategy::SEARCH)?;
            found.push(self.in_order(&cells(partition, self.batch, GroupOrder::Sorted), Order::Even));
        }
        Ok(found)
    }

    fn partition(&self, strategy: Strategy) -> Result<Vec<Vec<u32>>> {
        let instance = self.sizes.instance(self.candidate.groups())?;
        Ok(balance(&instance, strategy, &Caps::default(), &mut Budget::work(WORK))?.groups)
    }

    /// Assigns slots by [`search_pipeline`], which supports encoders with a different DP size.
    fn for_makespan(&self) -> Result<SlotAssignment> {
        let (instance, config) = describe(self.space, self.candidate, self.batch, &self.sizes)?;
        let ranks = search_pipeline(&instance, &config, &mut Budget::work(WORK))?;
        let by_cell: Vec<Vec<u32>> = (0..self.candidate.microbatches as usize)
            .flat_map(|slot| ranks.iter().map(move |rank| rank[slot].clone()))
            .collect();
        Ok(self.in_cells(&cells(by_cell, self.batch, GroupOrder::Sorted)))
    }
}
