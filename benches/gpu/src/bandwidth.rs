//! Benchmarks operations that only move bytes, relative to the copy rate.

use dflop_cuda::Cuda;
use dflop_device::Dtype;
use dflop_device::ops::adamw::{AdamW, AdamWState, UpdateRange};
use dflop_device::prelude::*;
use serde_json::json;

use super::report::median_seconds;
use crate::Result;
use crate::arguments::Arguments;
use crate::device::{self, numbers};
use crate::random::Random;
use crate::report::{self, Outcome};

const PART: &str = "bandwidth";
/// Minimum fraction of the copy rate.
const SHARE_MIN: f64 = 0.8;
/// Row widths in small and large models.
const COLUMNS: [usize; 3] = [1536, 3584, 8192];

/// Benchmark sizes.
struct Sizes {
    /// Number of matrix elements.
    elements: usize,
    rounds: usize,
}

/// Times the copy, then norms and the optimizer.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome> {
    let device = device::cuda(Dtype::Bf16)?;
    let sizes = if arguments.is_tiny {
        Sizes { elements: 1 << 12, rounds: 2 }
    } else {
        Sizes { elements: 1 << 28, rounds: 15 }
    };
    let mut random = Random::new(arguments.seed());
    let source = numbers(&device, &mut random, Dtype::Bf16, sizes.elements)?;
    let seconds = median_seconds(&device, sizes.rounds, |_| device.copy(&source).map(drop))?;
    let ceiling = 4.0 * sizes.elements as f64 / seconds;
    let mut shares = Vec::new();
    let mut found = |name: &str, bytes: usize, seconds: f64| {
        let rate = bytes as f64 / seconds;
        let share = rate / ceiling;
        eprintln!("{name:>26}: {:6.0} GB/s, {:3.0} % of a copy", rate / 1e9, 100.0 * share);
        report::result(
            PART,
            json!({"name": name, "side": "dflop", "seconds": seconds, "bytes": bytes, "share": share}),
        );
        shares.push((share, name.to_owned()));
    };
    found("copy", 4 * sizes.elements, seconds);
    drop(source);
    for columns in COLUMNS {
        norms(&device, &mut random, &sizes, columns, &mut found)?;
    }
    let (bytes, seconds) = optimizer(&device, &mut random, &sizes)?;
    found("adamw with masters", bytes, seconds);
    let (least, name) = shares.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
    let outcome = if least >= SHARE_MIN || arguments.is_tiny { Outcome::Passed } else { Outcome::Missed };
    let figure = format!("copy {:.0} GB/s; least {:.0} %, {name}", ceiling / 1e9, 100.0 * least);
    Ok(report::summary(PART, outcome, &figure, "norms and optimizer at 80 % of a copy"))
}

fn norms(
    device: &Cuda,
    random: &mut Random,
    sizes: &Sizes,
    columns: usize,
    found: &mut impl FnMut(&str, usize, f64),
) -> Result<()> {
    let columns = columns.min(sizes.elements / 4);
    let rows = sizes.elements / 4 / columns;
    let elements = rows * columns;
    let (x, dy) =
        (numbers(device, random, Dtype::Bf16, elements)?, numbers(device, random, Dtype::Bf16, elements)?);
    let weight = numbers(device, random, Dtype::Bf16, columns)?;
    let bias = numbers(device, random, Dtype::Bf16, columns)?;
    let (mut y, mut dx) = (device.alloc(elements)?, device.zeros(elements)?);
    let mut d_weight = device.zeros_as(Dtype::F32, columns)?;
    let mut d_bias = device.zeros_as(Dtype::F32, columns)?;
    let mut inverse = device.alloc_as(Dtype::F32, rows)?;
    let mut statistics = device.alloc_as(Dtype::F32, 2 * rows)?;
    let rounds = sizes.rounds;
    // forward reads x and writes y; backward reads dy and x, and adds to dx
    let (forward, backward) = (2 * 2 * elements, 4 * 2 * elements);
    let seconds =
        median_seconds(device, rounds, |_| device.rms_norm(&x, (&weight, 0.0), 1e-6, &mut y, &mut inverse))?;
    found(&format!("rms norm {columns}"), forward + 4 * rows, seconds);
    let seconds = median_seconds(device, rounds, |_| {
        device.rms_norm_backward(&dy, &x, (&weight, 0.0), &inverse, Some(&mut dx), Some(&mut d_weight))
    })?;
    found(&format!("rms norm {columns} backward"), backward + 4 * rows, seconds);
    let seconds = median_seconds(device, rounds, |_| {
        device.layer_norm(&x, (&weight, &bias), 1e-6, &mut y, &mut statistics)
    })?;
    found(&format!("layer norm {columns}"), forward + 8 * rows, seconds);
    let seconds = median_seconds(device, rounds, |_| {
        let parameters = Some((&mut d_weight, &mut d_bias));
        device.layer_norm_backward(&dy, &x, &weight, &statistics, Some(&mut dx), parameters)
    })?;
    found(&format!("layer norm {columns} backward"), backward + 8 * rows, seconds);
    Ok(())
}

/// Returns bytes and seconds for an optimizer step.
fn optimizer(device: &Cuda, random: &mut Random, sizes: &Sizes) -> Result<(usize, f64)> {
    let elements = sizes.elements / 2;
    let mut weights = numbers(device, random, Dtype::Bf16, elements)?;
    let gradients = numbers(device, random, Dtype::F32, elements)?;
    let mut master = numbers(device, random, Dtype::F32, elements)?;
    let mut mean = device.zeros_as(Dtype::F32, elements)?;
    let mut square = device.zeros_as(Dtype::F32, elements)?;
    let mut clip = device.zeros_as(Dtype::F64, 2)?;
    device.write_scalars(&[1.0, 1.0], &mut clip)?;
    let adamw = AdamW { step: 1, ..AdamW::default() };
    let ranges = [UpdateRange { elements: 0..elements, learning_rate: 1e-4, weight_decay: 0.1 }];
    let seconds = median_seconds(device, sizes.rounds, |_| {
        let state = AdamWState { master: Some(&mut master), mean: &mut mean, square: &mut square };
        device.adamw(&adamw, &ranges, &clip, &mut weights, &gradients, state)
    })?;
    // reads gradient, master, mean and square; writes the weight and these three
    Ok((elements * (4 * 4 + 2 + 3 * 4), seconds))
}
