//! Times predicted from a profile, in whole nanoseconds with uncertainty, and warnings about those that rest
//! on too few measurements.
//!
//! States how unequal the loads are on ranks that share experts.
//!
//! The *load imbalance* in an expert-parallel group is the largest rank load divided by the mean load, in
//! tokens times experts. It depends on the router, which the cost model does not know. Two figures bound it:
//! uniform routing, where every token selects its experts independently and all experts are equally likely,
//! and the worst routing, where all tokens select the same experts.

use crate::Module;
use crate::curve::Estimate;
use crate::model::ExpertsSpec;
use crate::profile::{Part, Phase};
use serde::Serialize;
use std::str::FromStr;

/// Time predicted from a profile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PredictedTime {
    /// Time in whole nanoseconds.
    pub ns: u64,
    /// Half width of the 90 % interval around `ns`, in nanoseconds: 9 of 10 measurements at a shape that was
    /// not measured are at most this far off.
    ///
    /// Covers the spread between repeats, the interpolation error and the difference between measurement
    /// sessions; never below the measured spread. Errors in a module's parts add up in full.
    pub uncertainty_ns: u64,
    /// Whether the shape is outside the measured points.
    #[serde(rename = "is_beyond")]
    pub is_extrapolated: bool,
}

impl From<Estimate> for PredictedTime {
    fn from(estimate: Estimate) -> Self {
        let Estimate { ns, uncertainty_ns, is_extrapolated } = estimate;
        Self { ns: whole_ns(ns), uncertainty_ns: whole_ns(uncertainty_ns), is_extrapolated }
    }
}

/// Rounds to whole nanoseconds, half up, saturating.
pub(super) fn whole_ns(ns: f64) -> u64 {
    // A cast from f64 saturates, and truncates, which makes `+ 0.5` round half up.
    (ns + 0.5) as u64
}

/// Reason why a prediction from a profile is weaker than between measured points.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant names its fields")]
pub enum ProfileWarning {
    /// The shape is outside the measured points; time was extrapolated linearly in work.
    #[serde(rename = "beyond")]
    Extrapolated {
        module: Module,
        part: Part,
        phase: Phase,
        batch: f64,
        tokens: f64,
        tokens_min: f64,
        tokens_max: f64,
    },
    /// Only one layer count was measured, so the cost outside the layers was scaled with them.
    LayersInProportion { module: Module, part: Part, phase: Phase, measured: u32, asked: u32 },
    /// Shapes with fewer layer counts than other shapes, or with more layers in less time, were not used.
    ShapesLeftOut { module: Module, part: Part, phase: Phase, shapes: usize },
    /// Attention was not measured separately, so attention over packed samples is overestimated.
    #[serde(rename = "attention_not_apart")]
    AttentionNotSeparate { module: Module, phase: Phase },
    /// A single shape was measured; time is scaled in proportion to work.
    SingleShape { module: Module, part: Part, phase: Phase },
    /// Some points have fewer than 3 repeats; a spread of 5 % is assumed for each.
    FewRepeats { module: Module, points: usize },
    /// The file does not state the widths of the measured module, so it was not compared with the model.
    #[serde(rename = "unknown_dimensions")]
    UnknownWidths { module: Module, file: String },
}

impl std::fmt::Display for ProfileWarning {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Extrapolated { module, part, phase, batch, tokens, tokens_min, tokens_max } => write!(
                formatter,
                "{module} {part} {phase}: {batch:.0} x {tokens:.0} tokens is outside the measured shapes \
                 ({tokens_min:.0} to {tokens_max:.0} tokens)"
            ),
            Self::LayersInProportion { module, part, phase, measured, asked } => write!(
                formatter,
                "{module} {part} {phase}: only {measured} layers were measured, scaled in proportion to {asked}; \
                 measure a second layer count to separate layers and constant"
            ),
            Self::ShapesLeftOut { module, part, phase, shapes } => write!(
                formatter,
                "{module} {part} {phase}: {shapes} shapes left out: they lack a layer count that others have, or took less \
                 time with more layers"
            ),
            Self::AttentionNotSeparate { module, phase } => {
                write!(formatter, "{module} {phase}: attention was not measured separately from linear work")
            }
            Self::SingleShape { module, part, phase } => {
                write!(
                    formatter,
                    "{module} {part} {phase}: one shape was measured, time is scaled in proportion"
                )
            }
            Self::FewRepeats { module, points } => write!(
                formatter,
                "{module}: {points} points have fewer than 3 repeats, a spread of 5 % is assumed for each"
            ),
            Self::UnknownWidths { module, file } => {
                write!(formatter, "{module}: `{file}` does not state the measured widths")
            }
        }
    }
}

/// Load imbalance between ranks that share experts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum ExpertImbalance {
    /// Imbalance with uniform routing, which a load-balancing loss aims at.
    #[default]
    Uniform,
    /// Stated factor, at least 1.
    Factor(f64),
}

impl ExpertImbalance {
    /// Returns the factor for a group of `ranks` ranks that route `tokens` tokens together; 1 for a single
    /// rank.
    #[must_use]
    pub fn factor(self, experts: &ExpertsSpec, ranks: u32, tokens: u64) -> f64 {
        let worst = Self::worst(experts, ranks);
        match self {
            Self::Uniform => Self::expected(experts, ranks, tokens),
            Self::Factor(factor) => factor.clamp(1.0, worst),
        }
    }

    /// Returns the expected factor with uniform routing.
    ///
    /// With `n` tokens that each select `k` of `E` experts, each of `R` ranks has `nk / R` loads in the mean.
    /// Their number is nearly normal, with a variance of `nk / R` for loads that are thrown independently,
    /// and less by `(E - k) / (E - 1)` because a token never selects an expert twice. The largest of `R`
    /// normal variables is `z` standard deviations above the mean, with `z` the quantile of
    /// `(R - 3/8) / (R + 1/4)`, so the factor is `1 + z sqrt(R (E - k) / (nk (E - 1)))`.
    ///
    /// # Source
    /// Loads as balls in bins, with this order of deviation: Raab and Steger, "Balls into Bins - A Simple and
    /// Tight Analysis", 1998, RANDOM, theorem 1. Maximum over normal variables: Blom, "Statistical Estimates
    /// and Transformed Beta-Variables", 1958.
    #[must_use]
    pub fn expected(experts: &ExpertsSpec, ranks: u32, tokens: u64) -> f64 {
        let worst = Self::worst(experts, ranks);
        if ranks < 2 || tokens == 0 {
            return worst.min(1.0);
        }
        let [all, selected] = [experts.experts, experts.experts_per_token].map(f64::from);
        let ranks = f64::from(ranks);
        let distinct = (all - selected) / (all - 1.0).max(1.0);
        let deviation = (ranks * distinct.max(0.0) / (tokens as f64 * selected)).sqrt();
        let quantile = normal_quantile((ranks - 0.375) / (ranks + 0.25));
        (1.0 + quantile * deviation).min(worst)
    }

    /// Returns the factor with the worst routing: all tokens select the same experts, on the minimum number
    /// of ranks that hold them.
    #[must_use]
    pub fn worst(experts: &ExpertsSpec, ranks: u32) -> f64 {
        let (ranks, selected) = (ranks.max(1), experts.experts_per_token.max(1));
        let on_one_rank = experts.experts.div_ceil(ranks).min(selected);
        f64::from(ranks) * f64::from(on_one_rank) / f64::from(selected)
    }
}

impl FromStr for ExpertImbalance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "uniform" {
            return Ok(Self::Uniform);
        }
        match text.parse() {
            Ok(factor) if (1.0..f64::INFINITY).contains(&factor) => Ok(Self::Factor(factor)),
            _ => Err(format!("expected `uniform` or a number of at least 1, found `{text}`")),
        }
    }
}

/// Returns the value that a standard normal variable does not exceed with a probability of 1/2 to 1.
///
/// # Source
/// Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, 26.2.23: at most 0.00045 off.
fn normal_quantile(probability: f64) -> f64 {
    let t = (2.0 * logarithm(1.0 / (1.0 - probability))).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    (t - above / below).max(0.0)
}

/// Returns the natural logarithm for a number that is at least 1, with the same bits on every machine.
///
/// Powers of two are split off; the remaining logarithm is `2 atanh((x - 1) / (x + 1))`, a series.
fn logarithm(mut number: f64) -> f64 {
    let mut powers = 0.0;
    while number > 2.0 {
        number /= 2.0;
        powers += 1.0;
    }
    let ratio = (number - 1.0) / (number + 1.0);
    let (mut power, mut sum) = (ratio, 0.0);
    for odd in (1..40).step_by(2) {
        sum += power / f64::from(odd);
        power *= ratio * ratio;
    }
    powers * std::f64::consts::LN_2 + 2.0 * sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ExpertsDetails, LayerSet};
    use crate::random::SplitMix64;

    fn mixture(experts: u32, experts_per_token: u32) -> ExpertsSpec {
        let layers = LayerSet::range(0, 1);
        let details = ExpertsDetails::NONE;
        ExpertsSpec { layers, experts, experts_per_token, ffn: 8, shared_ffn: 0, details }
    }

    /// Routes tokens uniformly and returns the mean ratio of largest load to mean load.
    fn simulated(experts: &ExpertsSpec, ranks: u32, tokens: u64, rounds: u32) -> f64 {
        let mut random = SplitMix64::new(7);
        let mut sum = 0.0;
        for _ in 0..rounds {
            let mut loads = vec![0_u32; ranks as usize];
            let mut order: Vec<u32> = (0..experts.experts).collect();
            for _ in 0..tokens {
                random.shuffle_front(&mut order, experts.experts_per_token as usize);
                for selected in &order[..experts.experts_per_token as usize] {
                    loads[(selected / experts.experts.div_ceil(ranks)) as usize] += 1;
                }
            }
            let mean = tokens as f64 * f64::from(experts.experts_per_token) / f64::from(ranks);
            sum += f64::from(loads.into_iter().max().unwrap_or(0)) / mean;
        }
        sum / f64::from(rounds)
    }

    #[test]
    fn the_expected_imbalance_is_that_of_simulated_routing() {
        for (experts, selected, ranks, tokens) in
            [(128, 8, 8, 500), (8, 2, 4, 400), (8, 2, 8, 400), (64, 6, 2, 300), (256, 8, 32, 1000)]
        {
            let mixture = mixture(experts, selected);
            let found = simulated(&mixture, ranks, tokens, 400);
            let expected = ExpertImbalance::expected(&mixture, ranks, tokens);
            let excess = (expected - 1.0) / (found - 1.0);
            assert!((0.85..1.15).contains(&excess), "{experts} {ranks}: {expected}, simulated {found}");
        }
    }

    #[test]
    fn the_worst_routing_loads_as_few_ranks_as_hold_its_experts() {
        assert!((ExpertImbalance::worst(&mixture(8, 2), 8) - 4.0).abs() < 1e-12, "2 of 8 ranks");
        assert!((ExpertImbalance::worst(&mixture(128, 8), 8) - 8.0).abs() < 1e-12, "one rank");
        assert!((ExpertImbalance::worst(&mixture(128, 8), 1) - 1.0).abs() < 1e-12);
        let factor = |text: &str| text.parse::<ExpertImbalance>().unwrap().factor(&mixture(8, 2), 8, 1000);
        assert!((factor("9") - 4.0).abs() < 1e-12, "no more than the worst");
        assert!((factor("1.5") - 1.5).abs() < 1e-12 && factor("uniform") < 1.2);
        assert!("0.5".parse::<ExpertImbalance>().is_err() && "most".parse::<ExpertImbalance>().is_err());
    }
}
