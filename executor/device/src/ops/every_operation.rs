//! Calls every device operation on small bf16 numbers, to compare devices: `cases` in each operation.

use half::bf16;

use super::each_operation;
use super::finite_difference::{numbers, to_f32};
use crate::error::Result;
use crate::ops::Device;
use crate::runtime::Tensor;

/// Operation names and results.
pub(crate) type Results = Vec<(&'static str, Vec<f32>)>;

pub(crate) const ROWS: usize = 6;
pub(crate) const COLUMNS: usize = 4;
pub(crate) const LEN: usize = ROWS * COLUMNS;

/// Calls an operation that changes a buffer with known contents, and returns the new contents.
pub(crate) fn changed<D: Device>(
    device: &D,
    len: usize,
    seed: u64,
    run: impl FnOnce(&mut Tensor<D>) -> Result<()>,
) -> Result<Vec<f32>> {
    let mut buffer = input(device, len, seed)?;
    run(&mut buffer)?;
    device.download(&buffer)
}

/// Random bf16 numbers.
pub(crate) fn input<D: Device>(device: &D, len: usize, seed: u64) -> Result<Tensor<D>> {
    let values = to_f32(&numbers(len, seed));
    device.upload(&values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect::<Vec<_>>())
}

/// Scalars, rounded to bf16.
pub(crate) fn scalars<D: Device>(device: &D, scalars: &Tensor<D>) -> Result<Vec<f32>> {
    Ok(device.read(scalars)?.iter().map(|&value| bf16::from_f64(value).to_f32()).collect())
}

macro_rules! cases {
    ($($file:ident::$Operation:ident),+ $(,)?) => {
        /// Calls every operation.
        pub(crate) fn all<D: Device>(device: &D) -> Result<Results> {
            Ok([$(super::$file::tests::cases(device)?),+].concat())
        }
    };
}
each_operation!(cases);
