//! Linear layers, with weights `[outputs, inputs]` as in checkpoints.
//!
//! Each tensor-parallel rank holds some outputs of a *column-parallel* layer, and some inputs of a
//! *row-parallel* layer, whose products are summed over ranks. The caller sums input gradients for
//! column-parallel layers over ranks, because several layers may have the same input.

use crate::block::{BackwardPass, ForwardPass, tensor_parallel};
use crate::error::Result;
use crate::parameters::weights::{AxisPartition, Init, ParameterId};
use crate::parameters::{Declaration, LayerWeights, PendingWeights, WeightGradients, WeightMatrix};
use dflop_device::ops::bias::Columns;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Tensor};

/// Linear layer: `y = x Wᵀ + b`.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    weight: ParameterId,
    bias: Option<ParameterId>,
    inputs: usize,
    outputs: usize,
    /// Whether outputs are sums over tensor-parallel ranks.
    is_row_parallel: bool,
    /// Whether another tensor-parallel rank adds the bias.
    is_bias_elsewhere: bool,
}

impl Linear {
    /// Declares `NAME.weight` and, if there is one, `NAME.bias`.
    pub fn declare(
        declaration: &mut Declaration,
        name: &str,
        [outputs, inputs]: [usize; 2],
        has_bias: bool,
        init: Init,
    ) -> Self {
        let weight = declaration.add(format!("{name}.weight"), &[outputs, inputs], init);
        let bias = has_bias.then(|| declaration.add(format!("{name}.bias"), &[outputs], Init::Zeros));
        Self::from_parameters(weight, bias, [outputs, inputs])
    }

    /// Declares a layer that is sharded by outputs; `sizes` are the unsharded sizes.
    pub fn declare_column_parallel(
        declaration: &mut Declaration,
        name: &str,
        [outputs, inputs]: [usize; 2],
        has_bias: bool,
        init: Init,
        parts: &AxisPartition,
    ) -> Self {
        let cut = (0, parts);
        let weight = declaration.add_cut(format!("{name}.weight"), &[outputs, inputs], init, cut);
        let bias =
            has_bias.then(|| declaration.add_cut(format!("{name}.bias"), &[outputs], Init::Zeros, cut));
        Self::from_parameters(weight, bias, [parts.len(declaration.tp_rank().rank), inputs])
    }

    /// Declares a layer that is sharded by inputs; `sizes` are the unsharded sizes.
    pub fn declare_row_parallel(
        declaration: &mut Declaration,
        name: &str,
        [outputs, inputs]: [usize; 2],
        has_bias: bool,
        init: Init,
        parts: &AxisPartition,
    ) -> Self {
        let weight = declaration.add_cut(format!("{name}.weight"), &[outputs, inputs], init, (1, parts));
        let bias = has_bias.then(|| declaration.add(format!("{name}.bias"), &[outputs], Init::Zeros));
        let tp_rank = declaration.tp_rank();
        Self {
            is_row_parallel: true,
            // outputs are summed over ranks, so only one rank may add the bias
            is_bias_elsewhere: tp_rank.rank > 0,
            ..Self::from_parameters(weight, bias, [outputs, parts.len(tp_rank.rank)])
        }
    }

    /// Builds a layer from declared parameters; the weight may have any shape with `outputs * inputs`
    /// elements.
    #[must_use]
    pub fn from_parameters(
        weight: ParameterId,
        bias: Option<ParameterId>,
        [outputs, inputs]: [usize; 2],
    ) -> Self {
        Self { weight, bias, inputs, outputs, is_row_parallel: false, is_bias_elsewhere: false }
    }

    /// Returns the output row width.
    #[must_use]
    pub const fn outputs(&self) -> usize {
        self.outputs
    }

    /// Computes all rows, summed over ranks for a row-parallel layer.
    pub fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
        rows: usize,
    ) -> Result<Tensor<D>> {
        let mut y = pass.device.alloc(rows * self.outputs)?;
        self.forward_into(pass, x, rows, &mut y, Columns::all(self.outputs))?;
        if self.is_row_parallel {
            tensor_parallel::all_reduce(pass.tensor, &mut y)?;
        }
        Ok(y)
    }

    /// Computes a column range in wider rows, without the sum over ranks.
    pub fn forward_into<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
        rows: usize,
        y: &mut Tensor<D>,
        columns: Columns,
    ) -> Result<()> {
        let bias = self.bias.filter(|_| !self.is_bias_elsewhere);
        let epilogue = bias.map_or(Epilogue::None, |bias| Epilogue::Bias(pass.parameters.value(bias)));
        let shape = GemmShape { rows, columns: self.outputs, inner: self.inputs };
        let weight = (pass.parameters.value(self.weight), MatrixLayout::rows(self.inputs).transposed());
        let target = (y, MatrixLayout::rows(columns.stride).at(columns.first));
        Ok(pass.device.gemm(shape, (x, MatrixLayout::rows(self.inputs)), weight, false, target, epilogue)?)
    }

    /// Accumulates parameter gradients, now or later, and returns the gradient of `x`.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        x: Tensor<D>,
        dy: &Tensor<D>,
        rows: usize,
    ) -> Result<Tensor<D>> {
        self.backward_weight(pass, x, dy, rows)?;
        self.backward_input(pass, dy, rows)
    }

    /// Returns the input gradient.
    pub fn backward_input<D: Device>(
        &self,
        pass: &BackwardPass<'_, D>,
        dy: &Tensor<D>,
        rows: usize,
    ) -> Result<Tensor<D>> {
        let mut dx = pass.device.alloc(rows * self.inputs)?;
        self.backward_into(pass, dy, rows, Columns::all(self.outputs), false, &mut dx)?;
        Ok(dx)
    }

    /// Accumulates parameter gradients, now or later.
    pub fn backward_weight<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        x: Tensor<D>,
        dy: &Tensor<D>,
        rows: usize,
    ) -> Result<()> {
        let layer = self.weights(Columns::all(self.outputs));
        match &mut pass.weights {
            WeightGradients::Now => layer.accumulate(pass.device, pass.parameters, (&x, dy), 0..rows),
            // The caller continues to use the output gradient.
            WeightGradients::Later(pending) => {
                pending.push(PendingWeights::new(vec![layer], x, pass.device.copy(dy)?, rows));
                Ok(())
            }
        }
    }

    /// Writes or accumulates the gradient of `x`, from a column range in wider rows.
    pub fn backward_into<D: Device>(
        &self,
        pass: &BackwardPass<'_, D>,
        dy: &Tensor<D>,
        rows: usize,
        columns: Columns,
        is_added: bool,
        dx: &mut Tensor<D>,
    ) -> Result<()> {
        let shape = GemmShape { rows, columns: self.inputs, inner: self.outputs };
        let weight = (pass.parameters.value(self.weight), MatrixLayout::rows(self.inputs));
        let dy = (dy, MatrixLayout::rows(columns.stride).at(columns.first));
        let dx = (dx, MatrixLayout::rows(self.inputs));
        Ok(pass.device.gemm(shape, dy, weight, is_added, dx, Epilogue::None)?)
    }

    /// Accumulates parameter gradients for layers with the same input, now or later.
    ///
    /// - `(x, dy)`: the input, and the gradient rows that contain the columns for all layers
    pub fn backward_weights<D: Device>(
        layers: Vec<LayerWeights>,
        pass: &mut BackwardPass<'_, D>,
        (x, dy): (Tensor<D>, Tensor<D>),
        rows: usize,
    ) -> Result<()> {
        pass.add_weights(PendingWeights::new(layers, x, dy, rows))
    }

    /// Returns the layer parameters, with the layer columns in the output rows.
    #[must_use]
    pub const fn weights(&self, columns: Columns) -> LayerWeights {
        let Self { weight, bias, inputs, outputs, .. } = *self;
        LayerWeights { weight, matrix: WeightMatrix::WHOLE, bias, inputs, outputs, columns }
    }
}
