//! Tests single-layer times against FLOPs and measured curves.

use std::fmt::Write;

use crate::flops::{Attention, EncoderFlops, LlmFlops, Recomputation};
use crate::model::{ExpertsDetails, ExpertsSpec, LayerSet, ModelSpec, Window, WindowedAttention};
use crate::predict::layer_matrices::{LayerFlops, llm_layer_flops, tile_work};
use crate::predict::{CostModel, DevicePreset, DeviceRate, LayerTimes, ProfileOptions};
use crate::profile::Profile;
use crate::{ImageSize, Module, SampleShape, VideoShape};

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

/// Linear work by patch and attention by pair give the FLOPs for several media, also with windows.
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

/// Milliseconds as in reference files: 4 layers with 7 FLOPs and a head with 14 take 42 in total.
#[test]
fn one_layer_count_is_divided_by_flops() {
    let spec = spec();
    let LayerFlops { layer, outside } = llm_layer_flops(&spec.llm);
    let ms = |layers: f64| (layers * layer + outside) / 1e9;
    let header = "seq_len,model_time,fwd_times,bwd_times,num_layers,tp_size\n";
    let skip = format!("{header}1024,{},{},{},4,1\n", ms(4.0), ms(4.0) / 3.0, ms(4.0) * 2.0 / 3.0);
    let whole =
        format!("{header}1024,{},{},{},4,1\n", ms(4.0) + 8.0, ms(4.0) / 3.0 + 4.0, ms(4.0) * 2.0 / 3.0 + 4.0);
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

/// 1 % noise between three repeats, at lengths from 64 to 4,096.
#[test]
fn a_measured_layer_has_a_half_width_that_grows_beyond_its_points() {
    let mut text = "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n".to_owned();
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

/// A model with experts in layers 1 to 3, and 100-token windows in layers 0 and 2.
fn mixture() -> ModelSpec {
    let mut spec = ModelSpec::preset("tiny").unwrap();
    spec.llm.experts = Some(ExpertsSpec {
        layers: LayerSet::range(1, 4),
        experts: 16,
        experts_per_token: 2,
        ffn: 512,
        shared_ffn: 256,
        details: ExpertsDetails::NONE,
    });
    let layers = [0, 2].into_iter().collect();
    spec.llm.windows = Some(WindowedAttention { layers, tokens: 100, kind: Window::Sliding });
    spec
}

/// Mean layers over layers with and without experts and windows add up to the model FLOPs.
#[test]
fn mean_layers_of_a_mixture_give_the_flops_of_the_whole_model() {
    let (spec, rate) = (mixture(), DeviceRate::preset("h100").unwrap());
    let times = LayerTimes::from_rate(&spec, Module::Llm, 1, &rate, 0);
    let layers = 4.0 * (times.layer_ns(1.0, 3000.0) + times.attention_ns(2.0, 1500.0));
    let flops = LlmFlops::new(&spec.llm).training(&[1500, 1500], Attention::Causal, Recomputation::None);
    let expected = flops.total() as f64 * 1000.0 / rate.llm_flops_per_us.get() as f64;
    assert!(close(layers + times.outside_layers_ns(1.0, 3000.0), expected));
    let experts = 3.0 * 6.0 * 2.0 * 3.0 * 256.0 * 512.0 * 3000.0 / rate.llm_flops_per_us.get() as f64;
    assert!(close(4.0 * times.experts_ns(3000.0), experts * 1000.0));
}

/// The weights for all experts are read whatever the tokens, and narrow experts run at a lower rate.
#[test]
fn few_tokens_wait_for_the_weights_of_experts() {
    let spec = ModelSpec::preset("internvl3.5-30b-a3b").unwrap();
    let device = DevicePreset::named("h100").unwrap();
    let times = LayerTimes::from_preset(&spec, Module::Llm, 1, &device, 0);
    // 128 experts with 3 x 2,048 x 768, 2 bytes, three times, at 3.35 TB/s.
    assert!(close(times.expert_read_ns(), 128.0 * 3.0 * 2048.0 * 768.0 * 6.0 / 3.35e3));
    let per_token = |tokens: f64| times.layer_ns(1.0, tokens) / tokens;
    assert!(per_token(100.0) > 10.0 * per_token(100_000.0) && times.layer_ns(1.0, 0.0).abs() < 1e-12);
    let flops = llm_layer_flops(&spec.llm).layer * 1000.0 / device.rate().llm_flops_per_us.get() as f64;
    assert!(per_token(1e9) > 1.1 * flops, "{} {flops}", per_token(1e9));
    let shared = LayerTimes::from_preset(&spec, Module::Llm, 4, &device, 0);
    assert!(close(shared.expert_read_ns() * 4.0, times.expert_read_ns()));
    assert!(shared.experts_ns(1e4) * 4.0 > 1.2 * times.experts_ns(1e4), "a quarter of 768 is narrow");
}

/// A profile whose attention takes one nanosecond per squared token: windows count as shorter sequences.
#[test]
fn windows_take_the_measured_time_of_shorter_sequences() {
    let spec = mixture();
    let mut text = "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n".to_owned();
    for phase in ["forward", "backward"] {
        for tokens in [50_u32, 100, 200, 400, 1000, 2000] {
            let square = f64::from(tokens) * f64::from(tokens) / 2000.0;
            writeln!(text, "llm,linear,{phase},1,1,1,{tokens},{}", f64::from(tokens)).unwrap();
            writeln!(text, "llm,attention,{phase},1,1,1,{tokens},{square}").unwrap();
        }
    }
    let profile = Profile::parse([("p.csv", &text[..])]).unwrap();
    let times = LayerTimes::from_profile(&spec, &profile, Module::Llm, 1, 0).unwrap();
    // 1,000² - 900² pairs in half the layers.
    let found = times.attention_ns(1.0, 1000.0);
    assert!((found / (0.5 * 1_000_000.0 + 0.5 * 190_000.0) - 1.0).abs() < 0.05, "{found}");
    let model = CostModel::from_profile(spec.clone(), &profile, ProfileOptions::default());
    assert!(model.is_err(), "the encoders were not measured");
    let text_only = ModelSpec { vision: None, audio: None, ..spec };
    let model = CostModel::from_profile(text_only, &profile, ProfileOptions::default()).unwrap();
    let shape = SampleShape { text_tokens: 1000, ..SampleShape::default() };
    let ns = model.predict(&shape).unwrap().module_ns.as_slice()[0] as f64;
    let linear = 4.0 * 2.0 * 1_000_000.0;
    assert!((ns / (linear + 4.0 * 595_000.0) - 1.0).abs() < 0.05, "{ns}");
}
