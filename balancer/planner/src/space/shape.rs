//! Cuts a module: tensor-parallel degree, pipeline stages, layers per stage, recomputation.

use crate::costs::{ModuleCosts, StageBytes, StagePart, TimeTable};
use crate::workload::{ItemSize, Workload};
use dflop_costmodel::MediaUnits;
use dflop_costmodel::memory::split_layers;
use std::borrow::Cow;

/// Forward and backward time as shares of the total time with everything trained: a forward pass is a third.
/// A weight gradient takes as long as the forward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct PassShares {
    pub(crate) forward: f64,
    pub(crate) backward: f64,
    /// Part of the backward time that computes weight gradients.
    pub(crate) weights: f64,
}

impl PassShares {
    /// Takes the time of a backward pass over that of the forward pass, for a number of layers, which run
    /// forward again if they are recomputed and anything needs a gradient.
    pub(crate) fn new(backward_ratio: f64, layers: u32, is_recomputed: bool) -> Self {
        let layers = f64::from(layers);
        let again = if is_recomputed && backward_ratio > 0.0 { layers } else { 0.0 };
        Self {
            forward: layers / 3.0,
            backward: (layers * backward_ratio + again) / 3.0,
            weights: layers * (backward_ratio - 1.0).clamp(0.0, 1.0) / 3.0,
        }
    }

    pub(crate) fn sum(self) -> f64 {
        self.forward + self.backward
    }
}

/// Module times at a tensor-parallel degree.
#[derive(Debug, Clone)]
pub(crate) struct TpTimes {
    pub(crate) tp: u32,
    /// Time per layer over a microbatch's units.
    pub(crate) layer: TimeTable,
    pub(crate) layer_hull: TimeTable,
    /// Time outside the layers, for trained parts.
    pub(crate) outside: TimeTable,
    pub(crate) outside_hull: TimeTable,
    /// Time per layer for an original sample.
    pub(crate) sample: TimeTable,
    /// The same by batch and sample; empty for an encoder.
    batch_samples_ns: Vec<Vec<f64>>,
    /// Time per layer and query-key pair in an encoder's media; 0 for tiles and for an LLM.
    pub(crate) pair_ns: f64,
    /// Attention time per layer over all samples, or all media, in a batch, mean over batches.
    pub(crate) samples_ns: f64,
    /// Times for the longest sample without other samples, mean over batches: per layer, and outside the
    /// layers.
    pub(crate) longest_ns: [f64; 2],
    /// Half widths of the 90 % interval around a layer's time, as a fraction of that time, by powers of two
    /// in units.
    half_widths: Vec<f64>,
}

/// Module shape: degree and stage layers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StageShape {
    /// Index into the [`TpTimes`].
    pub(crate) times: usize,
    pub(crate) tp: u32,
    /// Number of ranks in a pipeline.
    pub(crate) pp: u32,
    /// Number of stages per rank: rank `r` holds the stages `r`, `r + pp`, …
    pub(crate) chunks: usize,
    pub(crate) is_recomputed: bool,
    /// Passes of each stage in times of one layer.
    pub(crate) stage_shares: Vec<PassShares>,
    /// Pass shares in the time outside the layers.
    pub(crate) outside_shares: PassShares,
    /// Layers per stage.
    pub(crate) layers: Vec<u32>,
    /// Maximum layer times on a rank before the last; 0 with a single rank.
    pub(crate) inner: f64,
    /// Layer times on the last rank.
    pub(crate) last: f64,
    /// Layer times in all stages.
    pub(crate) all: f64,
    /// Memory for the stages that may be the fullest.
    pub(crate) memory: Vec<(u32, StageBytes)>,
}

impl TpTimes {
    /// Tabulates an LLM, whose samples have at least `tokens_min` tokens.
    pub(crate) fn for_llm(costs: &dyn ModuleCosts, tp: u32, workload: &Workload) -> Self {
        let sample = workload.batch_tokens / f64::from(workload.global_batch());
        let mut times = Self::new(costs, tp, (workload.tokens_min, workload.batch_tokens_max), sample);
        let count = workload.batches().len() as f64;
        for batch in workload.batches() {
            let of = |tokens: u32| times.sample.at(f64::from(tokens));
            let samples_ns: Vec<f64> = batch.iter().map(|item| of(item.tokens)).collect();
            times.samples_ns += samples_ns.iter().sum::<f64>() / count;
            let longest = batch.iter().map(|item| item.tokens).max().unwrap_or(0);
            let alone = times.layer.at(f64::from(longest)) + of(longest);
            let outside = times.outside.at(f64::from(longest));
            times.longest_ns = [times.longest_ns[0] + alone / count, times.longest_ns[1] + outside / count];
            times.batch_samples_ns.push(samples_ns);
        }
        times
    }

    /// Tabulates an encoder in the model, whose microbatch shares may be empty.
    pub(crate) fn for_encoder(costs: &dyn ModuleCosts, tp: u32, workload: &Workload, encoder: usize) -> Self {
        let media = workload.media(encoder);
        let mut times = Self::new(costs, tp, (0, media.batch_units_max), 1.0);
        if media.is_native() {
            let attention_ns = |item: &ItemSize| {
                let MediaUnits { units, pairs, .. } = item.media(encoder);
                costs.media_attention_ns(tp, u64::from(units), pairs)
            };
            let all_ns: f64 = workload.batches().iter().flatten().map(attention_ns).sum();
            times.samples_ns = all_ns / workload.batches().len() as f64;
            times.pair_ns = times.samples_ns / media.batch_pairs;
        }
        times
    }

    fn new(costs: &dyn ModuleCosts, tp: u32, (units_min, units_max): (u64, u64), sample: f64) -> Self {
        let half_width = |power: u32| {
            let units = f64::from(power).exp2();
            costs.relative_half_width(tp, units, [(units / sample).max(1.0), sample])
        };
        let layer = TimeTable::new(units_max, |units| costs.layer_ns(tp, units));
        let shares = PassShares::new(costs.backward_ratios()[1], 1, false).sum();
        let outside = TimeTable::new(units_max, |units| shares * costs.outside_layers_ns(tp, units));
        Self {
            tp,
            layer_hull: layer.hull(units_min),
            outside_hull: outside.hull(units_min),
            layer,
            outside,
            sample: TimeTable::new(units_max, |units| costs.sample_ns(tp, units)),
            batch_samples_ns: Vec::new(),
            pair_ns: 0.0,
            samples_ns: 0.0,
            longest_ns: [0.0; 2],
            half_widths: (0..=units_max.max(1).ilog2()).map(half_width).collect(),
        }
    }

    /// Returns the attention time that each sample in a batch adds to an LLM layer, nanoseconds.
    pub(crate) fn samples_ns(&self, workload: &Workload, batch: &[ItemSize]) -> Cow<'_, [f64]> {
        match workload.position(batch) {
            Some(at) => Cow::Borrowed(&self.batch_samples_ns[at]),
            None => Cow::Owned(batch.iter().map(|item| self.sample.at(f64::from(item.tokens))).collect()),
        }
    }

    /// Returns the half width of the 90 % interval around a layer's time for a microbatch, as a fraction of
    /// that time.
    pub(crate) fn half_width(&self, units: f64) -> f64 {
        let power = (units.max(1.0) as u64).ilog2() as usize;
        self.half_widths.get(power).or(self.half_widths.last()).copied().unwrap_or(0.0)
    }
}

impl StageShape {
    /// Cuts a module into `pp` stages; `outside_as_layers` is the time outside the layers, in layers.
    ///
    /// Even: as equal as possible, at most `ceil(layers / pp)`. Uneven: fewer layers in the last stage, to
    /// even out the time outside the layers; `None` if that is the even cut.
    pub(crate) fn new(
        costs: &dyn ModuleCosts,
        (times, tp, pp): (usize, u32, u32),
        is_recomputed: bool,
        uneven: Option<f64>,
    ) -> Option<Self> {
        let even = split_layers(costs.layers(), pp);
        let layers = match uneven {
            None => even,
            Some(outside_as_layers) => {
                Some(uneven_layers(costs.layers(), pp, outside_as_layers)).filter(|layers| *layers != even)?
            }
        };
        Some(Self::separate(costs, (times, tp), is_recomputed, layers))
    }

    /// Builds a shape for stages on separate GPUs, each with at least one layer.
    pub(crate) fn separate(
        costs: &dyn ModuleCosts,
        (times, tp): (usize, u32),
        is_recomputed: bool,
        layers: Vec<u32>,
    ) -> Self {
        let stages = fullest_stages(&layers);
        Self::from_layers(costs, (times, tp), is_recomputed, layers, &stages)
    }

    /// Builds a shape for ranks that hold several stages each, whose number divides the stages.
    pub(crate) fn in_chunks(
        costs: &dyn ModuleCosts,
        times: (usize, u32),
        is_recomputed: bool,
        (layers, chunks): (Vec<u32>, usize),
    ) -> Self {
        if chunks < 2 {
            return Self::separate(costs, times, is_recomputed, layers);
        }
        let stages: Vec<usize> = (0..layers.len()).collect();
        let shape = Self::from_layers(costs, times, is_recomputed, layers, &stages);
        let ranks = stages.len() / chunks;
        let own = |rank: usize| -> f64 {
            stages[rank..].iter().step_by(ranks).map(|stage| shape.layer_times(*stage)).sum()
        };
        let (inner, last) = ((0..ranks - 1).map(own).fold(0.0, f64::max), own(ranks - 1));
        Self { pp: ranks as u32, chunks, inner, last, ..shape }
    }

    /// Builds a shape from layers per stage, zero allowed; `stages` lists the stages that may be the fullest.
    pub(crate) fn from_layers(
        costs: &dyn ModuleCosts,
        (times, tp): (usize, u32),
        is_recomputed: bool,
        layers: Vec<u32>,
        stages: &[usize],
    ) -> Self {
        let [of_layers, of_outside] = costs.backward_ratios();
        let shares = |count: &u32| PassShares::new(of_layers, *count, is_recomputed);
        let stage_shares: Vec<PassShares> = layers.iter().map(shares).collect();
        let layer_times: Vec<f64> = stage_shares.iter().map(|shares| shares.sum()).collect();
        let last = layers.len() - 1;
        let memory = stages.iter().map(|&stage| {
            let part = stage_part(&layers, stage);
            if part.layers == 0 {
                return (stage as u32, StageBytes::default());
            }
            (stage as u32, costs.memory(tp, part, is_recomputed))
        });
        Self {
            times,
            tp,
            pp: layers.len() as u32,
            chunks: 1,
            is_recomputed,
            outside_shares: PassShares::new(of_outside, 1, false),
            inner: layer_times[..last].iter().copied().fold(0.0, f64::max),
            last: layer_times[last],
            all: layer_times.iter().sum(),
            memory: memory.collect(),
            stage_shares,
            layers,
        }
    }

    /// Returns a stage's time in layer times, recomputation included.
    pub(crate) fn layer_times(&self, stage: usize) -> f64 {
        self.stage_shares[stage].sum()
    }

    /// Returns the last stage with layers, which also computes what is outside the layers.
    pub(crate) fn end(&self) -> usize {
        self.layers.iter().rposition(|layers| *layers > 0).unwrap_or(0)
    }

    /// Whether the module computes any gradient.
    pub(crate) fn has_backward(&self) -> bool {
        self.outside_shares.backward > 0.0 || self.stage_shares.iter().any(|shares| shares.backward > 0.0)
    }

    /// Returns the number of GPUs per rank.
    pub(crate) fn gpus(&self) -> u32 {
        self.tp * self.pp
    }

    /// Returns the module part that a stage holds.
    pub(crate) fn part(&self, stage: usize) -> StagePart {
        stage_part(&self.layers, stage)
    }
}

fn stage_part(layers: &[u32], stage: usize) -> StagePart {
    let is_empty = |layers: &[u32]| layers.iter().all(|count| *count == 0);
    StagePart {
        layers: layers[stage],
        is_first: is_empty(&layers[..stage]),
        is_last: is_empty(&layers[stage + 1..]),
    }
}

/// Lists the first stage with each number of layers, the second stage, and the last stage: other stages hold
/// less.
fn fullest_stages(layers: &[u32]) -> Vec<usize> {
    let is_fullest = |stage: &usize| {
        *stage < 2 || *stage + 1 == layers.len() || !layers[1..*stage].contains(&layers[*stage])
    };
    (0..layers.len()).filter(is_fullest).collect()
}

/// Splits layers such that the slowest stage is fastest, by varying the last stage's number; ties go to more
/// layers in the last stage.
fn uneven_layers(layers: u32, pp: u32, outside_as_layers: f64) -> Vec<u32> {
    if pp < 2 {
        return vec![layers];
    }
    let slowest = |last: u32| {
        let inner = (layers - last).div_ceil(pp - 1);
        f64::from(inner).max(f64::from(last) + outside_as_layers)
    };
    // The last stage gets at most its even share: work outside the layers only adds to it.
    let most = layers / pp;
    let mut best = most;
    for last in (1..most).rev() {
        if slowest(last) < slowest(best) {
            best = last;
        }
    }
    let mut split = split_layers(layers - best, pp - 1);
    split.push(best);
    split
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_stage_makes_room_for_the_head() {
        assert_eq!(uneven_layers(28, 4, 2.0), [8, 7, 7, 6]);
        assert_eq!(uneven_layers(28, 4, 0.0), [7, 7, 7, 7]);
        assert_eq!(uneven_layers(8, 8, 3.0), [1; 8]);
        assert_eq!(uneven_layers(28, 1, 3.0), [28]);
    }

    #[test]
    fn fuller_stages_are_looked_at() {
        assert_eq!(fullest_stages(&[7, 7, 7, 6]), [0, 1, 3]);
        assert_eq!(fullest_stages(&[8, 7, 7, 7, 6]), [0, 1, 4]);
        assert_eq!(fullest_stages(&[9, 9, 8, 8, 2]), [0, 1, 2, 4]);
        assert_eq!(fullest_stages(&[9]), [0]);
    }
}
