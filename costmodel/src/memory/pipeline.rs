//! Predicts the memory for every stage in a pipeline, from a layer split and a TP degree per module.
//!
//! Encoder stages come before LLM stages; several encoders run in parallel. If a module's memory was
//! measured, the measured points replace the formulas for state and activations.

use std::num::NonZeroU32;

use super::{
    ActivationBytes, Execution, FitError, MeasuredMemory, Peak, SavedActivations, StageLayers, StateBytes,
    state,
};
use crate::Module;
use crate::error::{Error, Result};
use crate::frozen::FrozenParts;
use crate::memory::microbatches_in_flight;
use crate::model::{EncoderSpec, ModelSpec};

/// Module layout in a pipeline, and the tokens that the module processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleStages {
    /// Transformer layers in each pipeline stage, in order; they add up to the module's layers.
    pub layers: Vec<u32>,
    /// TP degree and kernels for every stage.
    pub execution: Execution,
    /// Tokens inside the module in the largest microbatch, on one rank: encoder patches or LLM positions.
    pub microbatch_tokens: u64,
}

/// Memory for a pipeline stage, on the fullest rank in the TP group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageMemory {
    /// Module that the stage belongs to.
    pub module: Module,
    /// Stage within the module, counted from 0.
    pub stage: u32,
    /// Number of transformer layers in the stage.
    pub layers: u32,
    /// Number of parameters in the stage, including frozen parameters.
    pub parameters: u64,
    /// Microbatches whose activations the stage holds at once.
    pub in_flight: u32,
    /// Peak memory in bytes.
    pub peak: Peak,
    /// Whether state and activations come from measured points.
    pub is_measured: bool,
}

/// Memory model for training a model in a pipeline.
///
/// # Examples
/// ```
/// use dflop_costmodel::ModelSpec;
/// use dflop_costmodel::memory::{Execution, ModuleStages, PipelineMemory};
///
/// let spec = ModelSpec::preset("qwen2.5-vl-7b")?;
/// let layout = |layers: &[u32], microbatch_tokens| ModuleStages {
///     layers: layers.to_vec(),
///     execution: Execution::default(),
///     microbatch_tokens,
/// };
/// let layouts = [layout(&[32], 4096), layout(&[14, 14], 8192)];
/// let stages = PipelineMemory::new(&spec).microbatches(8).stages(&layouts)?;
/// assert_eq!(stages.len(), 3);
/// assert_eq!(stages[0].in_flight, 3);
/// # Ok::<(), dflop_costmodel::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PipelineMemory<'a> {
    spec: &'a ModelSpec,
    frozen: FrozenParts,
    saved_activations: SavedActivations,
    /// Modules in which every layer with a multiple of a number is recomputed.
    recomputed: [Option<NonZeroU32>; Module::ALL.len()],
    trained_state: StateBytes,
    buffer_bytes: u64,
    microbatches: u32,
    measured: Vec<(Module, MeasuredMemory)>,
}

/// Stage position within a module.
struct StagePosition {
    layers: u32,
    first_layer: u32,
    is_first: bool,
    is_last: bool,
    in_flight: u32,
}

impl StagePosition {
    const fn stage(&self) -> StageLayers {
        let Self { layers, first_layer, is_first, is_last, .. } = *self;
        StageLayers { layers, first_layer: Some(first_layer), is_first, is_last }
    }
}

impl<'a> PipelineMemory<'a> {
    /// Creates a memory model with everything trained by Adam, all activations saved, one microbatch, no
    /// buffers and no measured points.
    #[must_use]
    pub const fn new(spec: &'a ModelSpec) -> Self {
        Self {
            spec,
            frozen: FrozenParts { vision: false, audio: false, projector: false, llm: false },
            saved_activations: SavedActivations::All,
            recomputed: [None; Module::ALL.len()],
            trained_state: StateBytes::ADAM,
            buffer_bytes: 0,
            microbatches: 1,
            measured: Vec::new(),
        }
    }

    /// Sets the frozen parts, which hold only parameters. Default: none.
    ///
    /// A frozen tower saves no activations except the output; a frozen LLM is assumed to save as many as a
    /// trained LLM.
    #[must_use]
    pub const fn frozen(mut self, frozen: FrozenParts) -> Self {
        self.frozen = frozen;
        self
    }

    /// Sets the activations saved for the backward passes. Default: all.
    #[must_use]
    pub const fn saved_activations(mut self, saved_activations: SavedActivations) -> Self {
        self.saved_activations = saved_activations;
        self
    }

    /// Recomputes every layer of a module whose number is a multiple of `every`; such a layer saves only the
    /// input. Default: [`Self::saved_activations`] holds for all layers.
    #[must_use]
    pub const fn recomputed_layers(mut self, module: Module, every: NonZeroU32) -> Self {
        self.recomputed[module as usize] = Some(every);
        self
    }

    /// Sets the state bytes per trained parameter. Default: [`StateBytes::ADAM`].
    #[must_use]
    pub const fn trained_state(mut self, state: StateBytes) -> Self {
        self.trained_state = state;
        self
    }

    /// Sets the bytes that every stage needs for communication, workspaces and fragmentation. Default: 0.
    #[must_use]
    pub const fn buffer_bytes(mut self, bytes: u64) -> Self {
        self.buffer_bytes = bytes;
        self
    }

    /// Sets the number of microbatches in a step on each DP rank. Default: 1.
    #[must_use]
    pub const fn microbatches(mut self, microbatches: u32) -> Self {
        self.microbatches = microbatches;
        self
    }

    /// Uses measured points for a module's state and activations.
    ///
    /// Points are for a run with everything trained and all activations saved. With frozen parts, or with
    /// recomputed layers, the formulas stay in force.
    #[must_use]
    pub fn measured(mut self, module: Module, points: MeasuredMemory) -> Self {
        self.measured.push((module, points));
        self
    }

    /// Returns the memory for all stages.
    ///
    /// - `layouts`: a layout per module, encoders first
    ///
    /// # Errors
    /// [`Error::Incompatible`] if a module has no layout, or the stage layers do not add up to the module's
    /// layers; [`Error::Memory`] if a module was measured, but not at this TP degree.
    pub fn stages(&self, layouts: &[ModuleStages]) -> Result<Vec<StageMemory>> {
        let modules: Vec<(Module, u32)> = self.modules().collect();
        if layouts.len() != modules.len() {
            return Err(self.incompatible(format!(
                "expected {} layouts, one per module, found {}",
                modules.len(),
                layouts.len()
            )));
        }
        let llm_stages = layouts[layouts.len() - 1].layers.len() as u32;
        let mut all = Vec::new();
        for ((module, layers), layout) in modules.into_iter().zip(layouts) {
            let found: u64 = layout.layers.iter().map(|&layers| u64::from(layers)).sum();
            if found != u64::from(layers) || layout.layers.is_empty() {
                return Err(self.incompatible(format!(
                    "stages of {module} have {found} layers in all, it has {layers}"
                )));
            }
            let own = layout.layers.len() as u32;
            // An encoder stage keeps a microbatch until it has passed all later stages, LLM stages included.
            let stages = if module == Module::Llm { own } else { own + llm_stages };
            let mut first_layer = 0;
            for (stage, &layers) in (0..own).zip(&layout.layers) {
                let in_flight = microbatches_in_flight(stage, stages, self.microbatches);
                let (is_first, is_last) = (stage == 0, stage + 1 == own);
                let position = StagePosition { layers, first_layer, is_first, is_last, in_flight };
                all.push(self.stage(module, stage, &position, layout)?);
                first_layer += layers;
            }
        }
        Ok(all)
    }

    fn modules(&self) -> impl Iterator<Item = (Module, u32)> {
        let encoders = self.spec.encoders().map(|(module, encoder, _)| (module, encoder.layers));
        encoders.chain([(Module::Llm, self.spec.llm.layers)])
    }

    fn incompatible(&self, problem: String) -> Error {
        Error::Incompatible { name: self.spec.name.clone(), problem }
    }

    fn stage(
        &self,
        module: Module,
        stage: u32,
        position: &StagePosition,
        layout: &ModuleStages,
    ) -> Result<StageMemory> {
        let encoder = self.spec.encoders().find(|(of, ..)| *of == module).map(|(_, encoder, _)| encoder);
        let (parameters, mut peak) = match &encoder {
            Some(encoder) => self.encoder(module, encoder, position, layout),
            None => self.llm(position, layout),
        };
        let is_measured = self.take_measured(module, position, layout, &mut peak)?;
        peak.buffers = self.buffer_bytes;
        let StagePosition { layers, in_flight, .. } = *position;
        Ok(StageMemory { module, stage, layers, parameters, in_flight, peak, is_measured })
    }

    fn encoder(
        &self,
        module: Module,
        spec: &EncoderSpec,
        position: &StagePosition,
        layout: &ModuleStages,
    ) -> (u64, Peak) {
        let Execution { tp, .. } = layout.execution;
        let count = |is_last| {
            let stage = StageLayers { is_last, ..position.stage() };
            state::encoder_parameters(spec, self.spec.llm.hidden, stage, tp)
        };
        let tower = count(false);
        let projector = if position.is_last { count(true).saturating_sub(tower) } else { 0 };
        let is_frozen = self.frozen.is_tower_frozen(module);
        let activations = ActivationBytes::for_encoder(spec, layout.execution);
        let tokens = layout.microbatch_tokens;
        let mut peak = self.activations(module, &activations, position, tokens);
        if is_frozen {
            let output = activations.input_bytes_per_token.saturating_mul(tokens);
            peak.working_set = activations.layer_bytes_per_token.saturating_mul(tokens);
            // The projector's weights need its input; a frozen projector after a frozen tower needs nothing.
            let is_saved = position.is_last && !self.frozen.projector;
            peak.activations =
                if is_saved { output.saturating_mul(u64::from(position.in_flight)) } else { 0 };
        }
        peak.state = self
            .state_bytes(is_frozen, tower)
            .saturating_add(self.state_bytes(self.frozen.projector, projector));
        (tower.saturating_add(projector), peak)
    }

    fn llm(&self, position: &StagePosition, layout: &ModuleStages) -> (u64, Peak) {
        let stage = position.stage();
        let parameters = stage.parameters(&self.spec.llm, layout.execution.tp);
        let activations = ActivationBytes::for_llm(&self.spec.llm, layout.execution);
        let tokens = layout.microbatch_tokens;
        let mut peak = self.activations(Module::Llm, &activations, position, tokens);
        peak.state = self.state_bytes(self.frozen.llm, parameters);
        (parameters, peak)
    }

    /// Returns the activations of a stage, with the layers that its module recomputes.
    fn activations(
        &self,
        module: Module,
        activations: &ActivationBytes,
        position: &StagePosition,
        tokens: u64,
    ) -> Peak {
        let peak = |saved| activations.peak(position.stage(), tokens, position.in_flight, saved);
        let Some(every) = self.recomputed[module as usize] else { return peak(self.saved_activations) };
        let (all, again) = (peak(SavedActivations::All), peak(SavedActivations::LayerInputs));
        let spared = all.activations.saturating_sub(again.activations) / u64::from(every.get());
        Peak { activations: all.activations - spared, ..again }
    }

    fn state_bytes(&self, is_frozen: bool, parameters: u64) -> u64 {
        let state = if is_frozen {
            StateBytes { parameter: self.trained_state.parameter, ..StateBytes::FROZEN }
        } else {
            self.trained_state
        };
        state.for_parameters(parameters)
    }

    /// Replaces state and activations by measured values, if they are for the same kind of training.
    fn take_measured(
        &self,
        module: Module,
        position: &StagePosition,
        layout: &ModuleStages,
        peak: &mut Peak,
    ) -> Result<bool> {
        let points = self.measured.iter().find(|(of, _)| *of == module);
        let Some((_, points)) = points else { return Ok(false) };
        let is_recomputed =
            self.saved_activations != SavedActivations::All || self.recomputed[module as usize].is_some();
        if is_recomputed || self.frozen != FrozenParts::default() {
            return Ok(false);
        }
        let tp = layout.execution.tp.get();
        let in_module = |error: FitError| Error::Memory { module, reason: error.to_string() };
        peak.state = points.state_bytes(position.layers, tp).map_err(in_module)?;
        // Activations are linear in tokens, so a single sequence with all tokens gives the same bytes.
        let one =
            points.activation_bytes(position.layers, tp, 1, layout.microbatch_tokens).map_err(in_module)?;
        peak.activations = one.saturating_mul(u64::from(position.in_flight));
        Ok(true)
    }
}

impl ModuleStages {
    /// Splits a module's layers over `stages` stages as equally as possible.
    #[must_use]
    pub fn even(layers: u32, stages: NonZeroU32, tp: NonZeroU32, microbatch_tokens: u64) -> Self {
        let execution = Execution { tp, ..Execution::default() };
        Self { layers: super::split_layers(layers, stages.get()), execution, microbatch_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryPoint;

    fn one(value: u32) -> NonZeroU32 {
        NonZeroU32::new(value).unwrap()
    }

    fn layouts(spec: &ModelSpec, stages: [u32; 2], tp: u32) -> Vec<ModuleStages> {
        let encoder = spec.vision.unwrap().encoder;
        vec![
            ModuleStages::even(encoder.layers, one(stages[0]), one(tp), 7290),
            ModuleStages::even(spec.llm.layers, one(stages[1]), one(tp), 8192),
        ]
    }

    fn spec() -> ModelSpec {
        ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap()
    }

    #[test]
    fn stages_add_up_to_the_model_and_the_first_holds_most_microbatches() {
        let spec = spec();
        let stages = PipelineMemory::new(&spec).microbatches(8).stages(&layouts(&spec, [2, 3], 1)).unwrap();
        let parameters: u64 = stages.iter().map(|stage| stage.parameters).sum();
        assert_eq!(parameters, spec.parameters());
        let state: u64 = stages.iter().map(|stage| stage.peak.state).sum();
        assert_eq!(state, 16 * spec.parameters());
        let in_flight: Vec<u32> = stages.iter().map(|stage| stage.in_flight).collect();
        assert_eq!(in_flight, [5, 4, 3, 2, 1]);
        let layers: Vec<u32> = stages.iter().map(|stage| stage.layers).collect();
        assert_eq!(layers, [14, 13, 10, 9, 9]);
        assert!(stages[4].peak.working_set >= 8192 * 6 * 152_064, "logits are on the last stage");
    }

    #[test]
    fn recomputation_and_tensor_parallelism_take_less() {
        let spec = spec();
        let total = |saved_activations, tp| {
            let memory = PipelineMemory::new(&spec).microbatches(8).saved_activations(saved_activations);
            let stages = memory.stages(&layouts(&spec, [1, 2], tp)).unwrap();
            stages.iter().map(|stage| stage.peak.total()).collect::<Vec<_>>()
        };
        let (all, again, split) = (
            total(SavedActivations::All, 1),
            total(SavedActivations::LayerInputs, 1),
            total(SavedActivations::All, 4),
        );
        assert!(all.iter().zip(&again).all(|(all, again)| again < all), "{all:?} {again:?}");
        assert!(all.iter().zip(&split).all(|(all, split)| split < all), "{all:?} {split:?}");
    }

    #[test]
    fn a_module_recomputes_every_layer_or_some() {
        let spec = spec();
        let activations = |memory: PipelineMemory<'_>| {
            let stages = memory.microbatches(8).stages(&layouts(&spec, [1, 1], 1)).unwrap();
            [stages[0].peak.activations, stages[1].peak.activations]
        };
        let memory = || PipelineMemory::new(&spec);
        let all = activations(memory());
        let again = activations(memory().saved_activations(SavedActivations::LayerInputs));
        let llm = |every| activations(memory().recomputed_layers(Module::Llm, one(every)));
        assert_eq!(llm(1), [all[0], again[1]]);
        let half = llm(2);
        assert_eq!((half[0], half[1]), (all[0], all[1] - (all[1] - again[1]) / 2));
        let encoder = activations(memory().recomputed_layers(Module::Vision, one(1)));
        assert_eq!(encoder, [again[0], all[1]]);
    }

    #[test]
    fn frozen_parts_hold_parameters_alone() {
        let spec = spec();
        let stages = |frozen: &str| {
            let memory = PipelineMemory::new(&spec).microbatches(4).frozen(frozen.parse().unwrap());
            memory.stages(&layouts(&spec, [1, 1], 1)).unwrap()
        };
        let trained = PipelineMemory::new(&spec).microbatches(4).stages(&layouts(&spec, [1, 1], 1)).unwrap();
        let both = stages("vision,projector");
        assert_eq!(both[0].peak.state, 2 * both[0].parameters);
        assert_eq!((both[0].peak.activations, both[1]), (0, trained[1]));
        let tower = stages("vision");
        let (_, whole) = spec.encoder_parameters()[0];
        assert_eq!(tower[0].peak.state, 2 * whole.tower() + 16 * whole.projector);
        assert_eq!(tower[0].peak.activations, 2 * 7290 * 2 * 1152, "the projector's input, twice in flight");
        assert_eq!(stages("llm")[1].peak.state, 2 * trained[1].parameters);
    }

    #[test]
    fn measured_points_take_the_place_of_the_formulas() {
        let spec = spec();
        let point = |layers: u32| MemoryPoint {
            layers,
            tp: 1,
            batch: 1,
            sequence: 1024,
            state_bytes: 1e9 + 5e8 * f64::from(layers),
            activation_bytes: 1024.0 * (1000.0 + 2000.0 * f64::from(layers)),
        };
        let fitted = MeasuredMemory::fit(&[point(3), point(4)]).unwrap();
        let memory =
            PipelineMemory::new(&spec).microbatches(8).buffer_bytes(77).measured(Module::Llm, fitted);
        let stages = memory.stages(&layouts(&spec, [1, 2], 1)).unwrap();
        assert_eq!([stages[0].is_measured, stages[1].is_measured], [false, true]);
        assert_eq!(stages[1].peak.state, 8_000_000_000);
        assert_eq!(stages[1].peak.activations, 2 * 8192 * 29_000);
        assert_eq!(stages[2].peak.buffers, 77);
        let again = memory
            .clone()
            .saved_activations(SavedActivations::LayerInputs)
            .stages(&layouts(&spec, [1, 2], 1))
            .unwrap();
        assert!(!again[1].is_measured);
        let error = memory.stages(&layouts(&spec, [1, 2], 2)).unwrap_err().to_string();
        assert_eq!(error, "memory of llm: TP 2 was not measured, only 1");
    }

    #[test]
    fn layouts_that_do_not_fit_the_model_are_errors() {
        let spec = spec();
        let memory = PipelineMemory::new(&spec);
        let mut wrong = layouts(&spec, [1, 2], 1);
        wrong[1].layers[0] += 1;
        let error = memory.stages(&wrong).unwrap_err().to_string();
        assert!(error.ends_with("stages of llm have 29 layers in all, it has 28"), "{error}");
        assert!(memory.stages(&wrong[..1]).is_err());
    }
}
