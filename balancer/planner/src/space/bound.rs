//! Lower bound and estimate for a range of plans, computed only from mean times.
//!
//! For a family with `m` microbatches on each of `r` LLM ranks, a batch of `S` tokens is partitioned into
//! `m r` parts. With `f` the convex hull of a layer's time, all parts together take at least
//! `m r f(S / (m r))` (Jensen), so the slowest rank's stage is busy for at least a rank's share of that; some
//! microbatch is at least average, and passes all stages sequentially; so does the longest sample. No
//! makespan is below any of these, for any partition, order and links. If backward passes may be split, only
//! the forward passes and input gradients of a microbatch are sequential. Sample and media attention is the
//! same in any partition, and some rank has at least its share. A whole range of `m` has a single bound: the
//! minimum of the first bound, where a part has the least time per unit, and the second bound at the maximum
//! number of microbatches.
//!
//! The *estimate* adds the time to fill and drain the pipeline with such microbatches; it sorts plans and is
//! not a bound.

use super::shape::{StageShape, TpTimes};
use super::{Candidate, EncoderPart, Family, SearchSpace};
use crate::cluster::Placement;
use crate::costs::TimeTable;

/// Relative margin for rounding in the bound's own arithmetic.
const ROUNDING: f64 = 1e-9;

/// Bound and estimate for a range of plans.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LowerEstimate {
    /// Lower bound on the step time for every plan in the range, nanoseconds.
    pub(crate) bound_ns: f64,
    /// Estimated step time for the best plan in the range, nanoseconds.
    pub(crate) estimate_ns: f64,
}

/// Part of an estimate that depends only on the LLM.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LlmEstimate {
    own: ModuleEstimate,
    /// Time for the longest sample to pass all stages, mean over batches.
    longest_ns: f64,
    /// Share of the times to pass all stages that is sequential under every schedule.
    path_share: f64,
}

/// Slowest stage's busy time, its time per microbatch, and the time for a microbatch to pass all stages.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "units end the names")]
struct ModuleEstimate {
    busy_ns: f64,
    stage_ns: f64,
    path_ns: f64,
}

/// Estimates a family's plans with `few` to `many` microbatches.
pub(crate) fn estimate(space: &SearchSpace<'_>, family: &Family, few: u32, many: u32) -> LowerEstimate {
    if family.placement == Placement::Joint {
        return joint_estimate(space, family, [few, many].map(f64::from));
    }
    let llm = llm_estimate(space, family.llm, family.llm_dp, few, many);
    estimate_with(space, &llm, family, few, many)
}

/// Returns the least estimate and the least bound of a family's plans without encoder times for the size of
/// microbatches: far cheaper than [`estimate_with`], and below it.
///
/// - `llm`: for any number of microbatches
pub(crate) fn least_with(space: &SearchSpace<'_>, llm: &LlmEstimate, family: &Family) -> LowerEstimate {
    let LlmEstimate { own, longest_ns, path_share } = llm;
    let mut busy_ns = own.busy_ns;
    if family.placement == Placement::Disaggregated {
        for (encoder, part) in family.encoders.iter().enumerate() {
            let (shape, times) = (space.encoder_shape(family, encoder), space.encoder_times(family, encoder));
            let ranks = f64::from(part.dp);
            let units = space.workload.media(encoder).batch_units / ranks;
            let layer_ns = times.layer_hull.least(units) + times.samples_ns / ranks;
            busy_ns = busy_ns.max(shape.inner.max(shape.last) * layer_ns);
        }
    }
    let typical_path_ns = own.path_ns + 0.5 * (longest_ns - own.path_ns).max(0.0);
    let bound_ns = busy_ns.max(path_share * own.path_ns.max(*longest_ns)) * (1.0 - ROUNDING);
    LowerEstimate::new(bound_ns, (busy_ns + typical_path_ns - own.stage_ns) * (1.0 - ROUNDING))
}

/// Estimates a family's plans from an existing LLM estimate.
pub(crate) fn estimate_with(
    space: &SearchSpace<'_>,
    llm: &LlmEstimate,
    family: &Family,
    few: u32,
    many: u32,
) -> LowerEstimate {
    let LlmEstimate { own, longest_ns, path_share } = llm;
    let typical_path_ns = own.path_ns + 0.5 * (longest_ns - own.path_ns).max(0.0);
    match family.placement {
        Placement::Disaggregated => {
            let encoder = encoders_estimate(space, family, few, many);
            let path_ns = (own.path_ns + encoder.path_ns).max(*longest_ns);
            let busy_ns = own.busy_ns.max(encoder.busy_ns);
            let others_ns = typical_path_ns + encoder.path_ns - own.stage_ns.max(encoder.stage_ns);
            LowerEstimate::new(busy_ns.max(path_share * path_ns), busy_ns + others_ns)
        }
        Placement::Joint => joint_estimate(space, family, [few, many].map(f64::from)),
        Placement::Colocated => {
            let phase_ns = phase_ns(space, family);
            let bound_ns = phase_ns + own.busy_ns.max(path_share * own.path_ns.max(*longest_ns));
            LowerEstimate::new(bound_ns, phase_ns + own.busy_ns + typical_path_ns - own.stage_ns)
        }
    }
}

/// Estimates the LLM without an encoder.
pub(crate) fn llm_estimate(
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
    let path_share = space.options.path_share();
    LlmEstimate { own, longest_ns: shape.all * layer_ns + outside_ns, path_share }
}

/// Returns a lower bound for a plan, nanoseconds.
pub(crate) fn lower_bound_ns(space: &SearchSpace<'_>, candidate: &Candidate) -> f64 {
    estimate(space, &candidate.family, candidate.microbatches, candidate.microbatches).bound_ns
}

/// Estimates concurrent encoders: the slowest encoder, and the longest path.
fn encoders_estimate(space: &SearchSpace<'_>, family: &Family, few: u32, many: u32) -> ModuleEstimate {
    let counts = [few, many].map(f64::from);
    let of = |(encoder, part)| encoder_estimate(space, encoder, part, counts);
    let each = family.encoders.iter().copied().enumerate().map(of);
    each.fold(ModuleEstimate { busy_ns: 0.0, stage_ns: 0.0, path_ns: 0.0 }, |all, own| ModuleEstimate {
        busy_ns: all.busy_ns.max(own.busy_ns),
        stage_ns: all.stage_ns.max(own.stage_ns),
        path_ns: all.path_ns.max(own.path_ns),
    })
}

fn encoder_estimate(
    space: &SearchSpace<'_>,
    encoder: usize,
    part: EncoderPart,
    counts: [f64; 2],
) -> ModuleEstimate {
    let module = &space.encoders[encoder];
    let shape = &module.shapes[part.shape as usize];
    let units = space.workload.media(encoder).batch_units;
    module_estimate(shape, &module.times[shape.times], counts, f64::from(part.dp), units)
}

/// Returns the time of an encoder's slowest stage for the mean microbatch.
pub(crate) fn encoder_slot_ns(
    space: &SearchSpace<'_>,
    encoder: usize,
    part: EncoderPart,
    microbatches: u32,
) -> f64 {
    encoder_estimate(space, encoder, part, [f64::from(microbatches); 2]).stage_ns
}

/// Returns the minimum time for all media in a batch, forward and backward, on the colocated encoder ranks.
fn phase_ns(space: &SearchSpace<'_>, family: &Family) -> f64 {
    let of = |(encoder, shape): (usize, &StageShape)| {
        let times = &space.encoders[encoder].times[shape.times];
        let ranks = f64::from(family.encoders[encoder].dp);
        let share = space.workload.media(encoder).batch_units / ranks;
        let layer_ns = times.layer_hull.at(share) + times.samples_ns / ranks;
        shape.all * layer_ns + times.outside_hull.at(share)
    };
    space.encoder_shapes(family).enumerate().map(of).sum()
}

/// Module times for one layer and outside the layers: for a rank's total work, and for a microbatch.
struct JointTimes<'a> {
    shape: &'a StageShape,
    busy_ns: [f64; 2],
    one_ns: [f64; 2],
}

impl<'a> JointTimes<'a> {
    /// Creates the times from a module's units and ranks in steps with `few` to `many` microbatches.
    fn new(shape: &'a StageShape, times: &TpTimes, units: f64, ranks: f64, [few, many]: [f64; 2]) -> Self {
        let units = units / ranks;
        let of_rank = |hull: &TimeTable| hull.least_of_parts(units, units / many, units / few);
        Self {
            shape,
            busy_ns: [of_rank(&times.layer_hull) + times.samples_ns / ranks, of_rank(&times.outside_hull)],
            one_ns: [
                times.layer_hull.at(units / many) + times.samples_ns / (ranks * many),
                times.outside_hull.at(units / many),
            ],
        }
    }

    fn stage_ns(&self, stage: usize, [layer_ns, outside_ns]: [f64; 2]) -> f64 {
        self.shape.layer_times(stage) * layer_ns + if self.shape.end() == stage { outside_ns } else { 0.0 }
    }
}

/// Estimates a family's joint plans, whose stages hold layers of all modules.
fn joint_estimate(space: &SearchSpace<'_>, family: &Family, counts: [f64; 2]) -> LowerEstimate {
    let (llm, of_llm) = (space.llm_shape(family), space.llm_times(family));
    let mut modules = Vec::with_capacity(family.encoders.len() + 1);
    for (encoder, part) in family.encoders.iter().enumerate() {
        let (shape, times) = (space.encoder_shape(family, encoder), space.encoder_times(family, encoder));
        let units = space.workload.media(encoder).batch_units;
        modules.push(JointTimes::new(shape, times, units, f64::from(part.dp), counts));
    }
    let ranks = f64::from(family.llm_dp);
    modules.push(JointTimes::new(llm, of_llm, space.workload.batch_tokens, ranks, counts));
    let sum = |stage: usize, of: fn(&JointTimes<'_>) -> [f64; 2]| {
        modules.iter().map(|module| module.stage_ns(stage, of(module))).sum::<f64>()
    };
    let stages = 0..llm.layers.len();
    let busy_ns = stages.clone().map(|stage| sum(stage, |module| module.busy_ns)).fold(0.0, f64::max);
    let slowest_ns = stages.clone().map(|stage| sum(stage, |module| module.one_ns)).fold(0.0, f64::max);
    let path_ns: f64 = stages.map(|stage| sum(stage, |module| module.one_ns)).sum();
    let [layer_ns, outside_ns] = of_llm.longest_ns;
    let longest_ns = llm.all * layer_ns + outside_ns;
    let typical_ns = path_ns + 0.5 * (longest_ns - path_ns).max(0.0);
    let bound_ns = busy_ns.max(space.options.path_share() * path_ns.max(longest_ns));
    LowerEstimate::new(bound_ns, busy_ns + typical_ns - slowest_ns)
}

impl LowerEstimate {
    fn new(bound_ns: f64, estimate_ns: f64) -> Self {
        Self { bound_ns: bound_ns * (1.0 - ROUNDING), estimate_ns: estimate_ns.max(bound_ns) }
    }
}

impl LlmEstimate {
    /// Returns a lower bound on the step time for any plan with this LLM layout.
    pub(crate) fn bound_ns(&self) -> f64 {
        self.own.busy_ns.max(self.path_share * self.own.path_ns.max(self.longest_ns)) * (1.0 - ROUNDING)
    }

    /// Returns a lower bound on the estimate for any plan with this LLM layout.
    pub(crate) fn least_ns(&self) -> f64 {
        // An encoder's path is at least as long as its slowest stage, so an encoder never lowers the
        // estimate.
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
    let [large, small] = [few, many].map(|count| units / (count * ranks));
    let small_layer_ns = times.layer_hull.at(small) + times.samples_ns / (many * ranks);
    let small_outside_ns = times.outside_hull.at(small);
    // Each number of microbatches uses its best case: for a rank's work, and for a microbatch's path.
    let of_rank = |hull: &TimeTable| hull.least_of_parts(units / ranks, small, large);
    let layer_ns = of_rank(&times.layer_hull) + times.samples_ns / ranks;
    let outside_ns = of_rank(&times.outside_hull);
    ModuleEstimate {
        busy_ns: (shape.inner * layer_ns).max(shape.last * layer_ns + outside_ns),
        stage_ns: (shape.inner * small_layer_ns).max(shape.last * small_layer_ns + small_outside_ns),
        path_ns: shape.all * small_layer_ns + small_outside_ns,
    }
}
