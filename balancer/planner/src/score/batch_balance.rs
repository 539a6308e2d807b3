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
//! The best of few samples is polished by moves and swaps: whole samples cannot be shared evenly by encoder
//! ranks, which the search for the makespan assumes.
//!
//! Orders with peaks in the middle shorten fill and drain, but keep the largest microbatches in flight
//! together; even orders spread them, and are tried if peaked orders do not fit into memory.

use super::slot_assignment::{Order, SlotAssignment, cells_of_groups, greedy_groups};
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

/// Maximum number of makespans computed to polish a batch.
const POLISHED_MAX: usize = 4_000;

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
) -> Result<BalancedBatch> {
    let balancer = Balancer { space, candidate, batch, sizes: item_times(space, candidate, batch) };
    let mut cell_of = balancer.greedy(Order::Peak);
    let mut found = balancer.judge(&cell_of);
    for other in balancer.searched()? {
        balancer.keep_better((&mut cell_of, &mut found), other);
    }
    if !balancer.fits(&found) {
        for other in balancer.spread()? {
            balancer.keep_better((&mut cell_of, &mut found), other);
        }
    }
    if space.workload.has_few_samples() {
        balancer.polish(&mut cell_of, &mut found);
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

/// Change of an assignment.
#[derive(Debug, Clone, Copy)]
enum Change {
    Move {
        item: usize,
        cell: u32,
    },
    Swap {
        item: usize,
        other: usize,
    },
    /// A rank's microbatch goes to another slot, and those between the two move up.
    Shift {
        rank: u32,
        from: u32,
        to: u32,
    },
}

impl Change {
    /// Returns each sample's cell afterwards; `None` if nothing changes or a microbatch would be empty.
    fn apply(self, cell_of: &[u32], ranks: u32) -> Option<Vec<u32>> {
        let mut changed = cell_of.to_vec();
        match self {
            Self::Move { item, cell } => {
                let own = cell_of[item];
                let is_only = cell_of.iter().filter(|of| **of == own).count() == 1;
                if cell == own || is_only {
                    return None;
                }
                changed[item] = cell;
            }
            Self::Swap { item, other } => {
                if cell_of[item] == cell_of[other] {
                    return None;
                }
                changed.swap(item, other);
            }
            Self::Shift { rank, from, to } => {
                for cell in changed.iter_mut().filter(|cell| **cell % ranks == rank) {
                    let slot = match *cell / ranks {
                        slot if slot == from => to,
                        slot if (from + 1..=to).contains(&slot) => slot - 1,
                        slot if (to..from).contains(&slot) => slot + 1,
                        slot => slot,
                    };
                    *cell = slot * ranks + rank;
                }
            }
        }
        Some(changed)
    }
}

/// Balancer for one batch and plan.
struct Balancer<'a> {
    space: &'a SearchSpace<'a>,
    candidate: &'a Candidate,
    batch: &'a [ItemSize],
    sizes: ItemTimes,
}

impl Balancer<'_> {
    fn judge(&self, cell_of: &[u32]) -> BalancedBatch {
        let cell = |item: usize| cell_of[item];
        let split = self.space.encoder_split;
        let assignment = SlotAssignment::new(self.space, self.candidate, self.batch, cell, split);
        let requirement = assignment.requirement(self.space, self.candidate);
        let makespan_ns = makespan_ns(self.space, self.candidate, &assignment);
        BalancedBatch { assignment, requirement, makespan_ns }
    }

    fn fits(&self, batch: &BalancedBatch) -> bool {
        batch.requirement.most() <= self.space.budget_bytes
    }

    /// Keeps the faster assignment among assignments that fit, and prefers any that fits; returns whether the
    /// other is kept.
    fn keep_better(
        &self,
        (cell_of, found): (&mut Vec<u32>, &mut BalancedBatch),
        other_cells: Vec<u32>,
    ) -> bool {
        let other = self.judge(&other_cells);
        let rank = |batch: &BalancedBatch| (!self.fits(batch), batch.makespan_ns);
        let is_better = rank(&other) < rank(found);
        if is_better {
            (*cell_of, *found) = (other_cells, other);
        }
        is_better
    }

    /// Moves samples to other cells, swaps samples, and moves microbatches to other slots, as long as that
    /// helps.
    fn polish(&self, cell_of: &mut Vec<u32>, found: &mut BalancedBatch) {
        let mut tried = 0;
        let mut is_better = true;
        while std::mem::take(&mut is_better) {
            for item in 0..cell_of.len() {
                for change in self.changes_of_item(cell_of, item) {
                    is_better |= self.try_change((cell_of, found), change, &mut tried);
                }
            }
            for change in self.changes_of_order() {
                is_better |= self.try_change((cell_of, found), change, &mut tried);
            }
        }
    }

    fn changes_of_item(&self, cell_of: &[u32], item: usize) -> Vec<Change> {
        let moves = (0..self.candidate.groups() as u32).map(|cell| Change::Move { item, cell });
        moves.chain((item + 1..cell_of.len()).map(|other| Change::Swap { item, other })).collect()
    }

    /// Lists the moves of a rank's microbatch to another slot; neighbors are swapped once.
    fn changes_of_order(&self) -> Vec<Change> {
        let (ranks, slots) = (self.candidate.family.llm_dp, self.candidate.microbatches);
        let of_rank = |rank| {
            let pairs = (0..slots).flat_map(move |from| (0..slots).map(move |to| (from, to)));
            let pairs = pairs.filter(|(from, to)| to > from || to + 1 < *from);
            pairs.map(move |(from, to)| Change::Shift { rank, from, to })
        };
        (0..ranks).flat_map(of_rank).collect()
    }

    /// Keeps a change that helps; `tried` counts the makespans that were computed.
    fn try_change(
        &self,
        (cell_of, found): (&mut Vec<u32>, &mut BalancedBatch),
        change: Change,
        tried: &mut usize,
    ) -> bool {
        let Some(changed) = change.apply(cell_of, self.candidate.family.llm_dp) else { return false };
        if *tried == POLISHED_MAX {
            return false;
        }
        *tried += 1;
        self.keep_better((cell_of, found), changed)
    }

    /// Assigns groups evenly to ranks, in an order.
    fn in_order(&self, group_of: &[u32], order: Order) -> Vec<u32> {
        let mut group_ns = vec![0; self.candidate.groups()];
        for (&group, size_ns) in group_of.iter().zip(self.sizes.sums_ns()) {
            group_ns[group as usize] += size_ns;
        }
        let cell_of = cells_of_groups(&group_ns, self.candidate.family.llm_dp as usize, order);
        group_of.iter().map(|group| cell_of[*group as usize]).collect()
    }

    fn greedy(&self, order: Order) -> Vec<u32> {
        self.in_order(&greedy_groups(&self.sizes.sums_ns(), self.candidate.groups()), order)
    }

    /// Lists the partitions from searches and from LPT.
    fn searched(&self) -> Result<Vec<Vec<u32>>> {
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
            found.push(cells(partition, self.batch, GroupOrder::Arbitrary));
            found.push(by_number);
        }
        let is_small = self.batch.len() * groups <= MAKESPAN_CELLS_MAX;
        if is_small && self.candidate.family.placement != Placement::Colocated {
            found.push(self.for_makespan()?);
        }
        Ok(found)
    }

    /// Deals samples in an arbitrary order, as a data-blind loader does.
    fn dealt(&self) -> Vec<u32> {
        let (ranks, slots) = (self.candidate.family.llm_dp as usize, self.candidate.microbatches as usize);
        let mut order: Vec<u32> = (0..self.batch.len() as u32).collect();
        batch_rng(self.batch).shuffle_front(&mut order, self.batch.len());
        let mut cell_of = vec![0; self.batch.len()];
        for (place, item) in order.into_iter().enumerate() {
            cell_of[item as usize] = (place / ranks % slots * ranks + place % ranks) as u32;
        }
        cell_of
    }

    /// Lists assignments that may need less memory: even orders, even tokens, and dealt samples.
    fn spread(&self) -> Result<Vec<Vec<u32>>> {
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
    fn for_makespan(&self) -> Result<Vec<u32>> {
        let (instance, config) = describe(self.space, self.candidate, self.batch, &self.sizes)?;
        let ranks = search_pipeline(&instance, &config, &mut Budget::work(WORK))?;
        let by_cell: Vec<Vec<u32>> = (0..self.candidate.microbatches as usize)
            .flat_map(|slot| ranks.iter().map(move |rank| rank[slot].clone()))
            .collect();
        Ok(cells(by_cell, self.batch, GroupOrder::Sorted))
    }
}
