//! Problem of placing whole and split items: checked once, when it is built; and a lower bound on the step
//! time under every placement.

use super::pipeline::PipelinePasses;
use crate::error::{Error, Result};
use crate::instance::Caps;
use crate::partition::{BoundKind, LowerBound};
use crate::pipeline::PipelineConfig;
use dflop_costmodel::{MessageLatency, ModelConstants, random};
use std::num::NonZeroUsize;

/// Maximum number of ranks in a group.
pub(super) const GROUP_RANKS_MAX: usize = 64;
/// Maximum total of a problem, so that load differences fit `i64`.
const SUM_MAX: u128 = i64::MAX as u128 / 2;
/// Maximum message latency in a group: an hour.
const LATENCY_MAX: u64 = 3_600_000_000_000;

/// Item that one rank takes as a whole, or the ranks of a group in slices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContextItem {
    /// Times of single media in nanoseconds, `[encoders][media]`; a medium is encoded on one rank in the
    /// group.
    pub media_ns: Vec<Vec<u64>>,
    /// Slices on 1, 2, 4, … ranks; an item cannot be split further than listed.
    pub slices: Vec<ContextSlice>,
}

/// Slice of an item on every rank in a group; where slices differ, the largest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ContextSlice {
    /// Time in the last module, the LLM, in nanoseconds.
    pub ns: u64,
    /// Time of messages less the computation that hides them, in nanoseconds. A group waits for the sum over
    /// its items and the [latency](ContextProblem::latencies), unless that is negative.
    pub message_ns: i64,
    /// Tokens, for [`Caps::tokens_max`].
    pub tokens: u64,
    /// Bytes, for [`Caps::bytes_max`].
    pub bytes: u64,
}

/// Checked problem: items, and ranks that run all modules, or [pipelines](Self::pipeline) of them, in a
/// number of microbatches (*slots*).
#[derive(Debug, Clone, PartialEq)]
pub struct ContextProblem {
    pub(super) ranks: usize,
    pub(super) slots: usize,
    /// Encoders and the LLM.
    pub(super) modules: usize,
    pub(super) items: Vec<ContextItem>,
    /// Encoder times of whole items, `[items * encoders]`.
    pub(super) encoder_ns: Vec<u64>,
    /// Media by item and encoder, longest first, `[items][encoders]`.
    pub(super) media_order: Vec<Vec<Vec<u32>>>,
    /// First medium of every item among all media, `[items + 1]`.
    pub(super) media_starts: Vec<usize>,
    pub(super) shard_ranks: usize,
    pub(super) pipeline: Option<PipelinePasses>,
    /// Logarithms of the smallest and largest group.
    pub(super) logs: [u8; 2],
    pub(super) caps: Caps,
    pub(super) constants: ModelConstants,
    /// Message latencies in a group with `2^log` ranks.
    latencies: Vec<MessageLatency>,
}

impl ContextProblem {
    /// Checks a problem. Without settings, ranks meet at the end of the step, items are not split, and
    /// nothing is capped.
    ///
    /// - `slots`: microbatches per rank
    /// - `encoders`: number of modules before the LLM; items may list no media for any of them
    ///
    /// # Errors
    /// [`Error::Config`] if `ranks` or `slots` is 0 or above 2^24; [`Error::ItemLength`] if an item has media
    /// for a different number of encoders; [`Error::Length`] if an item has no slice; [`Error::Overflow`] if
    /// the times do not fit 62 bits.
    pub fn new([ranks, slots]: [usize; 2], encoders: usize, items: Vec<ContextItem>) -> Result<Self> {
        for (setting, count) in [("ranks", ranks), ("slots", slots)] {
            if count == 0 || count > 1 << 24 {
                let reason = format!("must be at least 1 and at most 2^24, got {count}");
                return Err(Error::Config { setting, reason });
            }
        }
        let mut sum = 0_u128;
        for (item, own) in items.iter().enumerate() {
            if own.media_ns.len() != encoders && !own.media_ns.is_empty() {
                return Err(Error::ItemLength {
                    item,
                    found: own.media_ns.len() + 1,
                    expected: encoders + 1,
                });
            }
            if own.slices.is_empty() {
                return Err(Error::Length { field: "slices", found: 0, expected: 1 });
            }
            sum += largest_ns(own);
            if sum > SUM_MAX {
                return Err(Error::Overflow { field: "slices", item });
            }
        }
        let times = |item: &ContextItem| -> Vec<u64> {
            (0..encoders).map(|at| item.media_ns.get(at).map_or(0, |media| media.iter().sum())).collect()
        };
        let order = |media: &Vec<u64>| {
            let mut order: Vec<u32> = (0..media.len() as u32).collect();
            order.sort_by_key(|&medium| std::cmp::Reverse(media[medium as usize]));
            order
        };
        let mut media_starts = vec![0];
        for item in &items {
            let media: usize = item.media_ns.iter().map(Vec::len).sum();
            media_starts.push(media_starts[media_starts.len() - 1] + media);
        }
        Ok(Self {
            ranks,
            slots,
            modules: encoders + 1,
            encoder_ns: items.iter().flat_map(times).collect(),
            media_order: items.iter().map(|item| item.media_ns.iter().map(order).collect()).collect(),
            media_starts,
            items,
            shard_ranks: 1,
            pipeline: None,
            logs: [0, 0],
            caps: Caps::default(),
            constants: ModelConstants::default(),
            latencies: Vec::new(),
        })
    }

    /// Sets the number of consecutive ranks that meet in every module, as under FSDP: all ranks, or shard
    /// groups. Default: 1, ranks meet at the end of the step.
    ///
    /// # Errors
    /// [`Error::Config`] if it does not divide the number of ranks.
    pub fn shard_ranks(mut self, ranks: NonZeroUsize) -> Result<Self> {
        if !self.ranks.is_multiple_of(ranks.get()) {
            let reason = format!("must divide the number of ranks, {}, got {ranks}", self.ranks);
            return Err(Error::Config { setting: "shard_ranks", reason });
        }
        self.shard_ranks = ranks.get();
        self.check_meeting()
    }

    /// Makes every rank a pipeline: times of items and constants are per stage of each module. Default: a
    /// rank runs one module after the other.
    ///
    /// # Errors
    /// [`Error::Config`] if the DP size is not the number of ranks in every module, stages or schedule do not
    /// fit the modules, memory is limited, or ranks meet in every module; [`Error::Overflow`] if the times of
    /// all stages do not fit 62 bits.
    pub fn pipeline(mut self, config: &PipelineConfig) -> Result<Self> {
        let passes = PipelinePasses::new(config, [self.ranks, self.slots], self.modules)?;
        let stages: usize = config.stages.iter().sum();
        if self.largest_sum().saturating_mul(stages as u128) > SUM_MAX {
            return Err(Error::Overflow { field: "slices", item: self.items.len().saturating_sub(1) });
        }
        self.pipeline = Some(passes);
        self.check_meeting()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    fn check_meeting(self) -> Result<Self> {
        if self.shard_ranks > 1 && self.pipeline.is_some() {
            let reason = "ranks with a pipeline do not meet in every module".to_owned();
            return Err(Error::Config { setting: "shard_ranks", reason });
        }
        Ok(self)
    }

    /// Returns what all items take at most, in nanoseconds over all ranks.
    fn largest_sum(&self) -> u128 {
        self.items.iter().map(largest_ns).sum()
    }

    /// Whether the step gets shorter if every slot is even, not only the sum over slots.
    pub(super) const fn balances_slots(&self) -> bool {
        self.shard_ranks > 1 || self.pipeline.is_some()
    }

    /// Combines times in the LLM and in the encoders: their sum, or the longest if they are stages of a
    /// pipeline.
    pub(super) fn combined_ns(&self, llm_ns: u64, encoders_ns: impl Iterator<Item = u64>) -> u64 {
        if self.pipeline.is_some() {
            return encoders_ns.fold(llm_ns, u64::max);
        }
        llm_ns + encoders_ns.sum::<u64>()
    }

    /// Sets the smallest and the largest number of ranks that an item is split over. Groups are aligned:
    /// their first rank is a multiple of their size, so that small groups are inside of large ones, and no
    /// group crosses shard groups. Default: 1 and 1.
    ///
    /// # Errors
    /// [`Error::Config`] if a size is not a power of two up to 64, the smallest is above the largest, no
    /// group of the smallest size fits, or an item cannot be split into the smallest.
    pub fn group_ranks(mut self, [least, most]: [usize; 2]) -> Result<Self> {
        let refused = |reason: String| Error::Config { setting: "group_ranks", reason };
        for ranks in [least, most] {
            if !ranks.is_power_of_two() || ranks > GROUP_RANKS_MAX {
                return Err(refused(format!("must be a power of two up to {GROUP_RANKS_MAX}, got {ranks}")));
            }
        }
        let room = if self.shard_ranks > 1 { self.shard_ranks } else { self.ranks };
        if least > most || least > room {
            return Err(refused(format!("no group from {least} to {most} ranks fits into {room} ranks")));
        }
        if let Some(item) = self.items.iter().position(|item| item.slices.len() <= least.ilog2() as usize) {
            return Err(refused(format!("item {item} has no slices for {least} ranks")));
        }
        // Groups inside of shard groups whose size they divide do not cross them.
        let divides = |ranks: usize| self.shard_ranks == 1 || self.shard_ranks.is_multiple_of(ranks);
        let most = (0..=most.ilog2()).rev().map(|log| 1 << log).find(|&size| size <= room && divides(size));
        let most = most.filter(|most| *most >= least).ok_or_else(|| {
            refused(format!("groups with {least} ranks do not divide shard groups with {}", self.shard_ranks))
        })?;
        self.logs = [least.ilog2() as u8, most.ilog2() as u8];
        Ok(self)
    }

    /// Sets the caps for every rank and microbatch. Default: none.
    #[must_use]
    pub const fn caps(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// Sets the time of a microbatch in addition to the items. Default: none.
    #[must_use]
    pub fn constants(mut self, constants: ModelConstants) -> Self {
        self.constants = constants;
        self
    }

    /// Sets the message latencies in groups with 1, 2, 4, … ranks, once for all items in a group and
    /// slot. Default: none.
    ///
    /// # Errors
    /// [`Error::Overflow`] if a latency is longer than an hour.
    pub fn latencies(mut self, latencies: Vec<MessageLatency>) -> Result<Self> {
        let is_long = |own: &MessageLatency| own.exposed_ns.max(own.hidden_ns) > LATENCY_MAX;
        if let Some(item) = latencies.iter().position(is_long) {
            return Err(Error::Overflow { field: "latencies", item });
        }
        self.latencies = latencies;
        Ok(self)
    }

    /// Returns the time in which a group with items waits for messages, in nanoseconds.
    ///
    /// - `message_ns`: sum over the items
    pub(super) fn wait_ns(&self, log: u8, message_ns: i64) -> u64 {
        let latency = self.latencies.get(usize::from(log)).copied().unwrap_or_default();
        latency.exposed_ns + message_ns.saturating_add_unsigned(latency.hidden_ns).max(0) as u64
    }

    /// Returns the logarithms of the groups that an item may be split over, smallest first: those within the
    /// caps.
    pub(super) fn item_logs(&self, item: usize) -> impl Iterator<Item = u8> + '_ {
        let slices = &self.items[item].slices;
        let [least, most] = self.logs;
        (least..=most.min(slices.len() as u8 - 1))
            .filter(move |log| self.fits_alone(&slices[usize::from(*log)]))
    }

    pub(super) fn fits_alone(&self, slice: &ContextSlice) -> bool {
        let is_within = |max: Option<u64>, value: u64| max.is_none_or(|max| value <= max);
        is_within(self.caps.tokens_max, slice.tokens) && is_within(self.caps.bytes_max, slice.bytes)
    }

    /// Returns an item's slice on a group with `2^log` ranks.
    pub(super) fn slice(&self, item: usize, log: u8) -> &ContextSlice {
        &self.items[item].slices[usize::from(log)]
    }

    /// Returns the encoder times of a whole item, `[encoders]`.
    pub(super) fn encoder_ns(&self, item: usize) -> &[u64] {
        let encoders = self.modules - 1;
        &self.encoder_ns[item * encoders..(item + 1) * encoders]
    }

    /// Whether each rank gets work in every slot, because there are enough items.
    pub(super) fn fills(&self) -> bool {
        self.items.len() >= self.ranks * self.slots
    }

    /// Checks that every item fits on some group.
    pub(super) fn check_items(&self) -> Result<()> {
        for item in 0..self.items.len() {
            if self.item_logs(item).next().is_some() {
                continue;
            }
            let last = self.items[item].slices.len() - 1;
            let slice = self.items[item].slices[last.min(usize::from(self.logs[1]))];
            let [tokens, bytes] = [self.caps.tokens_max, self.caps.bytes_max];
            let (unit, value, max) = match tokens.filter(|max| slice.tokens > *max) {
                Some(max) => ("tokens", slice.tokens, max),
                None => ("bytes", slice.bytes, bytes.unwrap_or(u64::MAX)),
            };
            return Err(Error::CapItem { item, unit, value, max });
        }
        Ok(())
    }

    /// Returns a number that equal problems share.
    pub(super) fn seed(&self) -> u64 {
        let shape = [self.ranks, self.slots, self.modules, self.items.len()].map(|count| count as u64);
        let slices = self.items.iter().flat_map(|item| item.slices.iter().map(|slice| slice.ns));
        random::seed_from(shape.into_iter().chain(slices))
    }
}

/// Returns what an item takes at most, in nanoseconds over all ranks.
fn largest_ns(item: &ContextItem) -> u128 {
    let largest = |(log, slice): (usize, &ContextSlice)| {
        (u128::from(slice.ns) + u128::from(slice.message_ns.unsigned_abs())) << log.min(32)
    };
    let slice = item.slices.iter().enumerate().map(largest).max().unwrap_or(0);
    slice + item.media_ns.iter().flatten().map(|ns| u128::from(*ns)).sum::<u128>()
}

/// Returns the mean rank's work, each item split where that takes least work altogether, or the time of an
/// item that takes long however it is split.
///
/// No placement is faster: every rank in a group takes its slice, so a group spends at least the least work
/// of the item, and the slowest rank of all at least the mean. With ranks that meet in every module, this
/// holds for each module. A group encodes a medium on one rank, and all media in no less than the mean. A
/// pipeline takes as long as its slowest stage; an item passes all stages. Messages that may be hidden count
/// as nothing.
pub(super) fn lower_bound(problem: &ContextProblem) -> LowerBound {
    let alone = |item: usize| problem.item_logs(item).map(|log| alone_ns(problem, item, log)).min();
    let longest_ns = (0..problem.items.len()).filter_map(alone).max().unwrap_or(0);
    let mean_ns = mean_ns(problem);
    if longest_ns > mean_ns {
        LowerBound { ns: longest_ns, kind: BoundKind::LargestItem }
    } else {
        LowerBound { ns: mean_ns, kind: BoundKind::MeanLoad }
    }
}

/// Returns the mean rank's work in its slowest stage or in all modules, each item split where that takes
/// least work altogether.
pub(super) fn mean_ns(problem: &ContextProblem) -> u64 {
    let mut llm_ns = 0_u64;
    for item in 0..problem.items.len() {
        let work = |log: u8| problem.slice(item, log).ns << log;
        llm_ns = llm_ns.saturating_add(problem.item_logs(item).map(work).min().unwrap_or(0));
    }
    let encoders = problem.modules - 1;
    let encoder_ns = |module: usize| -> u64 {
        (0..problem.items.len()).map(|item| problem.encoder_ns(item)[module]).sum()
    };
    let ranks = problem.ranks as u64;
    if problem.balances_slots() {
        let mean = |module: usize| encoder_ns(module).div_ceil(ranks);
        return problem.combined_ns(llm_ns.div_ceil(ranks), (0..encoders).map(mean));
    }
    ((0..encoders).map(encoder_ns).sum::<u64>() + llm_ns).div_ceil(ranks)
}

/// Returns the least time of a group that has nothing but an item.
fn alone_ns(problem: &ContextProblem, item: usize, log: u8) -> u64 {
    let (slice_ns, ranks) = (problem.slice(item, log).ns, 1_u64 << log);
    let media = &problem.items[item].media_ns;
    let largest = |media: &Vec<u64>| media.iter().copied().max().unwrap_or(0);
    let encoder = |media: &Vec<u64>| largest(media).max(media.iter().sum::<u64>().div_ceil(ranks));
    if let Some(pipeline) = &problem.pipeline {
        let mut stage_ns: Vec<u64> = media.iter().map(encoder).collect();
        stage_ns.resize(problem.modules - 1, 0);
        stage_ns.push(slice_ns);
        return pipeline.through_ns(&stage_ns);
    }
    if problem.shard_ranks > 1 {
        return media.iter().map(encoder).sum::<u64>() + slice_ns;
    }
    let media_ns: u64 = media.iter().flatten().sum();
    // The rank with the longest medium has its slice as well.
    let longest = media.iter().map(largest).max().unwrap_or(0);
    (slice_ns + longest).max(slice_ns + media_ns.div_ceil(ranks))
}
