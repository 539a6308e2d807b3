//! Predicts the cost of samples and microbatches for a model.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::calibration::ProfileCheck;
use super::device::DeviceRate;
use super::microbatch_curve::{LaunchLimit, MicrobatchCurve};
use super::predicted_time::{PredictedTime, ProfileWarning, whole_ns};
use super::profile_timing::{MicrobatchWork, ProfileOptions, ProfileTiming};
use super::{ModuleWorkload, SampleWork};
use crate::correction::{CorrectionTable, FACTOR_ONE, MicrobatchConstants, ModelConstants, SampleTime};
use crate::error::{Error, Result};
use crate::flops::{Attention, EncoderFlops, LlmFlops, Recomputation, TrainingFlops};
use crate::frozen::FrozenParts;
use crate::model::ModelSpec;
use crate::profile::Profile;
use crate::tokens::{EncoderWork, MediaRule};
use crate::{MODULES_MAX, Module, ModuleTimes, SampleShape};

/// Predicted sample cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct SampleCost {
    /// LLM positions: text, and media after the encoders.
    pub tokens: u32,
    /// Tokens in the loss.
    pub target_tokens: u32,
    /// Tiles, patches and windows, as cut by the model's token rules, summed over both encoders.
    pub encoder_items: u32,
    /// Positions inside the encoders, summed over both.
    pub encoder_tokens: u32,
    /// Time that the sample **adds** to the microbatch, forward and backward: for each whole module, all
    /// layers, on one device. [`CostModel::microbatch_ns`] computes a microbatch's time from the sum.
    pub module_ns: ModuleTimes,
}

/// Predicted sample times with uncertainty.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Time that the sample adds to the microbatch in each module, in [`CostModel::modules`] order, equal to
    /// the times from [`CostModel::predict`].
    pub modules: Vec<PredictedTime>,
    /// Module parts for which the sample is outside the measured points.
    pub warnings: Vec<ProfileWarning>,
}

/// Predicts sample costs for one model on one device.
///
/// # Examples
/// ```
/// use dflop_costmodel::{CostModel, DeviceRate, ImageSize, ModelSpec, SampleShape};
///
/// # fn main() -> dflop_costmodel::Result<()> {
/// let model = CostModel::new(ModelSpec::preset("qwen2.5-vl-7b")?, DeviceRate::preset("h100")?);
/// let image = ImageSize { width: 640, height: 480 };
/// let shape = SampleShape { text_tokens: 100, images: vec![image], ..SampleShape::default() };
/// let cost = model.predict(&shape)?;
/// assert_eq!(cost.tokens, 100 + 391 + 2);
/// assert_eq!(cost.encoder_tokens, 4 * 391);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CostModel {
    pub(super) spec: ModelSpec,
    pub(super) times: TimeSource,
    check: Option<ProfileCheck>,
    correction: Option<Arc<CorrectionTable>>,
    modules: Vec<Module>,
    encoders: Vec<Encoder>,
    pub(super) llm: LlmFlops,
    recomputation: [ModuleRecomputation; MODULES_MAX],
    frozen: FrozenParts,
}

/// Work that a module's backward pass repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ModuleRecomputation {
    kind: Recomputation,
    /// Layers from one recomputed layer to the next.
    every: NonZeroU32,
}

impl ModuleRecomputation {
    const NONE: Self = Self { kind: Recomputation::None, every: NonZeroU32::MIN };

    /// Returns the share of the layers that run forward a second time.
    fn layer_share(self) -> f64 {
        if self.kind == Recomputation::Layers { 1.0 / f64::from(self.every.get()) } else { 0.0 }
    }

    /// Returns the FLOPs of both passes, saturating.
    ///
    /// - `flops`: FLOPs if every layer is recomputed
    fn total(self, flops: TrainingFlops) -> u128 {
        TrainingFlops { recomputed: flops.recomputed / u128::from(self.every.get()), ..flops }.total()
    }
}

/// Source that converts work to time.
#[derive(Debug, Clone)]
pub(super) enum TimeSource {
    /// FLOPs over a stated rate.
    Rate(DeviceRate),
    /// Curves through measured times.
    Profile(Arc<ProfileTiming>),
}

/// Encoder with FLOPs per token and pair.
#[derive(Debug, Clone, Copy)]
struct Encoder {
    module: Module,
    rule: MediaRule,
    flops: EncoderFlops,
}

impl CostModel {
    /// Builds a cost model with times from a stated rate.
    #[must_use]
    pub fn new(spec: ModelSpec, rate: DeviceRate) -> Self {
        Self::with_times(spec, TimeSource::Rate(rate))
    }

    /// Builds a cost model with times from a measured profile; tokens are the same as with
    /// [`CostModel::new`].
    ///
    /// # Errors
    /// [`Error::ProfileLacks`] with the points to measure, if a module was not measured at the module's
    /// tensor-parallel degree, or only with other widths; [`Error::ProfileInaccurate`] if the profile does
    /// not predict the held-out microbatches within bounds, unless that is
    /// [not checked](ProfileOptions::unchecked).
    ///
    /// # Source
    /// An et al., PACMMOD 2026, arXiv:2603.25120, section 3.2.1: attention per original sample, linear work
    /// per packed sequence; interpolated as times, not as rates.
    pub fn from_profile(spec: ModelSpec, profile: &Profile, options: ProfileOptions) -> Result<Self> {
        let timing = ProfileTiming::new(&spec, profile, options)?;
        let check = ProfileCheck::new(profile);
        if let Some(check) = check.as_ref().filter(|_| options.is_checked()) {
            check.require_within()?;
        }
        Ok(Self { check, ..Self::with_times(spec, TimeSource::Profile(Arc::new(timing))) })
    }

    /// Folds a model into FLOPs per token and pair, once, so that a sample takes a few multiplications.
    fn with_times(spec: ModelSpec, times: TimeSource) -> Self {
        let fold = |(module, encoder, rule)| {
            let flops = EncoderFlops::new(&encoder, spec.llm.hidden);
            Encoder { module, rule, flops }
        };
        let encoders: Vec<Encoder> = spec.encoders().map(fold).collect();
        let modules = encoders.iter().map(|encoder| encoder.module).chain([Module::Llm]).collect();
        let llm = LlmFlops::new(&spec.llm);
        let recomputation = [ModuleRecomputation::NONE; MODULES_MAX];
        let frozen = FrozenParts::default();
        Self { spec, times, check: None, correction: None, modules, encoders, llm, recomputation, frozen }
    }

    /// Sets what the backward pass recomputes. Default: nothing.
    ///
    /// On a profile, [`Recomputation::Layers`] adds the measured forward pass of the layers to the backward
    /// pass; [`Recomputation::Scores`] changes nothing, because measured times include what the kernels
    /// recompute.
    #[must_use]
    pub fn recomputation(mut self, recomputation: Recomputation) -> Self {
        self.recomputation =
            [ModuleRecomputation { kind: recomputation, every: NonZeroU32::MIN }; MODULES_MAX];
        self.apply_training();
        self
    }

    /// Recomputes every layer of a module whose number is a multiple of `every`; `None` recomputes none.
    /// Default: what [`Self::recomputation`] sets for all modules.
    #[must_use]
    pub fn recomputed_layers(mut self, module: Module, every: Option<NonZeroU32>) -> Self {
        let layers = |every| ModuleRecomputation { kind: Recomputation::Layers, every };
        self.recomputation[module as usize] = every.map_or(ModuleRecomputation::NONE, layers);
        self.apply_training();
        self
    }

    /// Returns what the backward pass of a module recomputes in the layers that it recomputes.
    pub(super) const fn module_recomputation(&self, module: Module) -> Recomputation {
        self.recomputation[module as usize].kind
    }

    /// Sets the frozen parts. Default: none.
    ///
    /// On a profile, a frozen LLM's linear work counts half its measured backward pass, because it computes
    /// one of two products, and its attention counts in full; if the two were not measured separately,
    /// everything counts half. A frozen encoder has no backward pass; for a projector after it, the backward
    /// pass is taken from the time measured outside the layers.
    ///
    /// # Errors
    /// [`Error::Incompatible`] if the model lacks a frozen part, or nothing is left to train.
    pub fn frozen(mut self, frozen: FrozenParts) -> Result<Self> {
        frozen.check(&self.spec)?;
        self.frozen = frozen;
        for encoder in &mut self.encoders {
            let [tower, projector] = frozen.encoder_gradients(encoder.module);
            encoder.flops = encoder.flops.gradients(tower, projector);
        }
        self.llm = self.llm.gradients(frozen.llm_gradients());
        self.apply_training();
        Ok(self)
    }

    /// Adapts measured times to frozen parts and recomputation, always starting from the measured times.
    fn apply_training(&mut self) {
        if let TimeSource::Profile(timing) = &mut self.times {
            let encoders = self.encoders.iter().map(|encoder| (encoder.module, &encoder.flops));
            let recomputed = |module| self.recomputation[module as usize].layer_share();
            *timing = Arc::new(timing.trained(encoders, self.frozen, recomputed));
        }
    }

    /// Applies a correction to all predictions from now on; `None` removes it.
    #[must_use]
    pub fn correction(mut self, table: Option<Arc<CorrectionTable>>) -> Self {
        self.correction = table;
        self
    }

    /// Returns the applied correction.
    #[must_use]
    pub fn correction_table(&self) -> Option<&CorrectionTable> {
        self.correction.as_deref()
    }

    /// Returns the model.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Returns the model's modules: encoders, then the LLM.
    #[must_use]
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// Returns the stated rate that times come from; `None` if they come from a profile.
    #[must_use]
    pub const fn rate(&self) -> Option<&DeviceRate> {
        match &self.times {
            TimeSource::Rate(rate) => Some(rate),
            TimeSource::Profile(_) => None,
        }
    }

    /// Returns the profile errors over the held-out microbatches; `None` for a stated rate, and without
    /// held-out microbatches.
    #[must_use]
    pub const fn profile_check(&self) -> Option<&ProfileCheck> {
        self.check.as_ref()
    }

    /// Returns the weaknesses of the whole profile; empty for a stated rate.
    #[must_use]
    pub fn profile_warnings(&self) -> &[ProfileWarning] {
        match &self.times {
            TimeSource::Rate(_) => &[],
            TimeSource::Profile(timing) => timing.warnings(),
        }
    }

    /// Predicts the cost that a sample adds to a microbatch; allocates nothing.
    ///
    /// At a stated rate, times are for executed FLOPs: LLM attention is causal, and recomputation counts. On
    /// a profile they come from the rates in the [curve](CostModel::microbatch_curve), and from the LM head
    /// over target tokens if it was measured separately. Media that the model has no encoder for are ignored:
    /// they add no tokens and no time, and are not checked. Sequences are not cut at the LLM's maximum.
    ///
    /// # Errors
    /// [`Error::EmptyImage`], [`Error::AspectRatio`] or [`Error::SampleRate`] if the model does not support a
    /// medium; [`Error::TooLarge`] if a count does not fit into 32 bits.
    pub fn predict(&self, shape: &SampleShape) -> Result<SampleCost> {
        let mut module_ns = ModuleTimes::EMPTY;
        let mut media = EncoderWork::default();
        for encoder in &self.encoders {
            let work = encoder.rule.work(shape)?;
            module_ns.push(self.encoder_ns(encoder, &work));
            media += work;
        }
        let tokens = to_u32("tokens", media.tokens.saturating_add(u64::from(shape.text_tokens)))?;
        module_ns.push(self.llm_ns(tokens, shape.target_tokens));
        Ok(SampleCost {
            tokens,
            target_tokens: shape.target_tokens,
            encoder_items: to_u32("encoder items", media.items)?,
            encoder_tokens: to_u32("encoder tokens", media.encoder_tokens)?,
            module_ns,
        })
    }

    /// Predicts the cost of a sample whose tokens were counted without the model's token rules.
    ///
    /// - `works`: work per encoder, in [`CostModel::modules`] order; the `tokens` in each are not read
    /// - `tokens`: LLM positions, media included
    ///
    /// # Errors
    /// [`Error::Incompatible`] if the number of encoders differs, [`Error::TooLarge`] if a count does not fit
    /// into 32 bits.
    pub fn predict_counted(
        &self,
        works: &[EncoderWork],
        tokens: u32,
        target_tokens: u32,
    ) -> Result<SampleCost> {
        if works.len() != self.encoders.len() {
            let problem = format!("has {} encoders, found the work of {}", self.encoders.len(), works.len());
            return Err(Error::Incompatible { name: self.spec.name.clone(), problem });
        }
        let mut module_ns = ModuleTimes::EMPTY;
        let mut media = EncoderWork::default();
        for (encoder, work) in self.encoders.iter().zip(works) {
            module_ns.push(self.encoder_ns(encoder, work));
            media += *work;
        }
        module_ns.push(self.llm_ns(tokens, target_tokens));
        Ok(SampleCost {
            tokens,
            target_tokens,
            encoder_items: to_u32("encoder items", media.items)?,
            encoder_tokens: to_u32("encoder tokens", media.encoder_tokens)?,
            module_ns,
        })
    }

    /// Predicts a sample with the uncertainty for each module; `None` for a stated rate, whose error is
    /// unknown.
    ///
    /// # Errors
    /// The errors of [`CostModel::predict`].
    pub fn predict_with_uncertainty(&self, shape: &SampleShape) -> Result<Option<Prediction>> {
        let work = self.work(shape)?;
        let TimeSource::Profile(timing) = &self.times else { return Ok(None) };
        let mut prediction = Prediction { modules: Vec::new(), warnings: Vec::new() };
        for &module in self.modules() {
            let workload = work.workload(module);
            let alone = timing.predict(module, &workload);
            let added_ns = whole_ns(timing.added_ns(module, &workload));
            let ns = self.corrected_ns(module, work.size(module), added_ns);
            let checked = self.check.as_ref().and_then(|check| check.module_half_widths[module as usize]);
            let half_width =
                checked.unwrap_or_else(|| alone.uncertainty_ns as f64 / (alone.ns as f64).max(1.0));
            prediction.modules.push(PredictedTime {
                ns,
                uncertainty_ns: whole_ns(ns as f64 * half_width),
                is_extrapolated: alone.is_extrapolated,
            });
            prediction.warnings.extend(timing.extrapolated(module, &workload));
        }
        Ok(Some(prediction))
    }

    /// Predicts a microbatch: samples that each module runs together.
    ///
    /// On a profile with whole modules, the time comes from the [curve](CostModel::microbatch_curve). On a
    /// profile with module parts, linear work is looked up for the packed sequence, LLM attention is summed
    /// over the samples, and an encoder runs all media as one batch. At a stated rate, times are summed over
    /// the samples.
    ///
    /// Returns forward and backward nanoseconds for each whole module, in [`CostModel::modules`] order.
    ///
    /// # Errors
    /// The errors of [`CostModel::predict`], for the first sample that the model does not support.
    pub fn predict_microbatch<'a>(
        &self,
        shapes: impl IntoIterator<Item = &'a SampleShape>,
    ) -> Result<ModuleTimes> {
        let mut added = [0_u64; MODULES_MAX];
        let mut works: [MicrobatchWork; MODULES_MAX] = Default::default();
        for shape in shapes {
            let cost = self.predict(shape)?;
            for (sum, ns) in added.iter_mut().zip(cost.module_ns.as_slice()) {
                *sum = sum.saturating_add(*ns);
            }
            let TimeSource::Profile(timing) = &self.times else { continue };
            let sample = self.work(shape)?;
            for (work, &module) in works.iter_mut().zip(self.modules()) {
                let factor = self.factor(module, sample.size(module));
                work.add(&sample, module, factor, timing);
            }
        }
        let by_curve = self.microbatch_ns(&added[..self.modules.len()]);
        let TimeSource::Profile(timing) = &self.times else { return Ok(by_curve) };
        let mut times = ModuleTimes::EMPTY;
        for ((ns, work), &module) in by_curve.as_slice().iter().zip(&works).zip(self.modules()) {
            let is_whole = timing.curve(module).is_some_and(|(_, is_whole)| is_whole);
            times.push(if is_whole { *ns } else { work.ns(module, timing) });
        }
        Ok(times)
    }

    /// Returns a microbatch's time in each module, forward and backward, from the sum that the samples add:
    /// at least the launch time, plus a constant in addition to the samples.
    ///
    /// - `added_ns`: sums of [`SampleCost::module_ns`], in [`CostModel::modules`] order
    #[must_use]
    pub fn microbatch_ns(&self, added_ns: &[u64]) -> ModuleTimes {
        let mut times = ModuleTimes::EMPTY;
        for ns in self.microbatch_constants().microbatch_ns(added_ns.to_vec()) {
            times.push(ns);
        }
        times
    }

    /// Returns a microbatch's constant time in addition to the samples, from the profile or learned by a
    /// correction; zero at a stated rate.
    #[must_use]
    pub fn microbatch_constants(&self) -> ModelConstants {
        let learned = self.correction.as_deref();
        let of = |&module: &Module| {
            let learned = learned.and_then(|table| table.constants(module));
            learned.unwrap_or_else(|| self.measured_constants(module))
        };
        ModelConstants {
            modules: self.modules.iter().map(of).collect(),
            whole: learned.and_then(CorrectionTable::whole_constants),
        }
    }

    /// Returns a module's constants without correction.
    fn measured_constants(&self, module: Module) -> MicrobatchConstants {
        let curve = self.microbatch_curve(module);
        curve.map_or_else(MicrobatchConstants::default, |curve| MicrobatchConstants {
            floor_ns: whole_ns(curve.floor_ns),
            base_ns: whole_ns(curve.base_ns),
        })
    }

    /// Returns the modules whose small microbatches are limited by launches, as measured in a profile.
    #[must_use]
    pub fn launch_limits(&self) -> Vec<LaunchLimit> {
        let of = |&module: &Module| LaunchLimit::new(module, self.microbatch_curve(module)?);
        self.modules.iter().filter_map(of).collect()
    }

    /// Returns a module's microbatch time curve, without correction; `None` at a stated rate.
    #[must_use]
    pub fn microbatch_curve(&self, module: Module) -> Option<&MicrobatchCurve> {
        match &self.times {
            TimeSource::Rate(_) => None,
            TimeSource::Profile(timing) => timing.curve(module).map(|(curve, _)| curve),
        }
    }

    /// Predicts the time that a sample adds to a module without correction, as an
    /// [`Observation`](crate::correction::Observation) needs it.
    ///
    /// Returns the sample's size inside the module, in tokens, and the time in nanoseconds; `None` if the
    /// sample has no work for the module.
    ///
    /// # Errors
    /// The errors of [`CostModel::predict`].
    pub fn predict_uncorrected(&self, module: Module, shape: &SampleShape) -> Result<Option<(u64, u64)>> {
        let Some(at) = self.modules().iter().position(|known| *known == module) else { return Ok(None) };
        let size = self.work(shape)?.size(module);
        // A clone is cheap, because the curves are shared.
        let plain = self.clone().correction(None);
        let ns = plain.predict(shape)?.module_ns.as_slice()[at];
        Ok((ns > 0).then_some((size, ns)))
    }

    /// Returns the time that a sample adds to a module, or to each module, without correction, as an
    /// [`Observation`](crate::correction::Observation) needs it; empty for a sample that the model rejects,
    /// which is planned at zero cost.
    #[must_use]
    pub fn sample_times(&self, module: Option<Module>, shape: &SampleShape) -> Vec<SampleTime> {
        let modules = self.modules.iter().copied().filter(|own| module.is_none_or(|module| module == *own));
        let time = |module: Module| {
            let (size, ns) = self.predict_uncorrected(module, shape).ok().flatten()?;
            Some(SampleTime { module, size, ns })
        };
        modules.filter_map(time).collect()
    }

    /// Returns the microbatch constants for these samples without correction: for a module, or for all
    /// modules that have work.
    #[must_use]
    pub fn sample_constants(&self, module: Option<Module>, samples: &[SampleTime]) -> MicrobatchConstants {
        let has_work = |own: &Module| samples.iter().any(|sample| sample.module == *own);
        let modules = self.modules.iter().filter(|own| module.is_none_or(|module| module == **own));
        let constants = modules.filter(|own| has_work(own)).map(|own| self.measured_constants(*own));
        constants.fold(MicrobatchConstants::default(), MicrobatchConstants::plus)
    }

    /// Returns the training FLOPs for samples packed into one sequence, per module.
    ///
    /// [`Attention::Full`] without recomputation gives the model FLOPs, from which MFU follows;
    /// [`Attention::Causal`] gives the executed FLOPs.
    ///
    /// # Errors
    /// The errors of [`CostModel::predict`].
    pub fn training_flops(
        &self,
        samples: &[SampleShape],
        attention: Attention,
        recomputation: Recomputation,
    ) -> Result<Vec<(Module, TrainingFlops)>> {
        let mut sample_tokens: Vec<u64> = samples.iter().map(|shape| u64::from(shape.text_tokens)).collect();
        let mut flops = Vec::with_capacity(self.modules.len());
        for encoder in &self.encoders {
            let mut work = EncoderWork::default();
            for (shape, tokens) in samples.iter().zip(&mut sample_tokens) {
                let media = encoder.rule.work(shape)?;
                // The LLM's tokens are complete only after the last encoder.
                *tokens = tokens.saturating_add(media.tokens);
                work += media;
            }
            flops.push((encoder.module, encoder.flops.training(&work, recomputation)));
        }
        let tokens = sample_tokens.into_iter().map(|count| to_u32("tokens", count));
        let tokens = tokens.collect::<Result<Vec<u32>>>()?;
        flops.push((Module::Llm, self.llm.training(&tokens, attention, recomputation)));
        Ok(flops)
    }

    /// Returns an encoder's corrected time, forward and backward.
    fn encoder_ns(&self, encoder: &Encoder, work: &EncoderWork) -> u64 {
        let module = encoder.module;
        let ns = match &self.times {
            TimeSource::Rate(rate) => {
                let recomputation = self.recomputation[module as usize];
                let flops = encoder.flops.training(work, recomputation.kind);
                rate.nanoseconds(module, recomputation.total(flops))
            }
            TimeSource::Profile(timing) => {
                whole_ns(timing.added_ns(module, &ModuleWorkload::from_encoder(work)))
            }
        };
        self.corrected_ns(module, work.encoder_tokens, ns)
    }

    /// Returns the LLM's corrected time over a sample, forward and backward.
    pub(super) fn llm_ns(&self, tokens: u32, targets: u32) -> u64 {
        let ns = match &self.times {
            TimeSource::Rate(rate) => {
                let recomputation = self.recomputation[Module::Llm as usize];
                let flops = self.llm.training(&[tokens], Attention::Causal, recomputation.kind);
                rate.nanoseconds(Module::Llm, recomputation.total(flops))
            }
            TimeSource::Profile(timing) => {
                let workload = ModuleWorkload::from_llm(tokens.into(), targets.into());
                whole_ns(timing.added_ns(Module::Llm, &workload))
            }
        };
        self.corrected_ns(Module::Llm, tokens.into(), ns)
    }

    pub(super) fn corrected_ns(&self, module: Module, size: u64, ns: u64) -> u64 {
        self.correction.as_ref().map_or(ns, |table| table.apply(module, size, ns))
    }

    fn factor(&self, module: Module, size: u64) -> f64 {
        let factor = self.correction.as_ref().map_or(FACTOR_ONE, |table| table.factor(module, size));
        f64::from(factor) / f64::from(FACTOR_ONE)
    }

    fn work(&self, shape: &SampleShape) -> Result<SampleWork> {
        let mut sample = SampleWork {
            encoders: [None; MODULES_MAX],
            tokens: u64::from(shape.text_tokens),
            targets: u64::from(shape.target_tokens),
        };
        for (encoder, slot) in self.encoders.iter().zip(&mut sample.encoders) {
            let work = encoder.rule.work(shape)?;
            sample.tokens = sample.tokens.saturating_add(work.tokens);
            *slot = Some((encoder.module, work));
        }
        Ok(sample)
    }
}

fn to_u32(quantity: &'static str, count: u64) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::TooLarge { quantity, count })
}
