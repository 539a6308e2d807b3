//! Chooses plans by the reference implementation's rule, and by Algorithm 1 in the paper.
//!
//! Both use the makespan `T = (m + encoder_pp + llm_pp - 1) * max(encoder stage, LLM stage)` for the mean
//! microbatch. Algorithm 1 selects the smallest `T` over all `m`. The reference uses one `m` per
//! configuration, the smallest whose mean microbatch is within the largest sample, accepts a plan if
//! `T < 1.1 * best T` and `m < best m`, and computes with rates, including means of rates.
//!
//! # Source
//! An et al., "DFLOP", PACMMOD 2026, arXiv:2603.25120, Algorithm 1.

use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::Module;
use dflop_costmodel::memory::MeasuredMemory;
use dflop_costmodel::profile::{Part, Phase, reference_model};
use dflop_planner::{Degrees, ItemSize, ModuleCosts, ModulePlan, ParallelismPlan, Placement, StagePart};

use super::{Case, MEMORY_BYTES, Prepared};

/// Factor that the reference multiplies memory by.
const CUSHION: f64 = 1.25;

/// Rule that chooses a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Rule in the reference implementation.
    Reference,
    /// Algorithm 1 in the paper.
    Paper,
}

/// Data statistics that both rules use.
struct Means {
    tiles: f64,
    tokens: f64,
    tiles_max: f64,
    tokens_max: f64,
    global_batch: f64,
}

/// Profile rates, as both rules compute with them.
struct Rates<'a> {
    prepared: &'a Prepared,
    /// Mean of squared tokens over the mean of tokens.
    squares_per_token: f64,
    /// Rows by LLM TP degree: degree, mean attention nanoseconds per squared token, mean of the inverse.
    attention: Vec<(u32, f64, f64)>,
}

/// Configuration under evaluation.
#[derive(Clone, Copy)]
struct Configuration {
    encoder: Degrees,
    llm: Degrees,
}

/// Chooses a plan for a case; `None` if no configuration passes.
///
/// # Panics
/// If the case's profile has no memory; synthetic profiles have it.
#[must_use]
pub fn choose(rule: Rule, case: &Case, prepared: &Prepared) -> Option<ParallelismPlan> {
    let count = prepared.sizes.len() as f64;
    let sum = |of: fn(&ItemSize) -> u32| prepared.sizes.iter().map(|size| f64::from(of(size))).sum::<f64>();
    let most = |of: fn(&ItemSize) -> u32| f64::from(prepared.sizes.iter().map(of).max().unwrap_or(0));
    let means = Means {
        tiles: sum(|size| size.media(0).units) / count,
        tokens: sum(|size| size.tokens) / count,
        tiles_max: most(|size| size.media(0).units),
        tokens_max: most(|size| size.tokens),
        global_batch: f64::from(case.global_batch),
    };
    let rates = Rates::new(prepared);
    let mut best: Option<(f64, u32, Configuration)> = None;
    for_each(case.gpus, prepared, |found| {
        if rule == Rule::Reference && !fits(prepared, &means, found) {
            return;
        }
        let counts = match rule {
            Rule::Reference => first_count(&means, found).map(|m| m..=m),
            Rule::Paper => Some(1..=case.global_batch / found.llm.dp),
        };
        for m in counts.into_iter().flatten() {
            if rule == Rule::Paper && !fits_paper(prepared, &means, found, m) {
                continue;
            }
            let makespan = rates.makespan(rule, &means, found, m);
            let is_better = best.as_ref().is_none_or(|(least, best_m, _)| match rule {
                Rule::Reference => makespan < 1.1 * least && m < *best_m,
                Rule::Paper => makespan < *least,
            });
            if is_better {
                best = Some((makespan, m, found));
            }
        }
    });
    best.map(|(_, m, found)| plan(prepared, found, m))
}

/// Visits every split of the GPUs, with every degree of both modules that fills its share.
fn for_each(gpus: u32, prepared: &Prepared, mut visit: impl FnMut(Configuration)) {
    let degrees = |costs: &dyn ModuleCosts, gpus: u32| {
        let mut all = Vec::new();
        for tp in costs.tp_degrees().into_iter().filter(|tp| *tp <= 8 && gpus.is_multiple_of(*tp)) {
            for pp in (1..=costs.layers()).filter(|pp| (gpus / tp).is_multiple_of(*pp)) {
                all.push(Degrees { tp, pp, dp: gpus / tp / pp });
            }
        }
        all
    };
    for split in 1..gpus {
        let llms = degrees(&prepared.model.llm, gpus - split);
        for encoder in degrees(prepared.encoder(), split) {
            for &llm in &llms {
                visit(Configuration { encoder, llm });
            }
        }
    }
}

/// Returns the smallest `m` whose mean microbatch has at least one sample, and at most the work of the
/// largest sample.
fn first_count(means: &Means, found: Configuration) -> Option<u32> {
    let most = means.global_batch as u32;
    (1..=most).find(|m| {
        let of_encoder = means.global_batch / (f64::from(*m) * f64::from(found.encoder.dp));
        let of_llm = means.global_batch / (f64::from(*m) * f64::from(found.llm.dp));
        let is_within =
            means.tiles * of_encoder <= means.tiles_max && means.tokens * of_llm <= means.tokens_max;
        is_within && of_encoder >= 1.0 && of_llm >= 1.0
    })
}

/// Checks memory as the reference does, independent of `m`: with the longest sample, and the encoder's
/// largest sample scaled by the ratio of ranks.
fn fits(prepared: &Prepared, means: &Means, found: Configuration) -> bool {
    let Configuration { encoder, llm } = found;
    let tiles = means.tiles_max * f64::from(llm.dp) / f64::from(encoder.dp);
    let of_encoder = bytes(prepared.encoder(), encoder, f64::from(encoder.pp + llm.pp) * tiles);
    let of_llm = bytes(&prepared.model.llm, llm, f64::from(llm.pp) * means.tokens_max);
    CUSHION * of_encoder.max(of_llm) <= MEMORY_BYTES as f64
}

/// Checks memory as the paper does, at the mean microbatch.
fn fits_paper(prepared: &Prepared, means: &Means, found: Configuration, m: u32) -> bool {
    let Configuration { encoder, llm } = found;
    let of = |mean: f64, dp: u32| mean * means.global_batch / (f64::from(m) * f64::from(dp));
    let tiles = f64::from(encoder.pp + llm.pp) * of(means.tiles, encoder.dp);
    let tokens = f64::from(llm.pp) * of(means.tokens, llm.dp);
    let most = bytes(prepared.encoder(), encoder, tiles).max(bytes(&prepared.model.llm, llm, tokens));
    most <= MEMORY_BYTES as f64
}

fn bytes(costs: &dyn ModuleCosts, degrees: Degrees, units: f64) -> f64 {
    let layers = costs.layers().div_ceil(degrees.pp);
    let part = StagePart { layers, is_first: true, is_last: true };
    costs.memory(degrees.tp, part, false).at(units, 0.0)
}

impl<'a> Rates<'a> {
    fn new(prepared: &'a Prepared) -> Self {
        let costs = &prepared.model.llm;
        let tokens: Vec<f64> = prepared.sizes.iter().map(|size| f64::from(size.tokens)).collect();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let squares: Vec<f64> = tokens.iter().map(|tokens| tokens * tokens).collect();
        let attention = costs.tp_degrees().into_iter().map(|tp| {
            let layers = f64::from(costs.layers());
            let of_sample = |tokens: &f64| layers * costs.sample_ns(tp, *tokens as u64) / (tokens * tokens);
            let each_ns: Vec<f64> = tokens.iter().map(of_sample).collect();
            let rates: Vec<f64> = each_ns.iter().map(|ns| 1.0 / ns).collect();
            (tp, mean(&each_ns), mean(&rates))
        });
        Self { prepared, squares_per_token: mean(&squares) / mean(&tokens), attention: attention.collect() }
    }

    fn makespan(&self, rule: Rule, means: &Means, found: Configuration, m: u32) -> f64 {
        let Configuration { encoder, llm } = found;
        let tiles = means.tiles * means.global_batch / (f64::from(m) * f64::from(encoder.dp));
        let tokens = means.tokens * means.global_batch / (f64::from(m) * f64::from(llm.dp));
        let slowest = self.encoder_ns(encoder, tiles).max(self.llm_ns(rule, llm, tokens));
        (f64::from(m + encoder.pp + llm.pp) - 1.0) * slowest
    }

    fn encoder_ns(&self, degrees: Degrees, tiles: f64) -> f64 {
        let costs = self.prepared.encoder();
        let at = |tiles: u64| {
            f64::from(costs.layers()) * costs.layer_ns(degrees.tp, tiles)
                + costs.outside_layers_ns(degrees.tp, tiles)
        };
        interpolated_by_rate(&at, tiles, &[1, 2, 4, 8, 16, 32, 64]) / f64::from(degrees.pp)
    }

    fn llm_ns(&self, rule: Rule, degrees: Degrees, tokens: f64) -> f64 {
        let costs = &self.prepared.model.llm;
        let (tp, layers) = (degrees.tp, f64::from(costs.layers()));
        let linear = |tokens: u64| layers * costs.layer_ns(tp, tokens) + costs.outside_layers_ns(tp, tokens);
        let places = [1024, 2048, 3072, 4096, 6144, 8192];
        let linear_ns = interpolated_by_rate(&linear, tokens, &places);
        let known = self.attention.iter().find(|(degree, ..)| *degree == tp);
        let (_, mean_ns, mean_rate) = known.expect("the degree is one of the profile");
        let work = self.squares_per_token * tokens;
        let attention_ns = match rule {
            // The reference uses the mean of the rates where the harmonic mean would be right.
            Rule::Reference => work / mean_rate,
            Rule::Paper => work * mean_ns,
        };
        (linear_ns + attention_ns) / f64::from(degrees.pp)
    }
}

/// Interpolates rates linearly between measured places, and extrapolates outside them.
fn interpolated_by_rate(time_ns: &dyn Fn(u64) -> f64, units: f64, places: &[u64]) -> f64 {
    let rate = |units: u64| units as f64 / time_ns(units);
    let after = places.iter().position(|place| *place as f64 > units).unwrap_or(places.len() - 1).max(1);
    let (low, high) = (places[after - 1], places[after]);
    let slope = (rate(high) - rate(low)) / (high - low) as f64;
    units / (rate(low) + slope * (units - low as f64)).max(1e-12)
}

fn plan(prepared: &Prepared, found: Configuration, microbatches: u32) -> ParallelismPlan {
    ParallelismPlan {
        expert_parallel: 1,
        encoders: vec![ModulePlan::even(prepared.encoder().layers(), found.encoder)],
        llm: ModulePlan::even(prepared.model.llm.layers(), found.llm),
        microbatches,
        placement: Placement::Disaggregated,
        schedule: ScheduleKind::OneForwardOneBackward,
    }
}

/// Returns whether the profile was read completely: memory for both modules, both parts of the LLM times.
#[must_use]
pub fn is_complete(prepared: &Prepared) -> bool {
    let has = |part: Part| {
        let points = prepared.profile.points();
        points.iter().any(|point| point.setting.part == part && point.setting.phase == Phase::Forward)
    };
    let Some(Ok(spec)) = reference_model(&prepared.profile) else { return false };
    let has_memory = [Module::Vision, Module::Llm].map(|module| {
        let points = MeasuredMemory::from_profile(&prepared.profile, &spec, module);
        points.is_ok_and(|points| points.is_some())
    });
    has(Part::Whole) && has(Part::Linear) && has_memory == [true, true]
}
