//! Checks that a profile with a separate LM head charges it by target tokens, and everything else by all
//! tokens.

use std::fmt::Write;

use dflop_costmodel::{CostModel, LayerTimes, ModelSpec, Module, Profile, ProfileOptions, SampleShape};

const HEADER: &str = "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n";

/// Writes a profile: four layers take 8 us per token, attention next to nothing, the embedding 1 us, the head
/// 5 us per target token.
fn profile(has_head: bool) -> Profile {
    let mut text = HEADER.to_owned();
    for phase in ["forward", "backward"] {
        for tokens in [100, 200, 400] {
            writeln!(text, "llm,linear,{phase},1,4,1,{tokens},{}", 8 * tokens).unwrap();
            writeln!(text, "llm,attention,{phase},1,1,1,{tokens},0.001").unwrap();
            writeln!(text, "llm,ends,{phase},1,0,1,{tokens},{tokens}").unwrap();
            if has_head {
                writeln!(text, "llm,head,{phase},1,0,1,{tokens},{}", 5 * tokens).unwrap();
            }
        }
    }
    Profile::parse([("p.csv", text.as_str())]).unwrap()
}

fn spec() -> ModelSpec {
    let tiny = ModelSpec::preset("tiny").unwrap();
    ModelSpec { vision: None, audio: None, ..tiny }
}

fn shape(text_tokens: u32, target_tokens: u32) -> SampleShape {
    SampleShape { text_tokens, target_tokens, ..SampleShape::default() }
}

fn close(ns: u64, expected_us: u64) -> bool {
    ns.abs_diff(expected_us * 1000) < 20
}

#[test]
fn the_head_is_charged_by_target_tokens() {
    let model = CostModel::from_profile(spec(), &profile(true), ProfileOptions::default()).unwrap();
    let of = |shape: &SampleShape| model.predict(shape).unwrap().module_ns.as_slice()[0];
    assert!(close(of(&shape(200, 0)), 2 * 9 * 200));
    assert!(close(of(&shape(200, 150)), 2 * (9 * 200 + 5 * 150)));
    let pack = [shape(200, 150), shape(100, 60)];
    let packed = model.predict_microbatch(&pack).unwrap().as_slice()[0];
    assert!(close(packed, 2 * (9 * 300 + 5 * 210)), "{packed}");
    let predicted = model.predict_with_uncertainty(&pack[0]).unwrap().unwrap().modules[0].ns;
    assert_eq!(predicted, of(&pack[0]));
}

#[test]
fn without_rows_of_the_head_target_tokens_change_nothing() {
    let model = CostModel::from_profile(spec(), &profile(false), ProfileOptions::default()).unwrap();
    assert_eq!(
        model.predict(&shape(200, 0)).unwrap().module_ns,
        model.predict(&shape(200, 150)).unwrap().module_ns
    );
}

#[test]
fn a_planner_charges_the_last_stage_with_the_head() {
    let outside_ns = |has_head| {
        let times = LayerTimes::from_profile(&spec(), &profile(has_head), Module::Llm, 1, 0).unwrap();
        times.outside_layers_ns(1.0, 200.0)
    };
    assert!((outside_ns(true) - outside_ns(false) - 2_000_000.0).abs() < 1.0);
}
