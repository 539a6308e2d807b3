//! Times of the modules of one model: a profile, folded once into curves, answers in a few multiplications.
//!
//! All arithmetic is `+ - * /` on `f64` in a fixed order, correctly rounded by IEEE 754, and ends in whole
//! nanoseconds: every rank gets the same bits. No function of a platform's mathematical library is called.

use super::curve::Estimate;
use super::measurement::REPEATS_MIN;
use super::module_timing::{ModuleTiming, Training};
use super::warning::ProfileWarning;
use super::{Dimensions, Profile};
use crate::error::Result;
use crate::flops::Recomputation;
use crate::frozen::Frozen;
use crate::model::ModelSpec;
use crate::module::Module;
use crate::predict::Encoder;
use crate::tokens::EncoderWork;

const MODULES: usize = 3;

/// How a profile is applied to a model; by default tensor-parallel degree 1, samples alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileOptions {
    tp: [u32; MODULES],
    packed_tokens: [Option<u64>; MODULES],
}

/// A time from a profile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct PredictedTime {
    /// The time, rounded to whole nanoseconds.
    pub ns: u64,
    /// How far one run may be off, in nanoseconds: spread of repeats, and what interpolation leaves open. To be read as
    /// a standard deviation: about one run in three is further off.
    pub uncertainty_ns: u64,
    /// Whether the shape is outside the measured ones.
    pub is_beyond: bool,
}

/// What a module has to do, as far as its time depends on it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Load {
    /// Tokens in all: linear work.
    pub(super) tokens: f64,
    /// Those that are learned: work of the LM head, where it runs for them alone.
    pub(super) targets: f64,
    /// Sequences, and tokens of each, in layers with full attention.
    pub(super) attention: [f64; 2],
    /// The same in layers with windows.
    pub(super) windows: [f64; 2],
}

/// Times of all modules of a model.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProfileTiming {
    modules: [Option<ModuleTiming>; MODULES],
    warnings: Vec<ProfileWarning>,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self { tp: [1; MODULES], packed_tokens: [None; MODULES] }
    }
}

impl ProfileOptions {
    /// Sets the tensor-parallel degree of a module; it must have been measured. Default: 1.
    #[must_use]
    pub const fn tp(mut self, module: Module, tp: u32) -> Self {
        self.tp[module as usize] = tp;
        self
    }

    /// Sets how many tokens of a module run together: the linear work of a sample with fewer is charged as its share
    /// of a sequence packed to this length, and so is the attention of an encoder. Default: a sample runs alone, and
    /// carries launch costs alone.
    #[must_use]
    pub const fn packed_tokens(mut self, module: Module, tokens: u64) -> Self {
        self.packed_tokens[module as usize] = Some(tokens);
        self
    }

    pub(super) const fn tp_of(&self, module: Module) -> u32 {
        self.tp[module as usize]
    }

    pub(super) const fn packed_tokens_of(&self, module: Module) -> Option<u64> {
        self.packed_tokens[module as usize]
    }
}

impl Load {
    /// The load of an encoder. Media are reduced to equal sequences with the same tokens and query-key pairs: exact
    /// for tiles, and for sequences of different lengths wherever attention takes `a tokens + b pairs`.
    pub(crate) fn of_encoder(work: &EncoderWork) -> Self {
        let tokens = work.encoder_tokens as f64;
        let sequences = |pairs: u64| match pairs {
            0 => [0.0, 0.0],
            pairs => {
                let length = pairs as f64 / tokens;
                [tokens / length, length]
            }
        };
        Self {
            tokens,
            targets: 0.0,
            attention: sequences(work.attention_pairs),
            windows: sequences(work.window_pairs),
        }
    }

    /// The load of an LLM: one sample, and how many of its tokens are learned.
    pub(crate) const fn of_llm(tokens: u64, targets: u64) -> Self {
        let tokens = tokens as f64;
        Self { tokens, targets: targets as f64, attention: [1.0, tokens], windows: [0.0, 0.0] }
    }

    /// `count` times the sequences side by side.
    pub(super) fn repeat(self, count: f64) -> Self {
        let times = |[sequences, length]: [f64; 2]| [sequences * count, length];
        Self {
            tokens: self.tokens * count,
            targets: self.targets * count,
            attention: times(self.attention),
            windows: times(self.windows),
        }
    }
}

impl ProfileTiming {
    /// Folds a profile for a model.
    ///
    /// # Errors
    /// [`crate::Error::ProfileLacks`] with the points to measure.
    pub(crate) fn new(spec: &ModelSpec, profile: &Profile, options: ProfileOptions) -> Result<Self> {
        let mut timing = Self { modules: [None, None, None], warnings: Vec::new() };
        for module in [Module::Vision, Module::Audio, Module::Llm] {
            let Some(widths) = Dimensions::of(spec, module) else { continue };
            let (points, unknown) = profile.select(module, &widths)?;
            let unknown = unknown.into_iter().map(|file| ProfileWarning::UnknownDimensions { module, file });
            timing.warnings.extend(unknown);
            let few = points.iter().filter(|point| point.repeats < REPEATS_MIN).count();
            if few > 0 {
                timing.warnings.push(ProfileWarning::FewRepeats { module, points: few });
            }
            let layers = layers_of(spec, module);
            let module_timing = ModuleTiming::new(&points, module, layers, options, &mut timing.warnings)?;
            timing.modules[module as usize] = Some(module_timing);
        }
        Ok(timing)
    }

    /// The same profile for a model that is trained in another way than it was measured.
    pub(crate) fn trained(&self, encoders: &[Encoder], frozen: Frozen, recomputation: Recomputation) -> Self {
        let mut trained = self.clone();
        let recomputes = recomputation == Recomputation::Layers;
        for encoder in encoders {
            let tower = if frozen.has_tower(encoder.module) { 0.0 } else { 1.0 };
            trained.set(
                encoder.module,
                Training {
                    linear: tower,
                    attention: tower,
                    ends: encoder.flops.ends_backward_share(),
                    recomputes_layers: recomputes && tower > 0.0,
                },
            );
        }
        let linear = if frozen.llm { 0.5 } else { 1.0 };
        let llm = Training { linear, attention: 1.0, ends: linear, recomputes_layers: recomputes };
        trained.set(Module::Llm, llm);
        trained
    }

    fn set(&mut self, module: Module, training: Training) {
        if let Some(timing) = &mut self.modules[module as usize] {
            *timing = timing.trained(training);
        }
    }

    /// What the times rest on, where that is less than it should be.
    pub(crate) fn warnings(&self) -> &[ProfileWarning] {
        &self.warnings
    }

    /// Forward and backward of a module in nanoseconds; 0 for a module that the model has not.
    pub(crate) fn ns(&self, module: Module, load: &Load) -> u64 {
        self.module(module).map_or(0, |timing| whole_ns(timing.ns(load)))
    }

    /// Forward and backward with uncertainty.
    pub(crate) fn predict(&self, module: Module, load: &Load) -> PredictedTime {
        self.module(module).map_or_else(PredictedTime::default, |timing| timing.predict(load).into())
    }

    /// Linear work and attention of a module that runs alone, forward and backward, in nanoseconds; a profile that
    /// has both in one gives the layers as attention.
    pub(crate) fn apart_ns(&self, module: Module, load: &Load) -> [f64; 2] {
        self.module(module).map_or([0.0, 0.0], |timing| timing.apart_ns(load))
    }

    /// Parts of a module whose measured shapes do not reach this load.
    pub(crate) fn beyond(&self, module: Module, load: &Load) -> Vec<ProfileWarning> {
        self.module(module).map_or_else(Vec::new, |timing| timing.beyond(load))
    }

    /// The update of a module's weights, if it was measured.
    pub(crate) fn optimizer(&self, module: Module) -> Option<PredictedTime> {
        self.module(module)?.optimizer().map(Into::into)
    }

    fn module(&self, module: Module) -> Option<&ModuleTiming> {
        self.modules[module as usize].as_ref()
    }
}

/// Layers with full attention, and with windows.
fn layers_of(spec: &ModelSpec, module: Module) -> [u32; 2] {
    let encoder = match module {
        Module::Vision => spec.vision.as_ref().map(|vision| vision.encoder),
        Module::Audio => spec.audio.as_ref().map(|audio| audio.encoder),
        Module::Llm => return [spec.llm.layers, 0],
    };
    encoder.map_or([0, 0], |encoder| {
        let windowed = encoder.windowed_layers.min(encoder.layers);
        [encoder.layers - windowed, windowed]
    })
}

impl From<Estimate> for PredictedTime {
    fn from(estimate: Estimate) -> Self {
        let Estimate { ns, uncertainty_ns, is_beyond } = estimate;
        Self { ns: whole_ns(ns), uncertainty_ns: whole_ns(uncertainty_ns), is_beyond }
    }
}

/// Rounds to whole nanoseconds, half up, saturating.
pub(crate) fn whole_ns(ns: f64) -> u64 {
    (ns + 0.5) as u64
}
