//! Learns from the microbatches for one module, or for all modules together.

use super::estimator::{Equation, Factors, factors};
use super::microbatch_fit::{MicrobatchFit, SlowRank, Timed, slow_ranks};
use super::table::{BINS, CorrectionTable, FACTOR_MAX, FACTOR_ONE, MicrobatchConstants, Observation, bin};
use crate::error::{Error, Result};
use crate::{MODULES_MAX, Module};

/// Minimum number of observations for fitting a floor, a constant and scales.
const FIT_MIN: usize = 8;
/// Maximum number of recent observations used in the fit.
const FIT_MAX: usize = 1024;
/// Maximum ratio of fit errors to prediction errors, and minimum difference between the two: noise can make a
/// fit slightly better.
const FIT_GAIN: f64 = 0.85;
const GAIN_MIN: f64 = 0.005;

/// Observation with samples sorted into bins.
#[derive(Debug, Clone)]
pub(super) struct BinnedObservation {
    pub(super) module: Option<Module>,
    constants: MicrobatchConstants,
    pub(super) timed: Timed,
    /// Module, bin, and nanoseconds for each sample.
    bins: Vec<(Module, usize, f64)>,
}

/// Result learned from the observations for one module, or for all modules together.
pub(super) struct Learned {
    /// Microbatch constants, if they differ from the known constants.
    pub(super) constants: Option<MicrobatchConstants>,
    pub(super) slow_ranks: Vec<SlowRank>,
    /// Whether predictions are off as a whole, so that floor, constant and scales were fitted.
    pub(super) is_off: bool,
    fit: MicrobatchFit,
    /// Shape factors, on top of the scale; none are learned from all modules together.
    shapes: Option<Factors>,
}

impl BinnedObservation {
    pub(super) fn new(observation: &Observation) -> Result<Self> {
        let &Observation { module, rank, measured_ns, constants, ref samples } = observation;
        let mut by_bin = [[0.0; BINS]; MODULES_MAX];
        let mut added_ns = [0.0; MODULES_MAX];
        for sample in samples {
            by_bin[sample.module as usize][bin(sample.size)] += sample.ns as f64;
            added_ns[sample.module as usize] += sample.ns as f64;
        }
        let predicted_ns: f64 = added_ns.iter().sum();
        if predicted_ns <= 0.0 || measured_ns == 0 {
            let name = module.map_or("all modules", Module::name);
            let reason = format!(
                "expected times above 0 for a microbatch of {name}, found {predicted_ns} ns predicted and \
                 {measured_ns} ns measured"
            );
            return Err(Error::Correction { reason });
        }
        let of_module = |module: Module| {
            let bins = by_bin[module as usize].into_iter().enumerate().filter(|(_, ns)| *ns > 0.0);
            bins.map(move |(bin, ns)| (module, bin, ns)).collect::<Vec<_>>()
        };
        let bins = Module::ALL.into_iter().flat_map(of_module).collect();
        let timed = Timed { measured_ns: measured_ns as f64, added_ns, rank };
        Ok(Self { module, constants, timed, bins })
    }

    /// Returns the predicted time, with a table or without.
    pub(super) fn predicted_ns(&self, table: Option<&CorrectionTable>) -> f64 {
        let Some(table) = table else { return MicrobatchFit::known(self.constants).ns(&self.timed.added_ns) };
        let learned = self.module.map_or(table.whole_constants(), |module| table.constants(module));
        let mut corrected_ns = [0.0; MODULES_MAX];
        for &(module, bin, ns) in &self.bins {
            let factor = f64::from(table.factor_of_bin(module, bin)) / f64::from(FACTOR_ONE);
            corrected_ns[module as usize] += factor * ns;
        }
        MicrobatchFit::known(learned.unwrap_or(self.constants)).ns(&corrected_ns)
    }
}

impl Learned {
    /// Learns from observations for the same module; `None` without observations.
    pub(super) fn new(observed: &[&BinnedObservation]) -> Option<Self> {
        let observed = &observed[observed.len().saturating_sub(FIT_MAX)..];
        // An encoder without work in a microbatch adds no constant to it.
        let of_all = observed.iter().map(|one| one.constants);
        let known = of_all.max_by_key(|known| (known.base_ns, known.floor_ns))?;
        let mut timed: Vec<Timed> = observed.iter().map(|one| one.timed).collect();
        let (mut fit, mut slow, mut is_off) = (MicrobatchFit::known(known), Vec::new(), false);
        if timed.len() >= FIT_MIN {
            let mut fitted = MicrobatchFit::new(&timed, known);
            slow = slow_ranks(&timed, &fitted);
            if !slow.is_empty() {
                for one in &mut timed {
                    let own = slow.iter().find(|slow| slow.rank == one.rank);
                    one.measured_ns /= own.map_or(1.0, |slow| slow.factor);
                }
                fitted = MicrobatchFit::new(&timed, known);
            }
            let (error, left) = (fit.error(&timed), fitted.error(&timed));
            if left < FIT_GAIN * error && error - left > GAIN_MIN {
                (fit, is_off) = (fitted, true);
            }
        }
        let constants = Some(fit.constants()).filter(|constants| *constants != known);
        let shapes = observed[0].module.map(|module| shape_factors(module, observed, &timed, &fit));
        Some(Self { constants, slow_ranks: slow, is_off, fit, shapes })
    }

    /// Writes a module's factors into a table.
    pub(super) fn write(&self, table: &mut CorrectionTable, module: Module) {
        let scale = self.fit.scales[module as usize];
        for bin in 0..BINS {
            let of_shapes = |shapes: &Factors| shapes.bins.get(&bin).copied().unwrap_or(shapes.common);
            table.put(module, bin, to_fixed_point(scale * self.shapes.as_ref().map_or(1.0, of_shapes)));
        }
    }
}

/// Estimates the shape factors from what a fit leaves, above the floor.
fn shape_factors(
    module: Module,
    observed: &[&BinnedObservation],
    timed: &[Timed],
    fit: &MicrobatchFit,
) -> Factors {
    let scale = fit.scales[module as usize];
    let equation = |(one, timed): (&&BinnedObservation, &Timed)| {
        let added_ns = scale * timed.added_ns[module as usize];
        let is_told = fit.is_above_floor(&timed.added_ns) && added_ns > 0.0;
        is_told.then(|| Equation {
            target: (timed.measured_ns - fit.base_ns) / added_ns - 1.0,
            shares: one.bins.iter().map(|(_, bin, ns)| (*bin, scale * ns / added_ns)).collect(),
        })
    };
    factors(&observed.iter().zip(timed).filter_map(equation).collect::<Vec<Equation>>())
}

/// Converts a factor to a fraction of [`FACTOR_ONE`], within the limits.
fn to_fixed_point(factor: f64) -> u32 {
    let (one, most) = (f64::from(FACTOR_ONE), f64::from(FACTOR_MAX));
    (factor.clamp(1.0 / most, most) * one).round() as u32
}
