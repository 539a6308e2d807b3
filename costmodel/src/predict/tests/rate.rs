//! Checks cost models at a stated rate against FLOPs counted by hand.

use proptest::prelude::*;

use super::super::*;
use crate::error::Error;
use crate::flops::Recomputation;
use crate::model::ModelSpec;
use crate::tokens::EncoderWork;
use crate::{AudioLength, ImageSize, Module, SampleShape, VideoShape};

fn cost_model(model: &str, device: &str) -> CostModel {
    CostModel::new(ModelSpec::preset(model).unwrap(), DeviceRate::preset(device).unwrap())
}

fn text(text_tokens: u32) -> SampleShape {
    SampleShape { text_tokens, target_tokens: text_tokens, ..SampleShape::default() }
}

/// 14,341,275,648,000 FLOPs forward (13,251,280,896,000 in layers, 1,089,994,752,000 in the head), times 3,
/// over 141.96 TFLOP/s: 303,070,068.6 ns.
#[test]
fn text_costs_its_flops_over_the_rate_rounded_up() {
    let cost = cost_model("llava-ov-qwen2.5-7b", "a100").predict(&text(1000)).unwrap();
    assert_eq!((cost.tokens, cost.target_tokens), (1000, 1000));
    assert_eq!((cost.encoder_items, cost.encoder_tokens), (0, 0));
    assert_eq!(cost.module_ns.as_slice(), [0, 303_070_069]);
}

/// Five tiles with 691,195,949,568 FLOPs, times 3, less 987,614,208 to the pixels, over 59.904 TFLOP/s:
/// 172,993,475.8 ns.
#[test]
fn an_image_costs_its_tiles() {
    let mut shape = text(50);
    shape.images.push(ImageSize { width: 640, height: 480 });
    let cost = cost_model("llava-ov-qwen2.5-7b", "a100").predict(&shape).unwrap();
    assert_eq!(cost.tokens, 50 + 2929);
    assert_eq!((cost.encoder_items, cost.encoder_tokens), (5, 5 * 729));
    assert_eq!(cost.module_ns.as_slice()[0], 172_993_476);
}

/// Measured on an H200 with every layer recomputed: 28.1 us per patch, 125.5 us per token.
#[test]
fn an_h200_takes_what_was_measured_on_one() {
    let model = cost_model("qwen2.5-vl-7b", "h200").recomputation(Recomputation::Layers);
    let us = |ns: u64, count: u32| ns as f64 / 1e3 / f64::from(count);
    // Images with 1,380 to 2,500 patches, texts with some hundred tokens.
    for (width, height) in [(644, 420), (700, 700)] {
        let shape = SampleShape { images: vec![ImageSize { width, height }], ..text(0) };
        let cost = model.predict(&shape).unwrap();
        let patch_us = us(cost.module_ns.as_slice()[0], cost.encoder_tokens);
        assert!((patch_us / 28.1 - 1.0).abs() < 0.02, "{patch_us}");
    }
    for tokens in [300, 640, 1000] {
        let token_us = us(model.predict(&text(tokens)).unwrap().module_ns.as_slice()[1], tokens);
        assert!((token_us / 125.5 - 1.0).abs() < 0.02, "{token_us}");
    }
}

/// The stated rate is for executed FLOPs: without recomputation there are fewer.
#[test]
fn what_is_not_recomputed_costs_nothing() {
    for device in ["a100", "h100", "h200", "b200"] {
        let ns = |recomputation| {
            let model = cost_model("qwen2.5-vl-7b", device).recomputation(recomputation);
            let shape = SampleShape { images: vec![ImageSize { width: 644, height: 420 }], ..text(640) };
            model.predict(&shape).unwrap().module_ns.as_slice().to_vec()
        };
        let (none, layers) = (ns(Recomputation::None), ns(Recomputation::Layers));
        for (none, layers) in none.iter().zip(&layers) {
            let share = *none as f64 / *layers as f64;
            assert!((0.72..0.78).contains(&share), "{device}: {share}");
        }
    }
}

/// Counted as by its token rule, a sample costs the same as by its shape.
#[test]
fn counted_tokens_cost_what_the_same_tokens_by_rule_cost() {
    let mut shape = text(50);
    shape.images.push(ImageSize { width: 640, height: 480 });
    let model = cost_model("llava-ov-qwen2.5-7b", "a100");
    let by_rule = model.predict(&shape).unwrap();
    let work = EncoderWork::from_sequences(&[729, 729, 0, 729, 729, 729]);
    assert_eq!(model.predict_counted(&[work], 50 + 2929, 50).unwrap(), by_rule);
    let error = model.predict_counted(&[], 1, 0).unwrap_err().to_string();
    assert_eq!(error, "`llava-ov-qwen2.5-7b`: has 1 encoders, found the work of 0");
}

/// A third of the FLOPs is forward, a third input gradients, a third weight gradients.
#[test]
fn frozen_parts_cost_less_at_a_rate() {
    let mut shape = text(50);
    shape.images.push(ImageSize { width: 640, height: 480 });
    let ns = |frozen: &str| {
        let model = cost_model("llava-ov-qwen2.5-7b", "a100").frozen(frozen.parse().unwrap()).unwrap();
        model.predict(&shape).unwrap().module_ns
    };
    let all = cost_model("llava-ov-qwen2.5-7b", "a100").predict(&shape).unwrap().module_ns;
    let ratio =
        |frozen: &str, module: usize| ns(frozen).as_slice()[module] as f64 / all.as_slice()[module] as f64;
    assert!((ratio("vision,projector", 0) - 1.0 / 3.0).abs() < 0.001);
    assert!((ratio("vision,projector", 1) - 1.0).abs() < 1e-9);
    assert!((0.66..0.69).contains(&ratio("llm", 1)), "{}", ratio("llm", 1));
    let recomputed = cost_model("llava-ov-qwen2.5-7b", "a100").recomputation(Recomputation::Layers);
    let again = recomputed.predict(&shape).unwrap().module_ns.as_slice()[0] as f64;
    assert!((1.3..1.36).contains(&(again / all.as_slice()[0] as f64)));
    let model = cost_model("llava-ov-qwen2.5-7b", "a100");
    assert!(model.clone().frozen("audio".parse().unwrap()).is_err());
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
        let cost = model.predict(&text(1)).unwrap();
        assert_eq!(cost.module_ns.as_slice().len(), modules.len());
    }
    assert_eq!([Module::Vision, Module::Audio, Module::Llm].map(Module::name), ["vision", "audio", "llm"]);
    assert_eq!(format!("{:>5}", Module::Llm), "  llm");
}

#[test]
fn media_without_an_encoder_are_ignored() {
    let mut shape = text(10);
    shape.images.push(ImageSize { width: 0, height: 0 });
    shape.videos.push(VideoShape { frames: 4, width: 0, height: 0 });
    let audio_only = cost_model("qwen2-audio-7b", "cpu");
    assert_eq!(audio_only.predict(&shape), audio_only.predict(&text(10)));
    let mut clip = text(10);
    clip.audio.push(AudioLength { frames: 9, sample_rate_hz: 0 });
    let vision_only = cost_model("qwen2.5-vl-7b", "cpu");
    assert_eq!(vision_only.predict(&clip), vision_only.predict(&text(10)));
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
    let cost = cost_model("omni-7b", "h200").predict(&shape).unwrap();
    assert_eq!(cost.tokens, 5 + 2929 + 2 * 752 + (8 * 196 + 1));
    assert_eq!(cost.encoder_items, 5 + 2 + 8);
    assert_eq!(cost.encoder_tokens, (5 + 8) * 729 + 2 * 1500);
}

#[test]
fn counts_beyond_32_bits_are_errors() {
    let mut shape = text(u32::MAX);
    let model = cost_model("omni-7b", "cpu");
    assert_eq!(model.predict(&shape).unwrap().tokens, u32::MAX);
    shape.audio.push(AudioLength { frames: 16_000, sample_rate_hz: 16_000 });
    let count = u64::from(u32::MAX) + 27;
    assert_eq!(model.predict(&shape), Err(Error::TooLarge { quantity: "tokens", count }));
    shape = text(0);
    shape.audio.push(AudioLength { frames: u64::MAX, sample_rate_hz: 1 });
    assert!(matches!(model.predict(&shape), Err(Error::TooLarge { .. })));
}

proptest! {
    #[test]
    fn longer_text_never_costs_less(short in 0u32..1 << 20, more in 0u32..1 << 20) {
        for model in ["llava-ov-qwen2.5-72b", "tiny"] {
            let model = cost_model(model, "a100");
            let short_ns = model.predict(&text(short)).unwrap().module_ns;
            let long_ns = model.predict(&text(short + more)).unwrap().module_ns;
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
            if let Ok(cost) = cost_model(name, "cpu").predict(&shape) {
                prop_assert!(cost.tokens >= text_tokens);
                prop_assert_eq!(cost.encoder_items == 0, cost.encoder_tokens == 0);
            }
        }
    }
}
