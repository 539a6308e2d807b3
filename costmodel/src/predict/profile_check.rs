//! Compares a profile with the microbatches that were held out when it was measured.
//!
//! A profile that does not predict them plans worse than a guess, so it is rejected unless the check is
//! turned off. The same errors give the prediction intervals: 90 % of held-out microbatches are within the
//! half width, with the finite-sample correction.

use std::collections::BTreeMap;

use serde::Serialize;

use super::calibration::covering_quantile;
use super::microbatch_curve::MicrobatchCurve;
use crate::error::{Error, Result};
use crate::measure::{ErrorSummary, MEDIAN_BOUND, P95_BOUND};
use crate::module::{MODULES_MAX, Module};
use crate::profile::{HeldOutRun, Part, Profile, ProfileFile};

/// Minimum number of microbatches that determine a 90 % quantile.
const MICROBATCHES_MIN: usize = 9;

/// Profile errors over held-out microbatches, `predicted / measured - 1`.
///
/// # Examples
/// ```
/// use dflop_costmodel::{Profile, ProfileCheck};
///
/// # fn main() -> dflop_costmodel::Result<()> {
/// let mut text = String::from("# dflop-profile: 1\n");
/// for microbatch in 0..10 {
///     text += &format!("# held-out: {microbatch},llm,100,10000,{}\n", 150 + microbatch);
/// }
/// text += "module,part,phase,tp,layers,batch,tokens,microseconds\n";
/// for tokens in [10, 20, 40, 80, 160] {
///     text += &format!("llm,whole,forward,1,4,1,{tokens},{tokens}\n");
///     text += &format!("llm,whole,backward,1,4,1,{tokens},{}\n", tokens as f64 / 2.0);
/// }
/// let check = ProfileCheck::new(&Profile::parse([("p.csv", text.as_str())])?).expect("microbatches");
/// assert!(check.is_within() && check.errors.count == 10 && check.errors.max < 0.06);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProfileCheck {
    /// Whole-microbatch errors: for the sum over all modules.
    pub errors: ErrorSummary,
    /// Half width of the 90 % interval for a whole microbatch, as a fraction of the predicted time.
    pub half_width: f64,
    /// Half width of each module's interval, by [`Module`]; `None` without microbatches for the module.
    pub module_half_widths: [Option<f64>; MODULES_MAX],
}

/// Predicted and measured time.
type Pair = [f64; 2];

impl ProfileCheck {
    /// Compares a profile; `None` if it has fewer than 9 held-out microbatches from whole-module runs.
    #[must_use]
    pub fn new(profile: &Profile) -> Option<Self> {
        let mut whole: BTreeMap<u32, Pair> = BTreeMap::new();
        let mut of_modules: [Vec<Pair>; MODULES_MAX] = Default::default();
        for module in Module::ALL {
            for (run, predicted_ns) in profile.files().iter().flat_map(|file| predictions(file, module)) {
                let pair = [predicted_ns, 1e3 * run.microseconds];
                of_modules[module as usize].push(pair);
                let sums = whole.entry(run.microbatch).or_default();
                sums.iter_mut().zip(pair).for_each(|(sum, ns)| *sum += ns);
            }
        }
        if whole.len() < MICROBATCHES_MIN {
            return None;
        }
        let error = |[predicted, measured]: &Pair| predicted / measured - 1.0;
        let errors: Vec<f64> = whole.values().map(error).collect();
        Some(Self {
            errors: ErrorSummary::from_errors(&errors),
            half_width: half_width(whole.values())?,
            module_half_widths: of_modules.map(|pairs| half_width(pairs.iter())),
        })
    }

    /// Whether the median error is at most 5 %, and the 95th percentile at most 12 %.
    #[must_use]
    pub fn is_within(&self) -> bool {
        self.errors.p50 <= MEDIAN_BOUND && self.errors.p95 <= P95_BOUND
    }

    /// Rejects a profile that is out of bounds.
    ///
    /// # Errors
    /// [`Error::ProfileInaccurate`] with the errors.
    pub fn require_within(&self) -> Result<()> {
        if self.is_within() {
            return Ok(());
        }
        let ErrorSummary { count, p50, p95, .. } = self.errors;
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        Err(Error::ProfileInaccurate { microbatches: count, median: percent(p50), p95: percent(p95) })
    }
}

/// Returns a module's held-out runs in a file, each with the predicted nanoseconds.
fn predictions(file: &ProfileFile, module: Module) -> Vec<(HeldOutRun, f64)> {
    let runs = || file.held_out.iter().filter(|run| run.module == module);
    let of_whole = file.measurements.iter().map(|row| row.setting);
    let of_whole = of_whole.filter(|setting| setting.module == module && setting.part == Part::Whole);
    // The deepest cut is the cut that ran.
    let Some(layers) = of_whole.map(|setting| setting.layers).max().filter(|_| runs().next().is_some())
    else {
        return Vec::new();
    };
    let curve = MicrobatchCurve::from_profile(&Profile::from_file(file.clone()), module, layers);
    let predict = |curve: MicrobatchCurve| runs().map(move |run| (*run, curve.ns(run.tokens, run.pairs)));
    curve.map(predict).into_iter().flatten().collect()
}

fn half_width<'a>(pairs: impl Iterator<Item = &'a Pair>) -> Option<f64> {
    covering_quantile(pairs.map(|[predicted, measured]| (measured / predicted - 1.0).abs()).collect())
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use crate::model::ModelSpec;
    use crate::predict::{CostModel, ProfileOptions};
    use crate::shape::SampleShape;

    /// A profile with 3 us per token, whose held-out microbatches take `factor` times as long, every second
    /// microbatch by `scatter` more.
    fn text(factor: f64, scatter: f64, microbatches: u32) -> String {
        let mut text = String::from("# dflop-profile: 1\n");
        for number in 0..microbatches {
            let tokens = 500 + 100 * number;
            let microseconds = 3.0 * f64::from(tokens) * factor * (1.0 + scatter * f64::from(number % 2));
            writeln!(text, "# held-out: {number},llm,{tokens},{},{microseconds}", tokens * 100).unwrap();
        }
        text += "module,part,phase,tp,layers,batch,tokens,microseconds\n";
        for tokens in [64, 256, 1024, 4096] {
            writeln!(text, "llm,whole,forward,1,4,1,{tokens},{tokens}").unwrap();
            writeln!(text, "llm,whole,backward,1,4,1,{tokens},{}", 2 * tokens).unwrap();
        }
        text
    }

    fn profile(text: &str) -> Profile {
        Profile::parse([("p.csv", text)]).unwrap()
    }

    #[test]
    fn a_profile_out_of_bounds_is_refused_with_the_figures_unless_told_otherwise() {
        let tiny = ModelSpec::preset("tiny").unwrap();
        let spec = ModelSpec { vision: None, audio: None, ..tiny };
        let build = |text: &str, options| CostModel::from_profile(spec.clone(), &profile(text), options);
        assert!(build(&text(1.0, 0.05, 20), ProfileOptions::default()).is_ok());
        let message = build(&text(1.0, 1.0, 20), ProfileOptions::default()).unwrap_err().to_string();
        assert!(
            message.contains("20 held-out microbatches") && message.contains("median error of 38%"),
            "{message}"
        );
        assert!(build(&text(1.0, 1.0, 20), ProfileOptions::default().unchecked()).is_ok());
        assert!(build(&text(1.0, 1.0, 8), ProfileOptions::default()).is_ok(), "too few to tell");
    }

    #[test]
    fn held_out_microbatches_set_level_and_interval() {
        let tiny = ModelSpec::preset("tiny").unwrap();
        let spec = ModelSpec { vision: None, audio: None, ..tiny };
        let profile = profile(&text(1.3, 0.08, 30));
        let model = CostModel::from_profile(spec, &profile, ProfileOptions::default()).unwrap();
        let shape = SampleShape { text_tokens: 1000, ..SampleShape::default() };
        let time = model.predict_with_uncertainty(&shape).unwrap().unwrap().modules[0];
        assert!((time.ns as f64 / (3e6 * 1.3 * 1.04) - 1.0).abs() < 1e-3, "{time:?}");
        let share = time.uncertainty_ns as f64 / time.ns as f64;
        assert!((share - (1.0 - 1.0 / 1.04)).abs() < 1e-3, "{share}");
    }

    #[test]
    fn modules_of_one_microbatch_are_added() {
        let llm = text(1.0, 0.2, 12);
        // What takes the LLM longer takes the encoder less.
        let vision = text(1.2, -1.0 / 6.0, 12).replace("llm", "vision");
        let both = Profile::parse([("a.csv", llm.as_str()), ("b.csv", vision.as_str())]).unwrap();
        let check = ProfileCheck::new(&both).unwrap();
        assert!(check.errors.count == 12 && check.errors.p50 < 0.02, "{check:?}");
        assert!(check.module_half_widths[Module::Llm as usize].unwrap() > 0.09, "{check:?}");
        assert_eq!(check.module_half_widths[Module::Audio as usize], None);
    }
}
