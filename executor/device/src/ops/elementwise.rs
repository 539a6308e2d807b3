//! Element-wise sums and scalings over complete buffers.

use rayon::prelude::*;

use super::argument::values;
use super::operation::operation;
use super::parallel::{add_to, chunk_len, dot, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Dtype, Runtime, Tensor};

/// Consecutive elements to copy, by first index in both tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRange {
    /// First element that is read.
    pub from: usize,
    /// First element that is written.
    pub to: usize,
    /// Number of elements.
    pub len: usize,
}

values!(CopyRange);

operation! {
    /// Sums, scalings and copies of complete tensors.
    pub trait Elementwise: Runtime {
        /// Fills with zeros.
        fn zero(&self, y: &mut Tensor<Self>) -> Result<()>;
        /// Adds: `y += x`.
        fn add(&self, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()>;
        /// Scales: `y *= factor`.
        fn scale(&self, factor: f32, y: &mut Tensor<Self>) -> Result<()>;
        /// Copies tensor ranges to a second tensor with the same type.
        fn copy_ranges(&self, ranges: &[CopyRange], x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()>;
        provided {
            /// Allocates zeros for a pass, in the type for weights and activations.
            fn zeros(&self, len: usize) -> Result<Tensor<Self>> {
                let mut tensor = self.alloc(len)?;
                self.zero(&mut tensor)?;
                Ok(tensor)
            }
            /// Copies a tensor.
            fn copy(&self, x: &Tensor<Self>) -> Result<Tensor<Self>> {
                let mut copy = self.alloc_as(x.dtype(), x.len())?;
                self.copy_ranges(&[CopyRange { from: 0, to: 0, len: x.len() }], x, &mut copy)?;
                Ok(copy)
            }
        }
    }
}

impl Elementwise for Cpu {
    fn zero(&self, y: &mut Tensor<Self>) -> Result<()> {
        self.fill_with_zeros(y);
        Ok(())
    }

    fn add(&self, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        let x = self.operand(x)?;
        self.update(y, |y| self.on_pool(|| add(&x, y)))
    }

    fn scale(&self, factor: f32, y: &mut Tensor<Self>) -> Result<()> {
        self.update(y, |y| self.on_pool(|| scale(factor, y)))
    }

    fn copy_ranges(&self, ranges: &[CopyRange], x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        fn copy<T: Copy>(ranges: &[CopyRange], x: &[T], y: &mut [T]) {
            for &CopyRange { from, to, len } in ranges {
                y[to..to + len].copy_from_slice(&x[from..from + len]);
            }
        }
        match x.dtype() {
            Dtype::F32 => copy(ranges, x.f32(), y.f32_mut()),
            Dtype::Bf16 => copy(ranges, x.bf16(), y.bf16_mut()),
            Dtype::F64 => copy(ranges, x.f64(), y.f64_mut()),
            Dtype::U32 => copy(ranges, x.u32(), y.u32_mut()),
        }
        Ok(())
    }
}

/// Adds: `y += x`.
pub fn add<F: Real>(x: &[F], y: &mut [F]) {
    assert_eq!(x.len(), y.len(), "summands have the same shape");
    let chunk = chunk_len(1);
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(y, x)| {
        vectorized(
            #[inline(always)]
            || add_to(y, x),
        );
    });
}

/// Scales: `y *= factor`.
pub fn scale<F: Real>(factor: F, y: &mut [F]) {
    y.par_chunks_mut(chunk_len(1)).for_each(|y| y.iter_mut().for_each(|y| *y *= factor));
}

/// Sums squares: within chunks in the number type, over chunks in `f64`.
pub fn sum_of_squares<F: Real>(x: &[F]) -> f64 {
    let sums: Vec<f64> = x
        .par_chunks(chunk_len(1))
        .map(|x| {
            vectorized(
                #[inline(always)]
                || dot(x, x),
            )
            .to_f64()
        })
        .collect();
    sums.iter().sum()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{LEN, Results, changed, input};
    use super::super::finite_difference::numbers;
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let x = input(d, LEN, 1)?;
        let ranges = [CopyRange { from: 3, to: 0, len: 2 }, CopyRange { from: 0, to: 9, len: 1 }];
        Ok(vec![
            ("add", changed(d, LEN, 4, |y| d.add(&x, y))?),
            ("scale", changed(d, LEN, 4, |y| d.scale(0.3, y))?),
            ("zero", changed(d, LEN, 4, |y| d.zero(y))?),
            ("copy ranges", changed(d, LEN, 4, |y| d.copy_ranges(&ranges, &x, y))?),
            ("copy", d.download(&d.copy(&x)?)?),
        ])
    }

    #[test]
    fn squares_add_up() {
        let x = numbers(20_000, 1);
        let truth: f64 = x.iter().map(|x| x * x).sum();
        assert!((sum_of_squares(&x) - truth).abs() < 1e-9 * truth);
        let mut y = x.clone();
        add(&x, &mut y);
        scale(0.5, &mut y);
        assert_eq!(x, y);
    }
}
