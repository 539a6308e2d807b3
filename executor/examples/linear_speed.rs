//! Compares linear layer products with the peak rate of matrix products on the same threads.
//!
//! ```sh
//! cargo run --release -p dflop-executor --example linear_speed -- THREADS ROUNDS
//! ```
//!
//! Weights are `[outputs, inputs]`, multiplied with microbatch rows: forward, input gradient, and weight
//! gradient, in the layouts used by `dflop_models::linear`. Every round times each product and the peak once;
//! the best round counts. One thread is timed by CPU time, several by wall time.
#![allow(clippy::print_stdout, reason = "this is a program")]

use dflop_device::Result;
use dflop_device::ops::gemm::{GemmShape, MatrixLayout};
use dflop_device::prelude::*;
use dflop_device::{Cpu, Epilogue, Tensor};
use dflop_executor::profile::clock::Clock;
use dflop_executor::profile::gemm_peak_flops;

/// Weight outputs and inputs.
const WEIGHTS: [[usize; 2]; 3] = [[512, 512], [512, 2048], [2048, 512]];
const ROWS: [usize; 2] = [1024, 4096];

/// Layer with rows, gradients and the best times for its three products.
struct Layer {
    rows: usize,
    outputs: usize,
    inputs: usize,
    x: Tensor<Cpu>,
    weight: Tensor<Cpu>,
    dy: Tensor<Cpu>,
    y: Tensor<Cpu>,
    dx: Tensor<Cpu>,
    d_weight: Tensor<Cpu>,
    best: [f64; 3],
}

fn main() -> dflop_executor::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (threads, rounds) = (number(1), number(10));
    let device = Cpu::new(threads)?;
    let sizes = WEIGHTS.into_iter().flat_map(|weight| ROWS.map(|rows| (weight, rows)));
    let mut layers =
        sizes.map(|(weight, rows)| Layer::new(&device, weight, rows)).collect::<Result<Vec<_>>>()?;
    let mut peak = 0.0_f64;
    for _ in 0..rounds {
        for layer in &mut layers {
            layer.time(&device)?;
            peak = peak.max(gemm_peak_flops(&device, 1)?);
        }
    }
    println!("{threads} threads, {}, peak {:.1} GFLOP/s", Clock::of(&device).name(), peak / 1e9);
    println!("{:>6} {:>14} {:>16} {:>16} {:>16}", "rows", "weight", "forward", "dx", "dw");
    for layer in &layers {
        let operations = 2.0 * (layer.rows * layer.outputs * layer.inputs) as f64;
        let cells = layer.best.map(|seconds| {
            format!("{:7.1} {:6.1} %", operations / seconds / 1e9, 100.0 * operations / seconds / peak)
        });
        let weight = format!("[{}, {}]", layer.outputs, layer.inputs);
        println!("{:>6} {weight:>14} {:>16} {:>16} {:>16}", layer.rows, cells[0], cells[1], cells[2]);
    }
    Ok(())
}

impl Layer {
    fn new(device: &Cpu, [outputs, inputs]: [usize; 2], rows: usize) -> Result<Self> {
        let numbers = |len: usize, seed: usize| {
            let values: Vec<f32> = (0..len).map(|at| ((at * 31 + seed) % 61) as f32 / 61.0 - 0.5).collect();
            device.upload(&values)
        };
        Ok(Self {
            rows,
            outputs,
            inputs,
            x: numbers(rows * inputs, 1)?,
            weight: numbers(outputs * inputs, 2)?,
            dy: numbers(rows * outputs, 3)?,
            y: device.zeros(rows * outputs)?,
            dx: device.zeros(rows * inputs)?,
            d_weight: device.zeros(outputs * inputs)?,
            best: [f64::INFINITY; 3],
        })
    }

    /// Times each product once.
    fn time(&mut self, device: &Cpu) -> dflop_executor::Result<()> {
        let Self { rows, outputs, inputs, x, weight, dy, y, dx, d_weight, best } = self;
        let (rows, outputs, inputs) = (*rows, *outputs, *inputs);
        let (by_input, by_output) = (MatrixLayout::rows(inputs), MatrixLayout::rows(outputs));
        let mut timed = |index: usize, product: &mut (dyn FnMut() -> Result<()> + Send)| {
            let (done, taken) = Clock::of(device).time(device, product)?;
            best[index] = best[index].min(taken.as_secs_f64());
            Ok::<(), dflop_executor::Error>(done?)
        };
        let shape = GemmShape { rows, columns: outputs, inner: inputs };
        let transposed = by_input.transposed();
        timed(0, &mut || {
            device.gemm(shape, (x, by_input), (weight, transposed), false, (y, by_output), Epilogue::None)
        })?;
        let shape = GemmShape { rows, columns: inputs, inner: outputs };
        timed(1, &mut || {
            device.gemm(shape, (dy, by_output), (weight, by_input), false, (dx, by_input), Epilogue::None)
        })?;
        let shape = GemmShape { rows: outputs, columns: inputs, inner: rows };
        let transposed = by_output.transposed();
        timed(2, &mut || {
            device.gemm(shape, (dy, transposed), (x, by_input), true, (d_weight, by_input), Epilogue::None)
        })
    }
}
