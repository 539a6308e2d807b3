//! Compares predictions with observed times: errors by module, part and shape bin.
//!
//! A point's relative error is `predicted / observed - 1`, so a prediction twice as long as the observed time
//! is +100 %.

use serde::Serialize;

use super::curve_query::CurveQuery;
use super::predicted_time::PredictedTime;
use crate::Module;
use crate::correction::{bin, bin_sizes};
use crate::curve::{Curve, Estimate, Surface};
use crate::error::{Error, Result};
use crate::measure::ErrorSummary;
use crate::profile::{ModuleWidths, Part, Phase, Point, Profile, Setting};

/// Observed point, and a prediction from a different profile.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PointAccuracy {
    /// Measured configuration.
    #[serde(flatten)]
    pub setting: Setting,
    /// Predicted time in nanoseconds.
    pub predicted_ns: u64,
    /// Observed time in nanoseconds, the median over repeats.
    pub observed_ns: u64,
    /// Half width of the 90 % prediction interval, in nanoseconds.
    pub uncertainty_ns: u64,
    /// Whether the point is outside the profile's measured points.
    #[serde(rename = "is_beyond")]
    pub is_extrapolated: bool,
}

/// Errors for points with sizes in the same bin.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BinAccuracy {
    /// Smallest number of tokens, over all sequences, in the bin.
    pub tokens_min: u64,
    /// Smallest number of tokens above the bin.
    pub tokens_end: u64,
    /// Errors for the points in the bin.
    pub errors: ErrorSummary,
}

/// Errors for one part of a module in one pass.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PartAccuracy {
    /// Module part.
    pub part: Part,
    /// Pass.
    pub phase: Phase,
    /// Errors for the part in this pass.
    pub errors: ErrorSummary,
}

/// Errors for one module.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModuleAccuracy {
    /// Module whose points are summarized.
    pub module: Module,
    /// Errors for all points in the module.
    pub errors: ErrorSummary,
    /// Errors by part and pass.
    pub parts: Vec<PartAccuracy>,
    /// Errors by size.
    pub bins: Vec<BinAccuracy>,
}

/// Points that could not be predicted, for the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unpredicted {
    /// Number of points.
    pub count: usize,
    /// Error message with the points that the profile lacks.
    pub reason: String,
}

/// Comparison between a profile and observations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AccuracyReport {
    /// Errors for all points.
    pub errors: ErrorSummary,
    /// Share of points within the 90 % prediction intervals.
    pub within_uncertainty: f64,
    /// Mean half width over the intervals, as a fraction of the predicted times.
    pub mean_uncertainty: f64,
    /// Number of points outside the profile's measured points.
    #[serde(rename = "beyond")]
    pub extrapolated: usize,
    /// Errors by module.
    pub modules: Vec<ModuleAccuracy>,
    /// Points that could not be compared.
    pub unpredicted: Vec<Unpredicted>,
    /// All compared points.
    pub points: Vec<PointAccuracy>,
}

impl AccuracyReport {
    /// Predicts every point in `observed` from `profile` and compares the two.
    ///
    /// # Errors
    /// [`Error::ProfileLacks`] if no point can be predicted.
    pub fn compare(profile: &Profile, observed: &Profile) -> Result<Self> {
        let mut points = Vec::new();
        let mut unpredicted: Vec<Unpredicted> = Vec::new();
        for group in observed.points_with_widths().chunk_by(has_same_setting) {
            match HeldOutTimes::new(profile, &group[0].1, &group[0].0.setting) {
                Ok(times) => points.extend(group.iter().map(|(point, _)| comparison(point, &times))),
                Err(error) => count_reason(&mut unpredicted, group.len(), error.to_string()),
            }
        }
        if points.is_empty() {
            let needed = unpredicted.into_iter().next().map_or_else(
                || "anything to compare: there are no observations".to_owned(),
                // The error adds this prefix again.
                |first| first.reason.trim_start_matches("the profile lacks ").to_owned(),
            );
            return Err(Error::ProfileLacks { needed });
        }
        Ok(Self::new(points, unpredicted))
    }

    fn new(points: Vec<PointAccuracy>, unpredicted: Vec<Unpredicted>) -> Self {
        let all: Vec<&PointAccuracy> = points.iter().collect();
        let modules = Module::ALL.into_iter().filter_map(|module| {
            let own: Vec<&PointAccuracy> =
                all.iter().copied().filter(|point| point.setting.module == module).collect();
            (!own.is_empty()).then(|| module_accuracy(module, &own))
        });
        let is_within =
            |point: &&&PointAccuracy| point.predicted_ns.abs_diff(point.observed_ns) <= point.uncertainty_ns;
        let share =
            |point: &&PointAccuracy| point.uncertainty_ns as f64 / (point.predicted_ns as f64).max(1.0);
        let count = all.len().max(1) as f64;
        Self {
            errors: summarize(&all),
            within_uncertainty: all.iter().filter(is_within).count() as f64 / count,
            mean_uncertainty: all.iter().map(share).sum::<f64>() / count,
            extrapolated: all.iter().filter(|point| point.is_extrapolated).count(),
            modules: modules.collect(),
            unpredicted,
            points,
        }
    }
}

impl PointAccuracy {
    /// Returns predicted time divided by observed time, minus 1.
    #[must_use]
    pub fn relative_error(&self) -> f64 {
        self.predicted_ns as f64 / (self.observed_ns as f64).max(1.0) - 1.0
    }

    /// Returns the total tokens over all sequences.
    #[must_use]
    pub fn size(&self) -> u64 {
        u64::from(self.setting.batch) * u64::from(self.setting.tokens)
    }
}

fn count_reason(unpredicted: &mut Vec<Unpredicted>, count: usize, reason: String) {
    match unpredicted.iter_mut().find(|known| known.reason == reason) {
        Some(known) => known.count += count,
        None => unpredicted.push(Unpredicted { count, reason }),
    }
}

/// Returns whether two points have the same configuration except for the shape.
fn has_same_setting(a: &(Point, ModuleWidths), b: &(Point, ModuleWidths)) -> bool {
    let shapeless = |setting: Setting| Setting { batch: 0, tokens: 0, ..setting };
    a.1 == b.1 && shapeless(a.0.setting) == shapeless(b.0.setting)
}

fn comparison(point: &Point, times: &HeldOutTimes) -> PointAccuracy {
    let Setting { batch, tokens, .. } = point.setting;
    let predicted = times.time(batch, tokens);
    PointAccuracy {
        setting: point.setting,
        predicted_ns: predicted.ns,
        observed_ns: (point.microseconds * 1000.0).round() as u64,
        uncertainty_ns: predicted.uncertainty_ns,
        is_extrapolated: predicted.is_extrapolated,
    }
}

fn module_accuracy(module: Module, points: &[&PointAccuracy]) -> ModuleAccuracy {
    let by_part = group_by(points, |point| (point.setting.part, point.setting.phase));
    let parts = by_part.into_iter().map(|((part, phase), points)| PartAccuracy {
        part,
        phase,
        errors: summarize(&points),
    });
    let by_bin = group_by(points, |point| bin(point.size()));
    let bins = by_bin.into_iter().map(|(bin, points)| {
        let [tokens_min, tokens_end] = bin_sizes(bin);
        BinAccuracy { tokens_min, tokens_end, errors: summarize(&points) }
    });
    ModuleAccuracy { module, errors: summarize(points), parts: parts.collect(), bins: bins.collect() }
}

/// Groups points by key, keys ascending.
fn group_by<'a, K: Ord + Copy>(
    points: &[&'a PointAccuracy],
    key: impl Fn(&PointAccuracy) -> K,
) -> Vec<(K, Vec<&'a PointAccuracy>)> {
    let mut groups: std::collections::BTreeMap<K, Vec<&'a PointAccuracy>> = std::collections::BTreeMap::new();
    for point in points {
        groups.entry(key(point)).or_default().push(point);
    }
    groups.into_iter().collect()
}

fn summarize(points: &[&PointAccuracy]) -> ErrorSummary {
    let errors: Vec<f64> = points.iter().map(|point| point.relative_error()).collect();
    ErrorSummary::from_errors(&errors)
}

/// Times for one module part in one pass, at one TP degree and layer count.
#[derive(Debug)]
struct HeldOutTimes(Times);

#[derive(Debug)]
enum Times {
    /// Time over all tokens.
    Linear(Curve),
    /// Time over batch and tokens, and the number of layers to multiply it by.
    Attention(Surface, f64),
    /// Linear work, attention per layer, and the number of layers to multiply the attention by.
    Sum(Curve, Surface, f64),
    /// Time that does not depend on the shape.
    Fixed(Estimate),
}

impl HeldOutTimes {
    /// Prepares the times for all settings that differ from `like` only in batch and tokens.
    ///
    /// Whole layers are looked up as measured, otherwise as the sum of linear work and attention.
    ///
    /// # Errors
    /// [`crate::Error::ProfileLacks`] with the points to measure.
    fn new(profile: &Profile, widths: &ModuleWidths, like: &Setting) -> Result<Self> {
        let Setting { module, part, phase, tp, layers, .. } = *like;
        let selected = profile.select(module, widths)?;
        let query = CurveQuery::new(&selected, module, phase, tp, layers);
        let mut warnings = Vec::new();
        let count = f64::from(layers);
        let times = match (phase, part) {
            // Attention has no weights, so whole layers have the same weights as their linear work.
            (Phase::Optimizer, Part::Whole) => query
                .optimizer_time(Part::Whole)
                .or_else(|| query.optimizer_time(Part::Linear))
                .map(Times::Fixed),
            (Phase::Optimizer, _) => query.optimizer_time(part).map(Times::Fixed),
            (_, Part::Attention) => {
                query.attention(&mut warnings).map(|surface| Times::Attention(surface, count))
            }
            (_, Part::Linear | Part::OutsideLayers | Part::Head) => {
                query.curve(part, &mut warnings).map(Times::Linear)
            }
            (_, Part::Whole) => match query.whole(&mut warnings) {
                Some(whole) => Some(Times::Attention(whole, 1.0)),
                None => query
                    .curve(Part::Linear, &mut warnings)
                    .zip(query.attention(&mut warnings))
                    .map(|(linear, attention)| Times::Sum(linear, attention, count)),
            },
        };
        times.map(Self).ok_or_else(|| query.lacks(part))
    }

    /// Predicts the time for a batch of sequences.
    fn time(&self, batch: u32, tokens: u32) -> PredictedTime {
        let (batch, tokens) = (f64::from(batch), f64::from(tokens));
        let estimate = match &self.0 {
            Times::Linear(curve) => curve.estimate(batch * tokens),
            Times::Attention(surface, layers) => surface.estimate(batch, tokens).times(*layers),
            Times::Sum(linear, attention, layers) => {
                linear.estimate(batch * tokens).plus(attention.estimate(batch, tokens).times(*layers))
            }
            Times::Fixed(estimate) => *estimate,
        };
        estimate.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n";

    fn profile(rows: &[(&str, u32, f64)]) -> Profile {
        let rows: Vec<String> = rows
            .iter()
            .map(|(part, tokens, time)| format!("llm,{part},forward,1,2,1,{tokens},{time}\n"))
            .collect();
        Profile::parse([("p.csv", format!("{HEADER}{}", rows.concat()).as_str())]).unwrap()
    }

    #[test]
    fn errors_are_signed_sized_and_binned() {
        let known = profile(&[("linear", 100, 100.0), ("linear", 200, 200.0), ("linear", 400, 400.0)]);
        let observed = profile(&[("linear", 150, 100.0), ("linear", 300, 400.0)]);
        let report = AccuracyReport::compare(&known, &observed).unwrap();
        let ErrorSummary { count, bias, mape, p50, p95, max } = report.errors;
        assert_eq!(count, 2);
        assert!((bias - 0.125).abs() < 1e-9 && (mape - 0.375).abs() < 1e-9, "{bias} {mape}");
        assert!((p50 - 0.375).abs() < 1e-9 && (p95 - 0.5).abs() < 1e-9 && (max - 0.5).abs() < 1e-9);
        let [module] = &report.modules[..] else { panic!("one module") };
        assert_eq!((module.bins.len(), module.parts.len()), (2, 1));
        assert!((module.bins[0].tokens_min..module.bins[0].tokens_end).contains(&150));
        assert!(report.within_uncertainty < 1.0 && report.extrapolated == 0);
    }

    #[test]
    fn a_profile_predicts_itself() {
        let rows =
            [("linear", 64, 10.0), ("linear", 128, 14.0), ("attention", 64, 3.0), ("attention", 128, 5.0)];
        let report = AccuracyReport::compare(&profile(&rows), &profile(&rows)).unwrap();
        assert!(report.errors.max < 1e-9 && (report.within_uncertainty - 1.0).abs() < 1e-12);
    }

    #[test]
    fn whole_layers_are_predicted_from_their_parts() {
        let parts =
            [("linear", 64, 10.0), ("linear", 128, 20.0), ("attention", 64, 4.0), ("attention", 128, 16.0)];
        let report = AccuracyReport::compare(&profile(&parts), &profile(&[("whole", 128, 36.0)])).unwrap();
        assert!(report.errors.max < 1e-9, "{report:?}");
    }

    #[test]
    fn unpredicted_points_are_counted_with_their_reason() {
        let known = profile(&[("linear", 100, 100.0), ("linear", 200, 200.0)]);
        let observed = profile(&[("linear", 150, 150.0), ("ends", 100, 1.0), ("ends", 200, 2.0)]);
        let report = AccuracyReport::compare(&known, &observed).unwrap();
        assert_eq!((report.errors.count, report.unpredicted[0].count), (1, 2));
        assert!(report.unpredicted[0].reason.contains("part ends"), "{:?}", report.unpredicted);
        let error = AccuracyReport::compare(&known, &profile(&[("ends", 100, 1.0)])).unwrap_err().to_string();
        assert!(error.starts_with("the profile lacks module llm, part ends"), "{error}");
    }
}
