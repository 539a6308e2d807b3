//! Reads the profiles in `costmodel/profiles`, and predicts from them.

use dflop_costmodel::profile::{Part, Phase};
use dflop_costmodel::{
    AccuracyReport, AudioLength, CostModel, ImageSize, ModelSpec, Module, Profile, ProfileOptions,
    SampleShape,
};

const MINIATURE: &str = include_str!("../profiles/cpu-miniature.csv");
const WHOLE: &str = include_str!("../profiles/cpu-miniature-whole.csv");
const HELD_OUT: &str = include_str!("../profiles/cpu-miniature-held-out.csv");

fn profile(name: &str, text: &str) -> Profile {
    Profile::parse([(name, text)]).unwrap()
}

#[test]
fn the_miniature_is_marked_as_one_and_has_repeats_of_every_part() {
    let profile = profile("cpu-miniature.csv", MINIATURE);
    assert!(profile.files()[0].metadata("kind").unwrap().contains("miniature of a CPU"));
    let points = profile.points();
    assert!(points.iter().all(|point| point.repeats == 5));
    for module in [Module::Vision, Module::Audio, Module::Llm] {
        for part in [Part::Linear, Part::Attention, Part::OutsideLayers] {
            for phase in [Phase::Forward, Phase::Backward] {
                let is_one = |setting: &dflop_costmodel::profile::Setting| {
                    (setting.module, setting.part, setting.phase) == (module, part, phase)
                };
                assert!(
                    points.iter().filter(|point| is_one(&point.setting)).count() >= 3,
                    "{module} {part} {phase}"
                );
            }
        }
    }
}

#[test]
fn the_miniature_makes_a_cost_model_of_its_preset_and_of_no_other() {
    let profile = profile("cpu-miniature.csv", MINIATURE);
    let build = |name: &str| {
        CostModel::from_profile(ModelSpec::preset(name).unwrap(), &profile, ProfileOptions::default())
    };
    let model = build("tiny").unwrap();
    assert!(model.profile_warnings().is_empty(), "{:?}", model.profile_warnings());
    let shape = SampleShape {
        text_tokens: 200,
        images: vec![ImageSize { width: 300, height: 300 }],
        audio: vec![AudioLength { frames: 16_000, sample_rate_hz: 16_000 }],
        ..SampleShape::default()
    };
    let cost = model.predict(&shape).unwrap();
    assert!(cost.module_ns.as_slice().iter().all(|ns| *ns > 1_000_000), "{cost:?}");
    let prediction = model.predict_with_uncertainty(&shape).unwrap().unwrap();
    assert!(prediction.warnings.is_empty(), "{:?}", prediction.warnings);
    let message = build("omni-7b").unwrap_err().to_string();
    assert!(message.contains("hidden=1152") && message.contains("hidden=256"), "{message}");
}

#[test]
fn shapes_between_are_predicted_from_those_around_them() {
    let report = AccuracyReport::compare(
        &profile("cpu-miniature.csv", MINIATURE),
        &profile("cpu-miniature-held-out.csv", HELD_OUT),
    )
    .unwrap();
    let shaped = report.points.iter().filter(|point| point.setting.phase != Phase::Optimizer);
    assert!(shaped.clone().all(|point| !point.is_extrapolated));
    let mut errors: Vec<f64> = shaped.map(|point| point.relative_error().abs()).collect();
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    assert!(errors.len() > 30 && median < 0.10, "median error {median}");
    assert!(report.within_uncertainty >= 0.85, "{} are within 90 % intervals", report.within_uncertainty);
    assert!(report.unpredicted.is_empty(), "{:?}", report.unpredicted);
}

/// Predicts layers with attention, at other layer counts, from linear work and attention measured separately.
#[test]
fn whole_layers_are_predicted_from_their_parts() {
    let report = AccuracyReport::compare(
        &profile("cpu-miniature.csv", MINIATURE),
        &profile("cpu-miniature-whole.csv", WHOLE),
    )
    .unwrap();
    let whole: Vec<f64> = report
        .points
        .iter()
        .filter(|point| point.setting.phase != Phase::Optimizer)
        .map(dflop_costmodel::PointAccuracy::relative_error)
        .collect();
    let mean = whole.iter().map(|error| error.abs()).sum::<f64>() / whole.len() as f64;
    assert!(whole.len() > 40 && mean < 0.10, "mean error {mean}");
    assert!(report.within_uncertainty >= 0.85, "{} are within 90 % intervals", report.within_uncertainty);
    assert!(report.unpredicted.is_empty(), "{:?}", report.unpredicted);
}

/// A profile by name equals its files: predictions are the same to the nanosecond.
#[test]
fn a_shipped_profile_predicts_what_its_files_do() {
    for (model, files) in [
        (
            "qwen2.5-vl-3b",
            [
                include_str!("../profiles/h200-torch/qwen2.5-vl-3b/vision.csv"),
                include_str!("../profiles/h200-torch/qwen2.5-vl-3b/llm.csv"),
            ],
        ),
        (
            "qwen2.5-vl-7b",
            [
                include_str!("../profiles/h200-torch/qwen2.5-vl-7b/vision.csv"),
                include_str!("../profiles/h200-torch/qwen2.5-vl-7b/llm.csv"),
            ],
        ),
    ] {
        let spec = || ModelSpec::preset(model).unwrap();
        let from_files = Profile::parse([("vision.csv", files[0]), ("llm.csv", files[1])]).unwrap();
        let by_name = Profile::shipped("h200-torch", &spec()).unwrap().expect("it comes with the crate");
        let build =
            |profile: &Profile| CostModel::from_profile(spec(), profile, ProfileOptions::default()).unwrap();
        let (from_files, by_name) = (build(&from_files), build(&by_name));
        let shapes = [(17, 0), (300, 480), (2000, 1400)].map(|(text_tokens, side)| SampleShape {
            text_tokens,
            images: (side > 0).then_some(ImageSize { width: side, height: side }).into_iter().collect(),
            ..SampleShape::default()
        });
        for shape in &shapes {
            assert_eq!(by_name.predict(shape).unwrap(), from_files.predict(shape).unwrap());
        }
        let microbatch = |model: &CostModel| model.predict_microbatch(&shapes).unwrap();
        assert_eq!(microbatch(&by_name), microbatch(&from_files));
    }
}
