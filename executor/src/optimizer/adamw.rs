//! Updates weights by `AdamW`, with learning rate schedules: linear warm-up, then constant or cosine decay.
//!
//! Parameter state (gradient means, squared gradient means, and a master weight if weights are stored as
//! bf16) is allocated at the first step, bucket by bucket like the gradients; frozen parameters have none. A
//! tied parameter on two stages has state on both; equal gradients keep both copies equal bit by bit.
//!
//! Steps count from 0, as in `transformers`: with `w` warm-up steps, step `s` has rate `peak * s / w`, so the
//! first step has rate 0 and step `w` the peak rate. From `w` to the last step the rate falls from the peak
//! to the minimum along a cosine: `minimum + (peak - minimum) * (1 + cos(pi * (s - w) / (steps - w))) / 2`.
//! From `steps` on it stays at the minimum, where `transformers` would let the cosine rise again.
//!
//! # Source
//! Loshchilov, Hutter: "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016, arXiv:1608.03983, one
//! cycle; warm-up: Goyal et al., 2017, arXiv:1706.02677.

use super::bucket_state::{BucketState, ParameterState, Precision};
use crate::error::{Error, Result};
use dflop_comm::StepContext;
use dflop_device::ops::adamw::{AdamW, UpdateRange};
use dflop_device::{Device, DeviceComm, Tensor};
use dflop_models::weights::ParameterSpec;
use dflop_models::{ParameterBucket, Parameters, Stage};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Parameters with weight decay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum DecayedParameters {
    /// Parameters with two or more axes; norms, biases and learned rows do not decay.
    #[default]
    Matrices,
    /// All parameters.
    All,
}

/// `AdamW` settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Decay factor for the gradient mean, in `0..1`.
    pub beta1: f64,
    /// Decay factor for the squared gradient mean, in `0..1`.
    pub beta2: f64,
    /// Epsilon added to the root of the squared gradient mean, above 0.
    pub epsilon: f64,
    /// Weight fraction, times the learning rate, that a step subtracts.
    pub weight_decay: f64,
    /// Parameters with weight decay.
    pub decayed: DecayedParameters,
    /// Number format for stored weights.
    pub precision: Precision,
}

impl Default for AdamWSettings {
    /// Betas 0.9 and 0.95, epsilon 1e-8, and weight decay 0.1 for matrices, as is common for large language
    /// models.
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            decayed: DecayedParameters::Matrices,
            precision: Precision::F32,
        }
    }
}

impl AdamWSettings {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`].
    pub fn check(&self) -> Result<()> {
        let rows = [
            ("beta1", self.beta1, (0.0..1.0).contains(&self.beta1)),
            ("beta2", self.beta2, (0.0..1.0).contains(&self.beta2)),
            ("epsilon", self.epsilon, self.epsilon > 0.0 && self.epsilon.is_finite()),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0.0 && self.weight_decay.is_finite()),
        ];
        match rows.into_iter().find(|(_, _, is_good)| !is_good) {
            Some((setting, value, _)) => {
                Err(Error::InvalidSetting { setting, reason: format!("{value} is out of range") })
            }
            None => Ok(()),
        }
    }

    /// Returns the weight decay for a parameter.
    ///
    /// - `weight_decay`: value for parameters that decay
    fn decay(&self, spec: &ParameterSpec, weight_decay: f64) -> f64 {
        match self.decayed {
            DecayedParameters::Matrices if spec.shape.len() < 2 => 0.0,
            _ => weight_decay,
        }
    }
}

/// Learning rate and weight decay of a parameter, where they differ from the settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterRate {
    /// Factor on the learning rate in every step, at least 0.
    pub learning_rate_factor: f64,
    /// Weight decay, if the parameter decays ([`AdamWSettings::decayed`]).
    pub weight_decay: f64,
}

/// `AdamW` with the state for all parameters on a rank.
pub struct AdamWOptimizer<D: Device> {
    settings: AdamWSettings,
    /// Number of steps taken.
    steps: u64,
    /// Number of steps that updated nothing.
    skipped: u64,
    /// States by stage and bucket; empty before the first step.
    states: Vec<Vec<BucketState<D>>>,
    /// Ranks that share the states of a stage; empty if every replica has complete states.
    replicas: Vec<Option<Arc<dyn DeviceComm<D>>>>,
    /// Rates that differ from the settings, by parameter name.
    rates: BTreeMap<String, ParameterRate>,
}

impl<D: Device> AdamWOptimizer<D> {
    /// Creates an optimizer with step count 0.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a setting is out of range.
    pub fn new(settings: AdamWSettings) -> Result<Self> {
        settings.check()?;
        let (states, replicas, rates) = (Vec::new(), Vec::new(), BTreeMap::new());
        Ok(Self { settings, steps: 0, skipped: 0, states, replicas, rates })
    }

    /// Returns the settings.
    #[must_use]
    pub const fn settings(&self) -> &AdamWSettings {
        &self.settings
    }

    /// Returns the number of steps taken.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the number of steps taken that updated nothing, because a loss or a gradient was not finite.
    #[must_use]
    pub const fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Starts a step with the stage gradients; [`confirm`](Self::confirm) counts it. Every call must pass the
    /// same stages in the same order.
    ///
    /// Weights that other replicas update are gathered while operations continue.
    ///
    /// - `clip`: `f64`, gradient norm and factor; nothing is updated if the factor is NaN
    ///
    /// # Errors
    /// [`Error::Device`] if the state of a parameter does not fit into memory.
    pub(crate) fn start(
        &mut self,
        stages: &mut [&mut (impl Stage<D> + ?Sized)],
        learning_rate: f64,
        clip: &Tensor<D>,
    ) -> Result<()> {
        self.allocate(stages.iter().map(|stage| &**stage))?;
        let AdamWSettings { beta1, beta2, epsilon, .. } = self.settings;
        // Bias correction counts updates from 1.
        let step = self.steps - self.skipped + 1;
        let adamw =
            AdamW { learning_rate, beta1, beta2, epsilon, weight_decay: 0.0, step, gradient_scale: 1.0 };
        let at = StepContext::step(self.steps, "gather weights");
        for (number, (stage, states)) in stages.iter_mut().zip(&mut self.states).enumerate() {
            let device = stage.device().clone();
            let ranges = ranges(&self.settings, &self.rates, learning_rate, stage.parameters());
            let replicas = stage_replicas(&self.replicas, number);
            let buckets = stage.parameters_mut().buckets_mut().iter_mut();
            // The last bucket first: it has the parameters that the next forward pass needs first.
            for ((bucket, state), ranges) in buckets.zip(states).zip(&ranges).rev() {
                state.step(&device, &adamw, ranges, clip, bucket)?;
                if let Some(replicas) = replicas {
                    state.gather_weights(&device, replicas, at, bucket)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the ranks that share the states of each stage; empty if every replica has complete states.
    pub(super) fn replicas(&self) -> &[Option<Arc<dyn DeviceComm<D>>>] {
        &self.replicas
    }

    /// Divides the states over the stage replicas, before the first step.
    pub(super) fn shard(&mut self, replicas: Vec<Option<Arc<dyn DeviceComm<D>>>>) {
        self.replicas = replicas;
    }

    /// Sets the rates of parameters that differ from the settings.
    pub(super) fn set_rates(&mut self, rates: BTreeMap<String, ParameterRate>) {
        self.rates = rates;
    }

    /// Counts a step whose factor was not NaN.
    pub(super) fn confirm(&mut self) {
        self.steps += 1;
    }

    /// Counts a step whose factor was NaN.
    pub(super) fn skip(&mut self) {
        self.steps += 1;
        self.skipped += 1;
    }

    /// Allocates states for stages that have none.
    fn allocate<'a, S: Stage<D> + ?Sized + 'a>(&mut self, stages: impl Iterator<Item = &'a S>) -> Result<()> {
        for (index, stage) in stages.enumerate() {
            if index < self.states.len() {
                continue;
            }
            let replicas = stage_replicas(&self.replicas, index);
            let of_bucket = |bucket: &ParameterBucket<D>| {
                let spec = &stage.parameters().specs()[bucket.parameters[0]];
                let what = || format!("optimizer state of tensor `{}`", spec.name);
                let state = BucketState::new(stage.device(), bucket, self.settings.precision, replicas);
                state.map_err(|error| error.while_allocating(what))
            };
            let states = stage.parameters().buckets().iter().map(of_bucket).collect::<Result<_, _>>()?;
            self.states.push(states);
        }
        Ok(())
    }

    /// Copies the state of a bucket to the host, if it has run a step; collective over the replicas that
    /// share it.
    ///
    /// - `number`: stage index in the stages passed to [`start`](Self::start)
    /// - `is_needed`: whether this rank needs it
    pub(crate) fn state(
        &self,
        (number, stage): (usize, &(impl Stage<D> + ?Sized)),
        bucket: usize,
        is_needed: bool,
    ) -> Result<Option<ParameterState<Vec<f32>>>> {
        let Some(state) = self.states.get(number).and_then(|states| states.get(bucket)) else {
            return Ok(None);
        };
        // Weight gathers in progress come first, on all replicas alike.
        stage.parameters().wait_all_values()?;
        let len = stage.parameters().buckets()[bucket].len();
        let at = StepContext::step(self.steps, "gather optimizer state");
        state.whole(stage.device(), stage_replicas(&self.replicas, number), at, (len, is_needed))
    }

    /// Replaces all states by the parameter states for every stage, and sets the numbers of completed and
    /// skipped steps.
    ///
    /// # Errors
    /// [`Error::Device`] if the states do not fit into memory.
    pub(crate) fn restore<'a, S: Stage<D> + ?Sized + 'a>(
        &mut self,
        (steps, skipped): (u64, u64),
        stages: impl Iterator<Item = &'a S> + Clone,
        states: Vec<BTreeMap<String, ParameterState<Vec<f32>>>>,
    ) -> Result<()> {
        (self.steps, self.skipped) = (steps, skipped);
        // Before the first step there is no state.
        if steps == 0 {
            return Ok(());
        }
        self.allocate(stages.clone())?;
        for ((stage, own), states) in stages.zip(&mut self.states).zip(states) {
            for (bucket, own) in stage.parameters().buckets().iter().zip(own) {
                let named = |&index: &usize| states.get(&stage.parameters().specs()[index].name);
                let of_bucket: Option<Vec<_>> = bucket.parameters.iter().map(named).collect();
                if let Some(of_bucket) = of_bucket {
                    own.restore(stage.device(), &of_bucket)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the size of all states in bytes, for memory accounting.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.states.iter().flatten().map(BucketState::bytes).sum()
    }
}

/// Returns the ranks that share the state of a stage, if any.
fn stage_replicas<D: Device>(
    replicas: &[Option<Arc<dyn DeviceComm<D>>>],
    number: usize,
) -> Option<&dyn DeviceComm<D>> {
    replicas.get(number)?.as_deref()
}

/// Returns learning rate and weight decay for the elements in every bucket.
fn ranges<D: Device>(
    settings: &AdamWSettings,
    rates: &BTreeMap<String, ParameterRate>,
    learning_rate: f64,
    parameters: &Parameters<D>,
) -> Vec<Vec<UpdateRange>> {
    let common = ParameterRate { learning_rate_factor: 1.0, weight_decay: settings.weight_decay };
    let of_bucket = |bucket: &ParameterBucket<D>| {
        let mut first = 0;
        let mut ranges: Vec<UpdateRange> = Vec::new();
        for &index in &bucket.parameters {
            let spec = &parameters.specs()[index];
            let rate = rates.get(&spec.name).unwrap_or(&common);
            let elements = first..first + spec.elements();
            first = elements.end;
            let own = UpdateRange {
                elements,
                learning_rate: learning_rate * rate.learning_rate_factor,
                weight_decay: settings.decay(spec, rate.weight_decay),
            };
            match ranges.last_mut() {
                Some(last) if is_same(last, &own) => last.elements.end = own.elements.end,
                _ => ranges.push(own),
            }
        }
        ranges
    };
    parameters.buckets().iter().map(of_bucket).collect()
}

/// Returns whether two ranges are updated alike, bit by bit.
fn is_same(one: &UpdateRange, other: &UpdateRange) -> bool {
    let bits = |range: &UpdateRange| [range.learning_rate, range.weight_decay].map(f64::to_bits);
    bits(one) == bits(other)
}

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

    #[test]
    fn settings_out_of_range_are_named() {
        let good = AdamWSettings::default();
        for (settings, expected) in [
            (AdamWSettings { beta1: 1.0, ..good }, "`beta1`: 1 is"),
            (AdamWSettings { beta2: -0.1, ..good }, "`beta2`: -0.1 is"),
            (AdamWSettings { epsilon: 0.0, ..good }, "`epsilon`: 0 is"),
            (AdamWSettings { weight_decay: f64::INFINITY, ..good }, "`weight_decay`: inf is"),
        ] {
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        good.check().unwrap();
    }

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
