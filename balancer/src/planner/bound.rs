//! Lower bound and estimate of a range of plans, from mean times alone.
//!
//! For a family with `m` microbatches of `r` LLM ranks, a batch of `S` tokens is cut into `m r` parts. With
//! `f` the convex hull of a layer's time, all parts together take at least `m r f(S / (m r))` (Jensen), so
//! the slowest rank's stage is busy for at least a rank's share of that; some microbatch is at least average,
//! and passes all stages one after another; so does the longest sample. No makespan is below any of these,
//! for any partition, order and links. The first grows with `m`, the second falls, so a whole range of `m`
//! has one bound.
//!
//! The *estimate* adds filling and draining the pipeline with such microbatches; it sorts plans and is not a
//! bound.

use super::cluster::Placement;
use super::space::shape::{StageShape, TpTimes};
use super::space::{Candidate, Family, SearchSpace};

/// Relative margin for the rounding of the bound's own arithmetic.
const ROUNDING: f64 = 1e-9;

/// Bound and estimate of a range of plans.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LowerEstimate {
    /// Lower bound on the step time of every plan of the range, nanoseconds.
    pub(super) bound_ns: f64,
    /// Estimated step time of the best plan of the range, nanoseconds.
    pub(super) estimate_ns: f64,
}

/// Part of an estimate that depends on the LLM alone.
#[derive(Debug, Clone, Copy)]
pub(super) struct LlmEstimate {
    own: ModuleEstimate,
    /// Time of the longest sample through all stages, mean over batches.
    longest_ns: f64,
}

/// Busy time of the slowest stage, its time for one microbatch, and the time of one microbatch through all
/// stages.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "units end the names")]
struct ModuleEstimate {
    busy_ns: f64,
    stage_ns: f64,
    path_ns: f64,
}

/// Estimates the plans of a family with `few` to `many` microbatches.
pub(super) fn estimate(space: &SearchSpace<'_>, family: &Family, few: u32, many: u32) -> LowerEstimate {
    let llm = llm_estimate(space, family.llm, family.llm_dp, few, many);
    estimate_with(space, &llm, family, few, many)
}

/// Estimates the plans of a family whose LLM is estimated already.
pub(super) fn estimate_with(
    space: &SearchSpace<'_>,
    llm: &LlmEstimate,
    family: &Family,
    few: u32,
    many: u32,
) -> LowerEstimate {
    let LlmEstimate { own, longest_ns } = llm;
    let typical_path_ns = own.path_ns + 0.5 * (longest_ns - own.path_ns).max(0.0);
    match family.placement {
        Placement::Disaggregated => {
            let encoder = encoder_estimate(space, family, few, many);
            let path_ns = (own.path_ns + encoder.path_ns).max(*longest_ns);
            let busy_ns = own.busy_ns.max(encoder.busy_ns);
            let others_ns = typical_path_ns + encoder.path_ns - own.stage_ns.max(encoder.stage_ns);
            LowerEstimate::new(busy_ns.max(path_ns), busy_ns + others_ns)
        }
        Placement::Colocated => {
            let phase_ns = encoder_phase_ns(space, family);
            let bound_ns = phase_ns + own.busy_ns.max(own.path_ns).max(*longest_ns);
            LowerEstimate::new(bound_ns, phase_ns + own.busy_ns + typical_path_ns - own.stage_ns)
        }
    }
}

/// Estimates the LLM alone, for any encoder.
pub(super) fn llm_estimate(
    space: &SearchSpace<'_>,
    llm: usize,
    ranks: u32,
    few: u32,
    many: u32,
) -> LlmEstimate {
    let shape = &space.llm.shapes[llm];
    let times = &space.llm.times[shape.times];
    let counts = [few, many].map(f64::from);
    let own = module_estimate(shape, times, counts, f64::from(ranks), space.workload.batch_tokens);
    let [layer_ns, outside_ns] = times.longest_ns;
    LlmEstimate { own, longest_ns: shape.all * layer_ns + outside_ns }
}

/// Returns a lower bound of one plan, nanoseconds.
pub(super) fn lower_bound_ns(space: &SearchSpace<'_>, candidate: &Candidate) -> f64 {
    estimate(space, &candidate.family, candidate.microbatches, candidate.microbatches).bound_ns
}

fn encoder_estimate(space: &SearchSpace<'_>, family: &Family, few: u32, many: u32) -> ModuleEstimate {
    let shape = &space.encoder.shapes[family.encoder];
    let times = &space.encoder.times[shape.times];
    let ranks = f64::from(family.encoder_dp);
    module_estimate(shape, times, [few, many].map(f64::from), ranks, space.workload.batch_tiles)
}

/// Returns the least time of all media of a batch, forward and backward, on the encoder's ranks.
fn encoder_phase_ns(space: &SearchSpace<'_>, family: &Family) -> f64 {
    let shape = &space.encoder.shapes[family.encoder];
    let times = &space.encoder.times[shape.times];
    let share = space.workload.batch_tiles / f64::from(family.encoder_dp);
    shape.all * times.layer_hull.at(share) + times.outside_hull.at(share)
}

impl LowerEstimate {
    fn new(bound_ns: f64, estimate_ns: f64) -> Self {
        Self { bound_ns: bound_ns * (1.0 - ROUNDING), estimate_ns: estimate_ns.max(bound_ns) }
    }
}

impl LlmEstimate {
    /// Returns a lower bound on the step time of any plan with this LLM layout.
    pub(super) fn bound_ns(&self) -> f64 {
        self.own.busy_ns.max(self.own.path_ns).max(self.longest_ns) * (1.0 - ROUNDING)
    }

    /// Returns a lower bound on the estimate of any plan with this LLM layout.
    pub(super) fn least_ns(&self) -> f64 {
        // An encoder's path is at least as long as its slowest stage, so it takes nothing off.
        let ModuleEstimate { busy_ns, stage_ns, path_ns } = self.own;
        (busy_ns + path_ns - stage_ns).max(self.longest_ns)
    }
}

fn module_estimate(
    shape: &StageShape,
    times: &TpTimes,
    [few, many]: [f64; 2],
    ranks: f64,
    units: f64,
) -> ModuleEstimate {
    let part = units / (few * ranks);
    let layer_ns = times.layer_hull.at(part) + times.samples_ns / (few * ranks);
    let outside_ns = times.outside_hull.at(part);
    let busiest_ns = (shape.inner * layer_ns).max(shape.last * layer_ns + outside_ns);
    // Busy time is least with few microbatches, the path of one with many: each takes its best case.
    let (small_layer_ns, small_outside_ns) = if many > few {
        let part = units / (many * ranks);
        (times.layer_hull.at(part) + times.samples_ns / (many * ranks), times.outside_hull.at(part))
    } else {
        (layer_ns, outside_ns)
    };
    ModuleEstimate {
        busy_ns: few * busiest_ns,
        stage_ns: (shape.inner * small_layer_ns).max(shape.last * small_layer_ns + small_outside_ns),
        path_ns: shape.all * small_layer_ns + small_outside_ns,
    }
}
