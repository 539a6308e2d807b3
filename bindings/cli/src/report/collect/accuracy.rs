//! Collects predictions and measurements for comparison: a profile on held-out points, or the passes in a
//! run.

use dflop_costmodel::{AccuracyReport, ErrorSummary, PointAccuracy};

use super::trace::Measured;
use crate::report::document::{Accuracy, AccuracyPoint, ErrorRow};

/// Maximum number of points that are listed.
const POINTS_MAX: usize = 3_000;
/// Fraction of points inside an interval that is fitted to them.
const INSIDE: f64 = 0.9;

impl Accuracy {
    /// Returns the comparison of a profile with observations; intervals come from the profile.
    pub(crate) fn from_profile(compared: &AccuracyReport) -> Self {
        let modules: Vec<String> = compared.modules.iter().map(|module| module.module.to_string()).collect();
        let point = |point: &PointAccuracy| {
            let setting = point.setting;
            let name = setting.module.to_string();
            AccuracyPoint {
                module: modules.iter().position(|module| *module == name).unwrap_or(0),
                label: format!(
                    "{} {}, {} layers, {} × {} tokens",
                    setting.part, setting.phase, setting.layers, setting.batch, setting.tokens
                ),
                predicted_ns: point.predicted_ns,
                interval_ns: point.uncertainty_ns,
                measured_ns: point.observed_ns,
                is_extrapolated: point.is_extrapolated,
            }
        };
        let parts = compared.modules.iter().flat_map(|module| {
            let name = |part: &dflop_costmodel::PartAccuracy| {
                format!("{} {} {}", module.module, part.part, part.phase)
            };
            module.parts.iter().map(move |part| error_row(name(part), &part.errors))
        });
        let rows = parts.chain([error_row("all".to_owned(), &compared.errors)]).collect();
        Self {
            about: "A dot is one measured point, with the 90 % interval of its prediction; on the diagonal both are \
                    equal. Errors are predicted over measured time, less one."
                .to_owned(),
            scale: 1.0,
            within_interval: compared.within_uncertainty,
            rows,
            points: thinned(compared.points.iter().map(point).collect()),
            count: compared.points.len(),
            modules,
        }
    }

    /// Returns the comparison of measured passes in a run with the predictions; `None` without a pass.
    ///
    /// - `is_absolute`: whether times come from a measured profile; stated-rate times are scaled to the
    ///   measured sum first
    pub(crate) fn from_passes(measured: &Measured, is_absolute: bool) -> Option<Self> {
        let all = &measured.passes;
        let sum = |of: fn(&AccuracyPoint) -> u64| all.iter().map(of).sum::<u64>() as f64;
        let [predicted, taken] = [sum(|point| point.predicted_ns), sum(|point| point.measured_ns)];
        if predicted <= 0.0 || taken <= 0.0 {
            return None;
        }
        let scale = if is_absolute { 1.0 } else { taken / predicted };
        let error = |point: &AccuracyPoint| {
            point.predicted_ns as f64 * scale / (point.measured_ns as f64).max(1.0) - 1.0
        };
        // Half widths relative to the prediction, one for each module.
        let widths: Vec<f64> = (0..measured.modules.len())
            .map(|module| {
                let own = all.iter().filter(|point| point.module == module);
                let off = own.map(|point| {
                    let scaled = (point.predicted_ns as f64 * scale).max(1.0);
                    (point.measured_ns as f64 - scaled).abs() / scaled
                });
                quantile(off.collect(), INSIDE)
            })
            .collect();
        let width = |point: &AccuracyPoint| {
            let width = widths.get(point.module).copied().unwrap_or(0.0);
            (point.predicted_ns as f64 * scale * width).ceil() as u64
        };
        let is_inside = |point: &&AccuracyPoint| {
            let scaled = (point.predicted_ns as f64 * scale).round() as u64;
            scaled.abs_diff(point.measured_ns) <= width(point) + 1
        };
        let within = all.iter().filter(is_inside).count() as f64 / all.len() as f64;
        let of_module = |module: usize| all.iter().filter(move |point| point.module == module).map(error);
        let mut rows: Vec<ErrorRow> = (measured.modules.iter().enumerate())
            .map(|(module, name)| {
                error_row(name.clone(), &ErrorSummary::from_errors(&of_module(module).collect::<Vec<_>>()))
            })
            .collect();
        let errors: Vec<f64> = all.iter().map(error).collect();
        rows.push(error_row("all".to_owned(), &ErrorSummary::from_errors(&errors)));
        let with_interval =
            all.iter().map(|point| AccuracyPoint { interval_ns: width(point), ..point.clone() });
        let scaled = if is_absolute {
            ""
        } else {
            " Predictions come from a stated rate, which weighs passes against each other only; they are scaled to \
             the measured sum."
        };
        Some(Self {
            about: format!(
                "A dot is one forward or backward pass of the last steps; its measured time is CPU time.{scaled} \
                 Intervals are fitted: 90 % of the passes of a module are inside."
            ),
            modules: measured.modules.clone(),
            scale,
            within_interval: within,
            rows,
            points: thinned(with_interval.collect()),
            count: all.len(),
        })
    }
}

fn error_row(name: String, errors: &ErrorSummary) -> ErrorRow {
    let ErrorSummary { count, bias, mape, p50, p95, max, .. } = *errors;
    ErrorRow { name, count, bias, mean: mape, p50, p95, max }
}

/// Returns the smallest value that a part of the values does not exceed; 0 without values.
fn quantile(mut values: Vec<f64>, part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let place = (values.len() as f64 * part).ceil() as usize;
    values.get(place.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Keeps points at even distances.
fn thinned(points: Vec<AccuracyPoint>) -> Vec<AccuracyPoint> {
    let every = points.len().div_ceil(POINTS_MAX).max(1);
    points.into_iter().step_by(every).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(points: &[(usize, u64, u64)]) -> Measured {
        let passes = points.iter().map(|&(module, predicted_ns, measured_ns)| AccuracyPoint {
            module,
            label: String::new(),
            predicted_ns,
            interval_ns: 0,
            measured_ns,
            is_extrapolated: false,
        });
        let modules = ["vision", "llm"].map(str::to_owned).to_vec();
        Measured { modules, passes: passes.collect(), ..Measured::default() }
    }

    #[test]
    fn a_stated_rate_is_scaled_and_a_profile_is_not() {
        let points: Vec<_> = (1..=20).map(|size| ((size % 2) as usize, size * 100, size * 300)).collect();
        let scaled = Accuracy::from_passes(&measured(&points), false).unwrap();
        assert!((scaled.scale - 3.0).abs() < 1e-9 && scaled.rows[2].max < 1e-9);
        assert_eq!((scaled.count, scaled.rows.len(), scaled.rows[0].count), (20, 3, 10));
        let absolute = Accuracy::from_passes(&measured(&points), true).unwrap();
        assert!((absolute.rows[2].bias + 2.0 / 3.0).abs() < 1e-9);
        assert!(Accuracy::from_passes(&measured(&[]), false).is_none());
    }

    #[test]
    fn nine_of_ten_passes_are_inside_the_fitted_interval() {
        // In each module, one pass in ten takes twice its time.
        let points: Vec<_> = (0..40)
            .map(|pass| (pass % 2, 1_000, if pass < 4 { 2_000 } else { 1_000 + pass as u64 }))
            .collect();
        let accuracy = Accuracy::from_passes(&measured(&points), true).unwrap();
        assert!((accuracy.within_interval - 0.9).abs() < 1e-9, "{}", accuracy.within_interval);
        assert!(accuracy.points.iter().all(|point| point.interval_ns < 100));
    }
}
