//! Splits the times of a module as a pipeline does: one layer, and what is outside the layers.
//!
//! A pipeline stage runs some layers, the last one also the LM head or the projector, so a planner needs
//! separate times. Two measured layer counts separate them, or rows of `ends`. A profile with a single layer
//! count has both in one time; it is then split in proportion to their FLOPs, which is exact for a device
//! that is equally fast at both.

use super::device_preset::DevicePreset;
use super::device_rate::DeviceRate;
use super::layer_flops::{
    LayerFlops, encoder_layer_flops, encoder_pair_flops, llm_layer_flops, llm_square_flops,
    native_layer_flops,
};
use super::layer_matrices::{LayerMatrix, encoder_matrices, llm_matrices};
use super::layer_pass_times::LayerPassTimes;
use crate::curve::Estimate;
use crate::error::Result;
use crate::model::{EncoderSpec, ModelSpec};
use crate::module::Module;
use crate::profile::{ModuleWidths, Phase, Profile};

/// FLOPs per weight and token: a multiplication and an addition, forward once and backward twice.
const TRAINING_FLOPS_PER_WEIGHT: f64 = 6.0;

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

impl LayerTimes {
    /// Computes the times of a module from a stated rate, divided evenly over the ranks of a TP group.
    ///
    /// - `sequence_tokens`: tokens of a tile, for an encoder; ignored for an LLM, and for an encoder of media
    ///   in native resolution, whose layers are mean layers over those with and without windows
    #[must_use]
    pub fn from_rate(
        spec: &ModelSpec,
        module: Module,
        tp: u32,
        rate: &DeviceRate,
        sequence_tokens: u32,
    ) -> Self {
        Self { source: TimeSource::Rate(RateTimes::new(spec, module, tp, rate, sequence_tokens)) }
    }

    /// Computes the times of a module on a known device, whose rate depends on the width of the shards.
    ///
    /// As [`LayerTimes::from_rate`] at the device's rate, where a matrix runs at its
    /// [efficiency](DevicePreset::efficiency) on the width that a rank of the TP group holds, and norms and
    /// residual additions are repeated on every rank. Times are of the rank, without the all-reduces of the
    /// group. Sequence parallelism, which divides the repeated work, is not assumed.
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
        for LayerMatrix { weights, local_width } in matrices {
            let lost = 1.0 / preset.efficiency(module, local_width) - 1.0;
            rates.layer_per_token += TRAINING_FLOPS_PER_WEIGHT * weights * flop_ns * lost;
        }
        rates.layer_per_token += preset.replicated_ns(hidden, tp);
        // Projector and LM head are cut along their long side, so the hidden size is their narrow one.
        rates.outside_per_token /= preset.efficiency(module, hidden.into());
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
        let selected = profile.select(module, &widths)?;
        let flops_split = match encoder_spec(spec, module) {
            Some(encoder) if spec.is_native(module) => native_layer_flops(&encoder, spec.llm.hidden),
            Some(encoder) => encoder_layer_flops(&encoder, spec.llm.hidden, sequence_tokens),
            None => llm_layer_flops(&spec.llm),
        };
        let pass = |phase| LayerPassTimes::new(&selected, module, phase, tp, flops_split);
        Ok(Self { source: TimeSource::Measured(vec![pass(Phase::Forward)?, pass(Phase::Backward)?]) })
    }

    /// Returns the TP degrees at which a profile has times of a module, ascending.
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

    /// Whether [`LayerTimes::attention_ns`] returns the time of attention, so that sequences may differ in
    /// length.
    #[must_use]
    pub fn is_attention_separate(&self) -> bool {
        match &self.source {
            TimeSource::Rate(rates) => rates.layer_per_square > 0.0,
            TimeSource::Measured(passes) => passes.iter().all(LayerPassTimes::is_attention_separate),
        }
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
                passes.iter().map(|pass| pass.attention_ns(sequences, tokens)).sum()
            }
        }
    }

    /// Returns the half width of the 90 % interval around the time of a layer with its attention, as a
    /// fraction of that time; `None` for a stated rate, whose error is unknown.
    ///
    /// The difference between sessions of measurements is left out, because it is common to all loads and to
    /// all plans that are compared: two plans whose times differ by less than this are within noise of each
    /// other. 0 for no load.
    ///
    /// - `sequences`, `tokens`: as for [`LayerTimes::layer_ns`]
    /// - `samples`: number of original samples and tokens of each, as for [`LayerTimes::attention_ns`]
    #[must_use]
    pub fn relative_half_width(&self, sequences: f64, tokens: f64, samples: [f64; 2]) -> Option<f64> {
        let TimeSource::Measured(passes) = &self.source else { return None };
        let estimates = passes.iter().map(|pass| pass.layer_estimate(sequences, tokens, samples));
        let all = estimates.fold(Estimate::default(), Estimate::plus);
        Some(if all.ns > 0.0 { all.uncertainty_ns / all.ns } else { 0.0 })
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
            }
        } else if let Some(encoder) = encoder_spec(spec, module) {
            let tokens = f64::from(sequence_tokens.max(1));
            let tile = encoder_layer_flops(&encoder, spec.llm.hidden, sequence_tokens);
            Self {
                layer_per_token: ns(tile.layer / tokens),
                // Tiles have one length, so their attention is part of the time per token.
                layer_per_square: 0.0,
                outside_per_token: ns(tile.outside / tokens),
            }
        } else {
            let LayerFlops { layer, outside } = llm_layer_flops(&spec.llm);
            Self {
                layer_per_token: ns(layer),
                layer_per_square: ns(llm_square_flops(&spec.llm)),
                outside_per_token: ns(outside),
            }
        }
    }
}

/// Returns the nanoseconds of a FLOP that is divided over the ranks of a TP group.
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

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::super::layer_flops::tile_work;
    use super::*;
    use crate::flops::{Attention, EncoderFlops, LlmFlops, Recomputation};
    use crate::shape::{ImageSize, SampleShape, VideoShape};

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

    /// Linear work by patch and attention by pair give the FLOPs of several media, also with windows.
    #[test]
    fn a_rate_gives_the_flops_of_media_in_native_resolution() {
        let shape = SampleShape {
            images: [(640, 480), (1920, 1080), (56, 56)]
                .map(|(width, height)| ImageSize { width, height })
                .to_vec(),
            videos: vec![VideoShape { frames: 7, width: 640, height: 360 }],
            ..SampleShape::default()
        };
        let rate = DeviceRate::preset("a100").unwrap();
        for name in ["qwen2-vl-7b", "qwen2.5-vl-7b"] {
            let spec = ModelSpec::preset(name).unwrap();
            let (_, encoder, rule) = spec.encoders().next().unwrap();
            let work = rule.work(&shape).unwrap();
            let times = LayerTimes::from_rate(&spec, Module::Vision, 2, &rate, 0);
            assert!(times.is_attention_separate());
            let pairs = encoder.mean_layer_pairs(&work) as f64;
            let patches = work.encoder_tokens as f64;
            let layer_ns = times.layer_ns(1.0, patches) + times.attention_ns(pairs, 1.0);
            let all = f64::from(encoder.layers) * layer_ns + times.outside_layers_ns(1.0, patches);
            let flops = EncoderFlops::new(&encoder, spec.llm.hidden).training(&work, Recomputation::None);
            let expected = flops.total() as f64 * 1000.0 / (2.0 * rate.vision_flops_per_us.get() as f64);
            assert!((all / expected - 1.0).abs() < 1e-6, "{name} {all} {expected}");
        }
        let tiles = LayerTimes::from_rate(&self::spec(), Module::Vision, 1, &rate, 729);
        assert!(!tiles.is_attention_separate());
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

    /// Noise of 1 % between three repeats, at lengths from 64 to 4,096.
    #[test]
    fn a_measured_layer_has_a_half_width_that_grows_beyond_its_points() {
        let mut text =
            "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n".to_owned();
        for (at, phase) in ["forward", "backward"].iter().enumerate() {
            for tokens in (6..=12).map(|power| 1_u32 << power) {
                for run in [0.99, 1.0, 1.01] {
                    let jitter = run + 0.004 * f64::from(tokens.trailing_zeros() * 7 % 5);
                    let time = jitter * (30.0 + 0.05 * f64::from(tokens)) * (at + 1) as f64;
                    writeln!(text, "llm,linear,{phase},1,1,1,{tokens},{time}").unwrap();
                    writeln!(text, "llm,attention,{phase},1,1,1,{tokens},{}", time / 4.0).unwrap();
                }
            }
        }
        let profile = Profile::parse([("p.csv", &text[..])]).unwrap();
        let times = LayerTimes::from_profile(&spec(), &profile, Module::Llm, 1, 0).unwrap();
        let share = |tokens| times.relative_half_width(1.0, tokens, [1.0, tokens]).unwrap();
        assert!((0.01..0.05).contains(&share(3000.0)), "{}", share(3000.0));
        assert!(share(40_000.0) > share(3000.0) && share(0.0).abs() < 1e-12);
        let rate = DeviceRate::preset("a100").unwrap();
        let stated = LayerTimes::from_rate(&spec(), Module::Llm, 1, &rate, 0);
        assert_eq!(stated.relative_half_width(1.0, 3000.0, [1.0, 3000.0]), None);
    }
}
