//! Gradients of linear layers' weights: computed with the backward pass, or kept for later.
//!
//! A schedule that splits backward passes first computes the gradient of the input, which the stage before
//! waits for, and fills waits of its own with the gradients of weights. Those are products of the rows that a
//! layer read and of the gradient of those that it wrote.
//!
//! # Source
//! Qi et al.: "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241.

use std::ops::Range;

use crate::error::Result;
use crate::parameters::Parameters;
use crate::weights::ParameterId;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Tensor};

/// Parameters of a linear layer, and its columns in rows that may be wider.
#[derive(Debug, Clone, Copy)]
pub struct LayerWeights {
    /// Parameter that has the weight.
    pub weight: ParameterId,
    /// Location of the weight in its parameter.
    pub matrix: WeightMatrix,
    /// Bias, `[outputs]`.
    pub bias: Option<ParameterId>,
    /// Width of an input row.
    pub inputs: usize,
    /// Width of an output row.
    pub outputs: usize,
    /// Columns of the outputs.
    pub columns: Columns,
}

/// Location and orientation of a weight in a parameter, which may have several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightMatrix {
    /// First element.
    pub first: usize,
    /// Whether the weight is `[inputs, outputs]` instead of `[outputs, inputs]`.
    pub is_by_inputs: bool,
}

impl WeightMatrix {
    /// All of the parameter, `[outputs, inputs]`.
    pub const WHOLE: Self = Self { first: 0, is_by_inputs: false };
}

/// Products that give the gradients of the weights of layers of one input, each with the rows that it read.
pub struct PendingWeights<D: Device> {
    layers: Vec<(LayerWeights, Range<usize>)>,
    x: Tensor<D>,
    dy: Tensor<D>,
}

/// When a backward pass computes the gradients of weights.
pub enum WeightGradients<'a, D: Device> {
    /// At once.
    Now,
    /// Later, from what is kept here.
    Later(&'a mut Vec<PendingWeights<D>>),
}

impl LayerWeights {
    /// Accumulates the gradients of the parameters.
    ///
    /// - `(x, dy)`: input rows, and the gradient of the rows that contain the outputs
    /// - `rows`: rows of both; a layer that has a bias reads all of them
    pub(crate) fn accumulate<D: Device>(
        &self,
        device: &D,
        parameters: &mut Parameters<D>,
        (x, dy): (&Tensor<D>, &Tensor<D>),
        rows: Range<usize>,
    ) -> Result<()> {
        let Self { weight, matrix, bias, inputs, outputs, columns } = *self;
        let (gradient, d_bias) = match bias {
            Some(bias) => parameters.gradients_mut(weight, bias),
            None => (parameters.gradient_mut(weight), None),
        };
        let Some(gradient) = gradient else {
            // a frozen matrix can have a trained bias
            return Ok(d_bias.map_or(Ok(()), |d_bias| device.bias_backward(dy, columns, d_bias))?);
        };
        let epilogue = d_bias.map_or(Epilogue::None, Epilogue::BiasGradient);
        let dy_at = MatrixLayout::rows(columns.stride).at(rows.start * columns.stride + columns.first);
        let x_at = MatrixLayout::rows(inputs).at(rows.start * inputs);
        if matrix.is_by_inputs {
            let shape = GemmShape { rows: inputs, columns: outputs, inner: rows.len() };
            let gradient = (gradient, MatrixLayout::rows(outputs).at(matrix.first));
            return Ok(device.gemm(shape, (x, x_at.transposed()), (dy, dy_at), true, gradient, epilogue)?);
        }
        let shape = GemmShape { rows: outputs, columns: inputs, inner: rows.len() };
        let gradient = (gradient, MatrixLayout::rows(inputs).at(matrix.first));
        Ok(device.gemm(shape, (dy, dy_at.transposed()), (x, x_at), true, gradient, epilogue)?)
    }
}

impl<D: Device> PendingWeights<D> {
    /// Keeps the rows of layers, and the gradients of their outputs.
    pub(crate) fn new(layers: Vec<LayerWeights>, x: Tensor<D>, dy: Tensor<D>, rows: usize) -> Self {
        Self::of_rows(layers.into_iter().map(|layer| (layer, 0..rows)).collect(), x, dy)
    }

    /// Keeps the rows of layers that each read some of them, and the gradients of their outputs.
    pub(crate) fn of_rows(layers: Vec<(LayerWeights, Range<usize>)>, x: Tensor<D>, dy: Tensor<D>) -> Self {
        Self { layers, x, dy }
    }

    /// Accumulates the gradients of the parameters.
    pub(crate) fn compute(&self, device: &D, parameters: &mut Parameters<D>) -> Result<()> {
        let products = (&self.x, &self.dy);
        let mut layers = self.layers.iter();
        layers.try_for_each(|(layer, rows)| layer.accumulate(device, parameters, products, rows.clone()))
    }

    /// Size of what is kept in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.x.bytes() + self.dy.bytes()
    }
}
