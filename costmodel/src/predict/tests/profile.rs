//! Checks cost models on profiles made from known formulas.

use std::fmt::Write;

use super::super::*;
use crate::correction::{CorrectionTable, FACTOR_ONE};
use crate::error::{Error, Result};
use crate::flops::Recomputation;
use crate::frozen::FrozenParts;
use crate::model::ModelSpec;
use crate::profile::{Part, Profile};
use crate::{AudioLength, ImageSize, Module, ModuleTimes, SampleShape, VideoShape};
use proptest::prelude::*;

const HEADER: &str =
    "# dflop-profile: 1\n# device: formula\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n";
/// Microseconds per layer launch.
const LAUNCH: f64 = 30.0;
/// Microseconds of linear work per token.
const PER_TOKEN: f64 = 0.05;
/// Microseconds of attention per query-key pair.
const PER_PAIR: f64 = 0.00002;
/// Microseconds per token outside the layers.
const OUTSIDE: f64 = 0.2;

fn linear(layers: f64, tokens: f64) -> f64 {
    layers * (LAUNCH + PER_TOKEN * tokens)
}

fn attention(batch: f64, tokens: f64) -> f64 {
    5.0 + PER_PAIR * batch * tokens * tokens
}

/// Writes a profile with all modules, at these layer counts and TP degrees; backward takes twice as long.
fn rows(layer_counts: &[u32], tps: &[u32]) -> String {
    let mut text = HEADER.to_owned();
    for module in ["vision", "audio", "llm"] {
        let (batches, lengths): (&[u32], &[u32]) = match module {
            "vision" => (&[1, 2, 4, 8, 16, 32], &[256, 729, 1024]),
            "audio" => (&[1, 2, 4, 8], &[1500]),
            _ => (&[1], &[64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]),
        };
        for &tp in tps {
            for (batch, tokens) in batches.iter().flat_map(|b| lengths.iter().map(move |s| (*b, *s))) {
                shape_rows(&mut text, module, layer_counts, [tp, batch, tokens]);
            }
        }
    }
    text
}

fn shape_rows(text: &mut String, module: &str, layer_counts: &[u32], [tp, batch, tokens]: [u32; 3]) {
    let (b, s, speed) = (f64::from(batch), f64::from(tokens), f64::from(tp));
    for (phase, factor) in [("forward", 1.0 / speed), ("backward", 2.0 / speed)] {
        let mut row = |part: &str, layers: u32, time: f64| {
            writeln!(text, "{module},{part},{phase},{tp},{layers},{batch},{tokens},{}", time * factor)
                .unwrap();
        };
        for &layers in layer_counts {
            row("linear", layers, linear(layers.into(), b * s));
        }
        row("attention", 1, attention(b, s));
        row("ends", 0, OUTSIDE * b * s);
    }
}

fn model(name: &str, text: &str, options: ProfileOptions) -> Result<CostModel> {
    let profile = Profile::parse([("p.csv", text)])?;
    CostModel::from_profile(ModelSpec::preset(name)?, &profile, options)
}

fn text_sample(tokens: u32) -> SampleShape {
    SampleShape { text_tokens: tokens, ..SampleShape::default() }
}

/// Returns the true time that sequences add to a module, forward and backward, in nanoseconds; launches count
/// for the microbatch.
fn added_truth(layers: f64, sequences: f64, tokens: f64) -> f64 {
    let linear = layers * PER_TOKEN * sequences * tokens;
    let attention = layers * PER_PAIR * sequences * tokens * tokens;
    3000.0 * (linear + attention + OUTSIDE * sequences * tokens)
}

/// Returns the true LLM time over a sample run separately.
fn llm_truth(layers: f64, tokens: f64) -> f64 {
    3000.0 * (linear(layers, tokens) + OUTSIDE * tokens + layers * attention(1.0, tokens))
}

#[test]
fn two_layer_counts_predict_all_layers_within_one_percent() {
    let model = model("omni-7b", &rows(&[2, 4], &[1]), ProfileOptions::default()).unwrap();
    for tokens in [64, 100, 700, 3_000, 9_000, 16_384] {
        let sample = text_sample(tokens);
        let ns = |times: ModuleTimes| *times.as_slice().last().unwrap() as f64;
        let added = ns(model.predict(&sample).unwrap().module_ns) / added_truth(28.0, 1.0, tokens.into());
        let alone = ns(model.predict_microbatch([&sample]).unwrap()) / llm_truth(28.0, tokens.into());
        assert!((added - 1.0).abs() < 0.01 && (alone - 1.0).abs() < 0.01, "{tokens}: {added} {alone}");
    }
}

#[test]
fn tiles_are_batches_and_clips_are_windows() {
    let model = model("omni-7b", &rows(&[2, 4], &[1]), ProfileOptions::default()).unwrap();
    let mut shape = text_sample(10);
    shape.images.push(ImageSize { width: 640, height: 480 });
    shape.audio.push(AudioLength { frames: 40 * 16_000, sample_rate_hz: 16_000 });
    let cost = model.predict(&shape).unwrap();
    let tiles = f64::from(cost.encoder_items - 2);
    let truths = [
        added_truth(27.0, tiles, 729.0),
        added_truth(32.0, 2.0, 1500.0),
        added_truth(28.0, 1.0, cost.tokens.into()),
    ];
    for (ns, truth) in cost.module_ns.as_slice().iter().zip(truths) {
        assert!((*ns as f64 / truth - 1.0).abs() < 0.01, "{ns} {truth}");
    }
}

#[test]
fn windows_of_native_encoders_are_short_sequences() {
    let model = model("qwen2.5-vl-7b", &rows(&[2, 4], &[1]), ProfileOptions::default()).unwrap();
    let shape = SampleShape { images: vec![ImageSize { width: 640, height: 480 }], ..SampleShape::default() };
    let prediction = model.predict_with_uncertainty(&shape).unwrap().unwrap();
    assert!(prediction.warnings.iter().any(|warning| matches!(
        warning,
        ProfileWarning::Extrapolated { module: Module::Vision, part: Part::Attention, tokens, .. } if *tokens < 64.0
    )));
}

#[test]
fn a_prediction_has_an_uncertainty() {
    let noisy: String = rows(&[2, 4], &[1]);
    let mut text = noisy.clone();
    // Two more runs of everything, 10 % slower and 10 % faster, so that repeats have a spread.
    for (number, factor) in [(0, 1.1), (1, 0.9)] {
        for line in noisy.lines().skip(3) {
            let (front, time) = line.rsplit_once(',').unwrap();
            writeln!(text, "{front},{}", time.parse::<f64>().unwrap() * factor).unwrap();
        }
        assert!(number < 2);
    }
    let model = model("omni-7b", &text, ProfileOptions::default()).unwrap();
    assert!(
        !model.profile_warnings().iter().any(|warning| matches!(warning, ProfileWarning::FewRepeats { .. }))
    );
    let within = model.predict_with_uncertainty(&text_sample(1000)).unwrap().unwrap();
    let beyond = model.predict_with_uncertainty(&text_sample(40_000)).unwrap().unwrap();
    let [inner, outer] = [&within, &beyond].map(|prediction| *prediction.modules.last().unwrap());
    let relative = |time: PredictedTime| time.uncertainty_ns as f64 / time.ns as f64;
    assert!(!inner.is_extrapolated && relative(inner) > 0.05, "{inner:?}");
    assert!(outer.is_extrapolated && relative(outer) > 0.05, "{outer:?}");
    assert!(within.warnings.is_empty() && beyond.warnings.len() >= 2, "{:?}", beyond.warnings);
    assert_eq!(inner.ns, *model.predict(&text_sample(1000)).unwrap().module_ns.as_slice().last().unwrap());
}

#[test]
fn attention_is_paid_per_sample_and_linear_work_per_pack() {
    let model = model("llava-ov-qwen2.5-7b", &rows(&[2, 4], &[1]), ProfileOptions::default()).unwrap();
    let samples = [text_sample(512), text_sample(1024), text_sample(2048)];
    let packed = *model.predict_microbatch(&samples).unwrap().as_slice().last().unwrap() as f64;
    let pairs: f64 = [512.0, 1024.0, 2048.0].map(|tokens| attention(1.0, tokens)).iter().sum();
    let truth = 3000.0 * (linear(28.0, 3584.0) + OUTSIDE * 3584.0 + 28.0 * pairs);
    assert!((packed / truth - 1.0).abs() < 0.01, "{packed} {truth}");
    let added = samples.iter().map(|sample| model.predict(sample).unwrap().module_ns.as_slice()[1]).sum();
    let alone: u64 =
        samples.iter().map(|sample| model.predict_microbatch([sample]).unwrap().as_slice()[1]).sum();
    assert!(packed < alone as f64, "launch costs are paid once");
    let from_sums = model.microbatch_ns(&[0, added]).as_slice()[1] as f64;
    // The sum over the parts launches attention for each sample, a microbatch once.
    let launched_once = packed - 2.0 * 3000.0 * 28.0 * 5.0;
    assert!((from_sums / launched_once - 1.0).abs() < 0.01, "{from_sums} {launched_once}");
    let constants = &model.microbatch_constants().modules[1];
    let launches = 3000.0 * 28.0 * (LAUNCH + 5.0);
    assert!((constants.base_ns as f64 / launches - 1.0).abs() < 0.01, "{constants:?}");
}

/// A 2 ms floor, and whole modules with 4 us per token and 0.02 us per pair.
#[test]
fn whole_modules_have_a_floor_and_a_sample_costs_what_it_adds() {
    let mut text = HEADER.to_owned();
    for module in ["vision", "audio", "llm"] {
        for (batch, tokens) in [(1, 64), (4, 64), (16, 64), (64, 64), (1, 512), (1, 2048), (1, 4096)] {
            let (b, s) = (f64::from(batch), f64::from(tokens));
            let time = (50.0 + 4.0 * b * s + 0.002 * b * s * s).max(2000.0);
            for (phase, share) in [("forward", 0.25), ("backward", 0.75)] {
                // The slower repeat had an external delay.
                for delay in [1.0, 1.2] {
                    let time = time * share * delay;
                    writeln!(text, "{module},whole,{phase},1,28,{batch},{tokens},{time}").unwrap();
                }
            }
        }
    }
    // Encoders with other layer counts are scaled; the LLM's layer count was measured.
    let model = model("omni-7b", &text, ProfileOptions::default()).unwrap();
    let llm =
        |samples: &[SampleShape]| *model.predict_microbatch(samples).unwrap().as_slice().last().unwrap();
    assert!(llm(&[text_sample(100)]).abs_diff(2_000_000) < 2_000);
    let limits = model.launch_limits();
    let shown = limits.last().unwrap().to_string();
    assert!(limits.len() == 3 && shown.starts_with("llm is limited by launches below 4"), "{shown}");
    assert!(shown.ends_with(" tokens a microbatch (2 ms)"), "{shown}");
    let pack = [text_sample(1000), text_sample(3000)];
    let truth = 1e3 * (50.0 + 4.0 * 4000.0 + 0.002 * 10e6);
    assert!((llm(&pack) as f64 / truth - 1.0).abs() < 1e-3, "{}", llm(&pack));
    let added = model.predict(&text_sample(1000)).unwrap().module_ns.as_slice()[2] as f64;
    assert!((added / (1e3 * (4.0 * 1000.0 + 0.002 * 1e6)) - 1.0).abs() < 1e-3, "{added}");
    let halves = model.clone().frozen("llm".parse().unwrap()).unwrap();
    let frozen = halves.predict(&text_sample(1000)).unwrap().module_ns.as_slice()[2] as f64;
    assert!((frozen / added - 0.625).abs() < 1e-3, "{frozen}");
}

/// A short measurement has three shapes, as whole modules and in parts, which do not quite add up: the cost
/// model predicts with the whole runs, whose curve is checked for accuracy.
#[test]
fn few_whole_runs_predict_as_the_curve_that_is_checked() {
    let mut text = HEADER.to_owned();
    let shapes = [(1, 64), (64, 64), (1, 4096)];
    for module in ["vision", "audio", "llm"] {
        for (batch, tokens) in shapes {
            let (b, s) = (f64::from(batch), f64::from(tokens));
            for (part, time) in [
                ("whole", 300.0 + 4.0 * b * s + 0.002 * b * s * s),
                ("linear", 200.0 + 3.9 * b * s),
                ("attention", 80.0 + 0.0018 * b * s * s),
            ] {
                let is_measured = if part == "attention" { batch == 1 } else { tokens == 64 };
                if part == "whole" || is_measured {
                    for phase in ["forward", "backward"] {
                        writeln!(text, "{module},{part},{phase},1,28,{batch},{tokens},{time}").unwrap();
                    }
                }
            }
        }
    }
    let curve = |module| {
        let profile = Profile::parse([("p.csv", text.as_str())]).unwrap();
        MicrobatchCurve::from_profile(&profile, module, 28).unwrap()
    };
    let model = model("omni-7b", &text, ProfileOptions::default()).unwrap();
    let pack = [text_sample(30), text_sample(77), text_sample(2000)];
    let expected = curve(Module::Llm).ns(2107.0, 900.0 + 5929.0 + 4e6);
    let found = model.predict_microbatch(&pack).unwrap().as_slice()[2] as f64;
    assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
    assert_eq!(model.microbatch_curve(Module::Llm), Some(&curve(Module::Llm)));
}

/// Recomputed layers run forward once more, frozen layers have half a linear backward pass or none; backward
/// takes twice as long as forward.
#[test]
fn frozen_parts_and_recomputed_layers_take_their_share_of_what_was_measured() {
    let rows = rows(&[2, 4], &[1]);
    let model = |frozen: &str, recomputation| {
        let trained = model("llava-ov-qwen2.5-7b", &rows, ProfileOptions::default()).unwrap();
        let frozen = if frozen.is_empty() { FrozenParts::default() } else { frozen.parse().unwrap() };
        trained.recomputation(recomputation).frozen(frozen).unwrap()
    };
    let mut shape = text_sample(10);
    shape.images.push(ImageSize { width: 640, height: 480 });
    let added = |layers: f64, [sequences, s]: [f64; 2], [linear, attention, outside]: [f64; 3]| {
        let tokens = sequences * s;
        1000.0 * tokens * (layers * (linear * PER_TOKEN + attention * PER_PAIR * s) + outside * OUTSIDE)
    };
    for (frozen, recomputation, vision_passes, llm_passes) in [
        ("", Recomputation::None, 3.0, [3.0, 3.0, 3.0]),
        ("", Recomputation::Scores, 3.0, [3.0, 3.0, 3.0]),
        ("", Recomputation::Layers, 4.0, [4.0, 4.0, 3.0]),
        ("vision,projector", Recomputation::Layers, 1.0, [4.0, 4.0, 3.0]),
        ("llm", Recomputation::None, 3.0, [2.0, 3.0, 2.0]),
        ("llm", Recomputation::Layers, 4.0, [3.0, 4.0, 2.0]),
    ] {
        let cost_model = model(frozen, recomputation);
        let cost = cost_model.predict(&shape).unwrap();
        let (tiles, tokens) = (f64::from(cost.encoder_items), f64::from(cost.tokens));
        let outside_passes = if frozen.contains("vision") { 1.0 } else { 3.0 };
        let vision = added(27.0, [tiles, 729.0], [vision_passes, vision_passes, outside_passes]);
        let llm = added(28.0, [1.0, tokens], llm_passes);
        let prediction = cost_model.predict_with_uncertainty(&shape).unwrap().unwrap();
        for ((ns, truth), time) in
            cost.module_ns.as_slice().iter().zip([vision, llm]).zip(&prediction.modules)
        {
            assert!((*ns as f64 / truth - 1.0).abs() < 0.01, "{frozen} {recomputation:?}: {ns} {truth}");
            assert!(ns.abs_diff(time.ns) <= 1, "{frozen} {recomputation:?}: {ns} {time:?}");
        }
    }
}

#[test]
fn a_projector_after_a_frozen_tower_runs_backward_in_part() {
    let rows = rows(&[2, 4], &[1]);
    let ns = |frozen: &str| {
        let model = model("llava-ov-qwen2.5-7b", &rows, ProfileOptions::default()).unwrap();
        let mut shape = text_sample(10);
        shape.images.push(ImageSize { width: 640, height: 480 });
        model.frozen(frozen.parse().unwrap()).unwrap().predict(&shape).unwrap().module_ns.as_slice()[0]
    };
    assert!(ns("vision,projector") < ns("vision") && ns("vision") < ns("projector"));
}

#[test]
fn an_unmeasured_degree_is_an_error_that_names_the_points_to_measure() {
    let rows = rows(&[2, 4], &[1, 2]);
    let options = |tp| ProfileOptions::default().tp(Module::Llm, tp);
    let [one, two] =
        [1, 2].map(|tp| model("omni-7b", &rows, options(tp)).unwrap().predict(&text_sample(900)).unwrap());
    let [one, two] = [one, two].map(|cost| cost.module_ns.as_slice()[2]);
    assert!(one.abs_diff(2 * two) < one / 500, "{one} {two}");
    let message = model("omni-7b", &rows, options(8)).unwrap_err().to_string();
    assert_eq!(
        message,
        "the profile lacks module llm, part linear, phase forward, tp 8, two layer counts, \
         batch 1 x tokens 512, 1024, 2048, 4096, 8192; found: tp 1, 2 only"
    );
}

#[test]
fn a_missing_pass_or_module_is_named() {
    let all = rows(&[2, 4], &[1]);
    let without = |pattern: &str| {
        let kept: Vec<&str> = all.lines().filter(|line| !line.starts_with(pattern)).collect();
        model("omni-7b", &kept.join("\n"), ProfileOptions::default()).unwrap_err().to_string()
    };
    assert!(
        without("llm,attention,backward")
            .contains("module llm, part attention, phase backward, tp 1, layers 1")
    );
    assert!(without("audio").contains("lacks module audio of hidden=1280 heads=20 ffn=5120"));
}

#[test]
fn a_profile_of_another_model_is_an_error_and_the_right_one_of_several_is_taken() {
    let rows = rows(&[2, 4], &[1]);
    let with_widths = |widths: &str| rows.replacen("# device", &format!("# llm: {widths}\n# device"), 1);
    let message =
        model("omni-7b", &with_widths("hidden=8192"), ProfileOptions::default()).unwrap_err().to_string();
    assert!(
        message.contains("hidden=3584") && message.ends_with("found: `p.csv` has hidden=8192"),
        "{message}"
    );
    let (right, wrong) = (with_widths("hidden=3584 heads=28 kv_heads=4"), with_widths("hidden=4096"));
    let wrong: Vec<&str> =
        wrong.lines().filter(|line| !line.starts_with("vision") && !line.starts_with("audio")).collect();
    let wrong = wrong.join("\n");
    let profile = Profile::parse([("right.csv", right.as_str()), ("wrong.csv", wrong.as_str())]).unwrap();
    let model =
        CostModel::from_profile(ModelSpec::preset("omni-7b").unwrap(), &profile, ProfileOptions::default());
    let unknown = |warning: &ProfileWarning| {
        matches!(warning, ProfileWarning::UnknownWidths { module: Module::Llm, .. })
    };
    assert!(!model.unwrap().profile_warnings().iter().any(unknown));
}

#[test]
fn profiles_of_two_devices_do_not_mix() {
    let one = rows(&[2], &[1]);
    let other = one.replace("formula", "guess");
    let error = Profile::parse([("a.csv", one.as_str()), ("b.csv", other.as_str())]).unwrap_err();
    assert_eq!(error.to_string(), "not one profile: `a.csv` was measured on formula, `b.csv` on guess");
    assert!(matches!(Profile::parse([]), Err(Error::ProfileMixed { .. })));
}

#[test]
fn one_layer_count_is_scaled_with_a_warning() {
    let model = model("omni-7b", &rows(&[2], &[1]), ProfileOptions::default()).unwrap();
    let scaled = |warning: &&ProfileWarning| {
        matches!(warning, ProfileWarning::LayersInProportion { part: Part::Linear, measured: 2, .. })
    };
    assert_eq!(model.profile_warnings().iter().filter(scaled).count(), 6, "three modules, two passes");
}

/// Reference files: whole layers, and the same run without attention.
#[test]
fn the_reference_pair_gives_attention_separately() {
    let head = "seq_len,model_time,fwd_times,bwd_times,num_layers,tp_size\n";
    let mut files = [head.to_owned(), head.to_owned()];
    for tokens in [1024.0, 2048.0, 4096.0, 8192.0] {
        let (skip, core) = (linear(4.0, tokens) / 1000.0, 4.0 * attention(1.0, tokens) / 1000.0);
        for (text, forward) in files.iter_mut().zip([skip + core, skip]) {
            writeln!(text, "{tokens},{},{forward},{},4,1", 3.0 * forward, 2.0 * forward).unwrap();
        }
    }
    let tiles = "batch_size,model_time,fwd_times,bwd_times,num_layers,tp_size\n1,3,1,2,16,1\n8,12,4,8,16,1\n64,93,31,62,16,1\n";
    let profile = Profile::parse([
        ("x/thr_llavaov_qwen2.5_7b.csv", files[0].as_str()),
        ("x/thr_llavaov_qwen2.5_7b_skip_attn.csv", files[1].as_str()),
        ("x/thr_llavaov_siglip_400m.csv", tiles),
    ])
    .unwrap();
    let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
    let model = CostModel::from_profile(spec, &profile, ProfileOptions::default()).unwrap();
    let ns = model.predict(&text_sample(3000)).unwrap().module_ns.as_slice()[1] as f64;
    let truth = added_truth(28.0, 1.0, 3000.0) - 3000.0 * OUTSIDE * 3000.0;
    assert!((ns / truth - 1.0).abs() < 0.02, "{ns} {truth}");
    let apart = |warning: &ProfileWarning| matches!(warning, ProfileWarning::AttentionNotSeparate { .. });
    assert!(!model.profile_warnings().iter().any(apart));
}

#[test]
fn a_correction_scales_the_shapes_of_its_bin_and_its_share_of_a_pack() {
    let plain = model("omni-7b", &rows(&[2, 4], &[1]), ProfileOptions::default()).unwrap();
    let table = CorrectionTable::new(1, 0, [(Module::Llm, 2000, 2 * FACTOR_ONE)]).unwrap();
    let corrected = plain.clone().correction(Some(table.into()));
    let llm =
        |model: &CostModel, tokens| model.predict(&text_sample(tokens)).unwrap().module_ns.as_slice()[2];
    assert_eq!(llm(&corrected, 2000), 2 * llm(&plain, 2000));
    assert_eq!(llm(&corrected, 500), llm(&plain, 500));
    let packs =
        [vec![text_sample(2000); 2], vec![text_sample(500); 2], vec![text_sample(2000), text_sample(500)]];
    let [slow, same, mixed] = packs.map(|pack| {
        let of = |model: &CostModel| model.predict_microbatch(&pack).unwrap().as_slice()[2] as f64;
        of(&corrected) / of(&plain)
    });
    assert!(
        (slow - 2.0).abs() < 1e-6 && (same - 1.0).abs() < 1e-6 && mixed > 1.5 && mixed < 2.0,
        "{slow} {same} {mixed}"
    );
    let rate = CostModel::new(ModelSpec::preset("omni-7b").unwrap(), DeviceRate::preset("h100").unwrap());
    let table = CorrectionTable::new(1, 0, [(Module::Llm, 2000, FACTOR_ONE / 2)]).unwrap();
    assert_eq!(llm(&rate.clone().correction(Some(table.into())), 2000), llm(&rate, 2000).div_ceil(2));
}

proptest! {
    #[test]
    fn no_shape_panics_and_longer_texts_never_cost_less(
        short in 0u32..100_000, more in 0u32..100_000,
        width in 1u32..5000, height in 1u32..5000, frames in 0u32..40, clip in 0u64..10_000_000,
    ) {
        let model = model("omni-7b", &rows(&[2, 4], &[1]), ProfileOptions::default()).unwrap();
        let llm = |tokens| *model.predict(&text_sample(tokens)).unwrap().module_ns.as_slice().last().unwrap();
        prop_assert!(llm(short) <= llm(short + more));
        let shape = SampleShape {
            images: vec![ImageSize { width, height }; 2],
            videos: vec![VideoShape { frames, width, height }],
            audio: vec![AudioLength { frames: clip, sample_rate_hz: 16_000 }],
            ..text_sample(short)
        };
        let cost = model.predict(&shape).unwrap();
        let prediction = model.predict_with_uncertainty(&shape).unwrap().unwrap();
        let times: Vec<u64> = prediction.modules.iter().map(|time| time.ns).collect();
        prop_assert_eq!(cost.module_ns.as_slice(), &times[..]);
    }
}
