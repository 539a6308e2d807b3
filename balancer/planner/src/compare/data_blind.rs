//! Runs a batch with samples dealt round robin, independent of their costs.

use super::outcome::{self, Outcome};
use crate::score::batch_balance::batch_rng;
use crate::score::encoder_shares::MediaLoad;
use crate::score::slot_assignment::SlotAssignment;
use crate::space::memory::MemoryRequirement;
use crate::space::{Candidate, Family, SearchSpace};
use crate::workload::ItemSize;
use dflop_costmodel::MediaUnits;

/// Assigns a batch to one job whose encoder ranks take whole samples in turn.
pub(super) fn one_job(space: &SearchSpace<'_>, candidate: &Candidate, batch: &[ItemSize]) -> SlotAssignment {
    let batch = &in_random_order(batch);
    let (ranks, slots) = (candidate.family.llm_dp as usize, candidate.microbatches as usize);
    let cell_of = |item: usize| cell(item, ranks, slots) as u32;
    let mut assignment = SlotAssignment::new(space, candidate, batch, cell_of, space.encoder_split);
    // Media may stay in their LLM rank; a colocated encoder divides all media in the batch, tile by tile.
    for (encoder, part) in candidate.family.encoders.iter().enumerate() {
        if candidate.family.is_shared(encoder) {
            let media: Vec<MediaUnits> = batch.iter().map(|item| item.media(encoder)).collect();
            let shares = shares_in_turn(&media, ranks, slots, part.dp as usize);
            assignment.set_shares(space, candidate, encoder, &shares);
        }
    }
    assignment
}

/// Returns the plan for one DP rank as a separate pipeline.
pub(super) fn alone(candidate: &Candidate) -> Candidate {
    let mut family = Family { llm_dp: 1, ..candidate.family };
    family.encoders.iter_mut().for_each(|part| part.dp = 1);
    Candidate { family, ..*candidate }
}

/// Assigns a batch to one pipeline per DP rank, each with its encoder and LLM.
pub(super) fn pipelines(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> Vec<SlotAssignment> {
    let batch = &in_random_order(batch);
    let (ranks, slots) = (candidate.family.llm_dp as usize, candidate.microbatches as usize);
    let alone = alone(candidate);
    let of_rank = |rank: usize| {
        let own: Vec<ItemSize> = batch.iter().skip(rank).step_by(ranks).copied().collect();
        SlotAssignment::new(space, &alone, &own, |item| (item % slots) as u32, space.encoder_split)
    };
    (0..ranks).map(of_rank).collect()
}

/// Runs [`pipelines`]; the slowest pipeline determines the step time.
pub(super) fn run_pipelines(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    pipelines: &[SlotAssignment],
) -> Outcome {
    let alone = alone(candidate);
    let mut all = Outcome { makespan_ns: 0, busy_ns: 0.0, requirement: MemoryRequirement::default() };
    for assignment in pipelines {
        let outcome = outcome::run(space, &alone, assignment);
        all.makespan_ns = all.makespan_ns.max(outcome.makespan_ns);
        all.busy_ns += outcome.busy_ns;
        let requirement = assignment.memory_requirement(space, &alone, &candidate.family);
        all.requirement = all.requirement.max(requirement);
    }
    // The pipelines run independently and meet in the all-reduce at the end.
    all.makespan_ns += reduce_of_ranks_ns(space, candidate);
    all
}

/// Returns the time to sum gradients over the DP ranks after the last pass and to gather weights before the
/// first pass.
fn reduce_of_ranks_ns(space: &SearchSpace<'_>, candidate: &Candidate) -> u64 {
    let empty = SlotAssignment::new(space, candidate, &[], |_| 0, space.encoder_split);
    let times = empty.times(space, candidate);
    let gather_ns = times.gather_ns.iter().copied().chain(std::iter::repeat(0));
    times.reduce_ns.iter().zip(gather_ns).map(|(reduce, gather)| reduce + gather).max().unwrap_or(0)
}

/// Shuffles a batch like a data-blind loader draws it; batches are stored by size.
fn in_random_order(batch: &[ItemSize]) -> Vec<ItemSize> {
    let mut shuffled = batch.to_vec();
    batch_rng(batch).shuffle_front(&mut shuffled, batch.len());
    shuffled
}

/// Returns the cell for item `i`: rank `i mod ranks`, slot `(i / ranks) mod slots`; slot by slot.
fn cell(item: usize, ranks: usize, slots: usize) -> usize {
    (item / ranks) % slots * ranks + item % ranks
}

/// Returns the media for each encoder rank in each slot. Samples with media go to the ranks in turn.
fn shares_in_turn(
    media: &[MediaUnits],
    ranks: usize,
    slots: usize,
    encoder_ranks: usize,
) -> Vec<Vec<MediaLoad>> {
    let mut shares = vec![vec![MediaLoad::default(); encoder_ranks]; slots];
    let mut next = vec![0; slots];
    for (item, media) in media.iter().enumerate().filter(|(_, media)| media.units > 0) {
        let slot = cell(item, ranks, slots) / ranks;
        shares[slot][next[slot] % encoder_ranks].add(*media);
        next[slot] += 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_go_round_ranks_and_then_slots() {
        let cells: Vec<usize> = (0..8).map(|item| cell(item, 2, 3)).collect();
        assert_eq!(cells, [0, 1, 2, 3, 4, 5, 0, 1]);
    }

    #[test]
    fn encoder_ranks_take_samples_in_turn() {
        let media = [9, 0, 1, 3, 2, 8].map(|units| MediaUnits::from_tiles(units, 1));
        // One rank, two slots: tiles 9, 1, 2 and 0, 3, 8.
        let tiles = |of_slot: &Vec<MediaLoad>| of_slot.iter().map(|share| share.tiles).collect::<Vec<u64>>();
        let shares = |ranks| shares_in_turn(&media, 1, 2, ranks).iter().map(tiles).collect::<Vec<_>>();
        assert_eq!(shares(2), [[11, 1], [3, 8]]);
        assert_eq!(shares(4), [[9, 1, 2, 0], [3, 8, 0, 0]]);
    }

    #[test]
    fn a_batch_is_shuffled_alike_each_time_and_nothing_is_lost() {
        let batch: Vec<ItemSize> = (1..=50).map(|tokens| ItemSize::from_tiles(0, tokens)).collect();
        let mut shuffled = in_random_order(&batch);
        assert_eq!(shuffled, in_random_order(&batch));
        assert_ne!(shuffled, batch);
        shuffled.sort_unstable_by_key(|item| item.tokens);
        assert_eq!(shuffled, batch);
    }
}
