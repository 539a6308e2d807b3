//! Folds a profile into the times for all modules in a model.
//!
//! Lookups are a few multiplications: `+ - * /` on `f64` in a fixed order, which IEEE 754 rounds correctly,
//! and rounding to whole nanoseconds at the end, so every rank gets the same bits. No platform math library
//! function is called.

use super::microbatch_curve::MicrobatchCurve;
use super::module_timing::{BackwardShares, ModuleQuery, ModuleTiming};
use super::predicted_time::{PredictedTime, ProfileWarning, whole_ns};
use super::{ModuleWorkload, SampleWork};
use crate::error::Result;
use crate::flops::EncoderFlops;
use crate::frozen::FrozenParts;
use crate::model::ModelSpec;
use crate::profile::{ModuleWidths, Part, Phase, Point, Profile, REPEATS_MIN, SelectedPoints};
use crate::tokens::{EncoderWork, VisionRule};
use crate::{MODULES_MAX, Module};

/// Times for all modules in a model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ProfileTiming {
    modules: [Option<ModuleTiming>; MODULES_MAX],
    warnings: Vec<ProfileWarning>,
}

impl ProfileTiming {
    /// Folds a profile for a model.
    ///
    /// # Errors
    /// [`crate::Error::ProfileLacks`] with the points to measure.
    pub(super) fn new(spec: &ModelSpec, profile: &Profile, options: ProfileOptions) -> Result<Self> {
        let mut timing = Self { modules: [None, None, None], warnings: Vec::new() };
        let fastest = profile.fastest_runs();
        for module in Module::ALL {
            let Some(widths) = ModuleWidths::from_spec(spec, module) else { continue };
            let selected = profile.select(module, &widths)?;
            let unknown = selected.unknown_files.iter().cloned();
            timing.warnings.extend(unknown.map(|file| ProfileWarning::UnknownWidths { module, file }));
            let few = selected.points.iter().filter(|point| point.repeats < REPEATS_MIN).count();
            if few > 0 {
                timing.warnings.push(ProfileWarning::FewRepeats { module, points: few });
            }
            let fastest = fastest.select(module, &widths)?;
            let query = module_query(spec, module, options, &selected);
            let level = MicrobatchCurve::profile_level(profile, module);
            let query = ModuleQuery { fastest: &fastest.points, level, ..query };
            timing.modules[module as usize] = Some(ModuleTiming::new(query, &mut timing.warnings)?);
        }
        Ok(timing)
    }

    /// Adapts the profile to frozen parts and recomputation; it was measured with everything trained.
    ///
    /// - `recomputed`: share of a module's layers that are recomputed
    pub(super) fn trained<'a>(
        &self,
        encoders: impl Iterator<Item = (Module, &'a EncoderFlops)>,
        frozen: FrozenParts,
        recomputed: impl Fn(Module) -> f64,
    ) -> Self {
        let mut trained = self.clone();
        for (module, flops) in encoders {
            let tower = if frozen.is_tower_frozen(module) { 0.0 } else { 1.0 };
            trained.set(
                module,
                BackwardShares {
                    linear: tower,
                    attention: tower,
                    outside_layers: flops.outside_layers_backward_share(),
                    recomputed: tower * recomputed(module),
                },
            );
        }
        // A frozen matrix computes one of two backward products; attention has no weights, so it computes
        // both.
        let linear = if frozen.llm { 0.5 } else { 1.0 };
        trained.set(
            Module::Llm,
            BackwardShares {
                linear,
                attention: 1.0,
                outside_layers: linear,
                recomputed: recomputed(Module::Llm),
            },
        );
        trained
    }

    fn set(&mut self, module: Module, shares: BackwardShares) {
        if let Some(timing) = &mut self.modules[module as usize] {
            *timing = timing.trained(shares);
        }
    }

    /// Returns the profile weaknesses that affect every prediction.
    pub(super) fn warnings(&self) -> &[ProfileWarning] {
        &self.warnings
    }

    /// Returns the time that a workload adds to a microbatch, forward and backward, in nanoseconds; 0 for a
    /// module that the model does not have.
    pub(super) fn added_ns(&self, module: Module, workload: &ModuleWorkload) -> f64 {
        self.module(module).map_or(0.0, |timing| timing.added_ns(workload))
    }

    /// Returns a module's microbatch time curve, and whether it was fitted to whole-module runs.
    pub(super) fn curve(&self, module: Module) -> Option<(&MicrobatchCurve, bool)> {
        self.module(module).map(|timing| (timing.curve(), timing.is_whole()))
    }

    /// Returns the forward and backward time for a workload run separately, with uncertainty.
    pub(super) fn predict(&self, module: Module, workload: &ModuleWorkload) -> PredictedTime {
        self.module(module).map_or_else(PredictedTime::default, |timing| timing.predict(workload).into())
    }

    /// Returns linear work and attention for a module run separately, forward and backward, in nanoseconds.
    ///
    /// A profile that measured both together counts the layers as attention.
    pub(super) fn linear_and_attention_ns(&self, module: Module, workload: &ModuleWorkload) -> [f64; 2] {
        self.module(module).map_or([0.0, 0.0], |timing| timing.linear_and_attention_ns(workload))
    }

    /// Returns a warning for each module part whose measured points do not reach this workload.
    pub(super) fn extrapolated(&self, module: Module, workload: &ModuleWorkload) -> Vec<ProfileWarning> {
        self.module(module).map_or_else(Vec::new, |timing| timing.extrapolated(workload))
    }

    fn module(&self, module: Module) -> Option<&ModuleTiming> {
        self.modules[module as usize].as_ref()
    }
}

/// Returns the curve from whole-module runs with all layers; `None` if they are too few, or not all layers
/// ran.
pub(super) fn whole_curve(
    spec: &ModelSpec,
    profile: &Profile,
    module: Module,
    options: ProfileOptions,
) -> Result<Option<MicrobatchCurve>> {
    let Some(widths) = ModuleWidths::from_spec(spec, module) else { return Ok(None) };
    let layers = attention_layers(spec, module);
    let selected = profile.select(module, &widths)?;
    let is_whole =
        |point: &&Point| point.setting.part == Part::Whole && point.setting.phase != Phase::Optimizer;
    let mut counts = selected.points.iter().filter(is_whole).map(|point| point.setting.layers);
    if counts.clone().next().is_none() || counts.any(|count| count != layers[0] + layers[1]) {
        return Ok(None);
    }
    let query = module_query(spec, module, options, &selected);
    let fastest = profile.fastest_runs().select(module, &widths)?;
    let level = MicrobatchCurve::profile_level(profile, module);
    let query = ModuleQuery { fastest: &fastest.points, level, ..query };
    let timing = ModuleTiming::new(query, &mut Vec::new())?;
    Ok(timing.is_whole().then(|| *timing.curve()))
}

/// Returns the query for a module, with the fastest points.
fn module_query<'a>(
    spec: &ModelSpec,
    module: Module,
    options: ProfileOptions,
    selected: &'a SelectedPoints,
) -> ModuleQuery<'a> {
    ModuleQuery {
        module,
        selected,
        fastest: &selected.points,
        tp: options.module_tp(module),
        layers: attention_layers(spec, module),
        llm_windows: spec.llm.windows.filter(|_| module == Module::Llm),
        window_tokens: window_tokens(spec, module),
        level: 1.0,
    }
}

/// Returns the number of layers with full attention, and with windows.
pub(super) fn attention_layers(spec: &ModelSpec, module: Module) -> [u32; 2] {
    let encoder = match module {
        Module::Vision => spec.vision.as_ref().map(|vision| vision.encoder),
        Module::Audio => spec.audio.as_ref().map(|audio| audio.encoder),
        Module::Llm => {
            let windowed = spec.llm.windowed_layer_count();
            return [spec.llm.layers - windowed, windowed];
        }
    };
    encoder.map_or([0, 0], |encoder| {
        let windowed = encoder.windowed_layers.min(encoder.layers);
        [encoder.layers - windowed, windowed]
    })
}

/// Returns the patches per encoder attention window; 0 without windows.
fn window_tokens(spec: &ModelSpec, module: Module) -> u32 {
    let rule = spec.vision.as_ref().map(|vision| &vision.rule).filter(|_| module == Module::Vision);
    let Some(VisionRule::Native(native)) = rule else { return 0 };
    native.window_patches.map_or(0, |side| u32::from(side.get()) * u32::from(side.get()))
}

/// Settings that apply a profile to a model; the default is TP degree 1, with held-out microbatches checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileOptions {
    tp: [u32; MODULES_MAX],
    is_checked: bool,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self { tp: [1; MODULES_MAX], is_checked: true }
    }
}

impl ProfileOptions {
    /// Sets a module's tensor-parallel degree; the profile must contain it. Default: 1.
    #[must_use]
    pub const fn tp(mut self, module: Module, tp: u32) -> Self {
        self.tp[module as usize] = tp;
        self
    }

    /// Accepts a profile that does not predict the held-out microbatches within bounds. Default: rejected.
    #[must_use]
    pub const fn unchecked(mut self) -> Self {
        self.is_checked = false;
        self
    }

    pub(super) const fn is_checked(&self) -> bool {
        self.is_checked
    }

    const fn module_tp(&self, module: Module) -> u32 {
        self.tp[module as usize]
    }
}

/// Module work, summed over a microbatch's samples.
#[derive(Default)]
pub(super) struct MicrobatchWork {
    work: EncoderWork,
    tokens: f64,
    targets: u64,
    /// Sum of tokens, weighted by each sample's correction.
    corrected_tokens: f64,
    /// Sum of attention, weighted by each sample's correction: encoder pairs, LLM nanoseconds.
    corrected_attention: f64,
}

impl MicrobatchWork {
    pub(super) fn add(&mut self, work: &SampleWork, module: Module, factor: f64, timing: &ProfileTiming) {
        let attention = match work.encoder(module) {
            Some(work) => {
                self.work += *work;
                work.attention_pairs as f64
            }
            None => timing.linear_and_attention_ns(module, &work.workload(module))[1],
        };
        let size = work.size(module) as f64;
        self.tokens += size;
        self.targets = self.targets.saturating_add(work.targets);
        self.corrected_tokens += size * factor;
        self.corrected_attention += attention * factor;
    }

    pub(super) fn ns(&self, module: Module, timing: &ProfileTiming) -> u64 {
        if self.tokens <= 0.0 {
            return 0;
        }
        // Linear work has a single time for the whole pack, so sample corrections are weighted by tokens.
        let linear_factor = self.corrected_tokens / self.tokens;
        if module == Module::Llm {
            let packed = ModuleWorkload::from_llm(self.tokens as u64, self.targets);
            let [linear_ns, _] = timing.linear_and_attention_ns(module, &packed);
            return whole_ns(linear_ns * linear_factor + self.corrected_attention);
        }
        let batch = ModuleWorkload::from_encoder(&self.work);
        let [linear_ns, attention_ns] = timing.linear_and_attention_ns(module, &batch);
        let attention_factor = self.corrected_attention / (self.work.attention_pairs as f64).max(1.0);
        whole_ns(linear_ns * linear_factor + attention_ns * attention_factor)
    }
}
