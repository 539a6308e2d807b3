//! Gives the memory of a pipeline stage as a function of its tokens, measured or computed.
//!
//! A stage takes `fixed + saved * tokens in flight + working * tokens of the microbatch that is computed`.
//! Memory points of a profile give state and activations linear in layers, with what is outside the layers
//! charged to every stage, as in the paper. Without points the formulas of [`super::StateBytes`] and
//! [`ActivationBytes`] apply.

use std::num::NonZeroU32;

use super::activation::{ActivationBytes, Execution, SavedActivations};
use super::fit::{FitError, MeasuredMemory};
use super::state::{StageLayers, StateBytes, encoder_parameters};
use crate::model::{EncoderSpec, LlmSpec, ModelSpec};
use crate::module::Module;

/// Bytes of one rank of a stage, by what they depend on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageByTokens {
    /// Bytes of parameters, gradients and optimizer state.
    pub fixed_bytes: f64,
    /// Bytes of activations for each token of every microbatch in flight.
    pub saved_bytes_per_token: f64,
    /// Further bytes for each token of the microbatch that is being computed.
    pub working_bytes_per_token: f64,
}

/// Memory model of one module, at any known TP degree.
#[derive(Debug, Clone)]
pub struct ModuleMemory {
    spec: ModuleSpec,
    llm_hidden: u32,
    state: StateBytes,
    measured: Option<MeasuredMemory>,
}

#[derive(Debug, Clone)]
enum ModuleSpec {
    Encoder(EncoderSpec),
    Llm(LlmSpec),
}

impl ModuleMemory {
    /// Computes memory from the sizes of a model; `None` if the model has no such module.
    #[must_use]
    pub fn from_spec(model: &ModelSpec, module: Module, state: StateBytes) -> Option<Self> {
        let spec = match module {
            Module::Vision => ModuleSpec::Encoder(model.vision?.encoder),
            Module::Audio => ModuleSpec::Encoder(model.audio?.encoder),
            Module::Llm => ModuleSpec::Llm(model.llm),
        };
        Some(Self { spec, llm_hidden: model.llm.hidden, state, measured: None })
    }

    /// Takes memory from measured points; formulas stay in force for layer inputs under recomputation.
    #[must_use]
    pub fn measured(mut self, points: MeasuredMemory) -> Self {
        self.measured = Some(points);
        self
    }

    /// Returns whether memory comes from measured points.
    #[must_use]
    pub const fn is_measured(&self) -> bool {
        self.measured.is_some()
    }

    /// Returns the memory of a stage.
    ///
    /// # Errors
    /// [`FitError::UnknownDegree`] if memory was measured, but not at this TP degree.
    pub fn stage(
        &self,
        tp: NonZeroU32,
        stage: StageLayers,
        saved: SavedActivations,
    ) -> Result<StageByTokens, FitError> {
        let execution = Execution { tp, ..Execution::default() };
        let activations = match &self.spec {
            ModuleSpec::Encoder(spec) => ActivationBytes::for_encoder(spec, execution),
            ModuleSpec::Llm(spec) => ActivationBytes::for_llm(spec, execution),
        };
        let inputs = activations.input_bytes_per_token as f64 * f64::from(stage.layers);
        let Some(measured) = &self.measured else {
            let peak = activations.peak(stage.layers, 1, 1, saved, self.is_llm() && stage.is_last);
            return Ok(StageByTokens {
                fixed_bytes: self.state.for_parameters(self.parameters(tp, stage)) as f64,
                saved_bytes_per_token: peak.activations as f64,
                working_bytes_per_token: peak.working_set as f64,
            });
        };
        let fixed_bytes = measured.state_bytes(stage.layers, tp.get())? as f64;
        let per_token = |layers: u32| -> Result<f64, FitError> {
            Ok(measured.activation_bytes(layers, tp.get(), 1, TOKENS)? as f64 / TOKENS as f64)
        };
        let all = per_token(stage.layers)?;
        Ok(match saved {
            SavedActivations::All => {
                StageByTokens { fixed_bytes, saved_bytes_per_token: all, working_bytes_per_token: 0.0 }
            }
            SavedActivations::LayerInputs => StageByTokens {
                fixed_bytes,
                // The formula may exceed the measurement, but inputs are part of all activations.
                saved_bytes_per_token: inputs.min(all),
                working_bytes_per_token: per_token(1)?.min(all),
            },
        })
    }

    /// Returns the parameters of a stage on one rank of a TP group.
    #[must_use]
    pub fn parameters(&self, tp: NonZeroU32, stage: StageLayers) -> u64 {
        match &self.spec {
            ModuleSpec::Encoder(spec) => encoder_parameters(spec, self.llm_hidden, stage, tp),
            ModuleSpec::Llm(spec) => stage.parameters(spec, tp),
        }
    }

    const fn is_llm(&self) -> bool {
        matches!(self.spec, ModuleSpec::Llm(_))
    }
}

/// Number of tokens that activations are read for, so large that rounding to whole bytes loses nothing.
const TOKENS: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryPoint;

    const TP: NonZeroU32 = NonZeroU32::MIN;

    fn stage(layers: u32) -> StageLayers {
        StageLayers { layers, is_first: false, is_last: false }
    }

    #[test]
    fn formulas_are_those_of_state_and_activations() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let memory = ModuleMemory::from_spec(&spec, Module::Llm, StateBytes::ADAM).unwrap();
        let inner = memory.stage(TP, stage(7), SavedActivations::All).unwrap();
        assert!((inner.fixed_bytes - 16.0 * memory.parameters(TP, stage(7)) as f64).abs() < 1.0);
        let inputs = memory.stage(TP, stage(7), SavedActivations::LayerInputs).unwrap();
        assert!((inputs.saved_bytes_per_token - 7.0 * 7168.0).abs() < 1e-6);
        assert!((inputs.working_bytes_per_token * 7.0 - inner.saved_bytes_per_token).abs() < 1e-6);
        let audio = ModuleMemory::from_spec(&spec, Module::Audio, StateBytes::ADAM);
        assert!(audio.is_none(), "the model has no audio encoder");
    }

    #[test]
    fn measured_points_replace_the_formulas() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let point = |layers: u32| MemoryPoint {
            layers,
            tp: 1,
            batch: 1,
            sequence: 1024,
            state_bytes: 1e9 + 2e9 * f64::from(layers),
            activation_bytes: (5e6 + 3e6 * f64::from(layers)) * 1024.0 / 1000.0,
        };
        let memory = ModuleMemory::from_spec(&spec, Module::Llm, StateBytes::ADAM).unwrap();
        let memory = memory.measured(MeasuredMemory::fit(&[point(3), point(4)]).unwrap());
        let found = memory.stage(TP, stage(10), SavedActivations::All).unwrap();
        assert!((found.fixed_bytes / 21e9 - 1.0).abs() < 1e-6);
        assert!((found.saved_bytes_per_token / 35e3 - 1.0).abs() < 1e-6);
        let two = NonZeroU32::new(2).unwrap();
        assert!(matches!(
            memory.stage(two, stage(10), SavedActivations::All),
            Err(FitError::UnknownDegree { .. })
        ));
    }
}
