//! Gradients of linear layers' weights: computed with the backward pass, or kept for later.
//!
//! A schedule that splits backward passes first computes the gradient of the input, which the stage before
//! waits for, and fills waits of its own with the gradients of weights. Those are products of the rows that a
//! layer read and of the gradient of those that it wrote.
//!
//! # Source
//! Qi et al.: "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241.

use crate::error::Result;
use crate::parameters::Parameters;
use crate::weights::ParameterId;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Tensor};

/// Parameters of a linear layer, and its columns in rows that may be wider.
#[derive(Debug, Clone, Copy)]
pub struct LayerWeights {
    /// Weight, `[outputs, inputs]`.
    pub weight: ParameterId,
    /// Bias, `[outputs]`.
    pub bias: Option<ParameterId>,
    /// Width of an input row.
    pub inputs: usize,
    /// Width of an output row.
    pub outputs: usize,
    /// Columns of the outputs.
    pub columns: Columns,
}

/// Products that give the gradients of the weights of layers of one input.
pub struct PendingWeights<D: Device> {
    layers: Vec<LayerWeights>,
    x: Tensor<D>,
    dy: Tensor<D>,
    rows: usize,
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
    pub(crate) fn accumulate<D: Device>(
        &self,
        device: &D,
        parameters: &mut Parameters<D>,
        (x, dy): (&Tensor<D>, &Tensor<D>),
        rows: usize,
    ) -> Result<()> {
        let Self { weight, bias, inputs, outputs, columns } = *self;
        let (gradient, d_bias) = match bias {
            Some(bias) => parameters.gradients_mut(weight, bias),
            None => (parameters.gradient_mut(weight), None),
        };
        let Some(gradient) = gradient else {
            // a frozen matrix can have a trained bias
            return Ok(d_bias.map_or(Ok(()), |d_bias| device.bias_backward(dy, columns, d_bias))?);
        };
        let epilogue = d_bias.map_or(Epilogue::None, Epilogue::BiasGradient);
        let shape = GemmShape { rows: outputs, columns: inputs, inner: rows };
        let dy = (dy, MatrixLayout::rows(columns.stride).at(columns.first).transposed());
        let by_input = MatrixLayout::rows(inputs);
        Ok(device.gemm(shape, dy, (x, by_input), true, (gradient, by_input), epilogue)?)
    }
}

impl<D: Device> PendingWeights<D> {
    /// Keeps the rows of layers, and the gradients of their outputs.
    pub(crate) fn new(layers: Vec<LayerWeights>, x: Tensor<D>, dy: Tensor<D>, rows: usize) -> Self {
        Self { layers, x, dy, rows }
    }

    /// Accumulates the gradients of the parameters.
    pub(crate) fn compute(&self, device: &D, parameters: &mut Parameters<D>) -> Result<()> {
        let products = (&self.x, &self.dy);
        self.layers.iter().try_for_each(|layer| layer.accumulate(device, parameters, products, self.rows))
    }

    /// Size of what is kept in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.x.bytes() + self.dy.bytes()
    }
}
