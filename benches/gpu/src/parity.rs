//! Small models from every family on the CUDA device against the CPU device, and a decoder for PyTorch.

use std::path::Path;
use std::sync::Arc;

use dflop_device::prelude::*;
use dflop_device::{Dtype, Tensor};
use dflop_models::encoder::{EncoderInput, TiledMedium};
use dflop_models::weights::{self, Seed};
use dflop_models::{
    Activations, BlockOutput, BlockStage, MicrobatchContext, ModelConfig, ModuleKind, Stage, assemble,
};
use serde_json::{Value, json};

use crate::Result;
use crate::arguments::Arguments;
use crate::models::Pack;
use crate::operations::error;
use crate::random::Random;
use crate::report::{self, Outcome};
use crate::{device, models};

const PART: &str = "parity";
/// Maximum error for losses, outputs and gradients in `f32` and in bf16.
const BOUNDS: [f64; 2] = [1e-4, 4e-2];
const TOKENS: usize = 48;
/// Size limit for a weights file in bytes: none.
const PIECE_BYTES_MAX: u64 = u64::MAX;

/// Reads the configuration for a recorded model.
macro_rules! recorded {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../tests/golden/executor/", $name, "/config.json")))
    };
}

/// Models from every family.
const MODELS: [(&str, &str); 7] = [
    recorded!("qwen2"),
    recorded!("llama"),
    recorded!("llava_onevision"),
    recorded!("internvl"),
    recorded!("qwen2_vl"),
    recorded!("qwen2_5_vl"),
    recorded!("qwen2_audio"),
];

/// Numbers that a model computes: loss or rows, and all gradients.
type Numbers = Vec<(String, Vec<f32>)>;

/// Runs every module in every model in both storage types.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome> {
    let seed = arguments.seed();
    let (mut wrong, mut count, mut worst_of_all) = (Vec::new(), 0, [0.0_f64; 2]);
    for (number, dtype) in [Dtype::F32, Dtype::Bf16].into_iter().enumerate() {
        let (cpu, cuda) = (device::cpu(dtype)?, device::cuda(dtype)?);
        for (name, document) in MODELS {
            let config = ModelConfig::from_config(&serde_json::from_str(document)?)?;
            for module in config.modules() {
                let expected = numbers(name, &config, module, &cpu, seed)?;
                let found = numbers(name, &config, module, &cuda, seed)?;
                let (what, worst) = worst(&found, &expected);
                let label = format!("{name} {module:?} {dtype:?}");
                eprintln!("{label:>32}, seed {seed}: {what} is off by {worst:.1e}");
                report::result(
                    PART,
                    json!({"name": label, "seed": seed.to_string(), "error": worst, "of": what,
                        "asked": BOUNDS[number]}),
                );
                count += 1;
                worst_of_all[number] = worst_of_all[number].max(worst);
                if worst >= BOUNDS[number] {
                    wrong.push(format!("{label}: {what} is off by {worst:.1e}"));
                }
            }
        }
    }
    if let Some(directory) = &arguments.directory {
        write(directory, arguments.is_tiny)?;
    }
    let [exact, half] = worst_of_all;
    let (outcome, figure) = match wrong.first() {
        None => (Outcome::Passed, format!("{count} modules, f32 {exact:.1e}, bf16 {half:.1e}")),
        Some(first) => (Outcome::Failed, format!("{} of {count} wrong, {first}", wrong.len())),
    };
    Ok(report::summary(PART, outcome, &figure, "f32 below 1e-4, bf16 below 4e-2"))
}

/// Computes loss or rows, and gradients, for a module with random weights and inputs.
fn numbers<D: Device>(
    name: &str,
    config: &ModelConfig,
    module: ModuleKind,
    device: &D,
    seed: u64,
) -> Result<Numbers> {
    let mut random = Random::new(seed);
    let mut stage = models::whole(config, module, device, Activations::Stored, &Seed(seed))?;
    let context = match module {
        ModuleKind::Llm => Pack::new(seed, 0, TOKENS, 40).context(&config.llm, device)?,
        encoder => medium(name, config, encoder, device, &mut random)?,
    };
    let (first, gradient) = match stage.forward(0, Arc::new(context), None)? {
        BlockOutput::Loss(loss) => (("loss".to_owned(), vec![stage.read_loss(0, &loss)? as f32]), None),
        BlockOutput::Rows(rows) => {
            let values = device.download(&rows)?;
            let gradient: Tensor<D> = device.upload(&random.numbers(values.len()))?;
            (("rows".to_owned(), values), Some(gradient))
        }
    };
    stage.backward(0, gradient)?;
    stage.parameters_mut().fold_shared_gradients(device)?;
    let mut all = vec![first];
    all.extend(stage.parameters().gradients(device)?);
    Ok(all)
}

/// Creates random media in the arrangement of a recorded model.
fn medium<D: Device>(
    name: &str,
    config: &ModelConfig,
    module: ModuleKind,
    device: &D,
    random: &mut Random,
) -> Result<MicrobatchContext<D>> {
    let encoder = if module == ModuleKind::Vision { &config.vision } else { &config.audio };
    let encoder = encoder.as_ref().ok_or("expected an encoder, found none")?;
    let tiles = |shown: &[TiledMedium], side: usize, random: &mut Random| {
        let count: usize = shown.iter().map(TiledMedium::tiles).sum();
        let pixels = random.numbers(count * 3 * side * side);
        encoder.context(device, &EncoderInput::Tiles { pixels: &pixels, shown })
    };
    Ok(match name {
        "internvl" => tiles(&[TiledMedium::Image { height: 1, width: 1, tiles: 3 }], 16, random)?,
        "llava_onevision" => {
            let image = TiledMedium::Image { height: 12, width: 24, tiles: 3 };
            tiles(&[image, TiledMedium::Video { frames: 2 }], 12, random)?
        }
        "qwen2_audio" => {
            let features = random.numbers(2 * 8 * 40);
            encoder.context(device, &EncoderInput::Windows { features: &features, frames: &[40, 17] })?
        }
        _ => {
            let grids = [[1, 4, 6], [2, 6, 8]];
            let patches: u32 = grids.iter().map(|[layers, rows, columns]| layers * rows * columns).sum();
            let values = random.numbers(patches as usize * 24);
            encoder.context(device, &EncoderInput::Patches { values: &values, grids: &grids })?
        }
    })
}

/// Returns the number with the largest error, relative to the norm or to a thousandth of the largest norm.
fn worst(found: &Numbers, expected: &Numbers) -> (String, f64) {
    if found.len() != expected.len() {
        return ("the number of gradients".to_owned(), f64::INFINITY);
    }
    let norm = |values: &[f32]| values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    let gradients = expected.iter().skip(1);
    let least = 1e-3 * gradients.map(|(_, values)| norm(values)).fold(0.0, f64::max);
    let mut worst = ("nothing".to_owned(), 0.0);
    for ((name, found), (_, truth)) in found.iter().zip(expected) {
        let own = norm(truth);
        // the error is relative to the norm of the truth, or to the minimum norm if that is larger
        let relative = error(found, truth) * own.max(1e-6) / own.max(least).max(1e-6);
        if relative > worst.1 || relative.is_nan() {
            worst = (name.clone(), if relative.is_nan() { f64::INFINITY } else { relative });
        }
    }
    worst
}

/// Writes decoder weights, a pack with the loss, and all gradients in `f32`, for the PyTorch side.
fn write(directory: &Path, is_tiny: bool) -> Result<()> {
    let mut document = if is_tiny { models::tiny() } else { models::medium() };
    document["is_recomputed"] = false.into();
    let config = ModelConfig::from_config(&document)?;
    let (tokens, seed) = (if is_tiny { TOKENS } else { 1024 }, 1);
    let pack = Pack::new(seed, 0, tokens, config.llm.spec.vocab as usize);
    let device = device::cuda(Dtype::F32)?;
    let mut stage: BlockStage<_> =
        models::whole(&config, ModuleKind::Llm, &device, Activations::Stored, &Seed(seed))?;
    let BlockOutput::Loss(loss) = stage.forward(0, Arc::new(pack.context(&config.llm, &device)?), None)?
    else {
        return Err("expected a loss of the whole model, found rows".into());
    };
    stage.backward(0, None)?;
    stage.parameters_mut().fold_shared_gradients(&device)?;
    let loss = stage.read_loss(0, &loss)? / pack.targets() as f64;
    std::fs::create_dir_all(directory.join("gradients"))?;
    let tensors = assemble(&stage)?.unwrap_or_default();
    let mut gradients = stage.parameters().gradients(&device)?;
    let of = |tensor: &weights::Tensor| weights::Tensor {
        values: gradients.remove(&tensor.name).unwrap_or_default(),
        ..tensor.clone()
    };
    weights::write(&directory.join("gradients"), tensors.iter().map(of).collect(), PIECE_BYTES_MAX)?;
    weights::write(directory, tensors, PIECE_BYTES_MAX)?;
    models::write_packs(directory, &[pack])?;
    document["loss"] = Value::from(loss);
    Ok(std::fs::write(directory.join("config.json"), document.to_string())?)
}
