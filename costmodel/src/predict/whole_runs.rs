//! Collects whole-module runs, forward and backward.

use std::collections::BTreeMap;

use super::layer_counts::{LayerCountTime, Method, at_layers};
use crate::profile::{Part, Phase, Point};

/// Whole-module run over a microbatch with equal sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct WholeRun {
    /// Number of sequences, and tokens per sequence.
    pub(super) shape: [f64; 2],
    /// Forward and backward in nanoseconds.
    pub(super) passes_ns: [f64; 2],
}

/// Returns the runs for a module with this many layers, by shape; `points` belong to this module.
///
/// Layers are extrapolated if they were not measured; if some shapes have two layer counts, shapes with only
/// one are left out, because scaled in proportion they would not be on the same curve.
pub(super) fn whole_runs(points: &[Point], tp: u32, layers: u32) -> Vec<WholeRun> {
    let mut shapes: BTreeMap<[u32; 2], [Vec<&Point>; 2]> = BTreeMap::new();
    for point in points {
        let setting = point.setting;
        let pass = match setting.phase {
            Phase::Forward => 0,
            Phase::Backward => 1,
            Phase::Optimizer => continue,
        };
        if setting.part == Part::Whole && setting.tp == tp {
            shapes.entry(point.shape()).or_default()[pass].push(point);
        }
    }
    shapes.retain(|_, passes| passes.iter().all(|pass| !pass.is_empty()));
    let times = |passes: &[Vec<&Point>; 2]| [0, 1].map(|pass: usize| at_layers(&passes[pass], layers));
    let mut runs: Vec<([u32; 2], [LayerCountTime; 2])> =
        shapes.iter().map(|(shape, passes)| (*shape, times(passes))).collect();
    let is_exact = |(_, times): &([u32; 2], [LayerCountTime; 2])| {
        times.iter().all(|time| time.method < Method::Proportion)
    };
    if runs.iter().any(is_exact) {
        runs.retain(is_exact);
    }
    let run = |(shape, times): ([u32; 2], [LayerCountTime; 2])| WholeRun {
        shape: shape.map(f64::from),
        passes_ns: times.map(|time| time.ns),
    };
    runs.into_iter().map(run).collect()
}
