//! Computes pipeline stage memory as a function of tokens, measured or from formulas.
//!
//! A stage takes `fixed + saved * tokens in flight + working * tokens of the microbatch that is computed`. A
//! profile's memory points give state and activations linear in layers, with what is outside the layers
//! charged to every stage, as in the paper. Without points the [`super::StateBytes`] and [`ActivationBytes`]
//! formulas apply.

use std::num::NonZeroU32;

use super::activation::{ActivationBytes, Execution, SavedActivations};
use super::fit::{FitError, MeasuredMemory};
use super::state::{StageLayers, StateBytes, encoder_parameters};
use crate::frozen::FrozenParts;
use crate::model::{EncoderSpec, LlmSpec, ModelSpec};
use crate::module::Module;

/// Bytes on one stage rank, by what they depend on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageByTokens {
    /// Bytes for parameters, gradients and optimizer state.
    pub fixed_bytes: f64,
    /// Optimizer state part of the fixed bytes, which data-parallel ranks may share (`ZeRO` stage 1), without
    /// expert optimizer state.
    pub optimizer_bytes: f64,
    /// Expert optimizer state part of the fixed bytes, which only the ranks with the same experts may share.
    pub expert_optimizer_bytes: f64,
    /// Activation bytes per token in every microbatch in flight.
    pub saved_bytes_per_token: f64,
    /// Additional bytes per token in the microbatch being computed.
    pub working_bytes_per_token: f64,
}

/// Memory model for a module, at any known TP degree.
#[derive(Debug, Clone)]
pub struct ModuleMemory {
    spec: ModuleSpec,
    llm_hidden: u32,
    state: StateBytes,
    is_sequence_parallel: bool,
    /// Expert-parallel degree: number of ranks that divide an LLM's experts.
    expert_parallel: NonZeroU32,
    /// Whether the layers are frozen, and whether an encoder's projector is.
    frozen: [bool; 2],
    measured: Option<MeasuredMemory>,
}

#[derive(Debug, Clone)]
enum ModuleSpec {
    Encoder(EncoderSpec),
    Llm(LlmSpec),
}

impl ModuleMemory {
    /// Computes memory from a model's sizes; `None` if the model has no such module.
    #[must_use]
    pub fn from_spec(model: &ModelSpec, module: Module, state: StateBytes) -> Option<Self> {
        let spec = match module {
            Module::Vision => ModuleSpec::Encoder(model.vision?.encoder),
            Module::Audio => ModuleSpec::Encoder(model.audio?.encoder),
            Module::Llm => ModuleSpec::Llm(model.llm),
        };
        let llm_hidden = model.llm.hidden;
        let (is_sequence_parallel, frozen) = (false, [false; 2]);
        let expert_parallel = NonZeroU32::MIN;
        Some(Self { spec, llm_hidden, state, is_sequence_parallel, expert_parallel, frozen, measured: None })
    }

    /// Sets whether norms and inputs are split over the TP ranks as well. Default: no. Measured points stay
    /// as they were measured.
    #[must_use]
    pub const fn sequence_parallel(mut self, is_sequence_parallel: bool) -> Self {
        self.is_sequence_parallel = is_sequence_parallel;
        self
    }

    /// Sets the number of ranks that divide an LLM's experts. Default: 1. Activations assume equal loads.
    /// Measured points stay as they were measured.
    #[must_use]
    pub const fn expert_parallel(mut self, degree: NonZeroU32) -> Self {
        self.expert_parallel = degree;
        self
    }

    /// Sets the frozen parts of the module: they hold only parameters, and a frozen encoder saves no
    /// activations except the input to a trained projector. A frozen module's memory is computed, not
    /// measured.
    #[must_use]
    pub fn frozen(mut self, parts: FrozenParts, module: Module) -> Self {
        self.frozen = [parts.is_tower_frozen(module), module != Module::Llm && parts.projector];
        self
    }

    /// Uses measured points for memory; formulas stay in force for layer inputs under recomputation.
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

    /// Returns a stage's memory.
    ///
    /// # Errors
    /// [`FitError::UnknownDegree`] if memory was measured, but not at this TP degree.
    pub fn stage(
        &self,
        tp: NonZeroU32,
        stage: StageLayers,
        saved: SavedActivations,
    ) -> Result<StageByTokens, FitError> {
        let is_sequence_parallel = self.is_sequence_parallel;
        let execution = Execution { tp, is_sequence_parallel, ..Execution::default() };
        let activations = match &self.spec {
            ModuleSpec::Encoder(spec) => ActivationBytes::for_encoder(spec, execution),
            ModuleSpec::Llm(spec) => ActivationBytes::for_llm(spec, execution),
        };
        let inputs = activations.input_bytes_per_token as f64 * f64::from(stage.layers);
        let state = self.state_bytes(tp, stage);
        let is_frozen = self.frozen.contains(&true);
        let Some(measured) = self.measured.as_ref().filter(|_| !is_frozen) else {
            let mut peak = activations.peak(stage, 1, 1, saved);
            if self.frozen[0] && !self.is_llm() {
                peak.working_set = activations.layer_bytes_per_token;
                // The projector's weights need its input.
                let is_saved = stage.is_last && !self.frozen[1];
                peak.activations = if is_saved { activations.input_bytes_per_token } else { 0 };
            }
            return Ok(StageByTokens {
                saved_bytes_per_token: peak.activations as f64,
                working_bytes_per_token: peak.working_set as f64,
                ..state
            });
        };
        let fixed_bytes = measured.state_bytes(stage.layers, tp.get())? as f64;
        let optimizer_bytes = state.optimizer_bytes.min(fixed_bytes);
        let expert_optimizer_bytes = state.expert_optimizer_bytes.min(fixed_bytes - optimizer_bytes);
        let fixed = StageByTokens { fixed_bytes, optimizer_bytes, expert_optimizer_bytes, ..state };
        let per_token = |layers: u32| -> Result<f64, FitError> {
            Ok(measured.activation_bytes(layers, tp.get(), 1, TOKENS)? as f64 / TOKENS as f64)
        };
        let all = per_token(stage.layers)?;
        Ok(match saved {
            SavedActivations::All => StageByTokens { saved_bytes_per_token: all, ..fixed },
            SavedActivations::LayerInputs => StageByTokens {
                // The formula may exceed the measurement, but inputs are part of all activations.
                saved_bytes_per_token: inputs.min(all),
                working_bytes_per_token: per_token(1)?.min(all),
                ..fixed
            },
        })
    }

    /// Returns a stage's state, by trained part.
    fn state_bytes(&self, tp: NonZeroU32, stage: StageLayers) -> StageByTokens {
        let of = |parameters: u64, is_frozen: bool| {
            let state = if is_frozen { StateBytes::FROZEN } else { self.state };
            let without = StateBytes { optimizer: 0, ..state };
            let all = state.for_parameters(parameters);
            [all as f64, (all - without.for_parameters(parameters)) as f64]
        };
        let [layers, projector] = self.parameters_by_part(tp, stage);
        let [fixed, optimizer] =
            [0, 1].map(|at| of(layers, self.frozen[0])[at] + of(projector, self.frozen[1])[at]);
        let [_, of_experts] = of(self.expert_parameters(tp, stage), self.frozen[0]);
        StageByTokens {
            fixed_bytes: fixed,
            optimizer_bytes: (optimizer - of_experts).max(0.0),
            expert_optimizer_bytes: of_experts,
            saved_bytes_per_token: 0.0,
            working_bytes_per_token: 0.0,
        }
    }

    /// Returns the number of trained parameters in a stage, on one rank in a TP group.
    #[must_use]
    pub fn trained_parameters(&self, tp: NonZeroU32, stage: StageLayers) -> u64 {
        let parts = self.parameters_by_part(tp, stage).into_iter().zip(self.frozen);
        parts.filter(|(_, is_frozen)| !is_frozen).map(|(parameters, _)| parameters).sum()
    }

    /// Returns the number of parameters in a stage without an encoder's projector, and in the projector.
    fn parameters_by_part(&self, tp: NonZeroU32, stage: StageLayers) -> [u64; 2] {
        let all = self.parameters(tp, stage);
        if self.is_llm() || !stage.is_last {
            return [all, 0];
        }
        let tower = self.parameters(tp, StageLayers { is_last: false, ..stage });
        [tower, all.saturating_sub(tower)]
    }

    /// Returns the number of trained expert parameters.
    #[must_use]
    pub fn trained_expert_parameters(&self, tp: NonZeroU32, stage: StageLayers) -> u64 {
        if self.frozen[0] { 0 } else { self.expert_parameters(tp, stage) }
    }

    /// Returns the number of parameters in a stage on one rank in a TP group, with the rank's share of the
    /// experts.
    #[must_use]
    pub fn parameters(&self, tp: NonZeroU32, stage: StageLayers) -> u64 {
        match &self.spec {
            ModuleSpec::Encoder(spec) => encoder_parameters(spec, self.llm_hidden, stage, tp),
            ModuleSpec::Llm(spec) => {
                let others = stage.parameters(spec, tp).saturating_sub(stage.expert_parameters(spec, tp));
                others.saturating_add(self.expert_parameters(tp, stage))
            }
        }
    }

    /// Returns the number of expert parameters on a rank, without shared experts, rounded up.
    fn expert_parameters(&self, tp: NonZeroU32, stage: StageLayers) -> u64 {
        match &self.spec {
            ModuleSpec::Encoder(_) => 0,
            ModuleSpec::Llm(spec) => {
                stage.expert_parameters(spec, tp).div_ceil(u64::from(self.expert_parallel.get()))
            }
        }
    }

    const fn is_llm(&self) -> bool {
        matches!(self.spec, ModuleSpec::Llm(_))
    }
}

/// Number of tokens for which activations are read, so large that rounding to whole bytes loses nothing.
const TOKENS: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryPoint;

    const TP: NonZeroU32 = NonZeroU32::MIN;

    fn stage(layers: u32) -> StageLayers {
        StageLayers { layers, first_layer: None, is_first: false, is_last: false }
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

    /// Optimizer state is 12 of 16 bytes; in a frozen encoder only the projector has optimizer state.
    #[test]
    fn state_is_divided_into_parts() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let memory = |module| ModuleMemory::from_spec(&spec, module, StateBytes::ADAM).unwrap();
        let llm = memory(Module::Llm).stage(TP, stage(7), SavedActivations::All).unwrap();
        assert!((llm.optimizer_bytes / llm.fixed_bytes - 0.75).abs() < 1e-9);
        let last = StageLayers { layers: 26, first_layer: None, is_first: true, is_last: true };
        let parts: FrozenParts = "vision".parse().unwrap();
        let tower = memory(Module::Vision).parameters(TP, StageLayers { is_last: false, ..last });
        let projector = memory(Module::Vision).parameters(TP, last) - tower;
        let frozen = memory(Module::Vision).frozen(parts, Module::Vision);
        assert_eq!(frozen.trained_parameters(TP, last), projector);
        let held = frozen.stage(TP, last, SavedActivations::All).unwrap();
        assert!((held.fixed_bytes - (2 * tower + 16 * projector) as f64).abs() < 1.0);
        assert!((held.saved_bytes_per_token - 2.0 * 1152.0).abs() < 1e-9, "the projector's input");
    }

    #[test]
    fn sequence_parallelism_divides_all_activations() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let memory =
            ModuleMemory::from_spec(&spec, Module::Llm, StateBytes::ADAM).unwrap().sequence_parallel(true);
        let saved = |tp| {
            let tp = NonZeroU32::new(tp).unwrap();
            memory.stage(tp, stage(7), SavedActivations::All).unwrap().saved_bytes_per_token
        };
        assert!((saved(1) / saved(4) - 4.0).abs() < 1e-9);
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

    /// Qwen3-30B-A3B: a layer has 128 experts with 3 x 2,048 x 768; ranks divide nothing else.
    #[test]
    fn expert_parallelism_divides_the_experts_alone() {
        let spec = ModelSpec::preset("internvl3.5-30b-a3b").unwrap();
        let memory = ModuleMemory::from_spec(&spec, Module::Llm, StateBytes::ADAM).unwrap();
        let experts = 7 * 128 * 3 * 2048 * 768;
        let shared = memory.clone().expert_parallel(NonZeroU32::new(8).unwrap());
        let (all, part) = (memory.parameters(TP, stage(7)), shared.parameters(TP, stage(7)));
        assert_eq!(all - part, experts - experts / 8);
        assert_eq!(shared.trained_expert_parameters(TP, stage(7)), experts / 8);
        let state = shared.stage(TP, stage(7), SavedActivations::All).unwrap();
        assert!((state.expert_optimizer_bytes - 12.0 * experts as f64 / 8.0).abs() < 1.0);
        assert!((state.fixed_bytes - 16.0 * part as f64).abs() < 1.0);
        assert!((state.optimizer_bytes - 12.0 * (part - experts / 8) as f64).abs() < 1.0);
    }
}
