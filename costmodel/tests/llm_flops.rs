//! Compares language model parameters, FLOPs and windows with transformers, as recorded by
//! `tests/record/llm_flops.py`.

use dflop_costmodel::LlmParameters;
use dflop_costmodel::config::{Documents, PartialModelSpec};
use dflop_costmodel::flops::{Attention, LlmFlops, Recomputation};
use dflop_costmodel::model::{LlmSpec, Window};
use serde::Deserialize;
use serde_json::Value;

/// Maximum relative FLOP difference; in models a few tokens wide, the product that computes the rotary
/// position angles is visible.
const TOLERANCE: f64 = 0.000_4;

#[derive(Deserialize)]
struct Case {
    name: String,
    config: Value,
    parameters: u64,
    /// Number of parameters per layer.
    layers: Vec<u64>,
    tokens: u32,
    forward: u64,
    backward: u64,
    /// Whether the recorded implementation runs every expert on every token.
    #[serde(default)]
    every_expert: bool,
    /// Query-key pairs that each layer's mask leaves.
    #[serde(default)]
    pairs: Vec<u64>,
}

impl Case {
    fn spec(&self) -> LlmSpec {
        let documents = Documents { config: self.config.clone(), ..Documents::default() };
        let read = PartialModelSpec::from_hugging_face(&documents);
        read.unwrap_or_else(|error| panic!("{}: {error}", self.name)).llm.unwrap()
    }
}

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llm_flops.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn parameters_are_exact_in_each_layer_and_in_all() {
    for case in cases() {
        let parameters = LlmParameters::new(&case.spec());
        assert_eq!(parameters.total(), case.parameters, "{}", case.name);
        for (layer, recorded) in (0..).zip(&case.layers) {
            assert_eq!(
                parameters.layer_parameters(layer..layer + 1),
                *recorded,
                "{} layer {layer}",
                case.name
            );
        }
        assert_eq!(parameters.layer_parameters(0..parameters.layers), case.layers.iter().sum::<u64>());
    }
}

/// Eager attention computes all pairs, so windows are left out; the next test compares them with masks.
#[test]
fn flops_agree_with_the_counter() {
    for case in cases() {
        let mut spec = LlmSpec { windows: None, ..case.spec() };
        if let Some(experts) = spec.experts.as_mut().filter(|_| case.every_expert) {
            experts.experts_per_token = experts.experts;
        }
        let counted = LlmFlops::new(&spec).training(&[case.tokens], Attention::Full, Recomputation::None);
        for (predicted, recorded) in [(counted.forward, case.forward), (counted.backward, case.backward)] {
            let difference = (predicted as f64 / recorded as f64 - 1.0).abs();
            let name = &case.name;
            assert!(
                difference <= TOLERANCE,
                "{name}: {predicted}, not {recorded}, {:.4} % off",
                100.0 * difference
            );
        }
    }
}

/// A layer's attention over a sequence counts twice the pairs in its mask, less half the diagonal, which
/// causal attention counts half everywhere.
#[test]
fn windows_leave_the_pairs_of_the_masks() {
    let mut windowed = 0;
    for case in cases().into_iter().filter(|case| !case.pairs.is_empty()) {
        let (spec, tokens) = (case.spec(), u64::from(case.tokens));
        for (layer, pairs) in (0..).zip(&case.pairs) {
            let expected = match spec.windows.filter(|_| spec.is_windowed(layer)) {
                None => 2 * pairs - tokens,
                Some(windows) if windows.kind == Window::Chunk => 2 * pairs - tokens,
                Some(windows) => 2 * pairs - tokens.min(u64::from(windows.tokens)),
            };
            windowed += u32::from(expected < tokens * tokens);
            let squares = match spec.windows.filter(|_| spec.is_windowed(layer)) {
                None => tokens * tokens,
                Some(windows) => windows.causal_squares(tokens),
            };
            assert_eq!(squares, expected, "{} layer {layer}", case.name);
        }
    }
    assert!(windowed > 30, "{windowed} layers with windows");
}

/// Attention FLOPs are the sum over the individual layers.
#[test]
fn attention_is_the_sum_over_layers() {
    for case in cases() {
        let spec = case.spec();
        let all = LlmFlops::new(&spec);
        let attention = all.layers_forward(&[5000], Attention::Causal)
            - 2500 * all.layers_forward(&[2], Attention::Causal)
            + 5000 * 2 * u128::from(spec.layers) * per_square(&spec);
        let mut expected = 0;
        for layer in 0..spec.layers {
            let squares = match spec.windows.filter(|_| spec.is_windowed(layer)) {
                None => 25_000_000,
                Some(windows) => windows.causal_squares(5000),
            };
            expected += u128::from(squares) * per_square(&spec);
        }
        assert_eq!(attention, expected, "{}", case.name);
    }
}

/// Layer FLOPs per squared token: one multiply-add for scores and one for values for every second pair.
fn per_square(spec: &LlmSpec) -> u128 {
    u128::from(spec.heads) * (u128::from(spec.head_dim) + u128::from(spec.value_dim()))
}
