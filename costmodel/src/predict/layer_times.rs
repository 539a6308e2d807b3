//! Splits a module's times as a pipeline does: per layer, and outside the layers.
//!
//! A pipeline stage runs some layers, the last stage also the LM head or the projector, so a planner needs
//! separate times. Two measured layer counts separate them, or rows of `ends`. A profile with a single layer
//! count has both in one time; it is then split in proportion to FLOPs, which is exact for a device that is
//! equally fast at both. If the whole module ran with all its layers, the [curve](MicrobatchCurve) for its
//! microbatches is divided, so that launches count.

use super::calibration::ProfileCheck;
use super::curve_query::CurveQuery;
use super::device::{DevicePreset, DeviceRate};
use super::layer_matrices::{
    LayerFlops, LayerMatrix, active_expert_weights, encoder_layer_flops, encoder_matrices,
    encoder_pair_flops, llm_layer_flops, llm_matrices, llm_square_flops, native_layer_flops, sparse_share,
};
use super::microbatch_curve::MicrobatchCurve;
use super::profile_timing::{ProfileOptions, attention_layers, whole_curve};
use crate::Module;
use crate::curve::{Curve, Estimate, Surface};
use crate::error::Result;
use crate::flops::LlmFlops;
use crate::model::{EncoderSpec, ModelSpec, WindowedAttention};
use crate::profile::{ModuleWidths, Part, Phase, Profile, SelectedPoints};

/// FLOPs per weight and token: a multiplication and an addition, forward once and backward twice.
const TRAINING_FLOPS_PER_WEIGHT: f64 = 6.0;
/// Half width of the interval for a whole module whose predictions were not checked.
const ASSUMED_HALF_WIDTH: f64 = 0.05;

/// Forward and backward times per layer and outside the layers, for one module at one TP degree.
#[derive(Debug, Clone)]
pub struct LayerTimes {
    source: TimeSource,
    llm: LlmLayers,
}

/// Differences between an LLM's layers; none in an encoder.
#[derive(Debug, Clone, Copy, Default)]
struct LlmLayers {
    /// Windows, and the share of layers that have them.
    windows: Option<(WindowedAttention, f64)>,
    /// Share of a mean layer's linear FLOPs in routed experts.
    expert_share: f64,
}

#[derive(Debug, Clone)]
enum TimeSource {
    Rate(RateTimes),
    Measured(Vec<LayerPassTimes>),
    /// Whole-module runs.
    Whole(WholeTimes),
}

/// Times from a whole-module curve, divided by layers and FLOPs.
#[derive(Debug, Clone, Copy)]
struct WholeTimes {
    curve: MicrobatchCurve,
    layers: f64,
    /// Number of layers whose attention grows with the squared length.
    full_layers: f64,
    /// Share of the time that is outside the layers.
    outside_share: f64,
    /// Half width of the 90 % interval, as a fraction.
    half_width: f64,
}

/// Times from a stated rate, in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct RateTimes {
    layer_per_token: f64,
    /// Nanoseconds per squared sequence token.
    layer_per_square: f64,
    /// Part of the nanoseconds per token in routed experts.
    experts_per_token: f64,
    /// Constant nanoseconds per layer: the weights for all experts are read.
    expert_read: f64,
    outside_per_token: f64,
}

impl LayerTimes {
    /// Computes a module's times from a stated rate, divided evenly over the ranks in a TP group.
    ///
    /// - `sequence_tokens`: tokens per tile, for an encoder; ignored for an LLM, and for an encoder with
    ///   native-resolution media, whose layers are mean layers over layers with and without windows
    #[must_use]
    pub fn from_rate(
        spec: &ModelSpec,
        module: Module,
        tp: u32,
        rate: &DeviceRate,
        sequence_tokens: u32,
    ) -> Self {
        let rates = RateTimes::new(spec, module, tp, rate, sequence_tokens);
        Self { source: TimeSource::Rate(rates), llm: LlmLayers::new(spec, module) }
    }

    /// Computes a module's times on a known device, whose rate depends on the shard width.
    ///
    /// As [`LayerTimes::from_rate`] at the device's rate, where a matrix runs at its
    /// [efficiency](DevicePreset::efficiency) on the width that a rank in the TP group holds, and norms and
    /// residual additions are repeated on every rank. Times are per rank, without the group's all-reduces.
    /// Sequence parallelism, which divides the repeated work, is not assumed.
    ///
    /// - `sequence_tokens`: as for [`LayerTimes::from_rate`]
    #[must_use]
    pub fn from_preset(
        spec: &ModelSpec,
        module: Module,
        tp: u32,
        preset: &DevicePreset,
        sequence_tokens: u32,
    ) -> Self {
        let mut rates = RateTimes::new(spec, module, tp, preset.rate(), sequence_tokens);
        let (hidden, matrices) = match encoder_spec(spec, module) {
            Some(encoder) => (encoder.hidden, encoder_matrices(&encoder, tp)),
            None => (spec.llm.hidden, llm_matrices(&spec.llm, tp)),
        };
        let flop_ns = ns_per_flop(preset.rate(), module, tp);
        for LayerMatrix { weights, local_width, rank_share } in matrices {
            // Rates divide all matrices over the ranks in a TP group.
            let share = rank_share * f64::from(tp.max(1));
            let lost = share / preset.efficiency(module, local_width) - 1.0;
            rates.layer_per_token += TRAINING_FLOPS_PER_WEIGHT * weights * flop_ns * lost;
        }
        if let Some(experts) = spec.llm.experts.filter(|_| module == Module::Llm) {
            let width = f64::from(spec.llm.hidden).min(f64::from(experts.ffn) / f64::from(tp.max(1)));
            rates.experts_per_token /= preset.efficiency(module, width);
            let weights = spec.llm.expert_weights() as f64 * f64::from(experts.experts);
            rates.expert_read =
                preset.expert_read_ns(sparse_share(&spec.llm) * weights / f64::from(tp.max(1)));
        }
        rates.layer_per_token += preset.replicated_ns(hidden, tp);
        // Projector and LM head are cut along their long side, so the hidden size is their narrow one.
        rates.outside_per_token /= preset.efficiency(module, hidden.into());
        Self { source: TimeSource::Rate(rates), llm: LlmLayers::new(spec, module) }
    }

    /// Looks up a module's times in a measured profile.
    ///
    /// # Errors
    /// [`crate::Error::ProfileLacks`] with the points to measure, if the module was not measured at this
    /// degree.
    pub fn from_profile(
        spec: &ModelSpec,
        profile: &Profile,
        module: Module,
        tp: u32,
        sequence_tokens: u32,
    ) -> Result<Self> {
        let widths = ModuleWidths::from_spec(spec, module).unwrap_or_default();
        let selected = profile.select(module, &widths)?;
        let flops_split = match encoder_spec(spec, module) {
            Some(encoder) if spec.is_native(module) => native_layer_flops(&encoder, spec.llm.hidden),
            Some(encoder) => encoder_layer_flops(&encoder, spec.llm.hidden, sequence_tokens),
            None => llm_layer_flops(&spec.llm),
        };
        if let Some(whole) = WholeTimes::new(spec, profile, module, tp, flops_split)? {
            return Ok(Self { source: TimeSource::Whole(whole), llm: LlmLayers::new(spec, module) });
        }
        let pass = |phase| LayerPassTimes::new(&selected, module, phase, tp, flops_split);
        let source = TimeSource::Measured(vec![pass(Phase::Forward)?, pass(Phase::Backward)?]);
        Ok(Self { source, llm: LlmLayers::new(spec, module) })
    }

    /// Returns the TP degrees at which a profile has times for a module, ascending.
    #[must_use]
    pub fn measured_degrees(spec: &ModelSpec, profile: &Profile, module: Module) -> Vec<u32> {
        let widths = ModuleWidths::from_spec(spec, module).unwrap_or_default();
        let Ok(selected) = profile.select(module, &widths) else { return Vec::new() };
        let has_passes = |tp: &u32| {
            let has = |phase| selected.points.iter().any(|p| p.setting.tp == *tp && p.setting.phase == phase);
            has(Phase::Forward) && has(Phase::Backward)
        };
        let mut degrees: Vec<u32> =
            selected.points.iter().map(|point| point.setting.tp).filter(has_passes).collect();
        degrees.sort_unstable();
        degrees.dedup();
        degrees
    }

    /// Whether [`LayerTimes::attention_ns`] returns the attention time, so that sequences may differ in
    /// length.
    #[must_use]
    pub fn is_attention_separate(&self) -> bool {
        match &self.source {
            TimeSource::Rate(rates) => rates.layer_per_square > 0.0,
            TimeSource::Measured(passes) => passes.iter().all(LayerPassTimes::is_attention_separate),
            TimeSource::Whole(whole) => whole.curve.pair_ns > 0.0,
        }
    }

    /// Returns the nanoseconds per layer without the attention that [`LayerTimes::attention_ns`] returns.
    ///
    /// - `sequences`, `tokens`: number of parallel sequences, and tokens per sequence: encoder tiles, or a
    ///   packed LLM sequence
    #[must_use]
    pub fn layer_ns(&self, sequences: f64, tokens: f64) -> f64 {
        match &self.source {
            TimeSource::Rate(rates) if sequences * tokens > 0.0 => {
                rates.layer_per_token * sequences * tokens + rates.expert_read
            }
            TimeSource::Rate(_) => 0.0,
            TimeSource::Measured(passes) => passes.iter().map(|pass| pass.layer_ns(sequences, tokens)).sum(),
            TimeSource::Whole(whole) => {
                whole.tokens_ns(sequences * tokens) * (1.0 - whole.outside_share) / whole.layers
            }
        }
    }

    /// Returns the routed-expert part of [`LayerTimes::layer_ns`], in proportion to tokens.
    ///
    /// Measured times are divided by FLOPs.
    #[must_use]
    pub fn experts_ns(&self, tokens: f64) -> f64 {
        match &self.source {
            TimeSource::Rate(rates) => rates.experts_per_token * tokens,
            TimeSource::Measured(_) | TimeSource::Whole(_) => {
                self.llm.expert_share * self.layer_ns(1.0, tokens)
            }
        }
    }

    /// Returns the part of [`LayerTimes::layer_ns`] for reading the weights of all experts, which does not
    /// depend on tokens; 0 for a constant rate, and for measured times, which include it.
    #[must_use]
    pub const fn expert_read_ns(&self) -> f64 {
        match &self.source {
            TimeSource::Rate(rates) => rates.expert_read,
            TimeSource::Measured(_) | TimeSource::Whole(_) => 0.0,
        }
    }

    /// Returns the attention nanoseconds in a layer over original samples; 0 if [`LayerTimes::layer_ns`]
    /// includes it.
    ///
    /// For an LLM with windows in some layers this is the mean layer: windows count as shorter sequences with
    /// as many pairs.
    #[must_use]
    pub fn attention_ns(&self, sequences: f64, tokens: f64) -> f64 {
        let Some((windows, share)) = self.llm.windows else {
            return self.full_attention_ns(sequences, tokens);
        };
        let length = windows.mean_length(tokens as u64);
        if length <= 0.0 {
            return 0.0;
        }
        let windowed = self.full_attention_ns(sequences * tokens / length, length);
        (1.0 - share) * self.full_attention_ns(sequences, tokens) + share * windowed
    }

    fn full_attention_ns(&self, sequences: f64, tokens: f64) -> f64 {
        match &self.source {
            TimeSource::Rate(rates) => rates.layer_per_square * sequences * tokens * tokens,
            TimeSource::Measured(passes) => {
                passes.iter().map(|pass| pass.attention_ns(sequences, tokens)).sum()
            }
            TimeSource::Whole(whole) => whole.curve.pair_ns * sequences * tokens * tokens / whole.full_layers,
        }
    }

    /// Returns the half width of the 90 % interval around the layer time including attention, as a fraction
    /// of that time; `None` for a stated rate, whose error is unknown.
    ///
    /// The difference between measurement sessions is left out, because it is common to all loads and to all
    /// compared plans: two plans whose times differ by less than this are within noise. 0 for no load.
    ///
    /// - `sequences`, `tokens`: as for [`LayerTimes::layer_ns`]
    /// - `samples`: number of original samples and tokens per sample, as for [`LayerTimes::attention_ns`]
    #[must_use]
    pub fn relative_half_width(&self, sequences: f64, tokens: f64, samples: [f64; 2]) -> Option<f64> {
        let passes = match &self.source {
            TimeSource::Rate(_) => return None,
            TimeSource::Whole(whole) => return Some(whole.half_width),
            TimeSource::Measured(passes) => passes,
        };
        let estimates = passes.iter().map(|pass| pass.layer_estimate(sequences, tokens, samples));
        let all = estimates.fold(Estimate::default(), Estimate::plus);
        Some(if all.ns > 0.0 { all.uncertainty_ns / all.ns } else { 0.0 })
    }

    /// Returns the nanoseconds outside the layers: projector, embedding, and LM head over all tokens.
    #[must_use]
    pub fn outside_layers_ns(&self, sequences: f64, tokens: f64) -> f64 {
        match &self.source {
            TimeSource::Rate(rates) => rates.outside_per_token * sequences * tokens,
            TimeSource::Measured(passes) => {
                passes.iter().map(|pass| pass.outside_layers_ns(sequences, tokens)).sum()
            }
            TimeSource::Whole(whole) => whole.tokens_ns(sequences * tokens) * whole.outside_share,
        }
    }
}

impl WholeTimes {
    /// Creates the times from whole-module runs with all layers; `None` if there are too few for a fit.
    fn new(
        spec: &ModelSpec,
        profile: &Profile,
        module: Module,
        tp: u32,
        flops_split: LayerFlops,
    ) -> Result<Option<Self>> {
        let options = ProfileOptions::default().tp(module, tp).unchecked();
        let Some(fitted) = whole_curve(spec, profile, module, options)? else { return Ok(None) };
        let [full, windowed] = attention_layers(spec, module).map(f64::from);
        let layers = (full + windowed).max(1.0);
        let check = ProfileCheck::new(profile).and_then(|check| check.module_half_widths[module as usize]);
        Ok(Some(Self {
            curve: fitted,
            layers,
            // LLM pairs are for a mean layer, encoder pairs for layers without windows.
            full_layers: if module == Module::Llm { layers } else { full.max(1.0) },
            outside_share: flops_split.outside / (flops_split.layer * layers + flops_split.outside),
            half_width: check.unwrap_or(ASSUMED_HALF_WIDTH),
        }))
    }

    /// Returns a microbatch's time without the part that grows with squared lengths; 0 without tokens.
    fn tokens_ns(&self, tokens: f64) -> f64 {
        if tokens > 0.0 { self.curve.ns(tokens, 0.0) } else { 0.0 }
    }
}

impl LlmLayers {
    fn new(spec: &ModelSpec, module: Module) -> Self {
        if module != Module::Llm {
            return Self::default();
        }
        let llm = &spec.llm;
        let windowed = match llm.counts {
            Some(_) => LlmFlops::new(llm).windowed_share(),
            None => f64::from(llm.windowed_layer_count()) / f64::from(llm.layers.max(1)),
        };
        let expert_flops = TRAINING_FLOPS_PER_WEIGHT * active_expert_weights(llm);
        Self {
            windows: llm.windows.map(|windows| (windows, windowed)),
            expert_share: expert_flops / llm_layer_flops(llm).layer.max(1.0),
        }
    }
}

impl RateTimes {
    fn new(spec: &ModelSpec, module: Module, tp: u32, rate: &DeviceRate, sequence_tokens: u32) -> Self {
        let ns =
            |flops: f64| flops * 1000.0 / (rate.flops_per_us(module).get() as f64 * f64::from(tp.max(1)));
        let native = encoder_spec(spec, module).filter(|_| spec.is_native(module));
        if let Some(encoder) = native {
            let patch = native_layer_flops(&encoder, spec.llm.hidden);
            Self {
                layer_per_token: ns(patch.layer),
                layer_per_square: ns(encoder_pair_flops(&encoder, spec.llm.hidden)),
                outside_per_token: ns(patch.outside),
                experts_per_token: 0.0,
                expert_read: 0.0,
            }
        } else if let Some(encoder) = encoder_spec(spec, module) {
            let tokens = f64::from(sequence_tokens.max(1));
            let tile = encoder_layer_flops(&encoder, spec.llm.hidden, sequence_tokens);
            Self {
                layer_per_token: ns(tile.layer / tokens),
                // All tiles have the same length, so their attention is part of the time per token.
                layer_per_square: 0.0,
                outside_per_token: ns(tile.outside / tokens),
                experts_per_token: 0.0,
                expert_read: 0.0,
            }
        } else {
            let LayerFlops { layer, outside } = llm_layer_flops(&spec.llm);
            Self {
                layer_per_token: ns(layer),
                layer_per_square: ns(llm_square_flops(&spec.llm)),
                outside_per_token: ns(outside),
                experts_per_token: ns(TRAINING_FLOPS_PER_WEIGHT * active_expert_weights(&spec.llm)),
                expert_read: 0.0,
            }
        }
    }
}

/// Returns the nanoseconds per FLOP, divided over the ranks in a TP group.
fn ns_per_flop(rate: &DeviceRate, module: Module, tp: u32) -> f64 {
    1000.0 / (rate.flops_per_us(module).get() as f64 * f64::from(tp.max(1)))
}

fn encoder_spec(spec: &ModelSpec, module: Module) -> Option<EncoderSpec> {
    match module {
        Module::Vision => spec.vision.map(|vision| vision.encoder),
        Module::Audio => spec.audio.map(|audio| audio.encoder),
        Module::Llm => None,
    }
}

/// Measured times in a pass.
#[derive(Debug, Clone)]
struct LayerPassTimes {
    linear: Option<LayersAndConstant<Curve>>,
    /// Attention per layer, if it was measured separately.
    attention: Option<Surface>,
    whole: Option<LayersAndConstant<Surface>>,
    outside_layers: Option<Curve>,
    /// LM head and loss, if they were measured separately for target tokens.
    head: Option<Curve>,
    /// Share of the measured time that is outside the layers; 0 if it was measured separately.
    outside_share: f64,
    /// Number of layers that the share refers to.
    measured_layers: f64,
}

/// Times at two layer counts: one layer with the constant, and the constant.
#[derive(Debug, Clone)]
struct LayersAndConstant<T> {
    one_layer: T,
    no_layer: T,
}

impl LayerPassTimes {
    fn new(
        selected: &SelectedPoints,
        module: Module,
        phase: Phase,
        tp: u32,
        flops_split: LayerFlops,
    ) -> Result<Self> {
        let all = CurveQuery::new(selected, module, phase, tp, 1).same_session();
        let query = |layers| all.with_layers(layers);
        let mut warnings = Vec::new();
        let linear =
            query(1).curve(Part::Linear, &mut warnings).zip(query(0).curve(Part::Linear, &mut warnings));
        let attention = query(1).attention(&mut warnings);
        let is_separate = linear.is_some() && attention.is_some();
        let whole = query(1).whole(&mut warnings).zip(query(0).whole(&mut warnings)).filter(|_| !is_separate);
        if !is_separate && whole.is_none() {
            let missing = if linear.is_some() { Part::Attention } else { Part::Linear };
            return Err(query(1).lacks(missing));
        }
        let outside_layers = query(0).curve(Part::OutsideLayers, &mut warnings);
        let head = query(0).curve(Part::Head, &mut warnings);
        let part = if is_separate { Part::Linear } else { Part::Whole };
        let mut counts: Vec<u32> = selected
            .points
            .iter()
            .filter(|p| p.setting.part == part && p.setting.tp == tp && p.setting.phase == phase)
            .map(|point| point.setting.layers)
            .collect();
        counts.sort_unstable();
        counts.dedup();
        let measured_layers = f64::from(counts.last().copied().unwrap_or(1));
        // With a single layer count and no rows of `ends`, zero layers scale to no time, and the constant is
        // unknown.
        let is_separable = outside_layers.is_some() || counts.len() > 1;
        let all = flops_split.layer * measured_layers + flops_split.outside;
        Ok(Self {
            linear: linear
                .filter(|_| is_separate)
                .map(|(one_layer, no_layer)| LayersAndConstant { one_layer, no_layer }),
            attention: attention.filter(|_| is_separate),
            whole: whole.map(|(one_layer, no_layer)| LayersAndConstant { one_layer, no_layer }),
            outside_layers,
            head,
            outside_share: if is_separable { 0.0 } else { flops_split.outside / all },
            measured_layers,
        })
    }

    /// Returns the measured time for a layer with the constant, and for the constant.
    fn measured_ns(&self, sequences: f64, tokens: f64) -> [f64; 2] {
        if let Some(linear) = &self.linear {
            let all = sequences * tokens;
            return [linear.one_layer.at(all), linear.no_layer.at(all)];
        }
        self.whole.as_ref().map_or([0.0; 2], |whole| {
            [whole.one_layer.at(sequences, tokens), whole.no_layer.at(sequences, tokens)]
        })
    }

    /// Whether attention was measured separately.
    fn is_attention_separate(&self) -> bool {
        self.attention.is_some()
    }

    fn layer_ns(&self, sequences: f64, tokens: f64) -> f64 {
        let [one_layer, no_layer] = self.measured_ns(sequences, tokens);
        (one_layer - no_layer).max(0.0) * (1.0 - self.outside_share)
    }

    /// Returns the attention time in a layer; 0 if it was not measured separately.
    fn attention_ns(&self, sequences: f64, tokens: f64) -> f64 {
        self.attention.as_ref().map_or(0.0, |attention| attention.at(sequences, tokens))
    }

    /// Returns the time for a layer including attention, with uncertainty.
    ///
    /// The uncertainty is for a layer with the constant, because both come from the same measurements.
    fn layer_estimate(&self, sequences: f64, tokens: f64, samples: [f64; 2]) -> Estimate {
        let with_constant = match (&self.linear, &self.whole) {
            (Some(linear), _) => linear.one_layer.estimate(sequences * tokens),
            (None, Some(whole)) => whole.one_layer.estimate(sequences, tokens),
            (None, None) => Estimate::default(),
        };
        let attention = self.attention.as_ref();
        let attention =
            attention.map_or_else(Estimate::default, |surface| surface.estimate(samples[0], samples[1]));
        if with_constant.ns <= 0.0 {
            return attention;
        }
        let share = self.layer_ns(sequences, tokens) / with_constant.ns;
        with_constant.times(share).plus(attention)
    }

    fn outside_layers_ns(&self, sequences: f64, tokens: f64) -> f64 {
        let [one_layer, no_layer] = self.measured_ns(sequences, tokens);
        let of = |curve: &Option<Curve>| curve.as_ref().map_or(0.0, |curve| curve.at(sequences * tokens));
        let separate = of(&self.outside_layers) + of(&self.head);
        separate + no_layer + (one_layer - no_layer).max(0.0) * self.outside_share * self.measured_layers
    }
}
