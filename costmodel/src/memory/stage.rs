//! Computes pipeline stage memory as a function of tokens, fitted to measured points or from formulas.
//!
//! A stage takes `fixed + saved * tokens in flight + working * tokens of the microbatch that is computed`. A
//! profile's memory points give state and activations linear in layers, with what is outside the layers
//! charged to every stage, as in the paper. Without points the [`super::StateBytes`] and [`ActivationBytes`]
//! formulas apply.
//!
//! A model with a few layers is run at every TP degree that will be used, and the memory is read. The
//! measured quantities are linear: `state(l, tp) = c(tp) + v(tp) * l` in the layers `l`, and
//! `act(l, tp, batch, seq) = (a(tp) + b(tp) * l) * batch * seq`; both are least-squares fits over the points
//! at one TP degree. A degree that was not measured is an error, never a guess.
//!
//! # Source
//! DFLOP, section 3.2.1: memory profile at two small layer counts.

use super::activation::{ActivationBytes, Execution, SavedActivations};
use super::state::{StageLayers, StateBytes, encoder_parameters};
use super::trainer::Trainer;
use crate::Module;
use crate::frozen::FrozenParts;
use crate::model::{EncoderSpec, LlmSpec, ModelSpec};
use std::num::NonZeroU32;

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
    /// Additional bytes while gradients are summed, when no activations are held.
    pub sum_bytes: f64,
    /// The same for bytes that the ranks which share the optimizer state share as well.
    pub shared_sum_bytes: f64,
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
    trainer: Trainer,
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
        let (trainer, expert_parallel) = (Trainer::default(), NonZeroU32::MIN);
        let measured = None;
        let own = Self {
            spec,
            llm_hidden,
            state,
            trainer,
            is_sequence_parallel,
            expert_parallel,
            frozen,
            measured,
        };
        Some(own)
    }

    /// Sets the trainer, whose kernels save the activations. Default: the executor.
    #[must_use]
    pub const fn trainer(mut self, trainer: Trainer) -> Self {
        self.trainer = trainer;
        self
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
        let kernels = self.trainer.kernels();
        let execution = Execution { tp, is_sequence_parallel, kernels, ..Execution::default() };
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
            let sums = [state.sums, state.shared_sums].map(|each| f64::from(each) * parameters as f64);
            [all as f64, (all - without.for_parameters(parameters)) as f64, sums[0], sums[1]]
        };
        let [layers, projector] = self.parameters_by_part(tp, stage);
        let [fixed, optimizer, sum_bytes, shared_sum_bytes] =
            [0, 1, 2, 3].map(|at| of(layers, self.frozen[0])[at] + of(projector, self.frozen[1])[at]);
        // PyTorch stages have all experts, whose state the replicas share as any other.
        let experts = if self.trainer == Trainer::Torch { 0 } else { self.expert_parameters(tp, stage) };
        let [_, of_experts, ..] = of(experts, self.frozen[0]);
        let [_, of_copies, ..] = of(self.whole_copies(tp, stage), self.frozen[0]);
        StageByTokens {
            fixed_bytes: fixed,
            optimizer_bytes: (optimizer - of_experts - of_copies).max(0.0),
            expert_optimizer_bytes: of_experts,
            sum_bytes,
            shared_sum_bytes,
            saved_bytes_per_token: 0.0,
            working_bytes_per_token: 0.0,
        }
    }

    /// Returns the number of parameters that replicas do not share in any case: in PyTorch the copies of tied
    /// embeddings in the first and the last stage.
    fn whole_copies(&self, tp: NonZeroU32, stage: StageLayers) -> u64 {
        match &self.spec {
            ModuleSpec::Llm(spec)
                if self.trainer == Trainer::Torch
                    && spec.details.has_tied_embeddings
                    && stage.is_first != stage.is_last =>
            {
                u64::from(spec.vocab.div_ceil(tp.get())).saturating_mul(spec.hidden.into())
            }
            _ => 0,
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

/// Memory in a measured run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryPoint {
    /// Transformer layers.
    pub layers: u32,
    /// TP degree.
    pub tp: u32,
    /// Number of tiles or sequences.
    pub batch: u32,
    /// Tokens per tile or sequence.
    pub sequence: u32,
    /// Bytes for parameters, gradients and optimizer state.
    pub state_bytes: f64,
    /// Activation bytes saved by the forward pass.
    pub activation_bytes: f64,
}

/// Reason why points cannot be fitted, or a fit has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum FitError {
    /// A point's value is not a measurement.
    #[error("point {point}: `{field}` = {found} must be a finite number above 0")]
    Point { point: usize, field: &'static str, found: f64 },
    /// A run occurs twice; a repeated profile was appended to an older profile.
    #[error("point {point} repeats {layers} layers at TP {tp}, batch {batch}, sequence {sequence}")]
    Repeated { point: usize, layers: u32, tp: u32, batch: u32, sequence: u32 },
    /// A line needs two layer counts.
    #[error("TP {tp} was measured with {layers} layers only; measure another number of layers")]
    OneLayerCount { tp: u32, layers: u32 },
    /// Nothing was measured at this degree.
    #[error("TP {tp} was not measured, only {known}")]
    UnknownDegree { tp: u32, known: String },
}

/// Fitted lines for every TP degree, ascending.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredMemory {
    degrees: Vec<Degree>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Degree {
    tp: u32,
    state: Line,
    activations: Line,
}

/// `constant + slope * layers`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Line {
    constant: f64,
    slope: f64,
}

impl MeasuredMemory {
    /// Fits the lines for all TP degrees that occur; the point order does not matter.
    ///
    /// # Errors
    /// [`FitError::Point`] for a value that is not above 0, [`FitError::Repeated`] for a run that occurs
    /// twice, [`FitError::OneLayerCount`] for a degree measured only with a single number of layers.
    pub fn fit(points: &[MemoryPoint]) -> Result<Self, FitError> {
        check(points)?;
        let mut sorted = points.to_vec();
        sorted.sort_by_key(|point| (point.tp, point.layers, point.batch, point.sequence));
        let by_degree = sorted.chunk_by(|one, other| one.tp == other.tp);
        let degrees = by_degree.map(Degree::fit).collect::<Result<_, _>>()?;
        Ok(Self { degrees })
    }

    /// Returns the bytes for parameters, gradients and optimizer state in `layers` layers, rounded up.
    ///
    /// # Errors
    /// [`FitError::UnknownDegree`] if nothing was measured at this degree.
    pub fn state_bytes(&self, layers: u32, tp: u32) -> Result<u64, FitError> {
        Ok(whole(self.degree(tp)?.state.at(layers)))
    }

    /// Returns the activation bytes that a forward pass through `layers` layers saves, rounded up.
    ///
    /// # Errors
    /// [`FitError::UnknownDegree`] if nothing was measured at this degree.
    pub fn activation_bytes(&self, layers: u32, tp: u32, batch: u64, sequence: u64) -> Result<u64, FitError> {
        let tokens = batch as f64 * sequence as f64;
        Ok(whole(self.degree(tp)?.activations.at(layers) * tokens))
    }

    fn degree(&self, tp: u32) -> Result<&Degree, FitError> {
        self.degrees.iter().find(|degree| degree.tp == tp).ok_or_else(|| {
            let known: Vec<String> = self.degrees.iter().map(|degree| degree.tp.to_string()).collect();
            FitError::UnknownDegree { tp, known: known.join(", ") }
        })
    }
}

fn check(points: &[MemoryPoint]) -> Result<(), FitError> {
    let run = |point: &MemoryPoint| (point.layers, point.tp, point.batch, point.sequence);
    for (at, point) in points.iter().enumerate() {
        for (field, found) in [
            ("layers", f64::from(point.layers)),
            ("tp", f64::from(point.tp)),
            ("batch", f64::from(point.batch)),
            ("sequence", f64::from(point.sequence)),
            ("state_bytes", point.state_bytes),
            ("activation_bytes", point.activation_bytes),
        ] {
            if !(found.is_finite() && found > 0.0) {
                return Err(FitError::Point { point: at, field, found });
            }
        }
        if points[..at].iter().any(|earlier| run(earlier) == run(point)) {
            let (layers, tp, batch, sequence) = run(point);
            return Err(FitError::Repeated { point: at, layers, tp, batch, sequence });
        }
    }
    Ok(())
}

impl Degree {
    fn fit(points: &[MemoryPoint]) -> Result<Self, FitError> {
        let MemoryPoint { tp, layers, .. } = points[0];
        if points.iter().all(|point| point.layers == layers) {
            return Err(FitError::OneLayerCount { tp, layers });
        }
        let states = points.iter().map(|point| (1.0, f64::from(point.layers), point.state_bytes));
        let activations = points.iter().map(|point| {
            let tokens = f64::from(point.batch) * f64::from(point.sequence);
            (tokens, tokens * f64::from(point.layers), point.activation_bytes)
        });
        Ok(Self { tp, state: Line::fit(states), activations: Line::fit(activations) })
    }
}

impl Line {
    fn at(self, layers: u32) -> f64 {
        self.constant + self.slope * f64::from(layers)
    }

    /// Fits `y = constant * u + slope * v` by least squares; `v / u` must not be the same in all rows.
    fn fit(rows: impl Iterator<Item = (f64, f64, f64)>) -> Self {
        let [mut uu, mut uv, mut vv, mut uy, mut vy] = [0.0; 5];
        for (u, v, y) in rows {
            uu += u * u;
            uv += u * v;
            vv += v * v;
            uy += u * y;
            vy += v * y;
        }
        // Above 0, because `Degree::fit` requires two layer counts.
        let determinant = uu * vv - uv * uv;
        Self { constant: (uy * vv - vy * uv) / determinant, slope: (vy * uu - uy * uv) / determinant }
    }
}

/// Rounds bytes up; a line that falls below 0 counts as 0.
fn whole(bytes: f64) -> u64 {
    bytes.max(0.0).ceil() as u64
}

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

    fn point(layers: u32, tp: u32, batch: u32, sequence: u32) -> MemoryPoint {
        let tokens = f64::from(batch * sequence);
        let (l, t) = (f64::from(layers), f64::from(tp));
        let state_bytes = 5e8 / t + 3e8 / t * l;
        let activation_bytes = (2000.0 + 90_000.0 / t * l) * tokens;
        MemoryPoint { layers, tp, batch, sequence, state_bytes, activation_bytes }
    }

    #[test]
    fn a_line_through_two_points_is_found_and_followed() {
        let points = [point(3, 1, 1, 1024), point(4, 1, 1, 1024), point(4, 2, 1, 512), point(8, 2, 2, 1024)];
        let fitted = MeasuredMemory::fit(&points).unwrap();
        for (layers, tp, batch, sequence) in [(28, 1, 1, 4096), (28, 2, 1, 4096), (1, 2, 7, 729)] {
            let expected = point(layers, tp, batch, sequence);
            let state = fitted.state_bytes(layers, tp).unwrap() as f64;
            let kept =
                fitted.activation_bytes(layers, tp, u64::from(batch), u64::from(sequence)).unwrap() as f64;
            assert!((state / expected.state_bytes - 1.0).abs() < 1e-6, "{state}");
            assert!((kept / expected.activation_bytes - 1.0).abs() < 1e-6, "{kept}");
        }
        let reversed: Vec<MemoryPoint> = points.iter().rev().copied().collect();
        assert_eq!(MeasuredMemory::fit(&reversed).unwrap(), fitted);
    }

    /// Three points off a line: state 10, 22, 31 at 1, 2, 3 layers has the line 0 + 10.5 l (computed by
    /// hand).
    #[test]
    fn noise_is_averaged_out() {
        let at = |layers, state_bytes| MemoryPoint { state_bytes, ..point(layers, 1, 1, 100) };
        let fitted = MeasuredMemory::fit(&[at(1, 10.0), at(2, 22.0), at(3, 31.0)]).unwrap();
        assert_eq!(fitted.state_bytes(4, 1).unwrap(), 42);
    }

    #[test]
    fn points_that_cannot_be_fitted_are_errors() {
        let good = [point(3, 1, 1, 1024), point(4, 1, 1, 1024)];
        let error_of = |points: &[MemoryPoint]| MeasuredMemory::fit(points).unwrap_err().to_string();
        assert_eq!(
            error_of(&[good[0], good[1], good[0]]),
            "point 2 repeats 3 layers at TP 1, batch 1, sequence 1024"
        );
        assert_eq!(
            error_of(&[good[0], point(3, 1, 2, 1024)]),
            "TP 1 was measured with 3 layers only; measure another number of layers"
        );
        for broken in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            let error = error_of(&[good[0], MemoryPoint { activation_bytes: broken, ..good[1] }]);
            assert!(error.starts_with("point 1: `activation_bytes` = "), "{error}");
        }
        assert!(error_of(&[MemoryPoint { batch: 0, ..good[0] }]).starts_with("point 0: `batch` = 0"));
        let fitted = MeasuredMemory::fit(&good).unwrap();
        assert_eq!(fitted.state_bytes(3, 8).unwrap_err().to_string(), "TP 8 was not measured, only 1");
        let empty = MeasuredMemory::fit(&[]).unwrap();
        assert!(empty.state_bytes(1, 1).is_err());
    }
}
