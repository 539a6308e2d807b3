//! Writes a synthetic profile in the reference file format.
//!
//! Times are FLOPs over the efficiency that an A100 reaches at such sizes; layer activations are recomputed,
//! as in the reference training.

use std::fmt::Write;
use std::num::NonZeroU32;

use dflop_costmodel::ModelSpec;
use dflop_costmodel::flops::{Attention, EncoderFlops, LlmFlops, Recomputation};
use dflop_costmodel::memory::{ActivationBytes, Execution};
use dflop_costmodel::memory::{StageLayers, encoder_parameters};
use dflop_costmodel::model::{EncoderSpec, LlmSpec};
use dflop_costmodel::profile::{Profile, reference_model};
use dflop_costmodel::tokens::EncoderWork;

use super::Case;

const PEAK_FLOPS_PER_MS: f64 = 312e9;
const BYTES_PER_GIB: f64 = 1_073_741_824.0;
const DEGREES: [u32; 4] = [1, 2, 4, 8];
/// Bytes per parameter after a step, and at the peak: 16-bit Adam.
const STATE_BYTES: [f64; 2] = [6.0, 8.0];

/// Returns file names and texts for a case.
///
/// # Panics
/// Never: the names are names of known models.
#[must_use]
pub fn files(case: &Case) -> Vec<(String, String)> {
    let spec = spec(case);
    let encoder = spec.vision.unwrap().encoder;
    let tile_tokens = if case.encoder.0 == "siglip" { 729 } else { 1024 };
    let name = |kind: &str, (name, size): (&str, &str), end: &str| {
        format!("{kind}_{}_{name}_{size}{end}.csv", case.family)
    };
    vec![
        (name("thr", case.encoder, ""), encoder_times(&encoder, &spec.llm, tile_tokens)),
        (name("mem", case.encoder, ""), encoder_memory(&encoder, &spec.llm, tile_tokens)),
        (name("thr", case.llm, ""), llm_times(&spec.llm, true)),
        (name("thr", case.llm, "_skip_attn"), llm_times(&spec.llm, false)),
        (name("mem", case.llm, ""), llm_memory(&spec.llm)),
    ]
}

/// Returns the model, from the names of files with a single row.
fn spec(case: &Case) -> ModelSpec {
    let times = "model_time,fwd_times,bwd_times,num_layers,tp_size\n";
    let (encoder, llm) =
        (format!("batch_size,{times}1,3,1,2,1,1\n"), format!("seq_len,{times}1,3,1,2,1,1\n"));
    let name = |(name, size): (&str, &str)| format!("thr_{}_{name}_{size}.csv", case.family);
    let names = [name(case.encoder), name(case.llm)];
    let profile = Profile::parse([(names[0].as_str(), encoder.as_str()), (names[1].as_str(), llm.as_str())]);
    reference_model(&profile.unwrap()).unwrap().unwrap()
}

/// Returns the fraction of peak FLOP/s: it rises with the work per GPU to `most`, and falls with the TP group
/// size.
fn efficiency(most: f64, flops: f64, half: f64, tp: u32) -> f64 {
    let share = flops / f64::from(tp);
    let group = [1.0, 0.93, 0.85, 0.72][tp.ilog2() as usize];
    most * group * share / (share + half)
}

fn ms(flops: f64, most: f64, half: f64, tp: u32) -> f64 {
    flops / (PEAK_FLOPS_PER_MS * f64::from(tp) * efficiency(most, flops, half, tp))
}

fn row(text: &mut String, shape: u32, ms: f64, layers: u32, tp: u32) {
    writeln!(text, "{shape},{ms:.5},{:.5},{:.5},{layers},{tp}", ms / 3.0, ms * 2.0 / 3.0).unwrap();
}

fn encoder_times(encoder: &EncoderSpec, llm: &LlmSpec, tile_tokens: u64) -> String {
    let mut text = "batch_size,model_time,fwd_times,bwd_times,num_layers,tp_size\n".to_owned();
    let measured = EncoderFlops::new(&EncoderSpec { layers: 16, ..*encoder }, llm.hidden);
    for tp in DEGREES.into_iter().filter(|tp| encoder.heads.is_multiple_of(*tp)) {
        for batch in [1, 2, 4, 8, 16, 32, 64] {
            let pairs = tile_tokens * tile_tokens;
            let tile = EncoderWork {
                items: 1,
                encoder_tokens: tile_tokens,
                tokens: 0,
                attention_pairs: pairs,
                window_pairs: pairs,
                padded_tokens: 0,
            };
            let flops = measured.training(&tile.repeat(batch), Recomputation::Layers).total() as f64;
            row(&mut text, batch as u32, ms(flops, 0.48, 1.2e12, tp), 16, tp);
        }
    }
    text
}

fn llm_times(llm: &LlmSpec, has_attention: bool) -> String {
    let mut text = "seq_len,model_time,fwd_times,bwd_times,num_layers,tp_size\n".to_owned();
    let measured = LlmFlops::new(&LlmSpec { layers: 4, ..*llm });
    for tp in DEGREES.into_iter().filter(|tp| llm.heads.is_multiple_of(*tp)) {
        for tokens in [1024_u32, 2048, 3072, 4096, 6144, 8192] {
            let [full, causal] = [Attention::Full, Attention::Causal].map(|attention| {
                measured.training(&[tokens], attention, Recomputation::Layers).total() as f64
            });
            let attention = full - causal;
            let linear = ms(causal - attention, 0.62, 4e12, tp);
            let attention = if has_attention { ms(attention, 0.4, 1.5e11, tp) } else { 0.0 };
            row(&mut text, tokens, linear + attention, 4, tp);
        }
    }
    text
}

fn memory_row(text: &mut String, shape: &str, parameters: u64, activations: f64, layers: u32, tp: u32) {
    let [behind, peak] = STATE_BYTES.map(|bytes| bytes * parameters as f64 / BYTES_PER_GIB);
    let activations = activations / BYTES_PER_GIB;
    writeln!(text, "{shape},{behind:.5},{activations:.5},{:.5},{layers},{tp}", peak + activations).unwrap();
}

fn encoder_memory(encoder: &EncoderSpec, llm: &LlmSpec, tile_tokens: u64) -> String {
    let mut text = "batch_size,model_mem,fwd_peak,model_state_peak,num_layers,tp_size\n".to_owned();
    for degree in DEGREES.into_iter().filter(|tp| encoder.heads.is_multiple_of(*tp)) {
        let tp = NonZeroU32::new(degree).unwrap();
        for layers in [4, 8] {
            let stage = StageLayers { layers, first_layer: None, is_first: true, is_last: true };
            let parameters = encoder_parameters(encoder, llm.hidden, stage, tp);
            let kept = ActivationBytes::for_encoder(encoder, Execution { tp, ..Execution::default() });
            let bytes = u64::from(layers) * kept.input_bytes_per_token + kept.layer_bytes_per_token;
            let activations = (2 * tile_tokens * bytes) as f64;
            memory_row(&mut text, "2", parameters, activations, layers, degree);
        }
    }
    text
}

fn llm_memory(llm: &LlmSpec) -> String {
    let mut text = "batch_size,seq_len,model_mem,fwd_peak,model_state_peak,num_layers,tp_size\n".to_owned();
    for degree in DEGREES.into_iter().filter(|tp| llm.heads.is_multiple_of(*tp)) {
        let tp = NonZeroU32::new(degree).unwrap();
        for layers in [3, 4] {
            let stage = StageLayers { layers, first_layer: None, is_first: true, is_last: true };
            let kept = ActivationBytes::for_llm(llm, Execution { tp, ..Execution::default() });
            let inputs = u64::from(layers) * kept.input_bytes_per_token;
            let bytes = inputs + kept.layer_bytes_per_token + kept.head_bytes_per_token;
            let activations = (1024 * bytes) as f64;
            memory_row(&mut text, "1,1024", stage.parameters(llm, tp), activations, layers, degree);
        }
    }
    text
}
