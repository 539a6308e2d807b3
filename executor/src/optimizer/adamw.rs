//! Updates the stages of a rank with `AdamW`.
//!
//! The state of a parameter (means of gradients and of their squares, and a master weight if weights are
//! stored as bf16) is created at its first step; frozen parameters have none. A tied parameter on two stages
//! has state on both; the same gradients keep both copies equal bit by bit.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::error::{Error, Result};
use dflop_device::ops::adamw::AdamW;
use dflop_device::{Buffer, Device};
use dflop_models::Stage;
use dflop_models::weights::ParameterSpec;

/// Number format that weights are stored in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The device's own format; weights are updated directly.
    #[default]
    F32,
    /// bf16; master weights in f32 are updated, and the weights rounded from them.
    Bf16,
}

/// Parameters that weight decay applies to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum DecayedParameters {
    /// Parameters of two or more axes; norms, biases and learned rows do not decay.
    #[default]
    Matrices,
    /// All parameters.
    All,
}

/// Settings of `AdamW`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Decay of the mean of gradients, in `0..1`.
    pub beta1: f64,
    /// Decay of the mean of their squares, in `0..1`.
    pub beta2: f64,
    /// Added to the root of the mean of squares, above 0.
    pub epsilon: f64,
    /// Fraction of the weights, times the learning rate, that a step subtracts.
    pub weight_decay: f64,
    /// Parameters that weight decay applies to.
    pub decayed: DecayedParameters,
    /// Number format that weights are stored in.
    pub precision: Precision,
}

impl Default for AdamWSettings {
    /// Betas 0.9 and 0.95, epsilon 1e-8, and weight decay 0.1 of matrices, as is common for large language
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

    fn decay(&self, spec: &ParameterSpec) -> f64 {
        match self.decayed {
            DecayedParameters::Matrices if spec.shape.len() < 2 => 0.0,
            _ => self.weight_decay,
        }
    }
}

/// Optimizer state of a parameter.
pub(crate) struct ParameterState<D: Device> {
    pub(crate) mean: D::Floats,
    pub(crate) square: D::Floats,
    pub(crate) master: Option<D::Floats>,
}

/// `AdamW` with the state of all parameters of a rank.
pub struct AdamWOptimizer<D: Device> {
    settings: AdamWSettings,
    /// Number of steps taken.
    steps: u64,
    /// States by stage and parameter name.
    states: Vec<BTreeMap<String, ParameterState<D>>>,
}

impl<D: Device> AdamWOptimizer<D> {
    /// Creates an optimizer that has taken no step.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a setting is out of range.
    pub fn new(settings: AdamWSettings) -> Result<Self> {
        settings.check()?;
        Ok(Self { settings, steps: 0, states: Vec::new() })
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

    /// Takes a step with the gradients of the stages times `gradient_scale`. Every call gets the same stages
    /// in the same order.
    ///
    /// # Errors
    /// [`Error::Device`] if the state of a parameter does not fit.
    pub fn step(
        &mut self,
        stages: &mut [&mut Stage<D>],
        learning_rate: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        self.states.resize_with(stages.len().max(self.states.len()), BTreeMap::new);
        // Bias correction counts steps from 1.
        self.steps += 1;
        let AdamWSettings { beta1, beta2, epsilon, precision, .. } = self.settings;
        for (stage, states) in stages.iter_mut().zip(&mut self.states) {
            let device = stage.device().clone();
            for (spec, weights, gradient) in stage.parameters_mut().trained_mut() {
                let weight_decay = self.settings.decay(spec);
                let step = self.steps;
                let adamw =
                    AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, step, gradient_scale };
                let state = match states.entry(spec.name.clone()) {
                    Entry::Occupied(state) => state.into_mut(),
                    Entry::Vacant(place) => {
                        let what = || format!("optimizer state of tensor `{}`", spec.name);
                        let state = ParameterState::new(&device, weights, precision);
                        place.insert(state.map_err(|error| error.while_allocating(what))?)
                    }
                };
                state.step(&device, &adamw, weights, gradient)?;
            }
        }
        Ok(())
    }

    /// Returns the state of a parameter of a stage, if it has taken a step.
    pub(crate) fn state(&self, stage: usize, name: &str) -> Option<&ParameterState<D>> {
        self.states.get(stage)?.get(name)
    }

    /// Replaces all states and sets the number of steps taken.
    pub(crate) fn restore(&mut self, steps: u64, states: Vec<BTreeMap<String, ParameterState<D>>>) {
        (self.steps, self.states) = (steps, states);
    }

    /// Returns the number of elements of all states, for memory accounting.
    #[must_use]
    pub fn elements(&self) -> usize {
        let of = |state: &ParameterState<D>| {
            state.mean.len() + state.square.len() + state.master.as_ref().map_or(0, Buffer::len)
        };
        self.states.iter().flat_map(BTreeMap::values).map(of).sum()
    }
}

impl<D: Device> ParameterState<D> {
    fn new(device: &D, weights: &D::Floats, precision: Precision) -> dflop_device::Result<Self> {
        let zeros = || device.zeros_f32(weights.len());
        let master = match precision {
            Precision::F32 => None,
            Precision::Bf16 => {
                // Adding to zeros copies the weights in f32.
                let mut master = zeros()?;
                device.add(weights, &mut master)?;
                Some(master)
            }
        };
        Ok(Self { mean: zeros()?, square: zeros()?, master })
    }

    fn step(
        &mut self,
        device: &D,
        adamw: &AdamW,
        weights: &mut D::Floats,
        gradient: &D::Floats,
    ) -> dflop_device::Result<()> {
        let means = (&mut self.mean, &mut self.square);
        let Some(master) = &mut self.master else { return device.adamw(adamw, weights, gradient, means) };
        device.adamw(adamw, master, gradient, means)?;
        // Rounds the master weights into the format of the weights.
        device.zero(weights)?;
        device.add(master, weights)
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
}
