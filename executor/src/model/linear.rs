//! Linear layers, with weights `[outputs, inputs]` as checkpoints have them.

use super::parameters::{Declaration, Init, ParameterId, Parameters};
use super::{BackwardPass, Pass};
use crate::device::{Device, Layout, Shape};
use crate::error::Result;
use crate::ops::bias::Columns;

/// `y = x Wᵀ + b`.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    weight: ParameterId,
    bias: Option<ParameterId>,
    inputs: usize,
    outputs: usize,
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
        Self { weight, bias, inputs, outputs }
    }

    /// A layer of parameters that are declared; the weight may have any shape of `outputs * inputs` elements.
    #[must_use]
    pub fn of(weight: ParameterId, bias: Option<ParameterId>, [outputs, inputs]: [usize; 2]) -> Self {
        Self { weight, bias, inputs, outputs }
    }

    /// Returns the width of a row that comes out.
    #[must_use]
    pub const fn outputs(&self) -> usize {
        self.outputs
    }

    /// Computes all rows.
    pub fn forward<D: Device>(&self, pass: &Pass<'_, D>, x: &D::Floats, rows: usize) -> Result<D::Floats> {
        let mut y = pass.device.alloc(rows * self.outputs)?;
        self.forward_into(pass, x, rows, &mut y, Columns::all(self.outputs))?;
        Ok(y)
    }

    /// Computes some columns of wider rows.
    pub fn forward_into<D: Device>(
        &self,
        pass: &Pass<'_, D>,
        x: &D::Floats,
        rows: usize,
        y: &mut D::Floats,
        columns: Columns,
    ) -> Result<()> {
        if let Some(bias) = self.bias {
            pass.device.bias(pass.parameters.value(bias), y, columns)?;
        }
        let shape = Shape { rows, columns: self.outputs, inner: self.inputs };
        let weight = (pass.parameters.value(self.weight), Layout::rows(self.inputs).transposed());
        let target = (y, Layout::rows(columns.stride).at(columns.first));
        pass.device.gemm(shape, (x, Layout::rows(self.inputs)), weight, self.bias.is_some(), target)
    }

    /// Adds the gradients of the parameters and returns that of `x`.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        x: &D::Floats,
        dy: &D::Floats,
        rows: usize,
    ) -> Result<D::Floats> {
        let mut dx = pass.device.alloc(rows * self.inputs)?;
        let columns = Columns::all(self.outputs);
        self.backward_weights(pass.device, pass.parameters, x, dy, rows, columns)?;
        self.backward_into(pass, dy, rows, columns, false, &mut dx)?;
        Ok(dx)
    }

    /// Writes the gradient of `x`, or adds it, from some columns of wider rows.
    pub fn backward_into<D: Device>(
        &self,
        pass: &BackwardPass<'_, D>,
        dy: &D::Floats,
        rows: usize,
        columns: Columns,
        is_added: bool,
        dx: &mut D::Floats,
    ) -> Result<()> {
        let shape = Shape { rows, columns: self.inputs, inner: self.outputs };
        let weight = (pass.parameters.value(self.weight), Layout::rows(self.inputs));
        let dy = (dy, Layout::rows(columns.stride).at(columns.first));
        pass.device.gemm(shape, dy, weight, is_added, (dx, Layout::rows(self.inputs)))
    }

    /// Adds the gradients of the parameters, from some columns of wider rows.
    pub fn backward_weights<D: Device>(
        &self,
        device: &D,
        parameters: &mut Parameters<D>,
        x: &D::Floats,
        dy: &D::Floats,
        rows: usize,
        columns: Columns,
    ) -> Result<()> {
        if let Some(gradient) = self.bias.and_then(|bias| parameters.gradient_mut(bias)) {
            device.bias_backward(dy, columns, gradient)?;
        }
        let Some(gradient) = parameters.gradient_mut(self.weight) else { return Ok(()) };
        let shape = Shape { rows: self.outputs, columns: self.inputs, inner: rows };
        let dy = (dy, Layout::rows(columns.stride).at(columns.first).transposed());
        device.gemm(shape, dy, (x, Layout::rows(self.inputs)), true, (gradient, Layout::rows(self.inputs)))
    }
}
