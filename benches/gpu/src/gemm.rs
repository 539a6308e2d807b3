//! Benchmarks the matrix products in linear layers: forward, input gradient, weight gradient.

use dflop_cuda::Cuda;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::prelude::*;
use dflop_device::{Dtype, Tensor};
use serde_json::{Value, json};

use super::report::median_seconds;
use crate::arguments::Arguments;
use crate::random::Random;
use crate::report::{self, Outcome};
use crate::{Result, device};

const PART: &str = "gemm";
/// Number of matrix sets that calls use in turn, so that a call does not find the operands in the cache.
const SETS: usize = 3;

/// A linear layer and the number of rows.
pub(crate) struct Linear {
    name: &'static str,
    rows: usize,
    outputs: usize,
    inputs: usize,
}

/// Layers: name, outputs, inputs.
const LAYERS: [(&str, usize, usize); 9] = [
    ("qwen2.5-1.5b qkv", 2048, 1536),
    ("qwen2.5-1.5b output", 1536, 1536),
    ("qwen2.5-1.5b gate-up", 17_920, 1536),
    ("qwen2.5-1.5b down", 1536, 8960),
    ("qwen2.5-7b gate-up", 37_888, 3584),
    ("qwen2.5-7b down", 3584, 18_944),
    ("siglip-so400m fc1", 4304, 1152),
    ("siglip-so400m fc2", 1152, 4304),
    ("large square", 8192, 8192),
];
const ROWS: usize = 8192;

/// Returns all layers.
pub(crate) fn all(is_tiny: bool) -> Vec<Linear> {
    let tiny = |size: usize| if is_tiny { (size / 256).clamp(8, 40) } else { size };
    let layer = |(name, outputs, inputs)| Linear {
        name,
        rows: tiny(ROWS),
        outputs: tiny(outputs),
        inputs: tiny(inputs),
    };
    LAYERS.map(layer).into_iter().collect()
}

impl Linear {
    pub(crate) fn to_json(&self) -> Value {
        json!({"name": self.name, "rows": self.rows, "outputs": self.outputs, "inputs": self.inputs})
    }
}

/// Times all layers.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome> {
    let device = device::cuda(Dtype::Bf16)?;
    let rounds = if arguments.is_tiny { 2 } else { 15 };
    let mut random = Random::new(arguments.seed());
    let mut best = 0.0_f64;
    for layer in all(arguments.is_tiny) {
        let operations = 2.0 * (layer.rows * layer.outputs * layer.inputs) as f64;
        let seconds = times(&device, &layer, &mut random, rounds)?;
        for (pass, seconds) in ["forward", "input", "weight"].into_iter().zip(seconds) {
            let rate = operations / seconds / 1e12;
            let name = format!("{} {pass}", layer.name);
            best = best.max(rate);
            eprintln!("{name:>30}: {:8.1} us, {rate:6.1} TFLOP/s", 1e6 * seconds);
            report::result(PART, json!({"name": name, "side": "dflop", "seconds": seconds, "tflops": rate}));
        }
    }
    let figure = format!("{best:.1} TFLOP/s at best");
    Ok(report::summary(PART, Outcome::Passed, &figure, "runs; speed is compared below"))
}

/// Layer matrices.
struct Matrices {
    x: Tensor<Cuda>,
    weight: Tensor<Cuda>,
    dy: Tensor<Cuda>,
    y: Tensor<Cuda>,
    dx: Tensor<Cuda>,
    d_weight: Tensor<Cuda>,
}

/// Returns seconds for the three products, in linear layer layouts.
fn times(device: &Cuda, layer: &Linear, random: &mut Random, rounds: usize) -> Result<[f64; 3]> {
    let &Linear { rows, outputs, inputs, .. } = layer;
    let mut numbers = |elements| device::numbers(device, random, Dtype::Bf16, elements);
    let mut set = || -> Result<Matrices> {
        Ok(Matrices {
            x: numbers(rows * inputs)?,
            weight: numbers(outputs * inputs)?,
            dy: numbers(rows * outputs)?,
            y: device.alloc(rows * outputs)?,
            dx: device.alloc(rows * inputs)?,
            d_weight: device.zeros_as(Dtype::F32, outputs * inputs)?,
        })
    };
    let mut sets = (0..SETS).map(|_| set()).collect::<Result<Vec<_>>>()?;
    let (by_input, by_output) = (MatrixLayout::rows(inputs), MatrixLayout::rows(outputs));
    let forward = median_seconds(device, rounds, |round| {
        let Matrices { x, weight, y, .. } = &mut sets[round % SETS];
        let shape = GemmShape { rows, columns: outputs, inner: inputs };
        let weight = (&*weight, by_input.transposed());
        device.gemm(shape, (x, by_input), weight, false, (y, by_output), Epilogue::None)
    })?;
    let input = median_seconds(device, rounds, |round| {
        let Matrices { dy, weight, dx, .. } = &mut sets[round % SETS];
        let shape = GemmShape { rows, columns: inputs, inner: outputs };
        device.gemm(shape, (dy, by_output), (weight, by_input), false, (dx, by_input), Epilogue::None)
    })?;
    let weight = median_seconds(device, rounds, |round| {
        let Matrices { x, dy, d_weight, .. } = &mut sets[round % SETS];
        let shape = GemmShape { rows: outputs, columns: inputs, inner: rows };
        let dy = (&*dy, by_output.transposed());
        device.gemm(shape, dy, (x, by_input), true, (d_weight, by_input), Epilogue::None)
    })?;
    Ok([forward, input, weight])
}
