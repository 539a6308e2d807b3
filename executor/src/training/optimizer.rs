//! `AdamW` over the stages of a rank.
//!
//! State of a parameter (mean of gradients and of their squares, and a master weight where weights are stored as bf16)
//! is made when the parameter takes its first step; frozen parameters have none. A tied parameter that two stages hold
//! has its state on both: the same gradient gives the same bits.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::device::{Buffer, Device};
use crate::error::{Error, Result};
use crate::ops::adamw::AdamW;
use crate::stage::Stage;
use crate::weights::ParameterSpec;

/// Numbers that weights are stored in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// As the device stores them: what is updated are the weights themselves.
    #[default]
    F32,
    /// bf16: what is updated are master weights of f32, from which the weights are rounded.
    Bf16,
}

/// Which parameters lose weight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Decayed {
    /// Those of two axes or more; norms, biases and learned rows do not.
    #[default]
    Matrices,
    /// All.
    All,
}

/// How weights are updated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerSettings {
    /// Decay of the mean of gradients, in `0..1`.
    pub beta1: f64,
    /// Decay of the mean of their squares, in `0..1`.
    pub beta2: f64,
    /// Added to the root of the mean of squares, above 0.
    pub epsilon: f64,
    /// Share of the weights, times the learning rate, that is taken off in a step.
    pub weight_decay: f64,
    /// Which parameters that is taken from.
    pub decayed: Decayed,
    /// How weights are stored.
    pub precision: Precision,
}

impl Default for OptimizerSettings {
    /// Betas 0.9 and 0.95, epsilon 1e-8 and a decay of 0.1 of matrices, as large language models are trained.
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            decayed: Decayed::Matrices,
            precision: Precision::F32,
        }
    }
}

impl OptimizerSettings {
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
            Decayed::Matrices if spec.shape.len() < 2 => 0.0,
            _ => self.weight_decay,
        }
    }
}

/// What the optimizer keeps of a parameter.
pub(super) struct State<D: Device> {
    pub(super) mean: D::Floats,
    pub(super) square: D::Floats,
    pub(super) master: Option<D::Floats>,
}

/// `AdamW` with the state of all parameters of a rank.
pub struct Optimizer<D: Device> {
    settings: OptimizerSettings,
    /// Steps taken.
    steps: u64,
    /// By stage and name.
    states: Vec<BTreeMap<String, State<D>>>,
}

impl<D: Device> Optimizer<D> {
    /// Makes an optimizer that has taken no step.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a setting is out of range.
    pub fn new(settings: OptimizerSettings) -> Result<Self> {
        settings.check()?;
        Ok(Self { settings, steps: 0, states: Vec::new() })
    }

    /// Returns the settings.
    #[must_use]
    pub const fn settings(&self) -> &OptimizerSettings {
        &self.settings
    }

    /// Returns how many steps were taken.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.steps
    }

    /// Takes a step with the gradients of the stages times `gradient_scale`. The stages are the same, in the same
    /// order, at every call.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is none for the state of a parameter.
    pub fn step(
        &mut self,
        stages: &mut [&mut Stage<D>],
        learning_rate: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        self.states.resize_with(stages.len().max(self.states.len()), BTreeMap::new);
        self.steps += 1;
        let OptimizerSettings { beta1, beta2, epsilon, precision, .. } = self.settings;
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
                        let what = || format!("state of the optimizer for tensor `{}`", spec.name);
                        let state = State::new(&device, weights, precision);
                        place.insert(state.map_err(|error| error.while_allocating(what))?)
                    }
                };
                state.step(&device, &adamw, weights, gradient)?;
            }
        }
        Ok(())
    }

    /// The state of a parameter of a stage, if it has taken a step.
    pub(super) fn state(&self, stage: usize, name: &str) -> Option<&State<D>> {
        self.states.get(stage)?.get(name)
    }

    /// Forgets all and goes on after so many steps, with these states.
    pub(super) fn restore(&mut self, steps: u64, states: Vec<BTreeMap<String, State<D>>>) {
        (self.steps, self.states) = (steps, states);
    }

    /// Returns the elements of all states, for an account of memory.
    #[must_use]
    pub fn elements(&self) -> usize {
        let of = |state: &State<D>| {
            state.mean.len() + state.square.len() + state.master.as_ref().map_or(0, Buffer::len)
        };
        self.states.iter().flat_map(BTreeMap::values).map(of).sum()
    }
}

impl<D: Device> State<D> {
    fn new(device: &D, weights: &D::Floats, precision: Precision) -> Result<Self> {
        let zeros = || device.zeros_f32(weights.len());
        let master = match precision {
            Precision::F32 => None,
            Precision::Bf16 => {
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
    ) -> Result<()> {
        let means = (&mut self.mean, &mut self.square);
        let Some(master) = &mut self.master else { return device.adamw(adamw, weights, gradient, means) };
        device.adamw(adamw, master, gradient, means)?;
        device.zero(weights)?;
        device.add(master, weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        let good = OptimizerSettings::default();
        for (settings, expected) in [
            (OptimizerSettings { beta1: 1.0, ..good }, "`beta1`: 1 is"),
            (OptimizerSettings { beta2: -0.1, ..good }, "`beta2`: -0.1 is"),
            (OptimizerSettings { epsilon: 0.0, ..good }, "`epsilon`: 0 is"),
            (OptimizerSettings { weight_decay: f64::INFINITY, ..good }, "`weight_decay`: inf is"),
        ] {
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        good.check().unwrap();
    }
}
