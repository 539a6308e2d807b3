//! Cuts one module: tensor-parallel degree, pipeline stages, layers per stage, recomputation.

use crate::planner::costs::time_table::TimeTable;
use crate::planner::costs::{ModuleCosts, StageBytes, StagePart};
use crate::planner::workload::Workload;
use dflop_costmodel::memory::split_layers;

/// Time of forward, backward and a second forward pass, over forward and backward.
const RECOMPUTED: f64 = 4.0 / 3.0;

/// Times of a module at one tensor-parallel degree.
#[derive(Debug, Clone)]
pub(in crate::planner) struct TpTimes {
    pub(in crate::planner) tp: u32,
    /// Time of one layer over the units of a microbatch.
    pub(in crate::planner) layer: TimeTable,
    pub(in crate::planner) layer_hull: TimeTable,
    /// Time outside the layers.
    pub(in crate::planner) outside: TimeTable,
    pub(in crate::planner) outside_hull: TimeTable,
    /// Time of an original sample in one layer.
    pub(in crate::planner) sample: TimeTable,
    /// Time of all samples of a batch in one layer, mean over batches.
    pub(in crate::planner) samples_ns: f64,
    /// Times of the longest sample alone, mean over batches: one layer, and outside the layers.
    pub(in crate::planner) longest_ns: [f64; 2],
}

/// Shape of a module: its degree and the cut into stages.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::planner) struct StageShape {
    /// Index of its [`TpTimes`].
    pub(in crate::planner) times: usize,
    pub(in crate::planner) tp: u32,
    pub(in crate::planner) pp: u32,
    pub(in crate::planner) is_recomputed: bool,
    /// Layers of each stage.
    pub(in crate::planner) layers: Vec<u32>,
    /// Time of each stage in layer times: recomputation counts.
    pub(in crate::planner) layer_times: Vec<f64>,
    /// Most layer times of a stage before the last; 0 with a single stage.
    pub(in crate::planner) inner: f64,
    /// Layer times of the last stage.
    pub(in crate::planner) last: f64,
    /// Layer times of all stages.
    pub(in crate::planner) all: f64,
    /// Memory of the stages that may be the fullest.
    pub(in crate::planner) memory: Vec<(u32, StageBytes)>,
}

impl TpTimes {
    /// Tabulates an LLM, whose samples are at least `tokens_min` long.
    pub(in crate::planner) fn of_llm(costs: &dyn ModuleCosts, tp: u32, workload: &Workload) -> Self {
        let mut times = Self::new(costs, tp, workload.batch_tokens_max, workload.tokens_min);
        let count = workload.batches().len() as f64;
        for batch in workload.batches() {
            let of = |tokens: u32| times.sample.at(f64::from(tokens));
            times.samples_ns += batch.iter().map(|item| of(item.tokens)).sum::<f64>() / count;
            let longest = batch.iter().map(|item| item.tokens).max().unwrap_or(0);
            let alone = times.layer.at(f64::from(longest)) + of(longest);
            let outside = times.outside.at(f64::from(longest));
            times.longest_ns = [times.longest_ns[0] + alone / count, times.longest_ns[1] + outside / count];
        }
        times
    }

    /// Tabulates an encoder, whose shares of a microbatch may be empty.
    pub(in crate::planner) fn of_encoder(costs: &dyn ModuleCosts, tp: u32, workload: &Workload) -> Self {
        Self::new(costs, tp, workload.batch_tiles_max, 0)
    }

    fn new(costs: &dyn ModuleCosts, tp: u32, units_max: u64, units_min: u64) -> Self {
        let layer = TimeTable::new(units_max, |units| costs.layer_ns(tp, units));
        let outside = TimeTable::new(units_max, |units| costs.outside_layers_ns(tp, units));
        Self {
            tp,
            layer_hull: layer.hull(units_min),
            outside_hull: outside.hull(units_min),
            layer,
            outside,
            sample: TimeTable::new(units_max, |units| costs.sample_ns(tp, units)),
            samples_ns: 0.0,
            longest_ns: [0.0; 2],
        }
    }
}

impl StageShape {
    /// Cuts a module into `pp` stages; `outside_as_layers` is the time outside the layers, in layers.
    ///
    /// Even: as equal as possible, at most `ceil(layers / pp)`. Uneven: fewer layers in the last stage, to
    /// even out the time outside the layers; `None` if that is the even cut.
    pub(in crate::planner) fn new(
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
        let factor = if is_recomputed { RECOMPUTED } else { 1.0 };
        let layer_times: Vec<f64> = layers.iter().map(|count| f64::from(*count) * factor).collect();
        let last = pp as usize - 1;
        let memory = fullest_stages(&layers).into_iter().map(|stage| {
            let part = stage_part(&layers, stage);
            (stage as u32, costs.memory(tp, part, is_recomputed))
        });
        Some(Self {
            times,
            tp,
            pp,
            is_recomputed,
            inner: layer_times[..last].iter().copied().fold(0.0, f64::max),
            last: layer_times[last],
            all: layer_times.iter().sum(),
            memory: memory.collect(),
            layers,
            layer_times,
        })
    }

    /// Returns the GPUs of one rank.
    pub(in crate::planner) fn gpus(&self) -> u32 {
        self.tp * self.pp
    }

    /// Returns the part of the module that a stage holds.
    pub(in crate::planner) fn part(&self, stage: usize) -> StagePart {
        stage_part(&self.layers, stage)
    }
}

fn stage_part(layers: &[u32], stage: usize) -> StagePart {
    StagePart { layers: layers[stage], is_first: stage == 0, is_last: stage + 1 == layers.len() }
}

/// Lists the first stage of each number of layers, the second, and the last: others hold less.
fn fullest_stages(layers: &[u32]) -> Vec<usize> {
    let is_fullest = |stage: &usize| {
        *stage < 2 || *stage + 1 == layers.len() || !layers[1..*stage].contains(&layers[*stage])
    };
    (0..layers.len()).filter(is_fullest).collect()
}

/// Splits layers with the number in the last stage that makes the slowest stage fastest; ties to more there.
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
