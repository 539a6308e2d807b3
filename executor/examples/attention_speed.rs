//! Times attention over equal-length segments, forward and backward.
//!
//! ```sh
//! cargo run --release -p dflop-executor --example attention_speed -- THREADS REPEATS HEAD_DIM
//! ```
//!
//! 8 heads, 4 key heads, about 4,096 rows in total, causal and full. Prints GFLOP/s for both passes at the
//! best time, counting only unmasked products, and 2.5 times as many for the backward pass.
#![allow(clippy::print_stdout, reason = "this is a program")]

use std::error::Error;

use dflop_device::ops::attention::AttentionShape;
use dflop_device::prelude::*;
use dflop_device::{Cpu, Dtype, Segments};
use dflop_executor::profile::Clock;

const ROWS: usize = 4096;
const LENGTHS: [usize; 11] = [16, 32, 33, 64, 65, 66, 96, 128, 129, 256, 1024];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (threads, repeats, head_dim) = (number(1), number(20), number(64));
    let device = Cpu::new(threads)?;
    println!("{:>7} {:>7} {:>16} {:>16}", "segment", "mask", "forward GFLOP/s", "backward GFLOP/s");
    for is_causal in [true, false] {
        let scale = (head_dim as f64).powf(-0.5);
        let shape = AttentionShape { heads: 8, kv_heads: 4, head_dim, scale, is_causal };
        for length in LENGTHS {
            let (forward, backward) = speed(&device, &shape, length, repeats)?;
            let mask = if is_causal { "causal" } else { "full" };
            println!("{length:>7} {mask:>7} {forward:>16.2} {backward:>16.2}");
        }
    }
    Ok(())
}

/// Returns GFLOP/s for the forward pass and the backward pass.
fn speed(
    device: &Cpu,
    shape: &AttentionShape,
    length: usize,
    repeats: usize,
) -> Result<(f64, f64), Box<dyn Error>> {
    let count = ROWS / length;
    let starts: Vec<u32> = (0..=count).map(|segment| (segment * length) as u32).collect();
    let segments = Segments::new(device, &starts)?;
    let rows = count * length;
    let numbers = |len: usize, seed: usize| {
        let values: Vec<f32> = (0..len).map(|at| ((at * 31 + seed) % 61) as f32 / 61.0 - 0.5).collect();
        device.upload(&values)
    };
    let (qkv, d_output) = (numbers(rows * shape.row(), 1)?, numbers(rows * shape.output(), 2)?);
    let mut output = device.alloc(rows * shape.output())?;
    let mut sums = device.alloc_as(Dtype::F32, rows * shape.heads)?;
    let (mut forward, mut backward) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..repeats {
        let run = || device.attention(shape, &segments, &qkv, &mut output, &mut sums);
        let (done, taken) = Clock::of(device).time(device, run)?;
        done?;
        forward = forward.min(taken.as_secs_f64());
        let run = || device.attention_backward(shape, &segments, &qkv, (&output, &sums), &d_output);
        let (done, taken) = Clock::of(device).time(device, run)?;
        done?;
        backward = backward.min(taken.as_secs_f64());
    }
    let pairs = if shape.is_causal { length * (length + 1) / 2 } else { length * length };
    // two products for each visible token pair
    let flops = (4 * count * shape.heads * shape.head_dim * pairs) as f64;
    Ok((flops / forward / 1e9, 2.5 * flops / backward / 1e9))
}
