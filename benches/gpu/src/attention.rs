//! Times attention on every bucket, forward and backward, and compares small ones with the CPU device.

use std::time::Instant;

use dflop_cuda::Cuda;
use dflop_device::prelude::*;
use dflop_device::{Dtype, Segments};
use serde_json::json;

use super::report::median_seconds;
use crate::arguments::Arguments;
use crate::buckets::{self, Bucket};
use crate::operations::error;
use crate::random::Random;
use crate::report::{self, Outcome};
use crate::{Result, device};

const PART: &str = "attention";
/// Maximum output and gradient error in bf16.
const BOUND: f64 = 1e-2;
/// Maximum number of forward pass operations for which a CPU check runs.
const CHECKED_FLOPS: f64 = 1e10;

/// Seconds in which cuDNN plans are built and cuDNN times compared with the times of our kernels.
const SETTLING_SECONDS: f64 = 45.0;

/// Runs all buckets, by our kernels or, with `--fastest`, by our kernels or cuDNN, whichever is faster.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome> {
    let (part, way) = if arguments.is_fastest { ("attention cuDNN", "fastest") } else { (PART, "own") };
    let asked = "right within 1e-2; speed is compared below";
    let device = if way == "own" {
        device::cuda(Dtype::Bf16)?
    } else {
        match device::cuda_with_cudnn() {
            Ok(device) => device,
            Err(error) => return Ok(report::summary(part, Outcome::Skipped, &error.to_string(), asked)),
        }
    };
    let rounds = if arguments.is_tiny { 2 } else { 20 };
    if way == "fastest" {
        settle(&device, arguments)?;
    }
    let (mut wrong, mut count) = (Vec::new(), 0);
    for bucket in buckets::all(arguments.is_tiny) {
        let mut random = Random::new(arguments.seed());
        let [forward, backward] = times(&device, &bucket, &mut random, rounds)?;
        let error = check(&device, &bucket, &mut random)?;
        let rate = |factor: f64, seconds: f64| factor * bucket.flops() / seconds / 1e12;
        let (forward_rate, backward_rate) = (rate(1.0, forward), rate(2.5, backward));
        let line = json!({
            "name": bucket.name, "side": "dflop", "way": way,
            "forward_seconds": forward, "backward_seconds": backward,
            "forward_tflops": forward_rate, "backward_tflops": backward_rate, "error": error,
        });
        report::result(part, line);
        let name = &bucket.name;
        eprintln!("{name:>30}: forward {:8.1} us, {forward_rate:6.1} TFLOP/s", 1e6 * forward);
        eprintln!("{:>30}  backward {:7.1} us, {backward_rate:6.1} TFLOP/s", "", 1e6 * backward);
        count += 1;
        wrong.extend(
            error.filter(|error| *error >= BOUND).map(|error| format!("{}: {error:.1e}", bucket.name)),
        );
    }
    device::report_attention(PART, &device);
    let (outcome, figure) = match wrong.first() {
        None => (Outcome::Passed, format!("{count} buckets timed")),
        Some(first) => (Outcome::Failed, format!("{} buckets wrong, {first}", wrong.len())),
    };
    Ok(report::summary(part, outcome, &figure, asked))
}

/// Calls attention for all buckets until plans are built and an engine is chosen.
fn settle(device: &Cuda, arguments: &Arguments) -> Result<()> {
    let usual = if arguments.is_tiny { 0.0 } else { SETTLING_SECONDS };
    let seconds = arguments.settling_seconds.unwrap_or(usual);
    let (start, buckets) = (Instant::now(), buckets::all(arguments.is_tiny));
    let mut random = Random::new(1);
    while start.elapsed().as_secs_f64() < seconds {
        for bucket in &buckets {
            times(device, bucket, &mut random, 2)?;
        }
    }
    Ok(())
}

/// Returns seconds for the forward and the backward pass.
fn times(device: &Cuda, bucket: &Bucket, random: &mut Random, rounds: usize) -> Result<[f64; 2]> {
    let (shape, rows) = (&bucket.shape, bucket.rows());
    let segments = Segments::new(device, &bucket.starts())?;
    let qkv = device::numbers(device, random, Dtype::Bf16, rows * shape.row())?;
    let d_output = device::numbers(device, random, Dtype::Bf16, rows * shape.output())?;
    let mut output = device.alloc(rows * shape.output())?;
    let mut sums = device.alloc_as(Dtype::F32, rows * shape.heads)?;
    let forward =
        median_seconds(device, rounds, |_| device.attention(shape, &segments, &qkv, &mut output, &mut sums))?;
    let backward = median_seconds(device, rounds, |_| {
        device.attention_backward(shape, &segments, &qkv, (&output, &sums), &d_output).map(drop)
    })?;
    Ok([forward, backward])
}

/// Returns the maximum error against a CPU; `None` if that would take too long.
fn check(cuda: &Cuda, bucket: &Bucket, random: &mut Random) -> Result<Option<f64>> {
    if bucket.flops() > CHECKED_FLOPS {
        return Ok(None);
    }
    let (shape, rows) = (&bucket.shape, bucket.rows());
    let qkv = random.numbers(rows * shape.row());
    let d_output = random.numbers(rows * shape.output());
    let found = both(cuda, bucket, &qkv, &d_output)?;
    let truth = both(&device::cpu(Dtype::Bf16)?, bucket, &qkv, &d_output)?;
    Ok(Some(found.iter().zip(&truth).map(|(found, truth)| error(found, truth)).fold(0.0, f64::max)))
}

/// Returns the output and the gradient.
fn both<D: Device>(device: &D, bucket: &Bucket, qkv: &[f32], d_output: &[f32]) -> Result<[Vec<f32>; 2]> {
    let (shape, rows) = (&bucket.shape, bucket.rows());
    let segments = Segments::new(device, &bucket.starts())?;
    let (qkv, d_output) = (device.upload(qkv)?, device.upload(d_output)?);
    let mut output = device.upload(&vec![f32::NAN; rows * shape.output()])?;
    let mut sums = device.alloc_as(Dtype::F32, rows * shape.heads)?;
    device.attention(shape, &segments, &qkv, &mut output, &mut sums)?;
    let d_qkv = device.attention_backward(shape, &segments, &qkv, (&output, &sums), &d_output)?;
    Ok([device.download(&output)?, device.download(&d_qkv)?])
}
