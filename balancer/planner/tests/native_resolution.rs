//! Plans for models with native-resolution images: times follow FLOPs, bounds hold, and a large image takes
//! longer than small images with as many patches in total.

use std::fmt::Write;

use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::flops::{EncoderFlops, Recomputation};
use dflop_costmodel::profile::Profile;
use dflop_costmodel::{DeviceRate, ImageSize, MediaUnits, ModelSpec, SampleShape, SampleUnits, VideoShape};
use dflop_planner::{
    Cluster, Degrees, EncoderSplit, ItemSize, ModelCostsBuilder, ModuleCosts, ModulePlan, ParallelismPlan,
    Placement, PlanProblem, PlannedModel, SearchSpaceOptions, Workload, compare, evaluate, plan,
};
use proptest::prelude::*;

const MODELS: [&str; 2] = ["qwen2-vl-7b", "qwen2.5-vl-7b"];

fn item_size(spec: &ModelSpec, shape: &SampleShape) -> ItemSize {
    SampleUnits::new(spec, shape).unwrap().try_into().unwrap()
}

/// Images with 46 x 34 and 32 x 32 patches, and two pairs of 72 x 40 frames.
#[test]
fn patches_of_a_table_are_those_of_a_sample() {
    let shape = SampleShape {
        text_tokens: 100,
        images: vec![ImageSize { width: 640, height: 480 }, ImageSize { width: 448, height: 448 }],
        videos: vec![VideoShape { frames: 3, width: 1920, height: 1080 }],
        ..SampleShape::default()
    };
    let pairs = 1564 * 1564 + 1024 * 1024 + 2 * 2880 * 2880;
    let windows = 92_560 + 65_536 + 2 * 2880 * 64;
    for name in ["qwen2-vl-7b", "qwen2.5-vl-7b"] {
        let spec = ModelSpec::preset(name).unwrap();
        let size = item_size(&spec, &shape);
        let windows = Some(if name == "qwen2-vl-7b" { pairs } else { windows });
        assert_eq!(MediaUnits::from_patches(&spec, 8348, pairs, windows), size.media(0));
        assert!(MediaUnits::from_patches(&spec, 8348, pairs, None).pairs >= size.media(0).pairs);
    }
}

fn spec(name: &str) -> ModelSpec {
    ModelSpec::preset(name).unwrap()
}

/// Builds a sample with media in a single encoder.
fn patches(units: u32, pairs: u64, tokens: u32) -> ItemSize {
    ItemSize::from_media(&[MediaUnits { units, pairs, media: 1 }], tokens).unwrap()
}

fn costs(spec: &ModelSpec) -> PlannedModel {
    ModelCostsBuilder::new(spec).rate(DeviceRate::preset("a100").unwrap()).build().unwrap()
}

/// Builds images with different sizes and, in every fifth sample, a video.
fn shape(at: u32) -> SampleShape {
    let side = |factor: u32| 60 + at * factor % 1100;
    let image = |index: u32| ImageSize { width: side(7919 + index), height: side(104_729 + index) };
    let videos = if at.is_multiple_of(5) {
        vec![VideoShape { frames: 3 + at % 9, width: side(31), height: side(57) }]
    } else {
        Vec::new()
    };
    SampleShape {
        text_tokens: 50,
        images: (0..at % 4).map(image).collect(),
        videos,
        ..SampleShape::default()
    }
}

fn problem<'a>(costs: &'a PlannedModel, workload: &'a Workload, gpus: u32) -> PlanProblem<'a> {
    PlanProblem {
        encoders: costs.encoder_costs(),
        llm: &costs.llm,
        workload,
        cluster: Cluster { gpus, gpus_per_node: 8, memory_bytes: 400 << 30, links: None },
        options: SearchSpaceOptions::default(),
        encoder_split: EncoderSplit::Sample,
        memory_margin: 1.0,
    }
}

fn disaggregated(costs: &PlannedModel, encoder: Degrees, llm: Degrees, microbatches: u32) -> ParallelismPlan {
    ParallelismPlan {
        expert_parallel: 1,
        encoders: vec![ModulePlan::even(costs.encoders[0].layers(), encoder)],
        llm: ModulePlan::even(costs.llm.layers(), llm),
        microbatches,
        placement: Placement::Disaggregated,
        schedule: ScheduleKind::OneForwardOneBackward,
    }
}

/// Returns the step seconds with one microbatch on one GPU per module.
fn one_microbatch_seconds(costs: &PlannedModel, sizes: &[ItemSize]) -> f64 {
    let workload = Workload::draw(sizes, sizes.len() as u32, 1, 0).unwrap();
    let alone = Degrees { tp: 1, pp: 1, dp: 1 };
    let mut problem = problem(costs, &workload, 2);
    problem.cluster.memory_bytes = 1 << 50;
    evaluate(&problem, &disaggregated(costs, alone, alone, 1)).unwrap().mean_seconds()
}

#[test]
fn the_encoder_takes_the_flops_of_all_media() {
    for name in MODELS {
        let spec = spec(name);
        let costs = costs(&spec);
        let (_, encoder, rule) = spec.encoders().next().unwrap();
        let shapes: Vec<SampleShape> = (0..24).map(shape).collect();
        let sizes: Vec<ItemSize> = shapes.iter().map(|shape| item_size(&spec, shape)).collect();
        let text: Vec<ItemSize> = sizes.iter().map(|size| ItemSize::from_tiles(0, size.tokens)).collect();
        let seconds = one_microbatch_seconds(&costs, &sizes) - one_microbatch_seconds(&costs, &text);
        let flops = EncoderFlops::new(&encoder, spec.llm.hidden);
        let of = |shape| flops.training(&rule.work(shape).unwrap(), Recomputation::None).total();
        let all: u128 = shapes.iter().map(of).sum();
        let rate = DeviceRate::preset("a100").unwrap().vision_flops_per_us.get() as f64 * 1e6;
        let expected = all as f64 / rate;
        assert!((seconds / expected - 1.0).abs() < 1e-6, "{name}: {seconds} s, by FLOPs {expected} s");
    }
}

#[test]
fn one_large_image_takes_longer_than_small_ones() {
    let costs = costs(&spec("qwen2-vl-7b"));
    let size = |images: u64| patches(16_000, 16_000 * 16_000 / images, 4100);
    let [large, small] = [1, 16].map(|images| one_microbatch_seconds(&costs, &[size(images)]));
    assert!(large > small * 1.1, "{large} {small}");
    // Two encoder ranks cannot share a single sample.
    let workload = Workload::draw(&[size(1)], 1, 1, 0).unwrap();
    let problem = problem(&costs, &workload, 3);
    let [encoder, llm] = [2, 1].map(|dp| Degrees { tp: 1, pp: 1, dp });
    let found = evaluate(&problem, &disaggregated(&costs, encoder, llm, 1)).unwrap();
    assert!((found.mean_seconds() / large - 1.0).abs() < 1e-6);
}

#[test]
fn patches_are_not_shared_as_tiles_are() {
    let costs = costs(&spec(MODELS[0]));
    let workload = Workload::draw(&[patches(8, 64, 9)], 1, 1, 0).unwrap();
    let problem = PlanProblem { encoder_split: EncoderSplit::Tile, ..problem(&costs, &workload, 2) };
    let error = plan(&problem).unwrap_err().to_string();
    assert!(error.contains("encoder ranks share whole samples"), "{error}");
}

#[test]
fn every_placement_and_method_stays_above_the_bound() {
    let spec = spec("qwen2.5-vl-7b");
    let costs = costs(&spec);
    let sizes: Vec<ItemSize> = (0..60).map(|at| item_size(&spec, &shape(at))).collect();
    let workload = Workload::draw(&sizes, 32, 3, 5).unwrap();
    let mut problem = problem(&costs, &workload, 8);
    let separate = plan(&problem).unwrap();
    problem.options =
        SearchSpaceOptions { is_joint: true, is_colocated: true, ..SearchSpaceOptions::default() };
    let any = plan(&problem).unwrap();
    assert!(any.lower_bound_seconds <= any.step_seconds && any.step_seconds <= separate.step_seconds);
    for report in [&separate, &any] {
        let score = evaluate(&problem, &report.plan).unwrap();
        assert!(score.lower_bound_ns <= score.mean_seconds() * 1e9, "{:?}", report.plan);
        let step_seconds = report.step_seconds;
        assert!((score.mean_seconds() / step_seconds - 1.0).abs() < 1e-9, "{score:?} {step_seconds}");
    }
    let compared = compare(&problem, &any).unwrap();
    for method in &compared.methods {
        assert!(compared.ideal_seconds <= method.step_seconds, "{method:?}");
    }
}

/// Microseconds for linear work and attention per layer; backward takes twice as long.
fn profile(is_separate: bool) -> Profile {
    let mut text =
        "# dflop-profile: 1\n# device: formula\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n"
            .to_owned();
    for module in ["vision", "llm"] {
        for (phase, factor) in [("forward", 1.0), ("backward", 2.0)] {
            for tokens in [64, 256, 1024, 4096, 16_384] {
                let linear = 0.05 * factor * f64::from(tokens);
                let attention = 2e-5 * factor * f64::from(tokens).powi(2);
                let mut row = |part: &str, layers: u32, us: f64| {
                    writeln!(text, "{module},{part},{phase},1,{layers},1,{tokens},{us}").unwrap();
                };
                if is_separate || module == "llm" {
                    row("linear", 4, 4.0 * linear);
                    row("attention", 1, attention);
                    row("ends", 0, 0.2 * factor * f64::from(tokens));
                } else {
                    row("whole", 4, 4.0 * (linear + attention));
                }
            }
        }
    }
    Profile::parse([("p.csv", &text[..])]).unwrap()
}

#[test]
fn measured_attention_is_looked_up_per_medium() {
    let spec = spec("qwen2-vl-7b");
    let measured = profile(true);
    let model = ModelCostsBuilder::new(&spec).profile(&measured).build().unwrap();
    let encoder = &model.encoders[0];
    // Four images with 1024 patches: forward and backward, in nanoseconds.
    let (units, pairs) = (4096, 4 * 1024 * 1024);
    assert!((encoder.layer_ns(1, units) / (3e3 * 0.05 * 4096.0) - 1.0).abs() < 1e-6);
    let attention_ns = encoder.media_attention_ns(1, units, pairs);
    assert!((attention_ns / (3e3 * 2e-5 * pairs as f64) - 1.0).abs() < 1e-6, "{attention_ns}");
    assert!((encoder.media_attention_ns(1, units, units * units) / attention_ns - 4.0).abs() < 1e-6);
    assert!(encoder.media_attention_ns(1, units, 0).abs() < 1e-12);
    let whole = profile(false);
    let error = ModelCostsBuilder::new(&spec).profile(&whole).build().unwrap_err().to_string();
    assert!(error.contains("found times of both together"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_bound_is_never_above_its_score(
        model in 0usize..2, tp in 0usize..3, pp in 1u32..7, encoder_pp in 1u32..5, dp in 1u32..7,
        encoder_dp in 1u32..9, microbatches in 1u32..25, seed in 0u32..1000,
    ) {
        let spec = spec(MODELS[model]);
        let costs = costs(&spec);
        let of_llm = Degrees { tp: [1, 2, 4][tp], pp, dp };
        let of_encoder = Degrees { tp: 1 + tp as u32 % 2, pp: encoder_pp, dp: encoder_dp };
        let sizes: Vec<ItemSize> =
            (seed..seed + 40).map(|at| item_size(&spec, &shape(at))).collect();
        let workload = Workload::draw(&sizes, 24, 3, u64::from(seed)).unwrap();
        let problem = problem(&costs, &workload, 256);
        prop_assume!(dp * microbatches <= 24);
        let score = evaluate(&problem, &disaggregated(&costs, of_encoder, of_llm, microbatches));
        prop_assume!(score.is_ok());
        let score = score.unwrap();
        let mean_ns = score.mean_seconds() * 1e9;
        prop_assert!(score.lower_bound_ns <= mean_ns, "{} {mean_ns}", score.lower_bound_ns);
        prop_assert!(score.lower_bound_ns > mean_ns * 0.05, "{} {mean_ns}", score.lower_bound_ns);
    }
}
