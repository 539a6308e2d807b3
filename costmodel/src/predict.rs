//! Predicts the cost of a sample: tokens and nanoseconds per module.
//!
//! A module's time is the FLOPs that it executes, forward and backward, divided by a stated sustained rate of
//! the device, rounded up to whole nanoseconds. It is a first guess that needs no measurement: it orders and
//! weighs samples, whereas absolute times need a profile. All of it is integer arithmetic, so that every rank
//! predicts the same bits.

use std::num::NonZeroU64;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::correction::CorrectionTable;
use crate::error::{Error, Result};
use crate::flops::{Attention, EncoderFlops, LlmFlops, Recomputation, TrainingFlops};
use crate::frozen::Frozen;
use crate::measured::Timing;
use crate::model::ModelSpec;
use crate::module::{Module, ModuleTimes};
use crate::shape::SampleShape;
use crate::tokens::{EncoderWork, MediaRule};

const NANOSECONDS_PER_MICROSECOND: u128 = 1000;

/// What one device sustains on each module, in FLOPs per microsecond (10⁶ FLOP/s).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceRate {
    /// On [`Module::Vision`].
    pub vision_flops_per_us: NonZeroU64,
    /// On [`Module::Audio`].
    pub audio_flops_per_us: NonZeroU64,
    /// On [`Module::Llm`].
    pub llm_flops_per_us: NonZeroU64,
}

/// A row of the device table.
struct Device {
    name: &'static str,
    /// Published dense peak.
    peak_flops_per_us: u64,
    /// Share of the peak that encoders are assumed to sustain.
    encoder_percent: u64,
    /// Share of the peak that the LLM is assumed to sustain.
    llm_percent: u64,
}

/// GPUs: dense BF16 peak of NVIDIA's data sheets, SXM form. `cpu`: one core of 2.5 GHz with two 8-wide f32
/// fused multiply-adds a cycle.
const DEVICES: [Device; 4] = [
    Device { name: "a100", peak_flops_per_us: 312_000_000, encoder_percent: 40, llm_percent: 50 },
    Device { name: "h100", peak_flops_per_us: 989_000_000, encoder_percent: 30, llm_percent: 40 },
    Device { name: "h200", peak_flops_per_us: 989_000_000, encoder_percent: 30, llm_percent: 40 },
    Device { name: "cpu", peak_flops_per_us: 80_000, encoder_percent: 50, llm_percent: 50 },
];

const DEVICE_NAMES: [&str; DEVICES.len()] = {
    let mut names = [""; DEVICES.len()];
    let mut device = 0;
    while device < DEVICES.len() {
        names[device] = DEVICES[device].name;
        device += 1;
    }
    names
};

impl DeviceRate {
    /// Returns the assumed rate of a device, one of [`DeviceRate::preset_names`].
    ///
    /// Published peak times an assumed utilization: 40 % on encoders and 50 % on the LLM for `a100`, 30 % and
    /// 40 % for `h100` and `h200`, 50 % for `cpu`, which is a single core. **A guess until measured.**
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] with the known names, if there is none.
    pub fn preset(name: &str) -> Result<Self> {
        for device in &DEVICES {
            if device.name == name {
                let encoder = share(device.peak_flops_per_us, device.encoder_percent);
                return Ok(Self {
                    vision_flops_per_us: encoder,
                    audio_flops_per_us: encoder,
                    llm_flops_per_us: share(device.peak_flops_per_us, device.llm_percent),
                });
            }
        }
        Err(Error::UnknownDevice { name: name.to_owned(), known: DEVICE_NAMES.join(", ") })
    }

    /// Returns the names that [`DeviceRate::preset`] knows.
    #[must_use]
    pub const fn preset_names() -> &'static [&'static str] {
        &DEVICE_NAMES
    }

    /// Returns the rate on one module, in FLOPs per microsecond.
    #[must_use]
    pub const fn flops_per_us(&self, module: Module) -> NonZeroU64 {
        match module {
            Module::Vision => self.vision_flops_per_us,
            Module::Audio => self.audio_flops_per_us,
            Module::Llm => self.llm_flops_per_us,
        }
    }

    /// Time of so many FLOPs, in ns rounded up, saturating.
    pub(crate) fn nanoseconds(&self, module: Module, flops: u128) -> u64 {
        let rate = self.flops_per_us(module).get();
        let scaled = flops.saturating_mul(NANOSECONDS_PER_MICROSECOND);
        // A division of 128 bits takes several times as long, and is rarely needed.
        match u64::try_from(scaled) {
            Ok(scaled) => scaled.div_ceil(rate),
            Err(_) => u64::try_from(scaled.div_ceil(u128::from(rate))).unwrap_or(u64::MAX),
        }
    }
}

const fn share(peak: u64, percent: u64) -> NonZeroU64 {
    match NonZeroU64::new(peak / 100 * percent) {
        Some(rate) => rate,
        None => NonZeroU64::MIN,
    }
}

/// What one sample costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SampleCost {
    /// LLM positions: text, and media after the encoders.
    pub tokens: u32,
    /// Tokens that the loss is taken over.
    pub target_tokens: u32,
    /// Tiles, patches and windows, as the token rules of the model say, summed over both encoders.
    pub encoder_items: u32,
    /// Positions inside the encoders, summed over both.
    pub encoder_tokens: u32,
    /// Forward and backward of each **whole** module, all its layers, on one device.
    pub module_ns: ModuleTimes,
}

/// Predicts the cost of samples for one model on one device.
///
/// # Examples
/// ```
/// use dflop_costmodel::{CostModel, DeviceRate, ImageSize, ModelSpec, SampleShape};
///
/// # fn main() -> dflop_costmodel::Result<()> {
/// let model = CostModel::new(ModelSpec::preset("qwen2.5-vl-7b")?, DeviceRate::preset("h100")?);
/// let image = ImageSize { width: 640, height: 480 };
/// let shape = SampleShape { text_tokens: 100, images: vec![image], ..SampleShape::default() };
/// let cost = model.annotate(&shape)?;
/// assert_eq!(cost.tokens, 100 + 391 + 2);
/// assert_eq!(cost.encoder_tokens, 4 * 391);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CostModel {
    spec: ModelSpec,
    pub(crate) timing: Timing,
    pub(crate) correction: Option<Arc<CorrectionTable>>,
    modules: Vec<Module>,
    pub(crate) encoders: Vec<Encoder>,
    pub(crate) llm: LlmFlops,
    pub(crate) recomputation: Recomputation,
    frozen: Frozen,
}

/// An encoder, folded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoder {
    pub(crate) module: Module,
    pub(crate) rule: MediaRule,
    pub(crate) flops: EncoderFlops,
}

impl CostModel {
    /// Folds a model into FLOPs per token, once; times come from a stated rate.
    #[must_use]
    pub fn new(spec: ModelSpec, rate: DeviceRate) -> Self {
        Self::with_timing(spec, Timing::Rate(rate))
    }

    pub(crate) fn with_timing(spec: ModelSpec, timing: Timing) -> Self {
        let fold = |(module, encoder, rule)| {
            let flops = EncoderFlops::new(&encoder, spec.llm.hidden);
            Encoder { module, rule, flops }
        };
        let encoders: Vec<Encoder> = spec.encoders().map(fold).collect();
        let modules = encoders.iter().map(|encoder| encoder.module).chain([Module::Llm]).collect();
        let llm = LlmFlops::new(&spec.llm);
        let recomputation = Recomputation::None;
        let frozen = Frozen::default();
        Self { spec, timing, correction: None, modules, encoders, llm, recomputation, frozen }
    }

    /// Sets what the backward pass computes again. Default: nothing.
    ///
    /// Of a profile, [`Recomputation::Layers`] adds the measured forward pass of the layers to the backward pass; the
    /// scores are in what was measured, one way or the other.
    #[must_use]
    pub fn recomputation(mut self, recomputation: Recomputation) -> Self {
        self.recomputation = recomputation;
        self.apply_training();
        self
    }

    /// Sets which parts are not trained. Default: all are.
    ///
    /// Of a profile, the measured backward pass of a frozen LLM counts half in its linear work, which then computes
    /// one of two products, and in full in its attention; where these were not measured apart, half in all. A frozen
    /// encoder has none; that of a projector behind it is taken from what was measured outside the layers.
    ///
    /// # Errors
    /// [`Error::Unfit`] if the model has not what is frozen, or nothing is left to train.
    pub fn frozen(mut self, frozen: Frozen) -> Result<Self> {
        frozen.check(&self.spec)?;
        self.frozen = frozen;
        for encoder in &mut self.encoders {
            let [tower, projector] = frozen.of_encoder(frozen.has_tower(encoder.module));
            encoder.flops = encoder.flops.gradients(tower, projector);
        }
        self.llm = self.llm.gradients(frozen.of_llm());
        self.apply_training();
        Ok(self)
    }

    /// Returns which parts are not trained.
    #[must_use]
    pub const fn frozen_parts(&self) -> Frozen {
        self.frozen
    }

    fn apply_training(&mut self) {
        if let Timing::Profile(timing) = &mut self.timing {
            *timing = Arc::new(timing.trained(&self.encoders, self.frozen, self.recomputation));
        }
    }

    /// Returns the model.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Returns the stated rate that times come from; `None` if they come from a profile.
    #[must_use]
    pub const fn rate(&self) -> Option<&DeviceRate> {
        match &self.timing {
            Timing::Rate(rate) => Some(rate),
            Timing::Profile(_) => None,
        }
    }

    /// Returns the modules of the model: its encoders, then the LLM.
    #[must_use]
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// Predicts the cost of one sample; allocates nothing.
    ///
    /// Times are of executed FLOPs: attention of the LLM is causal, and what is recomputed counts. Media of a
    /// kind that the model has no encoder for are ignored: they add no tokens and no time, and are not checked.
    /// Sequences are not cut at the LLM's maximum.
    ///
    /// # Errors
    /// [`Error::EmptyImage`], [`Error::AspectRatio`] or [`Error::SampleRate`] if the model cannot take a
    /// medium; [`Error::TooLarge`] if a count does not fit into 32 bits.
    pub fn annotate(&self, shape: &SampleShape) -> Result<SampleCost> {
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

    /// Returns the FLOPs of training on samples packed into one sequence, of each module.
    ///
    /// [`Attention::Full`] without recomputation gives the model's FLOPs, from which MFU follows;
    /// [`Attention::Causal`] gives what is executed.
    ///
    /// # Errors
    /// As [`CostModel::annotate`].
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
}

fn to_u32(quantity: &'static str, count: u64) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::TooLarge { quantity, count })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{AudioLength, ImageSize, VideoShape};
    use proptest::prelude::*;

    fn cost_model(model: &str, device: &str) -> CostModel {
        CostModel::new(ModelSpec::preset(model).unwrap(), DeviceRate::preset(device).unwrap())
    }

    fn text(text_tokens: u32) -> SampleShape {
        SampleShape { text_tokens, target_tokens: text_tokens, ..SampleShape::default() }
    }

    /// 14,341,275,648,000 FLOPs forward (13,251,280,896,000 in layers, 1,089,994,752,000 in the head), times 3,
    /// over 156 TFLOP/s: 275,793,762.5 ns.
    #[test]
    fn text_costs_its_flops_over_the_rate_rounded_up() {
        let cost = cost_model("llava-ov-qwen2.5-7b", "a100").annotate(&text(1000)).unwrap();
        assert_eq!((cost.tokens, cost.target_tokens), (1000, 1000));
        assert_eq!((cost.encoder_items, cost.encoder_tokens), (0, 0));
        assert_eq!(cost.module_ns.as_slice(), [0, 275_793_763]);
    }

    /// Five tiles of 691,195,949,568 FLOPs, times 3, less 987,614,208 to the pixels, over 124.8 TFLOP/s:
    /// 83,036,868.4 ns.
    #[test]
    fn a_image_costs_its_tiles() {
        let mut shape = text(50);
        shape.images.push(ImageSize { width: 640, height: 480 });
        let cost = cost_model("llava-ov-qwen2.5-7b", "a100").annotate(&shape).unwrap();
        assert_eq!(cost.tokens, 50 + 2929);
        assert_eq!((cost.encoder_items, cost.encoder_tokens), (5, 5 * 729));
        assert_eq!(cost.module_ns.as_slice()[0], 83_036_869);
    }

    /// Forward alone; forward and gradients of the inputs; all three.
    #[test]
    fn frozen_parts_cost_less_at_a_rate() {
        let mut shape = text(50);
        shape.images.push(ImageSize { width: 640, height: 480 });
        let ns = |frozen: &str| {
            let model = cost_model("llava-ov-qwen2.5-7b", "a100").frozen(frozen.parse().unwrap()).unwrap();
            model.annotate(&shape).unwrap().module_ns
        };
        let all = cost_model("llava-ov-qwen2.5-7b", "a100").annotate(&shape).unwrap().module_ns;
        let ratio = |frozen: &str, module: usize| {
            ns(frozen).as_slice()[module] as f64 / all.as_slice()[module] as f64
        };
        assert!((ratio("vision,projector", 0) - 1.0 / 3.0).abs() < 0.001);
        assert!((ratio("vision,projector", 1) - 1.0).abs() < 1e-9);
        assert!((0.66..0.69).contains(&ratio("llm", 1)), "{}", ratio("llm", 1));
        let recomputed = cost_model("llava-ov-qwen2.5-7b", "a100").recomputation(Recomputation::Layers);
        let again = recomputed.annotate(&shape).unwrap().module_ns.as_slice()[0] as f64;
        assert!((1.3..1.36).contains(&(again / all.as_slice()[0] as f64)));
        let model = cost_model("llava-ov-qwen2.5-7b", "a100");
        assert!(model.clone().frozen("audio".parse().unwrap()).is_err());
        assert_eq!(model.frozen("llm".parse().unwrap()).unwrap().frozen_parts().to_string(), "llm");
    }

    #[test]
    fn modules_are_the_encoders_then_the_llm() {
        for (model, modules) in [
            ("llava-ov-llama3-8b", &[Module::Vision, Module::Llm][..]),
            ("qwen2-audio-7b", &[Module::Audio, Module::Llm]),
            ("omni-7b", &[Module::Vision, Module::Audio, Module::Llm]),
            ("tiny", &[Module::Vision, Module::Audio, Module::Llm]),
        ] {
            let model = cost_model(model, "h100");
            assert_eq!(model.modules(), modules);
            let cost = model.annotate(&text(1)).unwrap();
            assert_eq!(cost.module_ns.as_slice().len(), modules.len());
        }
        assert_eq!(
            [Module::Vision, Module::Audio, Module::Llm].map(Module::name),
            ["vision", "audio", "llm"]
        );
        assert_eq!(format!("{:>5}", Module::Llm), "  llm");
    }

    #[test]
    fn media_without_an_encoder_are_ignored() {
        let mut shape = text(10);
        shape.images.push(ImageSize { width: 0, height: 0 });
        shape.videos.push(VideoShape { frames: 4, width: 0, height: 0 });
        let deaf_and_blind = cost_model("qwen2-audio-7b", "cpu");
        assert_eq!(deaf_and_blind.annotate(&shape), deaf_and_blind.annotate(&text(10)));
        let mut clip = text(10);
        clip.audio.push(AudioLength { frames: 9, sample_rate_hz: 0 });
        let deaf = cost_model("qwen2.5-vl-7b", "cpu");
        assert_eq!(deaf.annotate(&clip), deaf.annotate(&text(10)));
    }

    #[test]
    fn media_of_all_kinds_add_up() {
        let shape = SampleShape {
            text_tokens: 5,
            target_tokens: 3,
            images: vec![ImageSize { width: 640, height: 480 }],
            audio: vec![AudioLength { frames: 480_000, sample_rate_hz: 16_000 }; 2],
            videos: vec![VideoShape { frames: 8, width: 320, height: 240 }],
        };
        let cost = cost_model("omni-7b", "h200").annotate(&shape).unwrap();
        assert_eq!(cost.tokens, 5 + 2929 + 2 * 752 + (8 * 196 + 1));
        assert_eq!(cost.encoder_items, 5 + 2 + 8);
        assert_eq!(cost.encoder_tokens, (5 + 8) * 729 + 2 * 1500);
    }

    #[test]
    fn counts_beyond_32_bits_are_refused() {
        let mut shape = text(u32::MAX);
        let model = cost_model("omni-7b", "cpu");
        assert_eq!(model.annotate(&shape).unwrap().tokens, u32::MAX);
        shape.audio.push(AudioLength { frames: 16_000, sample_rate_hz: 16_000 });
        let count = u64::from(u32::MAX) + 27;
        assert_eq!(model.annotate(&shape), Err(Error::TooLarge { quantity: "tokens", count }));
        shape = text(0);
        shape.audio.push(AudioLength { frames: u64::MAX, sample_rate_hz: 1 });
        assert!(matches!(model.annotate(&shape), Err(Error::TooLarge { .. })));
    }

    #[test]
    fn an_unknown_device_is_answered_with_the_known_ones() {
        let message = DeviceRate::preset("tpu").unwrap_err().to_string();
        assert_eq!(message, "unknown device `tpu`, known are a100, h100, h200, cpu");
        for name in DeviceRate::preset_names() {
            assert!(DeviceRate::preset(name).is_ok());
        }
    }

    proptest! {
        #[test]
        fn longer_text_never_costs_less(short in 0u32..1 << 20, more in 0u32..1 << 20) {
            for model in ["llava-ov-qwen2.5-72b", "tiny"] {
                let model = cost_model(model, "a100");
                let short_ns = model.annotate(&text(short)).unwrap().module_ns;
                let long_ns = model.annotate(&text(short + more)).unwrap().module_ns;
                prop_assert!(short_ns.as_slice().last() <= long_ns.as_slice().last());
            }
        }

        #[test]
        fn any_shape_is_a_cost_or_a_typed_error(
            text_tokens in any::<u32>(),
            images in prop::collection::vec((any::<u32>(), any::<u32>(), 0u32..32), 0..4),
            clips in prop::collection::vec((any::<u64>(), any::<u32>(), 0u32..64), 0..4),
            videos in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u32>()), 0..4),
        ) {
            let mut shape = text(text_tokens);
            for (width, height, shift) in images {
                shape.images.push(ImageSize { width: width >> shift, height: height >> shift });
            }
            for (frames, sample_rate_hz, shift) in clips {
                shape.audio.push(AudioLength { frames: frames >> shift, sample_rate_hz });
            }
            for (frames, width, height) in videos {
                shape.videos.push(VideoShape { frames, width, height });
            }
            for name in ModelSpec::preset_names() {
                if let Ok(cost) = cost_model(name, "cpu").annotate(&shape) {
                    prop_assert!(cost.tokens >= text_tokens);
                    prop_assert_eq!(cost.encoder_items == 0, cost.encoder_tokens == 0);
                }
            }
        }
    }
}
