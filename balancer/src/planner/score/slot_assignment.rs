//! Slot assignment of one batch: the times of every pass and the memory that follow from it.

use super::encoder_shares::{LargestShares, MediaLoad, MediaPools};
use super::link_times;
use super::step_timeline::{ChainTimes, StepTimes};
use crate::planner::cluster::Placement;
use crate::planner::costs::StageBytes;
use crate::planner::memory::{self, MemoryRequirement};
use crate::planner::space::shape::{StageShape, TpTimes};
use crate::planner::space::{Candidate, EncoderSplit, SearchSpace};
use crate::planner::workload::ItemSize;

/// Units in each cell and each slot of a step.
#[derive(Debug, Clone, Default)]
pub(in crate::planner) struct SlotAssignment {
    pub(in crate::planner) ranks: usize,
    /// Tokens of each cell, `[slots * ranks]`.
    pub(in crate::planner) tokens: Vec<u64>,
    /// Attention time of each cell's samples in one layer.
    samples_ns: Vec<f64>,
    /// Most tiles of an encoder rank, `[slots]`; `[slots * ranks]` where media stay in their rank; of a
    /// colocated encoder in the whole batch, `[1]`.
    pub(in crate::planner) share_tiles: Vec<u64>,
    /// Time of the slowest of these ranks in one layer.
    share_layer_ns: Vec<f64>,
}

impl SlotAssignment {
    /// Sums samples by cell.
    pub(in crate::planner) fn new(
        space: &SearchSpace<'_>,
        candidate: &Candidate,
        batch: &[ItemSize],
        cell_of: impl Fn(usize) -> u32,
        split: EncoderSplit,
    ) -> Self {
        let family = &candidate.family;
        let (ranks, slots) = (family.llm_dp as usize, candidate.microbatches as usize);
        let [_, shape] = space.shapes(family);
        let llm = &space.llm.times[shape.times];
        let mut pools = MediaPools::new(space, candidate, split);
        let mut cells = Self {
            ranks,
            tokens: vec![0; ranks * slots],
            samples_ns: vec![0.0; ranks * slots],
            ..Self::default()
        };
        for (item, size) in batch.iter().enumerate() {
            let cell = cell_of(item) as usize;
            cells.tokens[cell] += u64::from(size.tokens);
            cells.samples_ns[cell] += llm.sample.at(f64::from(size.tokens));
            pools.add(cell, size);
        }
        cells.take_shares(pools.largest());
        cells
    }

    /// Replaces the media of encoder ranks by these shares, `[slots][ranks]`.
    pub(in crate::planner) fn set_shares(
        &mut self,
        space: &SearchSpace<'_>,
        candidate: &Candidate,
        shares: &[Vec<MediaLoad>],
    ) {
        let [encoder, _] = space.shapes(&candidate.family);
        let mut largest = LargestShares::default();
        for of_slot in shares {
            largest.push(of_slot, &space.encoder.times[encoder.times]);
        }
        self.take_shares(largest);
    }

    fn take_shares(&mut self, largest: LargestShares) {
        (self.share_tiles, self.share_layer_ns) = (largest.tiles, largest.layer_ns);
    }

    /// Returns the times of all passes.
    pub(in crate::planner) fn times(&self, space: &SearchSpace<'_>, candidate: &Candidate) -> StepTimes {
        let family = &candidate.family;
        let [encoder, llm] = space.shapes(family);
        let mut step = StepTimes::new(space.step_shape(family, candidate.microbatches), self.ranks);
        let llm_times = self.llm_times(&space.llm.times[llm.times]);
        let encoder_times = self.encoder_times(&space.encoder.times[encoder.times]);
        match family.placement {
            Placement::Disaggregated => {
                let lanes = if family.is_shared() { 1 } else { self.ranks };
                step.encoders.push(ChainTimes::new(lanes, rows(&[(encoder, &encoder_times)])));
                step.llm = ChainTimes::new(self.ranks, rows(&[(llm, &llm_times)]));
            }
            Placement::Colocated => step.llm = ChainTimes::new(self.ranks, rows(&[(llm, &llm_times)])),
            Placement::Joint => {
                let both = rows(&[(encoder, &encoder_times), (llm, &llm_times)]);
                step.llm = ChainTimes::new(self.ranks, both);
            }
        }
        link_times::add_links(space, candidate, self, &mut step);
        step
    }

    fn llm_times(&self, times: &TpTimes) -> CellTimes {
        let cells = self.tokens.iter().zip(&self.samples_ns);
        CellTimes {
            layer_ns: cells.map(|(tokens, samples_ns)| times.layer.at(*tokens as f64) + samples_ns).collect(),
            outside_ns: self.tokens.iter().map(|tokens| times.outside.at(*tokens as f64)).collect(),
        }
    }

    fn encoder_times(&self, times: &TpTimes) -> CellTimes {
        let outside_ns = self.share_tiles.iter().map(|tiles| times.outside.at(*tiles as f64)).collect();
        CellTimes { layer_ns: self.share_layer_ns.clone(), outside_ns }
    }

    /// Returns the time of all media, forward and backward, on colocated encoder ranks, nanoseconds.
    pub(in crate::planner) fn phase_ns(&self, space: &SearchSpace<'_>, candidate: &Candidate) -> u64 {
        let [shape, _] = space.shapes(&candidate.family);
        let times = &space.encoder.times[shape.times];
        let phase = self.share_tiles.iter().zip(&self.share_layer_ns);
        let ns = phase.map(|(tiles, layer_ns)| shape.all * layer_ns + times.outside.at(*tiles as f64));
        ns.sum::<f64>().ceil() as u64
    }

    /// Returns the memory of each module's fullest GPU.
    pub(in crate::planner) fn requirement(
        &self,
        space: &SearchSpace<'_>,
        candidate: &Candidate,
    ) -> MemoryRequirement {
        self.requirement_of(space, candidate, space.optimizer_ranks(&candidate.family))
    }

    /// Returns the memory of each module's fullest GPU where this many ranks share the optimizer state of
    /// encoder and LLM.
    pub(in crate::planner) fn requirement_of(
        &self,
        space: &SearchSpace<'_>,
        candidate: &Candidate,
        [encoder_ranks, llm_ranks]: [u32; 2],
    ) -> MemoryRequirement {
        let family = &candidate.family;
        let [encoder, llm] = space.shapes(family);
        let shape = space.step_shape(family, candidate.microbatches);
        let of_rank = |units: &[u64], rank: usize| -> Vec<u64> {
            units.iter().skip(rank).step_by(self.ranks).copied().collect()
        };
        if family.placement == Placement::Joint {
            let joint = &space.joint[family.llm];
            let parts: Vec<[StageBytes; 2]> = (0..shape.stages)
                .map(|stage| {
                    let [encoder, llm] = joint.memory(stage);
                    [encoder.shared_by(encoder_ranks), llm.shared_by(llm_ranks)]
                })
                .collect();
            let of_rank = |rank| {
                let units = [of_rank(&self.share_tiles, rank), of_rank(&self.tokens, rank)];
                let of_stage = |(stage, parts): (usize, &[StageBytes; 2])| {
                    held_by_both(parts, [&units[0], &units[1]], shape.in_flight(stage))
                };
                parts.iter().enumerate().map(of_stage).fold(0.0, f64::max)
            };
            let all = (0..self.ranks).map(of_rank).fold(0.0, f64::max);
            return MemoryRequirement { encoder_bytes: all, llm_bytes: all };
        }
        let in_flight = |stage: u32| shape.in_flight(shape.encoder_stages() + stage as usize);
        let of_rank = |rank| fullest(llm, llm_ranks, in_flight, &of_rank(&self.tokens, rank));
        let llm_bytes = (0..self.ranks).map(of_rank).fold(0.0, f64::max);
        if family.placement == Placement::Colocated {
            let largest_share = self.share_tiles.iter().copied().max().unwrap_or(0) as f64;
            let all = llm_bytes + memory::phase_bytes(space, family, largest_share);
            return MemoryRequirement { encoder_bytes: all, llm_bytes: all };
        }
        let in_flight = |stage: u32| shape.in_flight(stage as usize);
        let lanes = self.share_tiles.len() / shape.slots;
        let of_lane = |lane: usize| -> Vec<u64> {
            self.share_tiles.iter().skip(lane).step_by(lanes).copied().collect()
        };
        let of_lane = |lane| fullest(encoder, encoder_ranks, in_flight, &of_lane(lane));
        let encoder_bytes = (0..lanes).map(of_lane).fold(0.0, f64::max);
        MemoryRequirement { encoder_bytes, llm_bytes }
    }
}

/// Returns the memory of the fullest stage over consecutive microbatches, as many as are in flight.
fn fullest(shape: &StageShape, ranks: u32, in_flight: impl Fn(u32) -> usize, units: &[u64]) -> f64 {
    let largest = units.iter().copied().max().unwrap_or(0) as f64;
    let of_stage = |(stage, bytes): &(u32, StageBytes)| {
        let windows = Windows::new(units, in_flight(*stage));
        let held = windows.max().unwrap_or(0);
        bytes.shared_by(ranks).at(held as f64, largest)
    };
    shape.memory.iter().map(of_stage).fold(0.0, f64::max)
}

/// Returns the memory of a stage with layers of both modules, whose units are held together.
fn held_by_both(parts: &[StageBytes; 2], units: [&[u64]; 2], in_flight: usize) -> f64 {
    let kept = |part: usize, units: u64| parts[part].kept_per_unit * units as f64;
    let windows = Windows::new(units[0], in_flight).zip(Windows::new(units[1], in_flight));
    let held = windows.map(|(tiles, tokens)| kept(0, tiles) + kept(1, tokens)).fold(0.0, f64::max);
    // Layers of both modules are not computed at the same time.
    let working = (0..2).map(|part| {
        let largest = units[part].iter().copied().max().unwrap_or(0);
        parts[part].working_per_unit * largest as f64
    });
    let fixed: f64 = parts.iter().map(|part| part.fixed + part.optimizer).sum();
    fixed + held + working.fold(0.0, f64::max)
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

/// Times of the cells of a module: of one layer, and outside the layers.
struct CellTimes {
    layer_ns: Vec<f64>,
    outside_ns: Vec<f64>,
}

/// Computes rows of forward and backward times of stages that hold layers of one or of both modules: one for
/// each number of layers, and one for each stage that ends a module.
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
        // A stage that ends a module is like no other.
        known.push(if ends { Vec::new() } else { layers });
    }
    (stages, rows)
}

/// Adds the times of a module's layers in a stage, forward and backward.
fn add_stage(shape: &StageShape, stage: usize, times: &CellTimes, both: &mut [Vec<f64>; 2]) {
    let layers = f64::from(shape.layers[stage]);
    let (of_layers, of_outside) = (shape.layer_shares, shape.outside_shares);
    let outside = if shape.end() == stage { 1.0 / (of_outside.forward + of_outside.backward) } else { 0.0 };
    let factors = [
        (layers * of_layers.forward, outside * of_outside.forward),
        (layers * of_layers.backward, outside * of_outside.backward),
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
