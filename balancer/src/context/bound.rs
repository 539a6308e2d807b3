//! Lower bound on the step time under every placement, whole or split.

use super::problem::ContextProblem;
use crate::partition::{BoundKind, LowerBound};

/// Returns the mean rank's work, each item split where that takes least work altogether, or the time of an
/// item that takes long however it is split.
///
/// No placement is faster: every rank in a group takes its slice, so a group spends at least the least work
/// of the item, and the slowest rank of all at least the mean. With ranks that meet in every module, this
/// holds for each module. A group encodes a medium on one rank, and all media in no less than the mean. What
/// items may share counts as nothing.
pub(super) fn bound(problem: &ContextProblem) -> LowerBound {
    let (mut llm_ns, mut longest_ns) = (0_u64, 0_u64);
    for item in 0..problem.items.len() {
        let work = |log: u8| least_ns(problem, item, log) << log;
        llm_ns = llm_ns.saturating_add(problem.item_logs(item).map(work).min().unwrap_or(0));
        let alone = problem.item_logs(item).map(|log| alone_ns(problem, item, log)).min();
        longest_ns = longest_ns.max(alone.unwrap_or(0));
    }
    let encoders = problem.modules - 1;
    let encoder_ns = |module: usize| -> u64 {
        (0..problem.items.len()).map(|item| problem.encoder_ns(item)[module]).sum()
    };
    let ranks = problem.ranks as u64;
    let mean_ns: u64 = if problem.shard_ranks > 1 {
        (0..encoders).map(|module| encoder_ns(module).div_ceil(ranks)).sum::<u64>() + llm_ns.div_ceil(ranks)
    } else {
        ((0..encoders).map(encoder_ns).sum::<u64>() + llm_ns).div_ceil(ranks)
    };
    if longest_ns > mean_ns {
        LowerBound { ns: longest_ns, kind: BoundKind::LargestItem }
    } else {
        LowerBound { ns: mean_ns, kind: BoundKind::MeanLoad }
    }
}

/// Returns the time of a slice that shares all that it can share.
fn least_ns(problem: &ContextProblem, item: usize, log: u8) -> u64 {
    let slice = problem.slice(item, log);
    slice.ns.saturating_sub(slice.shared_ns)
}

/// Returns the least time of a group that has nothing but an item.
fn alone_ns(problem: &ContextProblem, item: usize, log: u8) -> u64 {
    let (slice_ns, ranks) = (least_ns(problem, item, log), 1_u64 << log);
    let media = &problem.items[item].media_ns;
    let largest = |media: &Vec<u64>| media.iter().copied().max().unwrap_or(0);
    if problem.shard_ranks > 1 {
        let encoder = |media: &Vec<u64>| largest(media).max(media.iter().sum::<u64>().div_ceil(ranks));
        return media.iter().map(encoder).sum::<u64>() + slice_ns;
    }
    let media_ns: u64 = media.iter().flatten().sum();
    // The rank with the longest medium has its slice as well.
    let longest = media.iter().map(largest).max().unwrap_or(0);
    (slice_ns + longest).max(slice_ns + media_ns.div_ceil(ranks))
}
