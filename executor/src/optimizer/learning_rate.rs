//! Learning rate schedules: linear warm-up, then constant or cosine decay.
//!
//! Steps count from 0, as in `transformers`: with `w` warm-up steps, step `s` has rate `peak * s / w`, so the
//! first step has rate 0 and step `w` the peak rate. From `w` to the last step the rate falls from the peak
//! to the minimum along a cosine: `minimum + (peak - minimum) * (1 + cos(pi * (s - w) / (steps - w))) / 2`.
//! From `steps` on it stays at the minimum, where `transformers` would let the cosine rise again.
//!
//! # Source
//! Loshchilov, Hutter: "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016, arXiv:1608.03983, one
//! cycle; warm-up: Goyal et al., 2017, arXiv:1706.02677.

use crate::error::{Error, Result};

/// Learning rate as a function of the step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRate {
    /// Peak rate.
    pub peak: f64,
    /// Number of steps until the peak; 0 for none.
    pub warmup_steps: u64,
    /// Decay after the warm-up.
    pub decay: Decay,
}

/// Learning rate decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    /// Constant at the peak.
    Constant,
    /// Half a cosine period.
    Cosine {
        /// Rate at the end, at most the peak.
        minimum: f64,
        /// Number of steps in the run, including warm-up.
        steps: u64,
    },
}

impl LearningRate {
    /// Creates a constant rate without warm-up.
    #[must_use]
    pub const fn constant(peak: f64) -> Self {
        Self { peak, warmup_steps: 0, decay: Decay::Constant }
    }

    /// Creates a warm-up and a cosine decay to zero, over a run with `steps` steps.
    #[must_use]
    pub const fn cosine(peak: f64, warmup_steps: u64, steps: u64) -> Self {
        Self { peak, warmup_steps, decay: Decay::Cosine { minimum: 0.0, steps } }
    }

    /// Checks that rates are finite and not negative, and the minimum is not above the peak.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] that names the invalid setting.
    pub fn check(&self) -> Result<()> {
        let invalid = |setting, reason| Err(Error::InvalidSetting { setting, reason });
        if !(self.peak.is_finite() && self.peak >= 0.0) {
            return invalid("learning_rate", format!("{} is not a finite rate of at least 0", self.peak));
        }
        let Decay::Cosine { minimum, steps } = self.decay else { return Ok(()) };
        if !(0.0..=self.peak).contains(&minimum) {
            let reason = format!("{minimum} is not between 0 and the peak {}", self.peak);
            return invalid("learning_rate_minimum", reason);
        }
        if steps < self.warmup_steps {
            let reason = format!("{} are more than the {steps} steps of the run", self.warmup_steps);
            return invalid("warmup_steps", reason);
        }
        Ok(())
    }

    /// Returns the rate for a step, counted from 0.
    #[must_use]
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step as f64 / self.warmup_steps as f64);
        }
        let Decay::Cosine { minimum, steps } = self.decay else { return self.peak };
        if step >= steps {
            return minimum;
        }
        let progress = (step - self.warmup_steps) as f64 / (steps - self.warmup_steps) as f64;
        // `libm` has the same bits on every platform.
        minimum + (self.peak - minimum) * 0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SGD rates with `lr=0.3` under `get_cosine_schedule_with_warmup(optimizer, 4, 20)` and
    /// `get_cosine_with_min_lr_schedule_with_warmup(optimizer, 4, 20, min_lr=0.03)` in transformers 5.23.0
    /// and torch 2.15.0, read from `param_groups` before each step: step, without and with a minimum.
    const TRANSFORMERS: [(u64, f64, f64); 9] = [
        (0, 0.0, 0.0),
        (1, 0.075, 0.075),
        (3, 0.224_999_999_999_999_98, 0.224_999_999_999_999_98),
        (4, 0.3, 0.3),
        (5, 0.297_117_792_060_484_55, 0.297_406_012_854_436_1),
        (9, 0.233_335_534_952_940_32, 0.240_001_981_457_646_29),
        (12, 0.15, 0.165),
        (19, 0.002_882_207_939_515_435_4, 0.032_593_987_145_563_89),
        (20, 0.0, 0.03),
    ];

    #[test]
    fn rates_are_those_of_transformers() {
        let to_zero = LearningRate::cosine(0.3, 4, 20);
        let to_minimum = LearningRate { decay: Decay::Cosine { minimum: 0.03, steps: 20 }, ..to_zero };
        for (step, zero, minimum) in TRANSFORMERS {
            assert!((to_zero.at(step) - zero).abs() < 1e-15, "{step}: {}", to_zero.at(step));
            assert!((to_minimum.at(step) - minimum).abs() < 1e-15, "{step}: {}", to_minimum.at(step));
        }
        assert_eq!(to_minimum.at(1000), 0.03);
    }

    #[test]
    fn a_constant_rate_may_warm_up() {
        assert_eq!(LearningRate::constant(0.5).at(0), 0.5);
        let warm = LearningRate { warmup_steps: 2, ..LearningRate::constant(0.5) };
        assert_eq!([0, 1, 2, 99].map(|step| warm.at(step)), [0.0, 0.25, 0.5, 0.5]);
    }

    #[test]
    fn rates_that_make_no_sense_are_named() {
        let minimum = |minimum| Decay::Cosine { minimum, steps: 20 };
        for (rate, expected) in [
            (LearningRate::constant(f64::NAN), "`learning_rate`: NaN"),
            (LearningRate::constant(-1.0), "`learning_rate`: -1"),
            (
                LearningRate { decay: minimum(0.4), ..LearningRate::constant(0.3) },
                "`learning_rate_minimum`: 0.4",
            ),
            (LearningRate::cosine(0.3, 21, 20), "`warmup_steps`: 21 are more than the 20 steps"),
        ] {
            let error = rate.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        LearningRate::cosine(0.3, 20, 20).check().unwrap();
        assert_eq!(LearningRate::cosine(0.3, 20, 20).at(20), 0.0);
    }
}
