//! Benchmarks two layers with published widths, forward and backward.

use std::sync::Arc;

use dflop_costmodel::ModelSpec;
use dflop_cuda::Cuda;
use dflop_device::prelude::*;
use dflop_device::{Dtype, Lane, Segments};
use dflop_models::{
    Block, BlockOutput, BlockStage, Layer, LayerContext, LayerSpec, MicrobatchContext, ModelConfig, Stage,
    StageBlocks, StageOptions,
};
use serde_json::json;

use super::report::{median, wait};
use crate::arguments::Arguments;
use crate::models::{Pack, Uniform};
use crate::random::Random;
use crate::report::{self, Outcome};
use crate::{Result, device, models};

const PART: &str = "profile";
const LAYERS: usize = 2;
/// Passes that are not timed.
const WARM_UP_PASSES: usize = 2;

/// Named layers, with the sequence length.
struct Subject {
    name: &'static str,
    layers: Vec<LayerSpec>,
    length: usize,
    /// Model whose decoder creates contexts; the layer context replaces the decoder context.
    config: ModelConfig,
}

/// Benchmarks all layers, for different token counts.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome> {
    let device = device::cuda(Dtype::Bf16)?;
    let subjects = if arguments.is_tiny { vec![tiny()?] } else { published()? };
    let (sizes, passes): (&[usize], _) =
        if arguments.is_tiny { (&[48], 2) } else { (&[2048, 8192, 16_384], 10) };
    let mut random = Random::new(arguments.seed());
    let mut count = 0;
    for subject in &subjects {
        let mut stage = stage(&device, subject)?;
        for &tokens in sizes {
            let sequences = (tokens / subject.length).max(1);
            let length = subject.length.min(tokens);
            let [forward, backward] =
                times(&device, subject, &mut stage, (sequences, length), passes, &mut random)?;
            report::result(
                PART,
                json!({"name": subject.name, "side": "dflop", "layers": LAYERS, "batch": sequences,
                    "tokens": length, "forward_seconds": forward, "backward_seconds": backward}),
            );
            let (name, forward, backward) = (subject.name, 1e3 * forward, 1e3 * backward);
            eprintln!("{name:>16}: {sequences:>3} x {length:>5}: {forward:8.3} ms, {backward:8.3} ms");
            count += 1;
        }
    }
    let figure = format!("{count} shapes of {} models", subjects.len());
    Ok(report::summary(PART, Outcome::Passed, &figure, "runs; figures are stated"))
}

fn published() -> Result<Vec<Subject>> {
    // name, preset, module, tokens per sequence
    let rows = [
        ("siglip-so400m", "llava-ov-qwen2.5-7b", "vision", 729),
        ("internvit-300m", "internvl3-8b", "vision", 1025),
        ("internvit-6b", "internvl2.5-qwen2.5-72b", "vision", 1025),
        ("whisper-large", "qwen2-audio-7b", "audio", 1500),
        ("qwen2.5-7b", "qwen2-vl-7b", "llm", 2048),
        ("llama3-8b", "llava-ov-llama3-8b", "llm", 2048),
    ];
    let text = ModelConfig::from_config(&models::tiny())?;
    let subject = |(name, preset, module, length)| -> Result<Subject> {
        let config = ModelConfig::from_spec(&ModelSpec::preset(preset)?)?;
        let encoder = if module == "vision" { &config.vision } else { &config.audio };
        let (layers, context) = match encoder.as_ref().filter(|_| module != "llm") {
            Some(encoder) => (encoder.layer_specs().iter().take(LAYERS).cloned().collect(), text.clone()),
            None => ((0..LAYERS).map(|layer| config.llm.layer(layer)).collect(), config),
        };
        Ok(Subject { name, layers, length, config: context })
    };
    rows.into_iter().map(subject).collect()
}

fn tiny() -> Result<Subject> {
    let config = ModelConfig::from_config(&models::tiny())?;
    let layers = (0..LAYERS).map(|layer| config.llm.layer(layer)).collect();
    Ok(Subject { name: "tiny", layers, length: 16, config })
}

/// Builds a stage from only the layers.
fn stage(device: &Cuda, subject: &Subject) -> Result<BlockStage<Cuda>> {
    let mut parts = StageBlocks::default();
    parts.add(false, |declaration| {
        let layer = |spec| Box::new(Layer::declare(declaration, spec)) as Box<dyn Block<Cuda>>;
        Ok(subject.layers.iter().map(layer).collect())
    })?;
    Ok(BlockStage::new(device.clone(), StageOptions::new(subject.name), parts, &Uniform(1))?)
}

/// Creates the context for a microbatch with sequences of equal length.
fn context(
    device: &Cuda,
    subject: &Subject,
    (sequences, length): (usize, usize),
) -> Result<MicrobatchContext<Cuda>> {
    let rows = sequences * length;
    let lengths = vec![length; sequences];
    let starts: Vec<u32> = (0..=sequences).map(|sequence| (sequence * length) as u32).collect();
    let vocabulary = subject.config.llm.spec.vocab as usize;
    let tokens = (0..rows).map(|row| (row * 7919 % vocabulary) as i64).collect();
    let whole = Pack { lengths, tokens }.context(&subject.config.llm, device)?;
    // encoder layers accept segments and, if they rotate, the angles of the encoder family
    let segments = Segments::new(device, &starts)?;
    let (windows, window_rotation, query_scales) = (None, None, None);
    let rotation = whole.layers.rotation;
    let layers = LayerContext { rows, segments, windows, rotation, window_rotation, query_scales };
    Ok(MicrobatchContext { layers, inputs: whole.inputs })
}

/// Returns median seconds for the forward and the backward pass.
fn times(
    device: &Cuda,
    subject: &Subject,
    stage: &mut BlockStage<Cuda>,
    shape: (usize, usize),
    passes: usize,
    random: &mut Random,
) -> Result<[f64; 2]> {
    let context = Arc::new(context(device, subject, shape)?);
    let hidden = subject.layers.first().map_or(0, |layer| layer.attention.hidden);
    let input = device.upload(&random.numbers(context.layers.rows * hidden))?;
    let mut events = Vec::new();
    for _ in 0..WARM_UP_PASSES + passes {
        let input = device.copy(&input)?;
        let start = device.mark(Lane::Compute)?;
        let BlockOutput::Rows(rows) = stage.forward(0, Arc::clone(&context), Some(input))? else {
            return Err("expected rows of layers, found a loss".into());
        };
        let middle = device.mark(Lane::Compute)?;
        stage.backward(0, Some(rows))?;
        events.push((start, middle, device.mark(Lane::Compute)?));
    }
    wait(device)?;
    let timed = &events[WARM_UP_PASSES..];
    let seconds = |from, to| device.busy_ns(from, to) as f64 * 1e-9;
    Ok([
        median(timed.iter().map(|(start, middle, _)| seconds(start, middle)).collect()),
        median(timed.iter().map(|(_, middle, end)| seconds(middle, end)).collect()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_layers_have_their_widths() {
        let widths = published().unwrap().into_iter().map(|subject| {
            assert_eq!(subject.layers.len(), LAYERS, "{}", subject.name);
            (subject.name, subject.layers[0].attention.hidden)
        });
        let expected = [
            ("siglip-so400m", 1152),
            ("internvit-300m", 1024),
            ("internvit-6b", 3200),
            ("whisper-large", 1280),
            ("qwen2.5-7b", 3584),
            ("llama3-8b", 4096),
        ];
        assert_eq!(widths.collect::<Vec<_>>(), expected);
    }
}
