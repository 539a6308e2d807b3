//! Costs of a model's modules, from a measured profile or a stated device rate.

use super::experts::{ExpertCosts, ExpertParallel};
use super::{ExpertLoads, ModuleCosts, StageBytes, StagePart};
use crate::error::{Error, Result};
use crate::planner::cluster::Link;
use dflop_costmodel::memory::{MeasuredMemory, ModuleMemory, SavedActivations, StageLayers, StateBytes};
use dflop_costmodel::model::EncoderSpec;
use dflop_costmodel::profile::Profile;
use dflop_costmodel::tokens::audio::AudioRule;
use dflop_costmodel::tokens::{MediaRule, VisionRule};
use dflop_costmodel::{DevicePreset, DeviceRate, FrozenParts, LayerTimes, ModelSpec, Module};
use std::num::NonZeroU32;

/// Bytes of an element of an activation or gradient.
const BYTES: f64 = 2.0;
/// All-reduces per tensor-parallel layer, forward and backward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3.
const REDUCES_PER_LAYER: f64 = 4.0;

/// Costs of all modules of a model.
#[derive(Debug, Clone)]
pub struct PlannedModel {
    /// Costs of the encoders, in the order of [`ModelSpec::encoders`].
    pub encoders: Vec<ModelCosts>,
    /// Costs of the LLM.
    pub llm: ModelCosts,
}

impl PlannedModel {
    /// Lists the costs of the encoders, as a problem takes them.
    #[must_use]
    pub fn encoder_costs(&self) -> Vec<&dyn ModuleCosts> {
        self.encoders.iter().map(|encoder| encoder as &dyn ModuleCosts).collect()
    }
}

/// Costs of one module of a model.
#[derive(Debug, Clone)]
pub struct ModelCosts {
    module: Module,
    layers: u32,
    degrees: Vec<Degree>,
    memory: ModuleMemory,
    /// Tokens per unit inside the module: per tile; 1 of patches and in an LLM.
    unit_tokens: f64,
    border_bytes: f64,
    backward_ratios: [f64; 2],
    units: Units,
    /// Experts of an LLM that has any.
    experts: Option<ExpertCosts>,
}

/// Units of a module's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Units {
    /// Tiles or windows of one size; attention is part of their time.
    Tiles,
    /// Patches of media that attend within themselves.
    Patches,
    /// Positions of an LLM, whose samples attend within themselves.
    Tokens,
}

#[derive(Debug, Clone)]
struct Degree {
    tp: u32,
    times: LayerTimes,
    /// Link of tensor-parallel all-reduces, where times do not include them already.
    link: Option<Link>,
}

/// Source of computed times.
#[derive(Debug, Clone, Copy)]
enum Rate {
    /// One rate per module, for any width.
    Constant(DeviceRate),
    /// A device that is slower on narrow matrices.
    Device(DevicePreset),
}

/// Builder of costs from a model and a source of times.
#[derive(Debug, Clone)]
pub struct ModelCostsBuilder<'a> {
    spec: &'a ModelSpec,
    rate: Option<Rate>,
    profile: Option<&'a Profile>,
    link: Option<Link>,
    state: StateBytes,
    is_sequence_parallel: bool,
    frozen: FrozenParts,
    expert_parallel: ExpertParallel,
}

impl<'a> ModelCostsBuilder<'a> {
    /// Starts from a model; times need a rate or a profile.
    #[must_use]
    pub fn new(spec: &'a ModelSpec) -> Self {
        Self {
            spec,
            rate: None,
            profile: None,
            link: None,
            state: StateBytes::ADAM,
            is_sequence_parallel: false,
            frozen: FrozenParts::default(),
            expert_parallel: ExpertParallel::default(),
        }
    }

    /// Takes times from a stated rate, the same for matrices of any width.
    #[must_use]
    pub const fn rate(mut self, rate: DeviceRate) -> Self {
        self.rate = Some(Rate::Constant(rate));
        self
    }

    /// Takes times from a device preset, whose rate depends on the width of matrices and the TP degree.
    #[must_use]
    pub const fn device(mut self, device: DevicePreset) -> Self {
        self.rate = Some(Rate::Device(device));
        self
    }

    /// Takes times from a profile, and memory where it has memory points.
    #[must_use]
    pub const fn profile(mut self, profile: &'a Profile) -> Self {
        self.profile = Some(profile);
        self
    }

    /// Adds tensor-parallel all-reduces over this link to times of a stated rate; measured times include
    /// them. Default: free.
    #[must_use]
    pub const fn tensor_parallel_link(mut self, link: Option<Link>) -> Self {
        self.link = link;
        self
    }

    /// Sets the bytes held per parameter where memory is computed. Default: [`StateBytes::ADAM`].
    #[must_use]
    pub const fn state(mut self, state: StateBytes) -> Self {
        self.state = state;
        self
    }

    /// Sets whether norms and inputs are split over the TP ranks as well. Default: no.
    #[must_use]
    pub const fn sequence_parallel(mut self, is_sequence_parallel: bool) -> Self {
        self.is_sequence_parallel = is_sequence_parallel;
        self
    }

    /// Sets which parts of the model are frozen. Default: none.
    #[must_use]
    pub const fn frozen(mut self, frozen: FrozenParts) -> Self {
        self.frozen = frozen;
        self
    }

    /// Sets the degrees of expert parallelism to plan with, and what their times depend on. Default: none.
    #[must_use]
    pub const fn expert_parallel(mut self, settings: ExpertParallel) -> Self {
        self.expert_parallel = settings;
        self
    }

    /// Builds the costs of the encoders and of the LLM.
    ///
    /// # Errors
    /// [`Error::Config`] if the model has no encoder, there is neither a rate nor a profile, the profile does
    /// not cover the model, or does not separate the attention of an encoder of media in native resolution,
    /// or the model does not have the frozen parts, or the degree of expert parallelism does not divide its
    /// experts.
    pub fn build(self) -> Result<PlannedModel> {
        let invalid = |reason: String| Error::Config { setting: "freeze", reason };
        self.frozen.check(self.spec).map_err(|error| invalid(error.to_string()))?;
        let encoder =
            |(module, _, rule): (Module, EncoderSpec, MediaRule)| self.module(module, unit_tokens(&rule));
        let encoders = self.spec.encoders().map(encoder).collect::<Result<Vec<ModelCosts>>>()?;
        if encoders.is_empty() {
            let reason =
                format!("`{}` has no encoder: there is nothing to split the GPUs between", self.spec.name);
            return Err(Error::Config { setting: "model", reason });
        }
        self.check_expert_parallel()?;
        Ok(PlannedModel { encoders, llm: self.module(Module::Llm, 1)? })
    }

    fn check_expert_parallel(&self) -> Result<()> {
        let Some(degree) = self.expert_parallel.degree.filter(|degree| *degree != 1) else { return Ok(()) };
        let invalid = |reason: String| Err(Error::Config { setting: "ep", reason });
        match self.spec.llm.experts {
            None => invalid(format!("`{}` has no experts to divide over {degree} ranks", self.spec.name)),
            Some(experts) if degree == 0 || !experts.experts.is_multiple_of(degree) => {
                invalid(format!("= {degree} must divide the {} experts of a layer", experts.experts))
            }
            Some(_) => Ok(()),
        }
    }

    fn module(&self, module: Module, unit_tokens: u32) -> Result<ModelCosts> {
        let invalid = |reason: String| Error::Config { setting: "profile", reason };
        let encoder = match module {
            Module::Vision => self.spec.vision.map(|vision| vision.encoder),
            Module::Audio => self.spec.audio.map(|audio| audio.encoder),
            Module::Llm => None,
        };
        let llm = &self.spec.llm;
        let (layers, hidden, heads, kv_heads) = encoder
            .map_or((llm.layers, llm.hidden, llm.heads, llm.kv_heads), |encoder| {
                (encoder.layers, encoder.hidden, encoder.heads, encoder.heads)
            });
        let mut memory = ModuleMemory::from_spec(self.spec, module, self.state)
            .ok_or_else(|| invalid(format!("the model has no module {module}")))?
            .sequence_parallel(self.is_sequence_parallel)
            .frozen(self.frozen, module);
        let points = self.profile.map(|profile| MeasuredMemory::from_profile(profile, self.spec, module));
        if let Some(points) = points.transpose().map_err(|error| invalid(error.to_string()))?.flatten() {
            memory = memory.measured(points);
        }
        let fits = |tp: &u32| {
            let has_heads = heads.is_multiple_of(*tp);
            has_heads
                // Fewer KV heads than ranks are replicated, if they divide evenly.
                && (kv_heads.is_multiple_of(*tp) || tp.is_multiple_of(kv_heads))
                && has_memory(&memory, *tp)
        };
        let candidates = match self.profile {
            Some(profile) => LayerTimes::measured_degrees(self.spec, profile, module),
            // A stated rate gives times for any degree.
            None => (1..=heads).collect(),
        };
        let degrees = candidates.into_iter().filter(fits).map(|tp| self.degree(module, tp, unit_tokens));
        let degrees = degrees.collect::<Result<Vec<Degree>>>()?;
        if degrees.is_empty() {
            return Err(invalid(format!("no tensor-parallel degree of {module} has both times and memory")));
        }
        let unit_tokens = f64::from(unit_tokens);
        let experts = ExpertCosts::new(&self.spec.llm, self.expert_parallel);
        let experts = experts.filter(|_| module == Module::Llm);
        if let Some(degree) = experts.and_then(|experts| NonZeroU32::new(experts.degree)) {
            memory = memory.expert_parallel(degree);
        }
        Ok(ModelCosts {
            experts,
            module,
            layers,
            degrees,
            memory,
            unit_tokens,
            border_bytes: unit_tokens * f64::from(hidden) * BYTES,
            backward_ratios: self.frozen.backward_ratios(module),
            units: self.units(module),
        })
    }

    fn units(&self, module: Module) -> Units {
        match module {
            Module::Llm => Units::Tokens,
            encoder if self.spec.is_native(encoder) => Units::Patches,
            _ => Units::Tiles,
        }
    }

    fn degree(&self, module: Module, tp: u32, tokens: u32) -> Result<Degree> {
        let invalid = |reason: String| Error::Config { setting: "profile", reason };
        let (times, link) = match (self.profile, &self.rate) {
            (Some(profile), _) => {
                let times = LayerTimes::from_profile(self.spec, profile, module, tp, tokens)
                    .map_err(|error| invalid(error.to_string()))?;
                (times, None)
            }
            (None, Some(Rate::Constant(rate))) => {
                (LayerTimes::from_rate(self.spec, module, tp, rate, tokens), self.link)
            }
            (None, Some(Rate::Device(device))) => {
                (LayerTimes::from_preset(self.spec, module, tp, device, tokens), self.link)
            }
            (None, None) => return Err(invalid("times need a profile or a device".to_owned())),
        };
        if self.units(module) == Units::Patches && !times.is_attention_separate() {
            let reason = format!(
                "`{}` takes media of their own size: expected times of linear work and of attention of \
                 {module}, found times of both together",
                self.spec.name
            );
            return Err(invalid(reason));
        }
        Ok(Degree { tp, times, link })
    }
}

/// Returns the tokens per unit of an encoder: of a tile or window, 1 of a patch or of audio in chunks.
fn unit_tokens(rule: &MediaRule) -> u32 {
    match rule {
        MediaRule::Vision(VisionRule::AnyRes(rule)) => {
            u32::from(rule.patches_per_side) * u32::from(rule.patches_per_side)
        }
        MediaRule::Vision(VisionRule::ListedGrids(rule)) => {
            u32::from(rule.patches_per_side) * u32::from(rule.patches_per_side)
        }
        MediaRule::Vision(VisionRule::ScaledTiles(rule)) => rule.tile_patches,
        MediaRule::Vision(VisionRule::FittedTiles(rule)) => rule.tile_patches,
        MediaRule::Vision(VisionRule::DynamicTiles(rule)) => u32::from(rule.tile_patches),
        MediaRule::Vision(VisionRule::Fixed(rule)) => rule.tile_patches,
        MediaRule::Vision(VisionRule::PanAndScan(rule)) => rule.tile.tile_patches,
        MediaRule::Audio(AudioRule::Windows(rule)) => rule.window_tokens,
        MediaRule::Vision(VisionRule::Native(_) | VisionRule::LongestEdge(_))
        | MediaRule::Audio(AudioRule::Chunks(_)) => 1,
    }
}

fn has_memory(memory: &ModuleMemory, tp: u32) -> bool {
    let part = StageLayers { layers: 1, first_layer: None, is_first: true, is_last: true };
    NonZeroU32::new(tp).is_some_and(|tp| memory.stage(tp, part, SavedActivations::All).is_ok())
}

impl ModelCosts {
    fn degree(&self, tp: u32) -> &Degree {
        let known = self.degrees.iter().find(|degree| degree.tp == tp);
        // The fallback is for degrees outside `tp_degrees` only; `build` ensures that there is one.
        known.unwrap_or(&self.degrees[0])
    }
}

impl ModuleCosts for ModelCosts {
    fn name(&self) -> &'static str {
        self.module.name()
    }

    fn layers(&self) -> u32 {
        self.layers
    }

    fn tp_degrees(&self) -> Vec<u32> {
        self.degrees.iter().map(|degree| degree.tp).collect()
    }

    fn layer_ns(&self, tp: u32, units: u64) -> f64 {
        let degree = self.degree(tp);
        let units = units as f64;
        let reduce = |link: &Link| REDUCES_PER_LAYER * link.all_reduce_ns(units * self.border_bytes, tp);
        let reduced_ns = degree.link.as_ref().map_or(0.0, reduce);
        if self.units != Units::Tiles {
            let experts = self.experts.as_ref();
            let experts_ns =
                experts.map_or(0.0, |experts| experts.additional_ns(&degree.times, tp, units as u64));
            return degree.times.layer_ns(1.0, units) + experts_ns + reduced_ns;
        }
        let tile = self.unit_tokens;
        degree.times.layer_ns(units, tile) + degree.times.attention_ns(units, tile) + reduced_ns
    }

    fn sample_ns(&self, tp: u32, units: u64) -> f64 {
        if self.units == Units::Tokens { self.degree(tp).times.attention_ns(1.0, units as f64) } else { 0.0 }
    }

    fn media_attention_ns(&self, tp: u32, units: u64, pairs: u64) -> f64 {
        if self.units != Units::Patches || pairs == 0 {
            return 0.0;
        }
        // Equal sequences with the same patches and pairs, as predictions take them.
        let length = pairs as f64 / units as f64;
        self.degree(tp).times.attention_ns(units as f64 / length, length)
    }

    fn outside_layers_ns(&self, tp: u32, units: u64) -> f64 {
        let times = &self.degree(tp).times;
        if self.units == Units::Tiles {
            times.outside_layers_ns(units as f64, self.unit_tokens)
        } else {
            times.outside_layers_ns(1.0, units as f64)
        }
    }

    fn backward_ratios(&self) -> [f64; 2] {
        self.backward_ratios
    }

    fn relative_half_width(&self, tp: u32, units: f64, samples: [f64; 2]) -> f64 {
        let times = &self.degree(tp).times;
        let tile = self.unit_tokens;
        let width = if self.units == Units::Tiles {
            times.relative_half_width(units, tile, [units, tile])
        } else {
            times.relative_half_width(1.0, units, samples)
        };
        width.unwrap_or(0.0)
    }

    fn memory(&self, tp: u32, part: StagePart, recomputed_layers: u32) -> StageBytes {
        let tp = NonZeroU32::new(tp).unwrap_or(NonZeroU32::MIN);
        let layers = part.layers;
        // Degrees without memory are not in `tp_degrees`, so they are never requested.
        let nothing = || StageBytes { fixed: f64::INFINITY, ..StageBytes::default() };
        let of = |saved: SavedActivations| {
            let stage = self.memory.stage(tp, part.into(), saved);
            stage.map_or_else(
                |_| nothing(),
                |stage| StageBytes {
                    fixed: stage.fixed_bytes - stage.optimizer_bytes - stage.expert_optimizer_bytes,
                    optimizer: stage.optimizer_bytes,
                    expert_optimizer: stage.expert_optimizer_bytes,
                    expert_parallel: self.expert_parallel(),
                    kept_per_unit: stage.saved_bytes_per_token * self.unit_tokens,
                    working_per_unit: stage.working_bytes_per_token * self.unit_tokens,
                },
            )
        };
        match recomputed_layers {
            0 => of(SavedActivations::All),
            all if all >= layers => of(SavedActivations::LayerInputs),
            some => {
                let (kept, inputs) = (of(SavedActivations::All), of(SavedActivations::LayerInputs));
                let fraction = f64::from(some) / f64::from(layers);
                StageBytes {
                    kept_per_unit: kept.kept_per_unit * (1.0 - fraction) + inputs.kept_per_unit * fraction,
                    working_per_unit: kept.working_per_unit.max(inputs.working_per_unit),
                    ..kept
                }
            }
        }
    }

    fn border_bytes(&self) -> f64 {
        self.border_bytes
    }

    fn gradient_bytes(&self, tp: u32, part: StagePart) -> f64 {
        let all = self.memory.trained_parameters(NonZeroU32::new(tp).unwrap_or(NonZeroU32::MIN), part.into());
        all as f64 * BYTES - self.expert_gradient_bytes(tp, part)
    }

    fn expert_gradient_bytes(&self, tp: u32, part: StagePart) -> f64 {
        if self.expert_parallel() < 2 {
            return 0.0;
        }
        let tp = NonZeroU32::new(tp).unwrap_or(NonZeroU32::MIN);
        self.memory.trained_expert_parameters(tp, part.into()) as f64 * BYTES
    }

    fn expert_parallel(&self) -> u32 {
        self.experts.map_or(1, |experts| experts.degree)
    }

    fn expert_parallel_degrees(&self, gpus: u32) -> Vec<u32> {
        self.experts.map_or_else(|| vec![1], |experts| experts.degrees(gpus))
    }

    fn at_expert_parallel(&self, degree: u32) -> Option<Box<dyn ModuleCosts>> {
        let experts = Some(self.experts?.at(degree)?);
        let memory = self.memory.clone().expert_parallel(NonZeroU32::new(degree)?);
        Some(Box::new(Self { memory, experts, ..self.clone() }))
    }

    fn expert_loads(&self, units: u64) -> Option<ExpertLoads> {
        self.experts.map(|experts| experts.loads(units))
    }
}

impl From<StagePart> for StageLayers {
    /// Takes a part whose first layer is not known.
    fn from(StagePart { layers, is_first, is_last }: StagePart) -> Self {
        Self { layers, first_layer: None, is_first, is_last }
    }
}
