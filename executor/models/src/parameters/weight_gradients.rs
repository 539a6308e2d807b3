//! Weight gradients for linear layers: computed with the backward pass, or deferred.
//!
//! A schedule that splits backward passes first computes the input gradient, which the previous stage waits
//! for, and fills idle time with weight gradients. A weight gradient is the product of input rows and output
//! gradient rows of a layer.
//!
//! # Source
//! Qi et al.: "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241.

use std::ops::Range;

use super::Parameters;
use super::weights::ParameterId;
use crate::error::Result;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Tensor};

/// Linear layer parameters, and the layer columns in rows that may be wider.
#[derive(Debug, Clone, Copy)]
pub struct LayerWeights {
    /// Parameter that contains the weight.
    pub weight: ParameterId,
    /// Weight location in the parameter.
    pub matrix: WeightMatrix,
    /// Bias, `[outputs]`.
    pub bias: Option<ParameterId>,
    /// Input row width.
    pub inputs: usize,
    /// Output row width.
    pub outputs: usize,
    /// Output columns.
    pub columns: Columns,
}

/// Location and orientation of a weight in a parameter, which may contain several weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightMatrix {
    /// First element.
    pub first: usize,
    /// Whether the weight is `[inputs, outputs]` instead of `[outputs, inputs]`.
    pub is_by_inputs: bool,
}

impl WeightMatrix {
    /// The complete parameter, `[outputs, inputs]`.
    pub const WHOLE: Self = Self { first: 0, is_by_inputs: false };
}

/// Pending products for the weight gradients of layers with the same input, each with the rows that the layer
/// read.
pub struct PendingWeights<D: Device> {
    layers: Vec<(LayerWeights, Range<usize>)>,
    x: Tensor<D>,
    dy: Tensor<D>,
}

/// Time at which a backward pass computes weight gradients.
pub enum WeightGradients<'a, D: Device> {
    /// At once.
    Now,
    /// Later, from products that are kept here.
    Later(&'a mut Vec<PendingWeights<D>>),
}

impl LayerWeights {
    /// Accumulates parameter gradients.
    ///
    /// - `(x, dy)`: input rows, and the gradient rows that contain the outputs
    /// - `rows`: row range in both; a layer with a bias reads all rows
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
    /// Keeps layer input rows and output gradients.
    pub(crate) fn new(layers: Vec<LayerWeights>, x: Tensor<D>, dy: Tensor<D>, rows: usize) -> Self {
        Self::from_rows(layers.into_iter().map(|layer| (layer, 0..rows)).collect(), x, dy)
    }

    /// Keeps input rows and output gradients for layers that each read some rows.
    pub(crate) fn from_rows(layers: Vec<(LayerWeights, Range<usize>)>, x: Tensor<D>, dy: Tensor<D>) -> Self {
        Self { layers, x, dy }
    }

    /// Accumulates parameter gradients.
    pub(crate) fn compute(&self, device: &D, parameters: &mut Parameters<D>) -> Result<()> {
        let products = (&self.x, &self.dy);
        let mut layers = self.layers.iter();
        layers.try_for_each(|(layer, rows)| layer.accumulate(device, parameters, products, rows.clone()))
    }

    /// Returns the size of the kept rows in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.x.bytes() + self.dy.bytes()
    }
}
