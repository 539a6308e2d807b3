//! Projects encoder rows into the LLM: merged rows, a norm, an MLP or one matrix, and an arrangement with
//! newlines.
//!
//! Matrix with a row for every input, like the Gemma 3 projection: `y = x W`, without a bias.
//!
//! The weight gradient is computed with the backward pass; tensor-parallel ranks have copies.

use super::INIT;
use crate::block::{BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations};
use crate::error::{Error, Result};
use crate::layers::{Linear, Mlp, MlpNames, MlpSpec, Norm, NormKind};
use crate::parameters::Declaration;
use crate::parameters::weights::ParameterId;
use dflop_device::ops::activation::Activation;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Tensor};

/// Projector sizes and names.
#[derive(Debug, Clone, PartialEq)]
pub struct ProjectorSpec {
    /// Number of encoder rows merged into each row.
    pub merged: usize,
    /// Row width before merging.
    pub hidden: usize,
    /// Norm kind, name, epsilon and width; the width shows whether the norm applies before or after merging.
    pub norm: Option<(NormKind, String, f64, usize)>,
    /// Matrices between encoder and LLM width.
    pub map: ProjectorMap,
    /// LLM width.
    pub outputs: usize,
    /// Name of the learned newline row, which ends image lines.
    pub newline: Option<String>,
}

/// Projector matrices.
#[derive(Debug, Clone, PartialEq)]
pub enum ProjectorMap {
    /// Names, width between the matrices, activation, and whether there are biases.
    Mlp([String; 2], usize, Activation, bool),
    /// Matrix name; the matrix has a bias.
    Linear(String),
    /// Full name for a matrix with a row for every input, without a bias.
    Matrix(String),
}

impl ProjectorSpec {
    /// Returns the width between the MLP matrices.
    pub(super) fn middle(&self) -> Option<usize> {
        match self.map {
            ProjectorMap::Mlp(_, middle, ..) => Some(middle),
            ProjectorMap::Linear(_) | ProjectorMap::Matrix(_) => None,
        }
    }
}

#[derive(Debug)]
enum Matrices {
    Mlp(Mlp),
    Linear(Linear),
    Matrix(Matrix),
}

/// Projector.
#[derive(Debug)]
pub(super) struct Projector {
    norm: Option<Norm>,
    map: Matrices,
    newline: Option<ParameterId>,
    /// Merged row width.
    inputs: usize,
    outputs: usize,
}

impl Projector {
    pub(super) fn declare(declaration: &mut Declaration, spec: &ProjectorSpec) -> Self {
        let (inputs, outputs) = (spec.merged * spec.hidden, spec.outputs);
        let norm = spec
            .norm
            .as_ref()
            .map(|(kind, name, epsilon, width)| Norm::declare(declaration, name, *kind, *width, *epsilon));
        let map = match &spec.map {
            ProjectorMap::Linear(name) => {
                Matrices::Linear(Linear::declare(declaration, name, [outputs, inputs], true, INIT))
            }
            ProjectorMap::Matrix(name) => {
                Matrices::Matrix(Matrix::declare(declaration, name, [inputs, outputs]))
            }
            ProjectorMap::Mlp(names, middle, activation, has_bias) => {
                let names = MlpNames::Plain(names.clone(), *activation);
                let (middle, has_bias) = (*middle, *has_bias);
                let spec = MlpSpec { inputs, middle, outputs, names, has_bias, init: INIT };
                Matrices::Mlp(Mlp::declare(declaration, &spec))
            }
        };
        let newline = spec.newline.as_ref().map(|name| declaration.add(name, &[outputs], INIT));
        Self { norm, map, newline, inputs, outputs }
    }
}

impl<D: Device> Block<D> for Projector {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let (device, inputs) = (pass.device, pass.context.inputs.encoder()?);
        let problem = format!("must be a multiple of {} elements", self.inputs);
        let whole = input.filter(|rows| rows.len().is_multiple_of(self.inputs));
        let mut x = whole.ok_or(Error::Input { input: "rows of the encoder", problem })?;
        let rows = x.len() / self.inputs;
        if let Some(norm) = self.norm {
            let (y, statistics) = norm.forward(pass, &x)?;
            saved.keep(x);
            saved.keep(statistics);
            x = y;
        }
        let projected = match &self.map {
            Matrices::Mlp(mlp) => mlp.forward(pass, x, rows, saved)?,
            Matrices::Linear(linear) => {
                let y = linear.forward(pass, &x, rows)?;
                saved.keep(x);
                y
            }
            Matrices::Matrix(matrix) => {
                let y = matrix.forward(pass, &x, rows)?;
                saved.keep(x);
                y
            }
        };
        // families without newlines or windows use the projected rows in order
        let Some(arranged) = &inputs.arranged else { return Ok(BlockOutput::Rows(projected)) };
        let mut y = device.zeros(arranged.rows * self.outputs)?;
        device.gather_scatter(&arranged.forward, self.outputs, &projected, &mut y)?;
        if let (Some(newline), Some(newlines)) = (self.newline, &inputs.newlines) {
            let newline = pass.parameters.value(newline);
            device.gather_scatter(&newlines.forward, self.outputs, newline, &mut y)?;
        }
        Ok(BlockOutput::Rows(y))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
        is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let (device, inputs) = (pass.device, pass.context.inputs.encoder()?);
        let mut d = crate::block::expect_rows::<D>(gradient, inputs.tokens, self.outputs)?;
        let newline = self.newline.and_then(|newline| pass.parameters.gradient_mut(newline));
        if let (Some(newline), Some(newlines)) = (newline, &inputs.newlines) {
            device.gather_scatter(&newlines.backward, self.outputs, &d, newline)?;
        }
        if let Some(arranged) = &inputs.arranged {
            let mut d_projected = device.zeros(inputs.projected_rows * self.outputs)?;
            device.gather_scatter(&arranged.backward, self.outputs, &d, &mut d_projected)?;
            d = d_projected;
        }
        let rows = inputs.projected_rows;
        let dx = match &self.map {
            Matrices::Mlp(mlp) => mlp.backward(pass, &d, rows, saved)?,
            Matrices::Linear(linear) => {
                let x = saved.take();
                linear.backward(pass, x, &d, rows)?
            }
            Matrices::Matrix(matrix) => {
                let x = saved.take();
                matrix.backward(pass, &x, &d, rows)?
            }
        };
        let Some(norm) = self.norm else { return Ok(Some(dx)) };
        let (statistics, x) = (saved.take(), saved.take());
        let mut d_rows = device.zeros(x.len())?;
        norm.backward(pass, &dx, &x, &statistics, is_input_needed.then_some(&mut d_rows))?;
        Ok(Some(d_rows))
    }
}

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
