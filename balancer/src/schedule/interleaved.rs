//! Interleaved 1F1B: every rank holds several chunks of layers, so the pipeline fills faster.

use super::action::PassKind::{Backward, Forward};
use super::action::{Part, Pass, PassKind};

/// Lists a rank's passes; rank `r` of `ranks` holds the stages `r`, `r + ranks`, `r + 2 ranks`, …
///
/// Microbatches run in groups of `ranks`, and the last group also takes the remainder; a group runs through
/// the first chunk, then through the second, backward in reverse. As many forward passes come first as in
/// Megatron-LM, `2 (ranks - r - 1) + (chunks - 1) g` with `g` the largest group, then forward and backward
/// passes alternate.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
/// 2021, arXiv:2104.04473, section 2.2.2.
pub(super) fn passes(rank: usize, ranks: usize, chunks: usize, microbatches: usize) -> Vec<Pass> {
    let groups = groups(ranks, microbatches);
    let largest = groups.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    let stages: Vec<usize> = (0..chunks).map(|chunk| chunk * ranks + rank).collect();
    let reversed: Vec<usize> = stages.iter().rev().copied().collect();
    let forward = in_groups(&groups, Forward, &stages);
    let backward = in_groups(&groups, Backward, &reversed);
    let warm_up = (2 * (ranks - rank - 1) + (chunks - 1) * largest).min(forward.len());

    let (first, steady) = forward.split_at(warm_up);
    let (turns, rest) = backward.split_at(steady.len());
    let mut passes = first.to_vec();
    passes.extend(steady.iter().zip(turns).flat_map(|(forward, backward)| [*forward, *backward]));
    passes.extend(rest);
    passes
}

/// Returns the maximum number of microbatches between forward and backward pass in a stage on the rank.
pub(super) fn held_max(passes: &[Pass], stage: usize) -> usize {
    let (mut held, mut most) = (0_usize, 0);
    for pass in passes.iter().filter(|pass| usize::from(pass.part.stage) == stage) {
        held = if pass.kind == Forward { held + 1 } else { held - 1 };
        most = most.max(held);
    }
    most
}

/// Groups microbatches by `ranks`, the remainder in the last group.
fn groups(ranks: usize, microbatches: usize) -> Vec<std::ops::Range<u32>> {
    let count = (microbatches / ranks).max(1);
    let end = |group: usize| if group == count { microbatches } else { group * ranks } as u32;
    (0..count).map(|group| end(group)..end(group + 1)).collect()
}

/// Lists passes group by group, each group through all stages.
fn in_groups(groups: &[std::ops::Range<u32>], kind: PassKind, stages: &[usize]) -> Vec<Pass> {
    let mut passes = Vec::new();
    for group in groups {
        for &stage in stages {
            let part = |microbatch| Part { microbatch, stage: stage as u16 };
            passes.extend(group.clone().map(|microbatch| Pass { kind, part: part(microbatch) }));
        }
    }
    passes
}
