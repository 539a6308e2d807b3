//! Places items on ranks that run whole models, and splits items over ranks where that shortens the step.
//!
//! An item is *whole*, on one rank, or *split* over the ranks of a group (context parallelism per item):
//! every rank in the group takes a slice in the LLM, and single media in the encoders. Groups have powers of
//! two of ranks, and small groups are inside of large ones, so that any two groups are disjoint or nested.
//! Whole and split items share microbatches.
//!
//! Which items are split follows from times and caps alone: a slice takes more than its share, because
//! messages and rounding are part of its time, and an item that no rank can hold has to be split.
//!
//! Ranks that meet in every module (FSDP) take, slot by slot, the slowest rank's time in each module. Other
//! ranks wait for each other at the end of the step; ranks that share an item also begin and end its
//! microbatch together. Ranks may be pipelines, which then begin and end every pass of the microbatch in the
//! LLM together.

mod pipeline;
mod problem;
mod search;
mod start;
mod state;

pub use pipeline::context_pipeline_ns;
pub use problem::{ContextItem, ContextProblem, ContextSlice};

use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::partition::LowerBound;
use crate::pipeline::shard_groups_ns;
use state::State;
use std::cmp::Reverse;
use std::num::NonZeroUsize;
use std::ops::Range;

/// Placement of whole and split items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextAssignment {
    /// Place of every item.
    pub places: Vec<ContextPlace>,
    /// Time of the step, in nanoseconds.
    pub makespan_ns: u64,
    /// Time that no placement can go below, split or not.
    pub bound: LowerBound,
    /// Work units spent.
    pub work_spent: u64,
    /// Whether every machine gets this result.
    pub is_reproducible: bool,
}

/// Place of an item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextPlace {
    /// Microbatch.
    pub slot: usize,
    /// Ranks in the group, one for a whole item.
    pub ranks: Range<usize>,
    /// Rank that encodes a medium, `[encoders][media]`.
    pub media: Vec<Vec<usize>>,
}

/// Places items, and splits them where that shortens the step.
///
/// Pure and deterministic like [`balance`](crate::balance). Starts from several limits to the length of a
/// slice, from every number of ranks for all items, and from `whole` if it is given; then items move, change
/// their number of ranks and exchange places, as long as the budget allows. The result is never longer than
/// `whole`, and small problems have all starts without a budget.
///
/// - `whole`: items by rank and slot without splits, as [`balance_lockstep`](crate::balance_lockstep) or
///   [`balance_pipeline`](crate::balance_pipeline) returns
///
/// # Errors
/// [`Error::CapItem`] if an item is above a cap however it is split; [`Error::CapUnmet`] if no placement
/// within the caps was found; [`Error::Config`] if `whole` does not have every item once, or has other ranks
/// or slots.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use dflop_balancer::{Budget, ContextItem, ContextProblem, ContextSlice, balance_context};
///
/// // a long item and two short ones on two ranks: 60 + 10 whole, 32 + 10 split
/// let slice = |ns| ContextSlice { ns, ..ContextSlice::default() };
/// let item = |whole, half| ContextItem { slices: vec![slice(whole), slice(half)], media_ns: Vec::new() };
/// let items = vec![item(60, 32), item(10, 6), item(10, 6)];
/// let ranks = NonZeroUsize::new(2).expect("above 0");
/// let problem = ContextProblem::new([2, 1], 0, items)?.shard_ranks(ranks)?.group_ranks([1, 2])?;
/// let found = balance_context(&problem, None, &mut Budget::work(1_000))?;
/// assert_eq!((found.makespan_ns, found.bound.ns), (42, 40));
/// assert_eq!(found.places[0].ranks, 0..2);
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
pub fn balance_context(
    problem: &ContextProblem,
    whole: Option<&[Vec<Vec<u32>>]>,
    budget: &mut Budget,
) -> Result<ContextAssignment> {
    problem.check_items()?;
    if let Some(whole) = whole {
        check_whole(problem, whole)?;
    }
    let work_before = budget.work_spent();
    let bound = problem::lower_bound(problem);
    let mean_ns = (problem::mean_ns(problem) / problem.slots as u64).max(1);
    let share = budget.steps_left() / 2;
    let start = budget.within(share, |budget| start::best(problem, whole, mean_ns, budget));
    let unmet = Error::CapUnmet { items: problem.items.len(), groups: problem.ranks * problem.slots };
    let (state, others) = start.ok_or(unmet)?;
    let best = search::search(state, &others, bound.ns, budget);
    let makespan_ns = best.total_ns();
    Ok(ContextAssignment {
        places: (0..problem.items.len()).map(|item| place(&best, item)).collect(),
        makespan_ns,
        bound,
        work_spent: budget.work_spent() - work_before,
        is_reproducible: budget.is_reproducible(),
    })
}

/// Returns the time of a step from the times of all ranks, in nanoseconds.
///
/// - `ranks_ns`: time by rank, slot and module
/// - `meetings`: groups of ranks that share an item, by slot, disjoint or nested
/// - `shard_ranks`: number of consecutive ranks that meet in every module; 1 if ranks meet at the end of the
///   step
#[must_use]
pub fn context_step_ns(
    ranks_ns: &[Vec<Vec<u64>>],
    meetings: &[Vec<Range<usize>>],
    shard_ranks: NonZeroUsize,
) -> u64 {
    if shard_ranks.get() > 1 {
        return shard_groups_ns(ranks_ns, shard_ranks);
    }
    let mut done_ns = vec![0_u64; ranks_ns.len()];
    let slots = ranks_ns.iter().map(Vec::len).max().unwrap_or(0);
    for slot in 0..slots {
        let mut groups = largest_groups(meetings.get(slot).map_or(&[], Vec::as_slice)).into_iter().peekable();
        let mut rank = 0;
        while rank < ranks_ns.len() {
            let group = groups.next_if(|group| group.start == rank).unwrap_or(rank..rank + 1);
            let slot_ns = |rank: usize| -> u64 { ranks_ns[rank].get(slot).map_or(0, |own| own.iter().sum()) };
            let start = done_ns[group.clone()].iter().copied().max().unwrap_or(0);
            let longest = group.clone().map(slot_ns).max().unwrap_or(0);
            done_ns[group.clone()].fill(start + longest);
            rank = group.end;
        }
    }
    done_ns.into_iter().max().unwrap_or(0)
}

/// Returns the groups that no other group contains, by first rank.
fn largest_groups(meetings: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut sorted: Vec<Range<usize>> = meetings.iter().filter(|group| group.len() > 1).cloned().collect();
    sorted.sort_by_key(|group| (group.start, Reverse(group.end)));
    let mut largest: Vec<Range<usize>> = Vec::new();
    for group in sorted {
        if largest.last().is_none_or(|last| last.end <= group.start) {
            largest.push(group);
        }
    }
    largest
}

fn place(state: &State<'_>, item: usize) -> ContextPlace {
    let spot = state.placement.spots[item];
    let mut next = state.problem.media_starts[item];
    let encoder = |media: &Vec<u64>| {
        let ranks = (next..next + media.len())
            .map(|medium| spot.first as usize + usize::from(state.placement.media[medium]));
        next += media.len();
        ranks.collect()
    };
    let media = state.problem.items[item].media_ns.iter().map(encoder).collect();
    ContextPlace { slot: spot.slot as usize, ranks: spot.ranks(), media }
}

fn check_whole(problem: &ContextProblem, whole: &[Vec<Vec<u32>>]) -> Result<()> {
    let refused = |reason: String| Err(Error::Config { setting: "whole", reason });
    if whole.len() != problem.ranks || whole.iter().any(|slots| slots.len() != problem.slots) {
        let (ranks, slots) = (problem.ranks, problem.slots);
        return refused(format!("must have {ranks} ranks with {slots} microbatches each"));
    }
    let mut placed: Vec<u32> = whole.iter().flatten().flatten().copied().collect();
    placed.sort_unstable();
    if !placed.iter().map(|item| *item as usize).eq(0..problem.items.len()) {
        return refused(format!("must have each of {} items once", problem.items.len()));
    }
    Ok(())
}
