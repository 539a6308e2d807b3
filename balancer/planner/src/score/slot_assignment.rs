//! Assigns samples in a batch to groups and groups to slots, with pass times and memory.
//!
//! Groups are filled greedily, the longest samples first, and assigned to ranks evenly; all ranks use the
//! same order by size, so that slot `k` has about the same size on all ranks.

use super::encoder_shares::{self, LargestShares, MediaLoad, MediaPools};
use super::link_times;
use super::step_timeline::{ChainTimes, StepTimes};
use crate::cluster::Placement;
use crate::costs::StageBytes;
use crate::space::memory::MemoryRequirement;
use crate::space::shape::{StageShape, TpTimes};
use crate::space::{Candidate, EncoderSplit, Family, SearchSpace, memory};
use crate::workload::ItemSize;
use dflop_balancer::peak_order;
use dflop_balancer::schedule::ScheduleKind;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

/// Units in each cell and each slot in a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct SlotAssignment {
    pub(crate) ranks: usize,
    /// Tokens per cell, `[slots * ranks]`.
    pub(crate) tokens: Vec<u64>,
    /// Attention time for each cell's samples in one layer.
    samples_ns: Vec<f64>,
    /// Largest rank shares for each encoder, `[slots]`; `[slots * ranks]` if media stay in their rank; `[1]`
    /// (whole batch) for a colocated encoder.
    pub(crate) shares: Vec<LargestShares>,
}

impl SlotAssignment {
    /// Sums samples by cell.
    pub(crate) fn new(
        space: &SearchSpace<'_>,
        candidate: &Candidate,
        batch: &[ItemSize],
        cell_of: impl Fn(usize) -> u32,
        split: EncoderSplit,
    ) -> Self {
        let family = &candidate.family;
        let (ranks, slots) = (family.llm_dp as usize, candidate.microbatches as usize);
        let encoders = 0..family.encoders.len();
        let is_colocated = family.placement == Placement::Colocated;
        let mut pools: Vec<MediaPools<'_>> = Vec::new();
        if !is_colocated {
            pools.extend(encoders.clone().map(|encoder| MediaPools::new(space, candidate, encoder, split)));
        }
        let mut cells = Self {
            ranks,
            tokens: vec![0; ranks * slots],
            samples_ns: vec![0.0; ranks * slots],
            ..Self::default()
        };
        let samples_ns = space.llm_times(family).samples_ns(space.workload, batch);
        for (item, (size, sample_ns)) in batch.iter().zip(samples_ns.iter()).enumerate() {
            let cell = cell_of(item) as usize;
            cells.tokens[cell] += u64::from(size.tokens);
            cells.samples_ns[cell] += sample_ns;
            for pools in &mut pools {
                pools.add(cell, size);
            }
        }
        cells.shares = if is_colocated {
            encoders
                .map(|encoder| encoder_shares::phase_shares(space, family, encoder, batch, split))
                .collect()
        } else {
            pools.into_iter().map(MediaPools::largest).collect()
        };
        cells
    }

    /// Replaces an encoder's media shares, `[slots][ranks]`.
    pub(crate) fn set_shares(
        &mut self,
        space: &SearchSpace<'_>,
        candidate: &Candidate,
        encoder: usize,
        shares: &[Vec<MediaLoad>],
    ) {
        let times = space.encoder_times(&candidate.family, encoder);
        let mut largest = LargestShares::default();
        for of_slot in shares {
            largest.push(of_slot, times);
        }
        self.shares[encoder] = largest;
    }

    /// Returns all pass times.
    pub(crate) fn times(&self, space: &SearchSpace<'_>, candidate: &Candidate) -> StepTimes {
        let family = &candidate.family;
        let mut step = StepTimes::new(space.step_shape(family, candidate.microbatches), self.ranks);
        let is_split = family.schedule == ScheduleKind::ZeroBubble;
        let encoder_times: Vec<CellTimes> = match family.placement {
            Placement::Colocated => Vec::new(),
            _ => self.encoder_times(space, family, is_split).collect(),
        };
        let llm = (space.llm_shape(family), &self.llm_times(space.llm_times(family), is_split));
        let encoders = space.encoder_shapes(family).zip(&encoder_times);
        match family.placement {
            Placement::Disaggregated => {
                let chain_of = |(encoder, module): (usize, (&StageShape, &CellTimes))| {
                    let lanes = if family.is_shared(encoder) { 1 } else { self.ranks };
                    chain(lanes, &[module], is_split)
                };
                step.encoders = encoders.enumerate().map(chain_of).collect();
                step.llm = chain(self.ranks, &[llm], is_split);
            }
            Placement::Colocated => step.llm = chain(self.ranks, &[llm], is_split),
            Placement::Joint => {
                let all: Vec<(&StageShape, &CellTimes)> = encoders.chain([llm]).collect();
                step.llm = chain(self.ranks, &all, is_split);
            }
        }
        if is_split && space.options.trainer.repeats_split_passes() {
            step.encoders.iter_mut().chain([&mut step.llm]).for_each(ChainTimes::repeat_row_gradients);
        }
        link_times::add_links(space, candidate, &self.tokens, &self.shares, &mut step);
        step
    }

    fn llm_times(&self, times: &TpTimes, is_split: bool) -> CellTimes {
        let cells = self.tokens.iter().zip(&self.samples_ns);
        CellTimes {
            linear_ns: linear_ns(&self.tokens, times, is_split),
            layer_ns: cells.map(|(tokens, samples_ns)| times.layer.at(*tokens as f64) + samples_ns).collect(),
            outside_ns: self.tokens.iter().map(|tokens| times.outside.at(*tokens as f64)).collect(),
        }
    }

    fn encoder_times<'a>(
        &'a self,
        space: &'a SearchSpace<'_>,
        family: &'a Family,
        is_split: bool,
    ) -> impl Iterator<Item = CellTimes> + 'a {
        self.shares.iter().enumerate().map(move |(encoder, shares)| {
            let times = space.encoder_times(family, encoder);
            let outside_ns = shares.tiles.iter().map(|tiles| times.outside.at(*tiles as f64)).collect();
            let linear_ns = linear_ns(&shares.tiles, times, is_split);
            CellTimes { layer_ns: shares.layer_ns.clone(), outside_ns, linear_ns }
        })
    }

    /// Returns the time for all media in an encoder, forward and backward, on its colocated ranks,
    /// nanoseconds.
    pub(crate) fn phase_ns(&self, space: &SearchSpace<'_>, candidate: &Candidate, encoder: usize) -> u64 {
        let shape = space.encoder_shape(&candidate.family, encoder);
        let times = space.encoder_times(&candidate.family, encoder);
        let shares = &self.shares[encoder];
        let phase = shares.tiles.iter().zip(&shares.layer_ns);
        let ns = phase.map(|(tiles, layer_ns)| shape.all * layer_ns + times.outside.at(*tiles as f64));
        ns.sum::<f64>().ceil() as u64
    }

    /// Returns the time for all media in colocated encoders, run sequentially, nanoseconds.
    pub(crate) fn phases_ns(&self, space: &SearchSpace<'_>, candidate: &Candidate) -> u64 {
        (0..self.shares.len()).map(|encoder| self.phase_ns(space, candidate, encoder)).sum()
    }

    /// Returns the memory on each module's fullest GPU.
    pub(crate) fn requirement(&self, space: &SearchSpace<'_>, candidate: &Candidate) -> MemoryRequirement {
        self.memory_requirement(space, candidate, &candidate.family)
    }

    /// Returns the memory on each module's fullest GPU if the `sharers` ranks share optimizer state.
    pub(crate) fn memory_requirement(
        &self,
        space: &SearchSpace<'_>,
        candidate: &Candidate,
        sharers: &Family,
    ) -> MemoryRequirement {
        let family = &candidate.family;
        let llm = space.llm_shape(family);
        let llm_ranks = space.optimizer_ranks(sharers.llm_dp);
        let encoder_ranks = |encoder: usize| space.optimizer_ranks(sharers.encoders[encoder].dp);
        let shape = space.step_shape(family, candidate.microbatches);
        if family.placement == Placement::Joint {
            let joint = &space.joint[family.llm];
            let parts = |stage: usize| -> Vec<StageBytes> {
                let encoders = 0..family.encoders.len();
                let encoders = encoders
                    .map(|encoder| joint.encoder_memory(encoder, stage).shared_by(encoder_ranks(encoder)));
                encoders.chain([joint.llm_memory(stage).shared_by(llm_ranks)]).collect()
            };
            let parts: Vec<(Vec<StageBytes>, usize)> =
                (0..shape.stages).map(|stage| (parts(stage), shape.in_flight(stage))).collect();
            let of_rank = |rank| {
                let media = self.shares.iter().map(|shares| lane_units(&shares.tiles, rank, self.ranks));
                let units: Vec<Vec<u64>> =
                    media.chain([lane_units(&self.tokens, rank, self.ranks)]).collect();
                let of_stages = parts.iter().map(|(parts, held)| held_by_all(parts, &units, *held));
                of_stages.fold(0.0, f64::max)
            };
            let all = (0..self.ranks).map(of_rank).fold(0.0, f64::max);
            return MemoryRequirement::for_all_modules(family, all);
        }
        let passes = if llm.chunks > 1 { shape.ordered_passes() } else { Vec::new() };
        let in_flight = |first_stage: usize| {
            let shape = &shape;
            move |stage: u32| shape.in_flight(first_stage + stage as usize)
        };
        let held = if llm.chunks > 1 {
            Vec::new()
        } else {
            fullest_stages(llm, llm_ranks, in_flight(shape.encoder_stages()))
        };
        let of_rank = |rank| {
            let units = lane_units(&self.tokens, rank, self.ranks);
            if llm.chunks > 1 {
                let units: Vec<f64> = units.into_iter().map(|tokens| tokens as f64).collect();
                return memory::chunks_bytes(llm, llm_ranks, &passes, &units);
            }
            fullest(&held, &units)
        };
        let llm_bytes = (0..self.ranks).map(of_rank).fold(0.0, f64::max);
        if family.placement == Placement::Colocated {
            let largest =
                |encoder: usize| self.shares[encoder].tiles.iter().copied().max().unwrap_or(0) as f64;
            return MemoryRequirement::for_all_modules(
                family,
                llm_bytes + memory::phase_bytes(space, family, largest),
            );
        }
        let mut all = MemoryRequirement { llm_bytes, ..MemoryRequirement::default() };
        for (encoder, (first_stage, _)) in shape.encoders.each().enumerate() {
            let own = space.encoder_shape(family, encoder);
            let held = fullest_stages(own, encoder_ranks(encoder), in_flight(first_stage));
            let tiles = &self.shares[encoder].tiles;
            let lanes = tiles.len() / shape.slots;
            let lane_bytes = |lane| fullest(&held, &lane_units(tiles, lane, lanes));
            all.encoder_bytes[encoder] = (0..lanes).map(lane_bytes).fold(0.0, f64::max);
        }
        all
    }
}

/// Returns the units in one lane.
fn lane_units(units: &[u64], lane: usize, lanes: usize) -> Vec<u64> {
    units.iter().skip(lane).step_by(lanes).copied().collect()
}

/// Lists the stages that may be the fullest, with the microbatches that each holds.
fn fullest_stages(
    shape: &StageShape,
    ranks: u32,
    in_flight: impl Fn(u32) -> usize,
) -> Vec<(StageBytes, usize)> {
    shape.memory.iter().map(|(stage, bytes)| (bytes.shared_by(ranks), in_flight(*stage))).collect()
}

/// Returns the fullest stage's memory over consecutive microbatches, as many as are in flight.
fn fullest(stages: &[(StageBytes, usize)], units: &[u64]) -> f64 {
    let largest = units.iter().copied().max().unwrap_or(0) as f64;
    let of_stage = |(bytes, in_flight): &(StageBytes, usize)| {
        let held = Windows::new(units, *in_flight).max().unwrap_or(0);
        bytes.at(held as f64, largest)
    };
    stages.iter().map(of_stage).fold(0.0, f64::max)
}

/// Returns the memory for a stage with layers from all modules, whose units are held together.
fn held_by_all(parts: &[StageBytes], units: &[Vec<u64>], in_flight: usize) -> f64 {
    let modules = parts.iter().zip(units);
    let mut windows: Vec<(f64, Windows<'_>)> =
        modules.clone().map(|(part, units)| (part.kept_per_unit, Windows::new(units, in_flight))).collect();
    let mut next = || -> Option<f64> {
        windows.iter_mut().map(|(kept, units)| units.next().map(|units| *kept * units as f64)).sum()
    };
    let held = std::iter::from_fn(&mut next).fold(0.0, f64::max);
    // Layers from two modules are not computed at the same time.
    let working = modules.map(|(part, units)| {
        let largest = units.iter().copied().max().unwrap_or(0);
        part.working_per_unit * largest as f64
    });
    let fixed: f64 = parts.iter().map(|part| part.fixed + part.optimizer).sum();
    let sums: f64 = parts.iter().map(StageBytes::all_sums).sum();
    fixed + (held + working.fold(0.0, f64::max)).max(sums)
}

/// Sums of consecutive units, as many as are in flight.
struct Windows<'a> {
    units: &'a [u64],
    in_flight: usize,
    end: usize,
    sum: u64,
}

impl<'a> Windows<'a> {
    fn new(units: &'a [u64], in_flight: usize) -> Self {
        let end = in_flight.min(units.len());
        Self { units, in_flight, end, sum: units[..end].iter().sum() }
    }
}

impl Iterator for Windows<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        if self.end > self.units.len() {
            return None;
        }
        let sum = self.sum;
        if let Some(next) = self.units.get(self.end) {
            self.sum = self.sum + next - self.units[self.end - self.in_flight];
        }
        self.end += 1;
        Some(sum)
    }
}

/// Times per cell for a module: one layer, and outside the layers.
#[expect(clippy::struct_field_names, reason = "units end the names")]
struct CellTimes {
    layer_ns: Vec<f64>,
    outside_ns: Vec<f64>,
    /// One layer without attention; empty if backward passes are whole.
    linear_ns: Vec<f64>,
}

/// Returns each cell's time in one layer without attention; none if backward passes are whole.
fn linear_ns(units: &[u64], times: &TpTimes, is_split: bool) -> Vec<f64> {
    let units = if is_split { units } else { &[] };
    units.iter().map(|units| times.layer.at(*units as f64)).collect()
}

/// Creates a chain of stages that hold layers from one or all modules.
fn chain(lanes: usize, modules: &[(&StageShape, &CellTimes)], is_split: bool) -> ChainTimes {
    let (stages, rows_ns) = rows(modules);
    let weights_ns = if is_split { weight_rows(modules, &stages) } else { Vec::new() };
    ChainTimes { weights_ns, ..ChainTimes::new(lanes, (stages, rows_ns)) }
}

/// Computes rows with weight gradient times: linear work in the layers. What is outside the layers computes
/// both gradients together, as does the executor.
///
/// - `stages`: row for each stage
fn weight_rows(modules: &[(&StageShape, &CellTimes)], stages: &[usize]) -> Vec<Vec<u64>> {
    let mut rows: Vec<Vec<u64>> = Vec::new();
    for (stage, row) in stages.iter().enumerate() {
        // Rows are numbered by their first stage.
        if *row < rows.len() {
            continue;
        }
        let cells = modules.first().map_or(0, |(_, times)| times.linear_ns.len());
        let mut sums = vec![0.0; cells];
        for (shape, times) in modules {
            let share = shape.stage_shares[stage].weights;
            sums.iter_mut().zip(&times.linear_ns).for_each(|(ns, linear_ns)| *ns += share * linear_ns);
        }
        rows.push(sums.into_iter().map(|ns| ns as u64).collect());
    }
    rows
}

/// Computes rows with forward and backward times for stages that hold layers from one or both modules: one
/// row for each number of layers, and one for each stage that ends a module.
fn rows(modules: &[(&StageShape, &CellTimes)]) -> (Vec<usize>, Vec<[Vec<u64>; 2]>) {
    let (mut stages, mut rows, mut known): (Vec<usize>, Vec<_>, Vec<Vec<u32>>) = Default::default();
    let cells = modules.iter().map(|(_, times)| times.layer_ns.len()).max().unwrap_or(0);
    for stage in 0..modules.last().map_or(0, |(shape, _)| shape.layers.len()) {
        let ends = modules.iter().any(|(shape, _)| shape.end() == stage);
        let layers: Vec<u32> = modules.iter().map(|(shape, _)| shape.layers[stage]).collect();
        if let Some(row) = known.iter().position(|of| *of == layers).filter(|_| !ends) {
            stages.push(row);
            continue;
        }
        let mut both = [vec![0.0; cells], vec![0.0; cells]];
        for (shape, times) in modules {
            add_stage(shape, stage, times, &mut both);
        }
        stages.push(rows.len());
        rows.push(both.map(|pass_ns| pass_ns.into_iter().map(whole_ns).collect()));
        // A stage that ends a module is unlike any other stage.
        known.push(if ends { Vec::new() } else { layers });
    }
    (stages, rows)
}

/// Adds a module's layer times in a stage, forward and backward.
fn add_stage(shape: &StageShape, stage: usize, times: &CellTimes, both: &mut [Vec<f64>; 2]) {
    let (of_layers, of_outside) = (shape.stage_shares[stage], shape.outside_shares);
    let outside = if shape.end() == stage { 1.0 / (of_outside.forward + of_outside.backward) } else { 0.0 };
    let factors = [
        (of_layers.forward, outside * of_outside.forward),
        (of_layers.backward, outside * of_outside.backward),
    ];
    for (pass_ns, (layers, outside)) in both.iter_mut().zip(factors) {
        let cells = times.layer_ns.iter().zip(&times.outside_ns);
        for (ns, (layer_ns, outside_ns)) in pass_ns.iter_mut().zip(cells) {
            *ns += layers * layer_ns + outside * outside_ns;
        }
    }
}

/// Rounds a time up.
fn whole_ns(ns: f64) -> u64 {
    let whole = ns as u64;
    whole + u64::from((whole as f64) < ns)
}

/// Order by size for a rank's microbatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The largest in the middle: fill and drain are short.
    Peak,
    /// Large and small microbatches alternate: microbatches in flight together use about the same memory
    /// everywhere.
    Even,
}

/// Assigns each item, in sequence, to the group with the smallest sum; returns each item's group.
///
/// This is LPT if the items are sorted by size. There are at least as many items as groups; the first items
/// seed the groups, so none is empty. Ties go to the lower index.
pub(super) fn greedy_groups(sizes_ns: &[u64], groups: usize) -> Vec<u32> {
    let seeds = sizes_ns.iter().take(groups).zip(0..);
    let mut heap: BinaryHeap<Reverse<u128>> =
        seeds.map(|(size, group)| Reverse(key(*size, group))).collect::<Vec<_>>().into();
    let mut group_of: Vec<u32> = (0..groups as u32).collect();
    for size in &sizes_ns[groups.min(sizes_ns.len())..] {
        if let Some(mut least) = heap.peek_mut() {
            group_of.push(least.0 as u32);
            least.0 += key(*size, 0);
        }
    }
    group_of
}

/// Joins a time and an index in one number with the same order: comparing numbers is faster.
const fn key(ns: u64, index: u32) -> u128 {
    (ns as u128) << u32::BITS | index as u128
}

/// Assigns groups to ranks and slots; returns each group's cell, `slot * ranks + rank`.
pub(super) fn cells_of_groups(group_ns: &[u64], ranks: usize, order_of_slots: Order) -> Vec<u32> {
    let slots = group_ns.len() / ranks;
    // The largest first.
    let mut order: Vec<u128> = group_ns.iter().zip(0..).map(|(ns, group)| key(!ns, group)).collect();
    order.sort_unstable();
    let (mut own_of_ranks, mut counts) = (vec![0; ranks * slots], vec![0; ranks]);
    let mut heap: BinaryHeap<Reverse<u128>> = (0..ranks as u32).map(|rank| Reverse(key(0, rank))).collect();
    for group in order.into_iter().map(|key| key as u32) {
        // A full rank leaves the heap, so the heap is not empty while groups are left.
        let Some(mut least) = heap.peek_mut() else { break };
        let rank = least.0 as u32 as usize;
        own_of_ranks[rank * slots + counts[rank]] = group;
        counts[rank] += 1;
        if counts[rank] < slots {
            least.0 += key(group_ns[group as usize], 0);
        } else {
            PeekMut::pop(least);
        }
    }
    // Every rank's groups are sorted, so that all ranks have the same order, but for equal groups.
    let falling: Vec<u64> = (0..slots as u64).rev().collect();
    let slots_of = |own_ns: &[u64]| match order_of_slots {
        Order::Peak => peak_order(own_ns),
        Order::Even => even_order(own_ns),
    };
    let usual = slots_of(&falling);
    let mut cells = vec![0; group_ns.len()];
    for (rank, own) in own_of_ranks.chunks(slots.max(1)).enumerate() {
        let own_ns = || own.iter().map(|&group| group_ns[group as usize]);
        let has_equal = own_ns().zip(own_ns().skip(1)).any(|(one, next)| one == next);
        let other = has_equal.then(|| slots_of(&own_ns().collect::<Vec<u64>>()));
        for (slot, &at) in other.as_ref().unwrap_or(&usual).iter().enumerate() {
            cells[own[at as usize] as usize] = (slot * ranks + rank) as u32;
        }
    }
    cells
}

/// Lists sizes so that each run of neighbors has about the same sum: the largest, the smallest, the second
/// largest, the second smallest, and so on.
fn even_order(sizes: &[u64]) -> Vec<u32> {
    let mut falling: Vec<u32> = (0..sizes.len() as u32).collect();
    falling.sort_unstable_by_key(|&at| (Reverse(sizes[at as usize]), at));
    let half = falling.len().div_ceil(2);
    let (large, small) = falling.split_at(half);
    let mut order = Vec::with_capacity(falling.len());
    for (at, large) in large.iter().enumerate() {
        order.push(*large);
        order.extend(small.len().checked_sub(at + 1).map(|at| small[at]));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn large_and_small_sizes_take_turns() {
        assert_eq!(even_order(&[1, 9, 5, 7, 3]), [1, 0, 3, 4, 2]);
        assert_eq!(even_order(&[4, 2]), [0, 1]);
        assert_eq!(even_order(&[4]), [0]);
        assert!(even_order(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn every_group_gets_an_item_and_every_cell_a_group(
            sizes in prop::collection::vec(0u64..50, 24..60), ranks in 1usize..5, slots in 1usize..6,
        ) {
            let groups = ranks * slots;
            let group_of = greedy_groups(&sizes, groups);
            let mut loads = vec![0; groups];
            let mut counts = vec![0; groups];
            for (item, &group) in group_of.iter().enumerate() {
                loads[group as usize] += sizes[item];
                counts[group as usize] += 1;
            }
            prop_assert!(counts.iter().all(|count| *count > 0));
            for order in [Order::Peak, Order::Even] {
                let mut cells = cells_of_groups(&loads, ranks, order);
                cells.sort_unstable();
                prop_assert_eq!(cells, (0..groups as u32).collect::<Vec<_>>());
            }
        }
    }
}
