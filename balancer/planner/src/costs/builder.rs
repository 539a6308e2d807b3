//! Builds module costs from a measured profile or a stated device rate.

use super::experts::{ExpertCosts, ExpertParallel};
use super::model::{BYTES, Degree, ModelCosts, PlannedModel, Units};
use crate::cluster::Link;
use dflop_balancer::{Error, Result};
use dflop_costmodel::memory::{
    MeasuredMemory, ModuleMemory, SavedActivations, StageLayers, StateBytes, Trainer,
};
use dflop_costmodel::model::EncoderSpec;
use dflop_costmodel::profile::Profile;
use dflop_costmodel::tokens::audio::AudioRule;
use dflop_costmodel::tokens::{MediaRule, VisionRule};
use dflop_costmodel::{DevicePreset, DeviceRate, FrozenParts, LayerTimes, ModelSpec, Module};
use std::num::NonZeroU32;

/// Share of a layer's time without the recomputed forward pass: three of four equal parts.
const PLAIN_SHARE: f64 = 0.75;

/// Source for computed times.
#[derive(Debug, Clone, Copy)]
enum Rate {
    /// One rate per module, for any width.
    Constant(DeviceRate),
    /// Device with lower rates on narrow matrices.
    Device(DevicePreset),
}

/// Builds module costs from a model and a time source.
#[derive(Debug, Clone)]
pub struct ModelCostsBuilder<'a> {
    spec: &'a ModelSpec,
    rate: Option<Rate>,
    profile: Option<&'a Profile>,
    link: Option<Link>,
    state: StateBytes,
    trainer: Trainer,
    is_sequence_parallel: bool,
    frozen: FrozenParts,
    expert_parallel: ExpertParallel,
}

impl<'a> ModelCostsBuilder<'a> {
    /// Creates a builder for a model; times require a rate or a profile.
    #[must_use]
    pub fn new(spec: &'a ModelSpec) -> Self {
        Self {
            spec,
            rate: None,
            profile: None,
            link: None,
            state: StateBytes::ADAM,
            trainer: Trainer::default(),
            is_sequence_parallel: false,
            frozen: FrozenParts::default(),
            expert_parallel: ExpertParallel::default(),
        }
    }

    /// Uses a stated rate for times, the same for any matrix width.
    #[must_use]
    pub const fn rate(mut self, rate: DeviceRate) -> Self {
        self.rate = Some(Rate::Constant(rate));
        self
    }

    /// Uses a device preset for times; the preset's rate depends on matrix width and TP degree.
    #[must_use]
    pub const fn device(mut self, device: DevicePreset) -> Self {
        self.rate = Some(Rate::Device(device));
        self
    }

    /// Uses a profile for times, and for memory if it has memory points.
    #[must_use]
    pub const fn profile(mut self, profile: &'a Profile) -> Self {
        self.profile = Some(profile);
        self
    }

    /// Adds tensor-parallel all-reduces over this link to times from a stated rate; measured times include
    /// them. Default: free.
    #[must_use]
    pub const fn tensor_parallel_link(mut self, link: Option<Link>) -> Self {
        self.link = link;
        self
    }

    /// Sets the bytes held per parameter for computed memory. Default: [`StateBytes::ADAM`].
    #[must_use]
    pub const fn state(mut self, state: StateBytes) -> Self {
        self.state = state;
        self
    }

    /// Sets the trainer, whose kernels determine computed activations. Default: the executor.
    #[must_use]
    pub const fn trainer(mut self, trainer: Trainer) -> Self {
        self.trainer = trainer;
        self
    }

    /// Sets whether norms and inputs are split over the TP ranks as well. Default: no.
    #[must_use]
    pub const fn sequence_parallel(mut self, is_sequence_parallel: bool) -> Self {
        self.is_sequence_parallel = is_sequence_parallel;
        self
    }

    /// Sets the frozen model parts. Default: none.
    #[must_use]
    pub const fn frozen(mut self, frozen: FrozenParts) -> Self {
        self.frozen = frozen;
        self
    }

    /// Sets the expert-parallel degrees to plan with, and their time settings. Default: none.
    #[must_use]
    pub const fn expert_parallel(mut self, settings: ExpertParallel) -> Self {
        self.expert_parallel = settings;
        self
    }

    /// Builds the encoder and LLM costs.
    ///
    /// # Errors
    /// [`Error::Config`] if the model has no encoder, there is neither a rate nor a profile, the profile does
    /// not cover the model or does not separate attention for an encoder with native-resolution media, the
    /// model lacks the frozen parts, or the expert-parallel degree does not divide the number of experts.
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
            .trainer(self.trainer)
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
            // A stated rate supports any degree.
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
        let is_recomputed = self.profile.is_some_and(Profile::recomputes_layers);
        Ok(ModelCosts {
            layer_share: if is_recomputed && self.trainer == Trainer::Torch { PLAIN_SHARE } else { 1.0 },
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

/// Returns the encoder tokens per unit: per tile or window, 1 for patches and chunked audio.
pub(crate) fn unit_tokens(rule: &MediaRule) -> u32 {
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
        MediaRule::Vision(VisionRule::Table(table)) | MediaRule::Audio(AudioRule::Table(table)) => {
            table.item_tokens.unwrap_or(1)
        }
        MediaRule::Vision(VisionRule::Native(_) | VisionRule::LongestEdge(_))
        | MediaRule::Audio(AudioRule::Chunks(_)) => 1,
    }
}

fn has_memory(memory: &ModuleMemory, tp: u32) -> bool {
    let part = StageLayers { layers: 1, first_layer: None, is_first: true, is_last: true };
    NonZeroU32::new(tp).is_some_and(|tp| memory.stage(tp, part, SavedActivations::All).is_ok())
}
