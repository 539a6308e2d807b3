//! Slot assignment of one batch: the times of every pass and the memory that follow from it.

use super::assign::largest_share;
use super::link_times;
use super::step_timeline::StepTimes;
use crate::planner::cluster::Placement;
use crate::planner::costs::time_table::TimeTable;
use crate::planner::memory::{self, MemoryRequirement, in_flight};
use crate::planner::space::shape::{StageShape, TpTimes};
use crate::planner::space::{Candidate, EncoderSplit, SearchSpace};
use crate::planner::workload::ItemSize;

/// Units in each cell and each slot of a step.
#[derive(Debug, Clone, Default)]
pub(in crate::planner) struct SlotAssignment {
    pub(in crate::planner) ranks: usize,
    pub(in crate::planner) slots: usize,
    /// Tokens of each cell, `[slots * ranks]`.
    pub(in crate::planner) tokens: Vec<u64>,
    /// Attention time of each cell's samples in one layer.
    samples_ns: Vec<f64>,
    /// Tiles of the largest share of an encoder rank, `[slots]`.
    pub(in crate::planner) share_tiles: Vec<u64>,
    /// Tiles of each slot, all encoder ranks together.
    slot_tiles: Vec<u64>,
    /// Tiles of the whole batch.
    pub(in crate::planner) batch_tiles: u64,
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
        let (ranks, slots) = (candidate.family.llm_dp as usize, candidate.microbatches as usize);
        let llm = &space.llm.times[space.llm.shapes[candidate.family.llm].times];
        let mut cells = Self {
            ranks,
            slots,
            tokens: vec![0; ranks * slots],
            samples_ns: vec![0.0; ranks * slots],
            share_tiles: Vec::new(),
            slot_tiles: vec![0; slots],
            batch_tiles: 0,
        };
        let mut by_slot = vec![Vec::new(); if split == EncoderSplit::Sample { slots } else { 0 }];
        for (item, size) in batch.iter().enumerate() {
            let cell = cell_of(item) as usize;
            let tiles = u64::from(size.tiles);
            cells.tokens[cell] += u64::from(size.tokens);
            cells.samples_ns[cell] += llm.sample.at(f64::from(size.tokens));
            cells.slot_tiles[cell / ranks] += tiles;
            cells.batch_tiles += tiles;
            // Only a split by sample needs the tiles of every sample.
            if let Some(of_slot) = by_slot.get_mut(cell / ranks) {
                of_slot.push(tiles);
            }
        }
        let encoder_dp = u64::from(candidate.family.encoder_dp);
        cells.share_tiles = match split {
            EncoderSplit::Tile => cells.slot_tiles.iter().map(|tiles| tiles.div_ceil(encoder_dp)).collect(),
            EncoderSplit::Sample => {
                by_slot.into_iter().map(|tiles| largest_share(tiles, encoder_dp as usize)).collect()
            }
        };
        cells
    }

    /// Returns the times of all passes.
    pub(in crate::planner) fn times(&self, space: &SearchSpace<'_>, candidate: &Candidate) -> StepTimes {
        let family = &candidate.family;
        let llm = &space.llm.shapes[family.llm];
        let llm_times = &space.llm.times[llm.times];
        let (layer_ns, outside_ns) = (
            self.tokens
                .iter()
                .zip(&self.samples_ns)
                .map(|(tokens, samples_ns)| llm_times.layer.at(*tokens as f64) + samples_ns),
            self.tokens.iter().map(|tokens| llm_times.outside.at(*tokens as f64)),
        );
        let (layer_ns, outside_ns): (Vec<f64>, Vec<f64>) = (layer_ns.collect(), outside_ns.collect());
        let (llm_stages, llm_ns) = rows(llm, &layer_ns, &outside_ns);
        let shape = candidate.step_shape(space);
        let mut step = StepTimes { llm_stages, llm_ns, ..StepTimes::new(shape, self.ranks) };
        if family.placement == Placement::Disaggregated {
            let encoder = &space.encoder.shapes[family.encoder];
            let times = &space.encoder.times[encoder.times];
            let of = |table: fn(&TpTimes) -> &TimeTable| -> Vec<f64> {
                self.share_tiles.iter().map(|tiles| table(times).at(*tiles as f64)).collect()
            };
            let (layer_ns, outside_ns) = (of(|times| &times.layer), of(|times| &times.outside));
            (step.encoder_stages, step.encoder_ns) = rows(encoder, &layer_ns, &outside_ns);
        }
        link_times::add_links(space, candidate, &self.tokens, &self.share_tiles, &mut step);
        step
    }

    /// Returns the time of all media, forward and backward, on colocated encoder ranks, nanoseconds.
    pub(in crate::planner) fn phase_ns(&self, space: &SearchSpace<'_>, candidate: &Candidate) -> u64 {
        let shape = &space.encoder.shapes[candidate.family.encoder];
        let times = &space.encoder.times[shape.times];
        let share = self.batch_tiles.div_ceil(u64::from(candidate.family.encoder_dp)) as f64;
        (shape.all * times.layer.at(share) + times.outside.at(share)).ceil() as u64
    }

    /// Returns the memory of each module's fullest GPU.
    pub(in crate::planner) fn requirement(
        &self,
        space: &SearchSpace<'_>,
        candidate: &Candidate,
    ) -> MemoryRequirement {
        let family = &candidate.family;
        let (encoder, llm) = (&space.encoder.shapes[family.encoder], &space.llm.shapes[family.llm]);
        let mut llm_bytes = 0.0_f64;
        for rank in 0..self.ranks {
            let tokens: Vec<u64> =
                (0..self.slots).map(|slot| self.tokens[slot * self.ranks + rank]).collect();
            llm_bytes = llm_bytes.max(fullest(llm, llm.pp, &tokens));
        }
        match family.placement {
            Placement::Disaggregated => MemoryRequirement {
                encoder_bytes: fullest(encoder, encoder.pp + llm.pp, &self.share_tiles),
                llm_bytes,
            },
            Placement::Colocated => {
                let all = llm_bytes + memory::phase_bytes(space, family, self.batch_tiles as f64);
                MemoryRequirement { encoder_bytes: all, llm_bytes: all }
            }
        }
    }
}

/// Returns the memory of the fullest stage over consecutive microbatches, as many as are in flight.
fn fullest(shape: &StageShape, stages_to_end: u32, units: &[u64]) -> f64 {
    let largest = units.iter().copied().max().unwrap_or(0) as f64;
    let mut most = 0.0_f64;
    for (stage, bytes) in &shape.memory {
        // Neighbors are in flight together, so a window slides over the microbatches.
        let window = in_flight(stages_to_end, *stage, units.len() as u32) as usize;
        let mut sum: u64 = units[..window].iter().sum();
        let mut held = sum;
        for at in window..units.len() {
            sum = sum + units[at] - units[at - window];
            held = held.max(sum);
        }
        most = most.max(bytes.at(held as f64, largest));
    }
    most
}

/// Computes rows of forward and backward times: one for each number of layers, and one for the last stage.
fn rows(shape: &StageShape, layer_ns: &[f64], outside_ns: &[f64]) -> (Vec<usize>, Vec<[Vec<u64>; 2]>) {
    let (mut stages, mut rows, mut known): (Vec<usize>, Vec<_>, Vec<u32>) = Default::default();
    let last = shape.layers.len() - 1;
    let recomputed = if shape.is_recomputed { 1.0 / 3.0 } else { 0.0 };
    for (stage, &layers) in shape.layers.iter().enumerate() {
        if let Some(row) = known.iter().position(|of| *of == layers).filter(|_| stage < last) {
            stages.push(row);
            continue;
        }
        let count = f64::from(layers);
        let outside_factor = if stage == last { 1.0 } else { 0.0 };
        let (mut forward, mut backward) =
            (Vec::with_capacity(layer_ns.len()), Vec::with_capacity(layer_ns.len()));
        for (layer_ns, outside_ns) in layer_ns.iter().zip(outside_ns) {
            let (own, outside) = (count * layer_ns, outside_factor * outside_ns);
            let third = (own + outside) / 3.0;
            forward.push(whole_ns(third));
            // Recomputation repeats the forward pass of the layers, without the work outside them.
            backward.push(whole_ns(2.0 * third + recomputed * own));
        }
        stages.push(rows.len());
        rows.push([forward, backward]);
        known.push(layers);
    }
    (stages, rows)
}

/// Rounds a time up.
fn whole_ns(ns: f64) -> u64 {
    let whole = ns as u64;
    whole + u64::from((whole as f64) < ns)
}
