//! Loads of all ranks and slots under a placement, and the step time that follows from them.

use super::pipeline::PipelineTimes;
use super::problem::ContextProblem;
use std::cmp::Reverse;
use std::ops::Range;

/// Group of ranks in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) slot: u32,
    pub(super) first: u32,
    /// Logarithm of the number of ranks.
    pub(super) log: u8,
}

impl Spot {
    pub(super) fn ranks(self) -> std::ops::Range<usize> {
        self.first as usize..self.first as usize + (1 << self.log)
    }
}

/// Number of possible group sizes.
const LOGS: usize = super::problem::GROUP_RANKS_MAX.ilog2() as usize + 1;

/// Placement of every item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) spots: Vec<Spot>,
    /// Rank of every medium inside the group.
    pub(super) media: Vec<u8>,
}

impl Placement {
    pub(super) fn copy_from(&mut self, other: &Self) {
        self.spots.copy_from_slice(&other.spots);
        self.media.copy_from_slice(&other.media);
    }

    /// Whether all items have equally many ranks, more than one.
    pub(super) fn is_alike(&self) -> bool {
        self.spots
            .first()
            .is_some_and(|first| first.log > 0 && self.spots.iter().all(|own| own.log == first.log))
    }
}

/// A group's items, on each rank.
#[derive(Debug, Clone, Copy, Default)]
struct GroupItems {
    items: u32,
    message_ns: i64,
}

/// Loads under a placement.
#[derive(Debug, Clone)]
pub(super) struct State<'a> {
    pub(super) problem: &'a ContextProblem,
    pub(super) placement: Placement,
    /// Nanoseconds that items add, `[slots * ranks * modules]`.
    pub(super) loads: Vec<u64>,
    /// Tokens and bytes, `[slots * ranks]`.
    limited: Vec<[u64; 2]>,
    /// Items, `[slots * ranks]`.
    pub(super) members: Vec<Vec<u32>>,
    /// Number of items and sum of messages by group size, `[slots * ranks]`.
    groups: Vec<[GroupItems; LOGS]>,
    /// Lockstep: time of every slot, `[shard groups * slots]`.
    slot_ns: Vec<u64>,
    /// Otherwise: time at which every rank is done, `[ranks]`.
    pub(super) done_ns: Vec<u64>,
    /// Times of the passes of pipelines.
    pipeline: PipelineTimes,
    /// Times before the last change: of slots by number, and at which every rank is done.
    slots_before_ns: Vec<(usize, u64)>,
    done_before_ns: Vec<u64>,
}

impl<'a> State<'a> {
    pub(super) fn empty(problem: &'a ContextProblem) -> Self {
        let bins = problem.slots * problem.ranks;
        let nowhere = Spot { slot: 0, first: 0, log: 0 };
        let media = problem.media_starts.last().copied().unwrap_or(0);
        Self {
            problem,
            placement: Placement { spots: vec![nowhere; problem.items.len()], media: vec![0; media] },
            loads: vec![0; bins * problem.modules],
            limited: vec![[0; 2]; bins],
            members: vec![Vec::new(); bins],
            groups: vec![[GroupItems::default(); LOGS]; bins],
            slot_ns: vec![0; problem.ranks / problem.shard_ranks * problem.slots],
            done_ns: vec![0; problem.ranks],
            pipeline: problem.pipeline.as_ref().map(|passes| passes.times(problem.ranks)).unwrap_or_default(),
            slots_before_ns: Vec::new(),
            done_before_ns: vec![0; problem.ranks],
        }
    }

    /// Takes all items away, and keeps the lists' memory.
    pub(super) fn clear(&mut self) {
        self.loads.fill(0);
        self.limited.fill([0; 2]);
        self.members.iter_mut().for_each(Vec::clear);
        self.groups.fill([GroupItems::default(); LOGS]);
        self.placement.media.fill(0);
    }

    /// Restores the loads of a placement.
    pub(super) fn restore(problem: &'a ContextProblem, placement: &Placement) -> Self {
        let mut state = Self::empty(problem);
        state.placement.media.clone_from(&placement.media);
        for (item, spot) in placement.spots.iter().enumerate() {
            state.insert_placed(item, *spot);
        }
        state.recount();
        state
    }

    pub(super) fn bin(&self, slot: usize, rank: usize) -> usize {
        slot * self.problem.ranks + rank
    }

    /// Puts an item on a group; its media go to the ranks with the least encoder work, longest first.
    pub(super) fn insert(&mut self, item: usize, spot: Spot) {
        self.add(item, spot);
        let (problem, modules) = (self.problem, self.problem.modules);
        let start = problem.media_starts[item];
        let first = self.bin(spot.slot as usize, spot.first as usize);
        let mut next = start;
        for (encoder, order) in problem.media_order[item].iter().enumerate() {
            let media_ns = &problem.items[item].media_ns[encoder];
            for &medium in order {
                let offset = self.least_loaded(first, spot.log, encoder);
                self.placement.media[next + medium as usize] = offset as u8;
                self.loads[(first + offset) * modules + encoder] += media_ns[medium as usize];
            }
            next += media_ns.len();
        }
    }

    /// Puts an item on a group, with the media on the ranks in the placement.
    pub(super) fn insert_placed(&mut self, item: usize, spot: Spot) {
        self.add(item, spot);
        self.add_placed_media(item, spot);
    }

    /// Returns the place in a group of the rank with the least work in an encoder, or in all modules if a
    /// rank runs them in turn and waits for others at the end of the step.
    fn least_loaded(&self, first: usize, log: u8, encoder: usize) -> usize {
        if log == 0 {
            return 0;
        }
        let modules = self.problem.modules;
        let load = |offset: usize| {
            let load = &self.loads[(first + offset) * modules..(first + offset + 1) * modules];
            if self.problem.balances_slots() { load[encoder] } else { load.iter().sum() }
        };
        (0..1 << log).min_by_key(|offset| load(*offset)).unwrap_or(0)
    }

    /// Puts an item on a group, with equal media shares on every rank.
    pub(super) fn insert_shares(&mut self, item: usize, spot: Spot) {
        self.add(item, spot);
        self.change_shares(item, spot, |load, ns| *load += ns);
    }

    fn change_shares(&mut self, item: usize, spot: Spot, change: impl Fn(&mut u64, u64)) {
        let problem = self.problem;
        let first = self.bin(spot.slot as usize, spot.first as usize);
        for bin in first..first + (1 << spot.log) {
            for (encoder, ns) in problem.encoder_ns(item).iter().enumerate() {
                change(&mut self.loads[bin * problem.modules + encoder], ns >> spot.log);
            }
        }
    }

    /// Places the media of all split items that have shares: those in small groups first, then the longest,
    /// each on the rank with the least work.
    pub(super) fn settle_media(&mut self) {
        let (problem, modules) = (self.problem, self.problem.modules);
        // Group size, time, item, encoder and number of the medium.
        let mut media: Vec<(u8, Reverse<u64>, u32, u32, u32)> = Vec::new();
        for item in 0..problem.items.len() {
            let spot = self.placement.spots[item];
            if spot.log == 0 {
                continue;
            }
            self.change_shares(item, spot, |load, ns| *load -= ns);
            let mut next = problem.media_starts[item] as u32;
            for (encoder, media_ns) in problem.items[item].media_ns.iter().enumerate() {
                for &ns in media_ns {
                    media.push((spot.log, Reverse(ns), item as u32, encoder as u32, next));
                    next += 1;
                }
            }
        }
        media.sort_unstable();
        for (log, Reverse(ns), item, encoder, medium) in media {
            let spot = self.placement.spots[item as usize];
            let first = self.bin(spot.slot as usize, spot.first as usize);
            let offset = self.least_loaded(first, log, encoder as usize);
            self.placement.media[medium as usize] = offset as u8;
            self.loads[(first + offset) * modules + encoder as usize] += ns;
        }
        self.recount();
    }

    /// Adds everything of an item but its media.
    fn add(&mut self, item: usize, spot: Spot) {
        let slice = *self.problem.slice(item, spot.log);
        let modules = self.problem.modules;
        let [before, after] = self.change_group(spot, 1, slice.message_ns);
        for rank in spot.ranks() {
            let bin = self.bin(spot.slot as usize, rank);
            let load = &mut self.loads[(bin + 1) * modules - 1];
            *load = *load + slice.ns + after - before;
            self.limited[bin][0] += slice.tokens;
            self.limited[bin][1] += slice.bytes;
            self.members[bin].push(item as u32);
        }
        self.placement.spots[item] = spot;
    }

    /// Changes the number of items in a group and the sum of messages; returns the nanoseconds in which the
    /// group waits for messages before and after.
    fn change_group(&mut self, spot: Spot, items: i32, message_ns: i64) -> [u64; 2] {
        let (first, log) = (self.bin(spot.slot as usize, spot.first as usize), usize::from(spot.log));
        let before = self.groups[first][log];
        let items = before.items.saturating_add_signed(items);
        let after = GroupItems { items, message_ns: before.message_ns + message_ns };
        for own in &mut self.groups[first..first + (1 << log)] {
            own[log] = after;
        }
        let wait_ns = |own: GroupItems| {
            if log == 0 || own.items == 0 { 0 } else { self.problem.wait_ns(spot.log, own.message_ns) }
        };
        [before, after].map(wait_ns)
    }

    /// Adds an item's media to the ranks that they were placed on.
    fn add_placed_media(&mut self, item: usize, spot: Spot) {
        self.change_media(item, spot, |load, ns| *load += ns);
    }

    fn change_media(&mut self, item: usize, spot: Spot, change: impl Fn(&mut u64, u64)) {
        let problem = self.problem;
        let first = self.bin(spot.slot as usize, spot.first as usize);
        let mut next = problem.media_starts[item];
        for (encoder, media_ns) in problem.items[item].media_ns.iter().enumerate() {
            for &ns in media_ns {
                let offset = usize::from(self.placement.media[next]);
                change(&mut self.loads[(first + offset) * problem.modules + encoder], ns);
                next += 1;
            }
        }
    }

    /// Takes an item away.
    pub(super) fn remove(&mut self, item: usize) {
        let spot = self.placement.spots[item];
        self.change_media(item, spot, |load, ns| *load -= ns);
        let slice = *self.problem.slice(item, spot.log);
        let modules = self.problem.modules;
        let [before, after] = self.change_group(spot, -1, -slice.message_ns);
        for rank in spot.ranks() {
            let bin = self.bin(spot.slot as usize, rank);
            let load = &mut self.loads[(bin + 1) * modules - 1];
            *load = *load + after - slice.ns - before;
            self.limited[bin][0] -= slice.tokens;
            self.limited[bin][1] -= slice.bytes;
            if let Some(at) = self.members[bin].iter().position(|own| *own as usize == item) {
                self.members[bin].swap_remove(at);
            }
        }
    }

    /// Whether an item fits on a group within the caps.
    pub(super) fn fits(&self, item: usize, spot: Spot) -> bool {
        let (slice, caps) = (self.problem.slice(item, spot.log), self.problem.caps);
        let max = [caps.tokens_max, caps.bytes_max];
        if max == [None, None] {
            return true;
        }
        let is_within = |bin: usize| {
            let after = [self.limited[bin][0] + slice.tokens, self.limited[bin][1] + slice.bytes];
            max.iter().zip(after).all(|(max, after)| max.is_none_or(|max| after <= max))
        };
        spot.ranks().all(|rank| is_within(self.bin(spot.slot as usize, rank)))
    }

    /// Returns what the items of a rank's microbatch take in all modules.
    pub(super) fn load_ns(&self, bin: usize) -> u64 {
        let modules = self.problem.modules;
        self.loads[bin * modules..(bin + 1) * modules].iter().sum()
    }

    /// Returns the time of a rank's microbatch in a module.
    pub(super) fn module_ns(&self, bin: usize, module: usize) -> u64 {
        let modules = self.problem.modules;
        let load = &self.loads[bin * modules..(bin + 1) * modules];
        let constants = &self.problem.constants;
        match &constants.whole {
            None => constants.modules.get(module).map_or(load[module], |own| own.microbatch_ns(load[module])),
            Some(whole) if module + 1 == modules => {
                let sum = load.iter().sum();
                load[module] + whole.microbatch_ns(sum).saturating_sub(sum)
            }
            Some(_) => load[module],
        }
    }

    fn bin_ns(&self, bin: usize) -> u64 {
        (0..self.problem.modules).map(|module| self.module_ns(bin, module)).sum()
    }

    /// Computes the times of all slots anew.
    pub(super) fn recount(&mut self) {
        if self.problem.pipeline.is_some() {
            let ranks = self.problem.ranks;
            self.count_pipelines((0..self.problem.slots).map(|slot| (slot, 0..ranks)));
        } else if self.problem.shard_ranks > 1 {
            self.slots_before_ns.clear();
            for slot in 0..self.problem.slots {
                for shard in 0..self.problem.ranks / self.problem.shard_ranks {
                    self.count_slot(shard, slot);
                }
            }
        } else {
            self.count_ranks();
        }
    }

    /// Computes the times anew after changes in some groups, which [`State::uncount`] takes back.
    ///
    /// Returns the number of read loads and computed ends of passes.
    pub(super) fn count_spots(&mut self, spots: &[Spot]) -> usize {
        if self.problem.pipeline.is_some() {
            return self.count_pipelines(spots.iter().map(|spot| (spot.slot as usize, spot.ranks())));
        }
        if self.problem.shard_ranks == 1 {
            self.done_before_ns.clone_from(&self.done_ns);
            self.count_ranks();
            return self.loads.len();
        }
        self.slots_before_ns.clear();
        for (at, spot) in spots.iter().enumerate() {
            let shard = |spot: &Spot| (spot.first as usize / self.problem.shard_ranks, spot.slot as usize);
            let (own, slot) = shard(spot);
            if !spots[..at].iter().any(|before| shard(before) == (own, slot)) {
                self.count_slot(own, slot);
            }
        }
        spots.len() * self.problem.shard_ranks * self.problem.modules
    }

    /// Computes the time of a slot whose ranks meet in every module.
    fn count_slot(&mut self, shard: usize, slot: usize) {
        let first = self.bin(slot, shard * self.problem.shard_ranks);
        let bins = first..first + self.problem.shard_ranks;
        let slowest = |module: usize| bins.clone().map(|bin| self.module_ns(bin, module)).max().unwrap_or(0);
        let slot_ns = (0..self.problem.modules).map(slowest).sum();
        let at = shard * self.problem.slots + slot;
        self.slots_before_ns.push((at, std::mem::replace(&mut self.slot_ns[at], slot_ns)));
    }

    /// Takes the last change of times back.
    pub(super) fn uncount(&mut self) {
        if self.problem.pipeline.is_some() {
            self.pipeline.undo();
            self.done_ns.copy_from_slice(self.pipeline.done_ns());
        } else if self.problem.shard_ranks == 1 {
            self.done_ns.copy_from_slice(&self.done_before_ns);
        } else {
            for (at, ns) in self.slots_before_ns.drain(..) {
                self.slot_ns[at] = ns;
            }
        }
    }

    /// Computes when every pipeline is done, after changes on some ranks in some slots.
    fn count_pipelines(&mut self, changed: impl Iterator<Item = (usize, Range<usize>)>) -> usize {
        let Some(passes) = &self.problem.pipeline else { return 0 };
        let mut times = std::mem::take(&mut self.pipeline);
        let module_ns =
            |slot: usize, rank: usize, module: usize| self.module_ns(self.bin(slot, rank), module);
        let computed = passes.change(&mut times, changed, module_ns, |slot, rank| self.group(slot, rank));
        self.done_ns.copy_from_slice(times.done_ns());
        self.pipeline = times;
        computed
    }

    /// Returns the ranks that share items with a rank in a slot, and the rank itself.
    fn group(&self, slot: usize, rank: usize) -> Range<usize> {
        let own = &self.groups[self.bin(slot, rank)];
        let log = own.iter().rposition(|own| own.items > 0).unwrap_or(0);
        let first = rank >> log << log;
        first..first + (1 << log)
    }

    /// Returns the groups of ranks that share items in a slot, single ranks included.
    fn slot_groups(&self, slot: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut rank = 0;
        std::iter::from_fn(move || {
            let group = (rank < self.problem.ranks).then(|| self.group(slot, rank))?;
            rank = group.end;
            Some(group)
        })
    }

    /// Computes when every rank is done. Ranks that share an item begin and end a microbatch together,
    /// because they wait for each other's keys in every layer.
    fn count_ranks(&mut self) {
        self.done_ns.fill(0);
        let mut done_ns = std::mem::take(&mut self.done_ns);
        for slot in 0..self.problem.slots {
            for group in self.slot_groups(slot) {
                let start = done_ns[group.clone()].iter().copied().max().unwrap_or(0);
                let slowest = group.clone().map(|rank| self.bin_ns(self.bin(slot, rank))).max().unwrap_or(0);
                done_ns[group].fill(start + slowest);
            }
        }
        self.done_ns = done_ns;
    }

    /// Returns the step time.
    pub(super) fn total_ns(&self) -> u64 {
        if self.problem.shard_ranks == 1 {
            return self.done_ns.iter().copied().max().unwrap_or(0);
        }
        self.slot_ns.chunks(self.problem.slots).map(|slots| slots.iter().sum()).max().unwrap_or(0)
    }

    /// Returns the shard group with the longest time.
    pub(super) fn slowest_shard(&self) -> usize {
        let total = |shard: usize| {
            self.slot_ns[shard * self.problem.slots..(shard + 1) * self.problem.slots].iter().sum::<u64>()
        };
        let shards = 0..self.problem.ranks / self.problem.shard_ranks;
        shards.rev().max_by_key(|shard| total(*shard)).unwrap_or(0)
    }
}
