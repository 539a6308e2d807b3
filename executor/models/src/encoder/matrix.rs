//! Matrix with a row for every input, like the Gemma 3 projection: `y = x W`, without a bias.
//!
//! The weight gradient is computed with the backward pass; tensor-parallel ranks have copies.

use super::INIT;
use crate::block::{BackwardPass, ForwardPass};
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::ParameterId;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Tensor};

/// Matrix `[inputs, outputs]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix {
    weight: ParameterId,
    inputs: usize,
    outputs: usize,
}

impl Matrix {
    pub(super) fn declare(declaration: &mut Declaration, name: &str, [inputs, outputs]: [usize; 2]) -> Self {
        Self { weight: declaration.add(name, &[inputs, outputs], INIT), inputs, outputs }
    }

    /// Computes all rows.
    pub(super) fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
        rows: usize,
    ) -> Result<Tensor<D>> {
        let mut y = pass.device.alloc(rows * self.outputs)?;
        let shape = GemmShape { rows, columns: self.outputs, inner: self.inputs };
        let (x, weight) = ((x, MatrixLayout::rows(self.inputs)), pass.parameters.value(self.weight));
        let by_output = MatrixLayout::rows(self.outputs);
        pass.device.gemm(shape, x, (weight, by_output), false, (&mut y, by_output), Epilogue::None)?;
        Ok(y)
    }

    /// Accumulates the weight gradient and returns the gradient of `x`.
    pub(super) fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        x: &Tensor<D>,
        dy: &Tensor<D>,
        rows: usize,
    ) -> Result<Tensor<D>> {
        let device = pass.device;
        let (by_input, by_output) = (MatrixLayout::rows(self.inputs), MatrixLayout::rows(self.outputs));
        let mut dx = device.alloc(rows * self.inputs)?;
        let (weight, gradient) = pass.parameters.both(self.weight);
        let shape = GemmShape { rows, columns: self.inputs, inner: self.outputs };
        let transposed = (weight, by_output.transposed());
        device.gemm(shape, (dy, by_output), transposed, false, (&mut dx, by_input), Epilogue::None)?;
        if let Some(gradient) = gradient {
            let shape = GemmShape { rows: self.inputs, columns: self.outputs, inner: rows };
            let x = (x, by_input.transposed());
            device.gemm(shape, x, (dy, by_output), true, (gradient, by_output), Epilogue::None)?;
        }
        Ok(dx)
    }
}
