//! The paper's planning: minimizes the makespan for a batch whose microbatches all equal the mean.

use crate::cluster::Placement;
use crate::costs::StageBytes;
use crate::space::shape::{StageShape, TpTimes};
use crate::space::{Candidate, Family, SearchSpace};

/// Relative margin for rounding, used when a range of plans is ruled out by an endpoint.
const ROUNDING: f64 = 1e-9;
/// Number of LLM rank counts tried per shape in the first pass.
const FIRST_LOOK: u32 = 16;

/// Finds the plans from Algorithm 1: with every possible number of microbatches, and with the single number
/// that the authors' implementation tries for each configuration.
///
/// For every GPU split and all degrees with equal stages, `T = (m + E_pp + L_pp - 1) * max(E_dur, L_dur)` at
/// the mean shapes of `m` microbatches, if these fit into memory. The mean ignores uneven batches, so the
/// first plan may have as many microbatches as samples; the second plan has the minimum number whose mean
/// does not exceed the largest sample.
///
/// A whole range of `m` is ruled out at once: `T` is at least the number of slots at the lower end times the
/// durations at the upper end, where memory is lowest, too. The plans are identical to an exhaustive search.
///
/// # Source
/// An et al., "DFLOP", PACMMOD 2026, arXiv:2603.25120, section 3.3. Times are interpolated here, not rates.
pub(crate) fn plans(space: &SearchSpace<'_>) -> Vec<Candidate> {
    // Plan that fits: longer plans are ruled out from the start.
    let mut first = Found::new([f64::INFINITY; 2]);
    fill(space, &mut first, |ranks| ranks.is_multiple_of(ranks.div_ceil(FIRST_LOOK)), |pp| pp == 1);
    let mut found = Found::new(first.best.map(|best| best.map_or(f64::INFINITY, |(ns, _)| ns)));
    fill(space, &mut found, |_| true, |_| true);
    found.best.into_iter().flatten().map(|(_, candidate)| candidate).collect()
}

/// Best plan per rule so far; ties go to the earlier plan.
struct Found {
    /// Makespans of known plans, upper bounds for the best makespans.
    known_ns: [f64; 2],
    best: [Option<(f64, Candidate)>; 2],
}

impl Found {
    fn new(known_ns: [f64; 2]) -> Self {
        Self { known_ns, best: [None, None] }
    }

    /// Whether no plan with at least this makespan is the best for a rule.
    fn rules_out(&self, rule: usize, least_ns: f64) -> bool {
        let least_ns = least_ns * (1.0 - ROUNDING);
        least_ns > self.known_ns[rule] || self.best[rule].is_some_and(|(best_ns, _)| least_ns >= best_ns)
    }

    fn consider(&mut self, rule: usize, space: &SearchSpace<'_>, candidate: Candidate) {
        let ns = makespan_ns(space, &candidate);
        if self.best[rule].is_none_or(|(best_ns, _)| ns < best_ns) && fits(space, &candidate) {
            self.best[rule] = Some((ns, candidate));
        }
    }
}

/// Whether all stages have the same number of layers, as trainers of the paper's time require: the slowest
/// stage of 28 layers over 13 stages has half as many layers again as the mean.
fn is_even(shape: &StageShape) -> bool {
    shape.layers.iter().all(|layers| *layers == shape.layers[0])
}

/// Considers the families with accepted LLM ranks and encoder stages, in search-space order.
fn fill(
    space: &SearchSpace<'_>,
    found: &mut Found,
    ranks: impl Fn(u32) -> bool,
    stages: impl Fn(u32) -> bool,
) {
    space.visit_llms(|llm, llm_dp| {
        if !ranks(llm_dp) || !is_even(&space.llm.shapes[llm]) {
            return;
        }
        let [is_first, is_second] = [0, 1].map(|rule| may_be_best(space, found, rule, llm, llm_dp));
        if !is_first && !is_second {
            return;
        }
        space.visit_encoders(llm, llm_dp, &mut |family| {
            // Algorithm 1 splits the GPUs between the modules.
            let is_wanted = space.encoder_shapes(family).all(|shape| stages(shape.pp) && is_even(shape));
            if family.placement == Placement::Colocated || !is_wanted {
                return;
            }
            if is_first {
                consider_all(space, found, family);
            }
            let fewest = fewest(space, family).filter(|fewest| *fewest <= space.microbatches_max(family));
            if let (true, Some(microbatches)) = (is_second, fewest) {
                found.consider(1, space, Candidate { family: *family, microbatches });
            }
        });
    });
}

/// Whether a plan with this LLM shape may be the best for a rule, with any encoder.
fn may_be_best(space: &SearchSpace<'_>, found: &Found, rule: usize, llm: usize, llm_dp: u32) -> bool {
    let shape = &space.llm.shapes[llm];
    let mut ranges = vec![(1, space.workload.global_batch() / llm_dp)];
    while let Some((few, many)) = ranges.pop() {
        // An encoder has at least one stage.
        let least_ns = f64::from(few + shape.pp) * llm_stage_ns(space, llm, llm_dp, many);
        if found.rules_out(rule, least_ns) {
            continue;
        }
        if few == many {
            return true;
        }
        let middle = few + (many - few) / 2;
        ranges.extend([(middle + 1, many), (few, middle)]);
    }
    false
}

/// Considers all microbatch numbers for a family, in ascending order.
fn consider_all(space: &SearchSpace<'_>, found: &mut Found, family: &Family) {
    let slots = f64::from(stages(space, family) - 1);
    let mut ranges = vec![(1, space.microbatches_max(family))];
    while let Some((few, many)) = ranges.pop() {
        let upper_end = Candidate { family: *family, microbatches: many };
        let least_ns = (f64::from(few) + slots) * duration_ns(space, &upper_end);
        let least_bytes = || bytes(space, &upper_end) * (1.0 - ROUNDING);
        if found.rules_out(0, least_ns) || least_bytes() > space.budget_bytes {
            continue;
        }
        if few == many {
            found.consider(0, space, upper_end);
            continue;
        }
        let middle = few + (many - few) / 2;
        ranges.extend([(middle + 1, many), (few, middle)]);
    }
}

/// Returns the minimum number of microbatches whose mean has at least one sample per rank and does not exceed
/// the largest sample.
fn fewest(space: &SearchSpace<'_>, family: &Family) -> Option<u32> {
    let samples = f64::from(space.workload.global_batch());
    let is_small = |microbatches: u32| {
        let candidate = Candidate { family: *family, microbatches };
        let is_small = |encoder: usize| {
            mean_units(space, &candidate, encoder) <= space.workload.media(encoder).units_max as f64
        };
        (0..family.encoders.len()).all(is_small)
            && mean_tokens(space, &candidate) <= space.workload.tokens_max as f64
    };
    // Means shrink with the number of microbatches.
    let (mut few, mut many) = (1, space.workload.global_batch());
    while few < many {
        let middle = few + (many - few) / 2;
        if is_small(middle) { many = middle } else { few = middle + 1 }
    }
    let ranks = family.encoders.iter().map(|part| part.dp).fold(family.llm_dp, u32::max);
    let ranks = f64::from(ranks);
    (is_small(few) && samples >= f64::from(few) * ranks).then_some(few)
}

/// Computes `T` at the mean microbatch.
pub(super) fn makespan_ns(space: &SearchSpace<'_>, candidate: &Candidate) -> f64 {
    let slots = candidate.microbatches + stages(space, &candidate.family) - 1;
    f64::from(slots) * duration_ns(space, candidate)
}

/// Returns the number of stages on the longest path: encoders run side by side.
fn stages(space: &SearchSpace<'_>, family: &Family) -> u32 {
    let encoders = space.encoder_shapes(family).map(|shape| shape.pp);
    encoders.max().unwrap_or(0) + space.llm_shape(family).pp
}

/// Returns the slowest module's stage time for the mean microbatch; it decreases with the number of
/// microbatches.
fn duration_ns(space: &SearchSpace<'_>, candidate: &Candidate) -> f64 {
    let Family { encoders, llm, llm_dp, .. } = &candidate.family;
    let encoder_ns = |encoder: usize| {
        let times = space.encoder_times(&candidate.family, encoder);
        let slots = f64::from(encoders[encoder].dp * candidate.microbatches);
        let units = mean_units(space, candidate, encoder);
        stage_ns(space.encoder_shape(&candidate.family, encoder), times, units, times.samples_ns / slots)
    };
    let llm_ns = llm_stage_ns(space, *llm, *llm_dp, candidate.microbatches);
    (0..encoders.len()).map(encoder_ns).fold(llm_ns, f64::max)
}

fn llm_stage_ns(space: &SearchSpace<'_>, llm: usize, llm_dp: u32, microbatches: u32) -> f64 {
    let shape = &space.llm.shapes[llm];
    let times = &space.llm.times[shape.times];
    let tokens = space.workload.batch_tokens / (f64::from(microbatches) * f64::from(llm_dp));
    stage_ns(shape, times, tokens, times.samples_ns / f64::from(llm_dp * microbatches))
}

/// Returns the units in the mean microbatch on an encoder rank.
fn mean_units(space: &SearchSpace<'_>, candidate: &Candidate, encoder: usize) -> f64 {
    let slots = f64::from(candidate.microbatches) * f64::from(candidate.family.encoders[encoder].dp);
    space.workload.media(encoder).batch_units / slots
}

/// Returns the tokens in the mean microbatch on an LLM rank.
fn mean_tokens(space: &SearchSpace<'_>, candidate: &Candidate) -> f64 {
    let slots = f64::from(candidate.microbatches) * f64::from(candidate.family.llm_dp);
    space.workload.batch_tokens / slots
}

/// Returns a stage's time with all work divided evenly: `E_FLOP / (E_thr E_tp E_pp)`.
fn stage_ns(shape: &StageShape, times: &TpTimes, units: f64, samples_ns: f64) -> f64 {
    (shape.all * (times.layer.at(units) + samples_ns) + times.outside.at(units)) / f64::from(shape.pp)
}

/// Whether the mean microbatch, times the number in flight, fits into memory.
pub(super) fn fits(space: &SearchSpace<'_>, candidate: &Candidate) -> bool {
    bytes(space, candidate) <= space.budget_bytes
}

/// Returns the memory on the fullest GPU with mean microbatches; it never grows with the number of
/// microbatches.
fn bytes(space: &SearchSpace<'_>, candidate: &Candidate) -> f64 {
    let family = &candidate.family;
    let step = space.step_shape(family, candidate.microbatches);
    let fullest = |shape: &StageShape, dp: u32, first_stage: usize, units: f64| {
        let ranks = space.optimizer_ranks(dp);
        let of = |(stage, bytes): &(u32, StageBytes)| {
            let in_flight = step.in_flight(first_stage + *stage as usize) as f64;
            bytes.shared_by(ranks).at(in_flight * units, units)
        };
        shape.memory.iter().map(of).fold(0.0, f64::max)
    };
    let tokens = mean_tokens(space, candidate);
    let mut most = fullest(space.llm_shape(family), family.llm_dp, step.encoder_stages(), tokens);
    for (encoder, (first, _)) in step.encoders.each().enumerate() {
        let (shape, units) = (space.encoder_shape(family, encoder), mean_units(space, candidate, encoder));
        most = most.max(fullest(shape, family.encoders[encoder].dp, first, units));
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Cluster, Link, Links};
    use crate::costs::ModelCostsBuilder;
    use crate::space::SearchSpaceOptions;
    use crate::workload::{ItemSize, Workload};
    use dflop_costmodel::{DeviceRate, ModelSpec};

    /// Considers every number of microbatches for every family.
    fn exhaustive(space: &SearchSpace<'_>) -> Vec<Candidate> {
        let mut found = Found::new([f64::INFINITY; 2]);
        space.visit(|family| {
            let is_even = is_even(space.llm_shape(family)) && space.encoder_shapes(family).all(is_even);
            if family.placement == Placement::Colocated || !is_even {
                return;
            }
            let samples = f64::from(space.workload.global_batch());
            let fewest = (1..=space.workload.global_batch()).find(|&microbatches| {
                let candidate = Candidate { family: *family, microbatches };
                let ranks = f64::from(family.encoders[0].dp.max(family.llm_dp));
                mean_units(space, &candidate, 0) <= space.workload.media(0).units_max as f64
                    && mean_tokens(space, &candidate) <= space.workload.tokens_max as f64
                    && samples >= f64::from(microbatches) * ranks
            });
            for microbatches in 1..=space.microbatches_max(family) {
                let candidate = Candidate { family: *family, microbatches };
                found.consider(0, space, candidate);
                if Some(microbatches) == fewest {
                    found.consider(1, space, candidate);
                }
            }
        });
        found.best.into_iter().flatten().map(|(_, candidate)| candidate).collect()
    }

    fn sizes(seed: u32) -> Vec<ItemSize> {
        let size = |at: u32| {
            let tiles = (at * 7919 + seed) % 97 % (3 + seed % 9);
            ItemSize::from_tiles(tiles, 20 + 196 * tiles + (at * 104_729 + seed) % (200 + 600 * (seed % 5)))
        };
        (0..200).map(size).collect()
    }

    #[test]
    fn ranges_that_are_ruled_out_hold_no_better_plan() {
        let rate = DeviceRate::preset("a100").unwrap();
        let link = |bytes_per_second| Link { bytes_per_second, latency_seconds: 1e-5 };
        let links = Links { nvlink: link(2e11), infiniband: link(1e10) };
        let mut found = 0;
        for model in ["llava-ov-qwen2.5-7b", "internvl3-8b", "qwen2-audio-7b"] {
            let spec = ModelSpec::preset(model).unwrap();
            for (seed, gpus) in (0..12).zip([4, 8, 11, 16, 24, 32].into_iter().cycle()) {
                let links = (seed % 2 == 1).then_some(links);
                let builder = ModelCostsBuilder::new(&spec).rate(rate);
                let costs = builder.tensor_parallel_link(links.map(|links| links.nvlink)).build().unwrap();
                let workload = Workload::draw(&sizes(seed), gpus * (1 + seed % 4), 3, seed.into()).unwrap();
                let memory_bytes = [12, 24, 80][seed as usize % 3] << 30;
                let cluster = Cluster { gpus, gpus_per_node: 8.min(gpus), memory_bytes, links };
                let options = SearchSpaceOptions {
                    has_recomputation: seed % 4 == 0,
                    has_uneven_layers: seed % 4 == 1,
                    ..SearchSpaceOptions::default()
                };
                let space = SearchSpace::new(&costs.encoder_costs(), &costs.llm, &workload, cluster, options);
                let plans = plans(&space);
                assert_eq!(plans, exhaustive(&space), "{model} {gpus} {seed}");
                let mut counted = 0;
                space.visit(|family| counted += u64::from(space.microbatches_max(family)));
                assert_eq!(space.count_plans(), counted, "{model} {gpus} {seed}");
                found += plans.len();
            }
        }
        assert!(found > 30, "{found}");
    }
}
