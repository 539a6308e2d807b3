//! Splits the times of a module as a pipeline does: one layer, and what is outside the layers.
//!
//! A pipeline stage runs some layers, the last one also the LM head or the projector, so a planner needs
//! separate times. Two measured layer counts separate them, or rows of `ends`. A profile with a single layer
//! count has both in one time; it is then split in proportion to their FLOPs, which is exact for a device
//! that is equally fast at both.

use super::curve_query::CurveQuery;
use super::device_rate::DeviceRate;
use crate::curve::{Curve, Surface};
use crate::error::Result;
use crate::flops::{Attention, EncoderFlops, LlmFlops, Recomputation};
use crate::model::{EncoderDetails, EncoderSpec, LlmSpec, ModelSpec};
use crate::module::Module;
use crate::profile::{ModuleWidths, Part, Phase, Point, Profile};
use crate::tokens::EncoderWork;

/// Times of one layer and of what is outside the layers, forward and backward, of one module at one TP
/// degree.
#[derive(Debug, Clone)]
pub struct LayerTimes {
    source: TimeSource,
}

#[derive(Debug, Clone)]
enum TimeSource {
    Rate(RateTimes),
    Measured(Vec<LayerPassTimes>),
}

/// Times from a stated rate, in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct RateTimes {
    layer_per_token: f64,
    /// Nanoseconds per squared token of a sequence.
    layer_per_square: f64,
    outside_per_token: f64,
}

/// Measured times of one pass.
#[derive(Debug, Clone)]
struct LayerPassTimes {
    linear: Option<LayersAndConstant<Curve>>,
    /// Attention of one layer, where it was measured separately.
    attention: Option<Surface>,
    whole: Option<LayersAndConstant<Surface>>,
    outside_layers: Option<Curve>,
    /// LM head and loss, where they were measured separately for target tokens.
    head: Option<Curve>,
    /// Share of the measured time that is outside the layers; 0 where it was measured separately.
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

/// FLOPs of one layer and of what is outside the layers, for one token or tile.
#[derive(Debug, Clone, Copy)]
struct LayerFlops {
    layer: f64,
    outside: f64,
}

impl LayerTimes {
    /// Computes the times of a module from a stated rate, divided evenly over the ranks of a TP group.
    ///
    /// - `sequence_tokens`: tokens of a tile, for an encoder; ignored for an LLM
    #[must_use]
    pub fn from_rate(
        spec: &ModelSpec,
        module: Module,
        tp: u32,
        rate: &DeviceRate,
        sequence_tokens: u32,
    ) -> Self {
        let ns =
            |flops: f64| flops * 1000.0 / (rate.flops_per_us(module).get() as f64 * f64::from(tp.max(1)));
        let rates = if let Some(encoder) = encoder_spec(spec, module) {
            let tokens = f64::from(sequence_tokens.max(1));
            let tile = encoder_layer_flops(&encoder, spec.llm.hidden, sequence_tokens);
            RateTimes {
                layer_per_token: ns(tile.layer / tokens),
                // Tiles have one length, so their attention is part of the time per token.
                layer_per_square: 0.0,
                outside_per_token: ns(tile.outside / tokens),
            }
        } else {
            let LayerFlops { layer, outside } = llm_layer_flops(&spec.llm);
            RateTimes {
                layer_per_token: ns(layer),
                layer_per_square: ns(llm_square_flops(&spec.llm)),
                outside_per_token: ns(outside),
            }
        };
        Self { source: TimeSource::Rate(rates) }
    }

    /// Looks up the times of a module in a measured profile.
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
        let (points, _) = profile.select(module, &widths)?;
        let flops_split = match encoder_spec(spec, module) {
            Some(encoder) => encoder_layer_flops(&encoder, spec.llm.hidden, sequence_tokens),
            None => llm_layer_flops(&spec.llm),
        };
        let pass = |phase| LayerPassTimes::new(&points, module, phase, tp, flops_split);
        Ok(Self { source: TimeSource::Measured(vec![pass(Phase::Forward)?, pass(Phase::Backward)?]) })
    }

    /// Returns the TP degrees at which a profile has times of a module, ascending.
    #[must_use]
    pub fn measured_degrees(spec: &ModelSpec, profile: &Profile, module: Module) -> Vec<u32> {
        let widths = ModuleWidths::from_spec(spec, module).unwrap_or_default();
        let Ok((points, _)) = profile.select(module, &widths) else { return Vec::new() };
        let has_passes = |tp: &u32| {
            let has = |phase| points.iter().any(|p| p.setting.tp == *tp && p.setting.phase == phase);
            has(Phase::Forward) && has(Phase::Backward)
        };
        let mut degrees: Vec<u32> = points.iter().map(|point| point.setting.tp).filter(has_passes).collect();
        degrees.sort_unstable();
        degrees.dedup();
        degrees
    }

    /// Returns the nanoseconds of one layer without the attention that [`LayerTimes::attention_ns`] returns.
    ///
    /// - `sequences`, `tokens`: number of sequences side by side, and tokens of each: tiles of an encoder,
    ///   one packed sequence of an LLM
    #[must_use]
    pub fn layer_ns(&self, sequences: f64, tokens: f64) -> f64 {
        match &self.source {
            TimeSource::Rate(rates) => rates.layer_per_token * sequences * tokens,
            TimeSource::Measured(passes) => passes.iter().map(|pass| pass.layer_ns(sequences, tokens)).sum(),
        }
    }

    /// Returns the nanoseconds of attention in one layer over original samples; 0 if [`LayerTimes::layer_ns`]
    /// includes it.
    #[must_use]
    pub fn attention_ns(&self, sequences: f64, tokens: f64) -> f64 {
        match &self.source {
            TimeSource::Rate(rates) => rates.layer_per_square * sequences * tokens * tokens,
            TimeSource::Measured(passes) => {
                let of = |pass: &LayerPassTimes| {
                    pass.attention.as_ref().map_or(0.0, |attention| attention.at(sequences, tokens))
                };
                passes.iter().map(of).sum()
            }
        }
    }

    /// Returns the nanoseconds of what is outside the layers: projector, embedding, and LM head over all
    /// tokens.
    #[must_use]
    pub fn outside_layers_ns(&self, sequences: f64, tokens: f64) -> f64 {
        match &self.source {
            TimeSource::Rate(rates) => rates.outside_per_token * sequences * tokens,
            TimeSource::Measured(passes) => {
                passes.iter().map(|pass| pass.outside_layers_ns(sequences, tokens)).sum()
            }
        }
    }
}

impl LayerPassTimes {
    fn new(points: &[Point], module: Module, phase: Phase, tp: u32, flops_split: LayerFlops) -> Result<Self> {
        let query = |layers| CurveQuery { points, module, phase, tp, layers };
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
        let mut counts: Vec<u32> = points
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

    /// Returns the measured time of one layer with the constant, and of the constant.
    fn measured_ns(&self, sequences: f64, tokens: f64) -> [f64; 2] {
        if let Some(linear) = &self.linear {
            let all = sequences * tokens;
            return [linear.one_layer.at(all), linear.no_layer.at(all)];
        }
        self.whole.as_ref().map_or([0.0; 2], |whole| {
            [whole.one_layer.at(sequences, tokens), whole.no_layer.at(sequences, tokens)]
        })
    }

    fn layer_ns(&self, sequences: f64, tokens: f64) -> f64 {
        let [one_layer, no_layer] = self.measured_ns(sequences, tokens);
        (one_layer - no_layer).max(0.0) * (1.0 - self.outside_share)
    }

    fn outside_layers_ns(&self, sequences: f64, tokens: f64) -> f64 {
        let [one_layer, no_layer] = self.measured_ns(sequences, tokens);
        let of = |curve: &Option<Curve>| curve.as_ref().map_or(0.0, |curve| curve.at(sequences * tokens));
        let separate = of(&self.outside_layers) + of(&self.head);
        separate + no_layer + (one_layer - no_layer).max(0.0) * self.outside_share * self.measured_layers
    }
}

fn encoder_spec(spec: &ModelSpec, module: Module) -> Option<EncoderSpec> {
    match module {
        Module::Vision => spec.vision.map(|vision| vision.encoder),
        Module::Audio => spec.audio.map(|audio| audio.encoder),
        Module::Llm => None,
    }
}

/// Counts FLOPs of one tile, forward and backward.
fn encoder_layer_flops(spec: &EncoderSpec, llm_hidden: u32, tile_tokens: u32) -> LayerFlops {
    let work = tile_work(1, tile_tokens);
    let flops = |spec: &EncoderSpec| {
        EncoderFlops::new(spec, llm_hidden).training(&work, Recomputation::None).total() as f64
    };
    let details = EncoderDetails { unused_layers: 0, ..spec.details };
    let outside = flops(&EncoderSpec { layers: 0, windowed_layers: 0, details, ..*spec });
    LayerFlops { layer: (flops(spec) - outside).max(0.0) / f64::from(spec.layers.max(1)), outside }
}

fn tile_work(tiles: u64, tile_tokens: u32) -> EncoderWork {
    let tokens = u64::from(tile_tokens);
    let pairs = tokens * tokens;
    let tile = EncoderWork {
        items: 1,
        encoder_tokens: tokens,
        tokens: 0,
        attention_pairs: pairs,
        window_pairs: pairs,
    };
    tile.repeat(tiles)
}

/// Counts FLOPs of one token without attention, forward and backward.
fn llm_layer_flops(spec: &LlmSpec) -> LayerFlops {
    let [one, two] = one_layer_flops(spec);
    let outside = 3.0 * LlmFlops::new(spec).head_forward(1) as f64;
    // `2 (a + b) - (2a + 4b) / 2` is `a`; three passes, one forward and two backward.
    LayerFlops { layer: 3.0 * (2.0 * one - two / 2.0), outside }
}

/// Counts FLOPs of causal attention in one layer, per squared token, forward and backward.
fn llm_square_flops(spec: &LlmSpec) -> f64 {
    let [one, two] = one_layer_flops(spec);
    // `(2a + 4b) / 2 - (a + b)` is `b`.
    3.0 * (two / 2.0 - one)
}

/// Counts forward FLOPs of one layer over sequences of one token and of two: `a + b` and `2a + 4b`.
fn one_layer_flops(spec: &LlmSpec) -> [f64; 2] {
    let layer = LlmFlops::new(&LlmSpec { layers: 1, ..*spec });
    [1, 2].map(|tokens| layer.layers_forward(&[tokens], Attention::Causal) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> ModelSpec {
        ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap()
    }

    fn close(found: f64, expected: f64) -> bool {
        (found / expected - 1.0).abs() < 1e-9
    }

    #[test]
    fn a_rate_gives_the_flops_of_the_whole_model() {
        let (spec, rate) = (spec(), DeviceRate::preset("a100").unwrap());
        let times = LayerTimes::from_rate(&spec, Module::Llm, 1, &rate, 0);
        let all = 28.0 * (times.layer_ns(1.0, 2000.0) + times.attention_ns(1.0, 2000.0));
        let flops = LlmFlops::new(&spec.llm).training(&[2000], Attention::Causal, Recomputation::None);
        let expected = flops.total() as f64 * 1000.0 / rate.llm_flops_per_us.get() as f64;
        assert!(close(all + times.outside_layers_ns(1.0, 2000.0), expected));
        let half = LayerTimes::from_rate(&spec, Module::Llm, 2, &rate, 0);
        assert!(close(half.layer_ns(1.0, 2000.0) * 2.0, times.layer_ns(1.0, 2000.0)));

        let encoder = spec.vision.unwrap().encoder;
        let times = LayerTimes::from_rate(&spec, Module::Vision, 1, &rate, 729);
        let all = 27.0 * times.layer_ns(5.0, 729.0) + times.outside_layers_ns(5.0, 729.0);
        let flops = EncoderFlops::new(&encoder, spec.llm.hidden);
        let flops = flops.training(&tile_work(5, 729), Recomputation::None).total();
        assert!(close(all, flops as f64 * 1000.0 / rate.vision_flops_per_us.get() as f64));
    }

    /// Milliseconds as in reference files: 4 layers of 7 FLOPs and a head of 14 take 42 in all.
    #[test]
    fn one_layer_count_is_divided_by_flops() {
        let spec = spec();
        let LayerFlops { layer, outside } = llm_layer_flops(&spec.llm);
        let ms = |layers: f64| (layers * layer + outside) / 1e9;
        let header = "seq_len,model_time,fwd_times,bwd_times,num_layers,tp_size\n";
        let skip = format!("{header}1024,{},{},{},4,1\n", ms(4.0), ms(4.0) / 3.0, ms(4.0) * 2.0 / 3.0);
        let whole = format!(
            "{header}1024,{},{},{},4,1\n",
            ms(4.0) + 8.0,
            ms(4.0) / 3.0 + 4.0,
            ms(4.0) * 2.0 / 3.0 + 4.0
        );
        let files =
            [("thr_llavaov_qwen2.5_7b.csv", &whole[..]), ("thr_llavaov_qwen2.5_7b_skip_attn.csv", &skip[..])];
        let profile = Profile::parse(files).unwrap();
        assert_eq!(LayerTimes::measured_degrees(&spec, &profile, Module::Llm), [1]);
        let times = LayerTimes::from_profile(&spec, &profile, Module::Llm, 1, 0).unwrap();
        assert!(close(times.layer_ns(1.0, 1024.0), layer / 1e3));
        assert!(close(times.outside_layers_ns(1.0, 1024.0), outside / 1e3));
        assert!(close(times.attention_ns(1.0, 1024.0), 2e6), "a fourth of 8 ms");
        assert!(LayerTimes::from_profile(&spec, &profile, Module::Llm, 2, 0).is_err());
    }

    #[test]
    fn two_layer_counts_separate_the_constant() {
        let spec = spec();
        let header = "batch_size,model_time,fwd_times,bwd_times,num_layers,tp_size\n";
        let text = format!("{header}2,9,3,6,4,1\n2,15,5,10,8,1\n");
        let profile = Profile::parse([("thr_llavaov_siglip_400m.csv", &text[..])]).unwrap();
        let times = LayerTimes::from_profile(&spec, &profile, Module::Vision, 1, 729).unwrap();
        assert!(close(times.layer_ns(2.0, 729.0), 1.5e6));
        assert!(close(times.outside_layers_ns(2.0, 729.0), 3e6));
    }
}
