//! Layer MLP: gated, with three matrices, or plain, with two.
//!
//! Each tensor-parallel rank holds a column range between the matrices.

use super::linear::Linear;
use crate::block::{BackwardPass, ForwardPass, SavedActivations, tensor_parallel};
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::{AxisPartition, Init};
use dflop_device::ops::activation::Activation;
use dflop_device::ops::bias::Columns;
use dflop_device::{Device, Tensor};

/// MLP sizes and names.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpSpec {
    /// Input row width.
    pub inputs: usize,
    /// Width between the matrices.
    pub middle: usize,
    /// Output row width.
    pub outputs: usize,
    /// Matrix names.
    pub names: MlpNames,
    /// Whether they have biases.
    pub has_bias: bool,
    /// Matrix initialization.
    pub init: Init,
}

/// Matrix names, by MLP kind.
#[derive(Debug, Clone, PartialEq)]
pub enum MlpNames {
    /// Gate, up, down, with the activation on the gate.
    Gated([String; 3], Activation),
    /// Up and down, with the activation between them.
    Plain([String; 2], Activation),
}

/// Layer or projector MLP.
#[derive(Debug)]
pub struct Mlp {
    /// Gate and up, or only up.
    inner: Vec<Linear>,
    down: Linear,
    activation: Activation,
    /// Width between the matrices on this rank.
    middle: usize,
}

impl Mlp {
    /// Declares the parameters.
    pub fn declare(declaration: &mut Declaration, spec: &MlpSpec) -> Self {
        let MlpSpec { inputs, middle, outputs, has_bias, init, .. } = *spec;
        let (inner, down, activation) = match &spec.names {
            MlpNames::Gated([gate, up, down], activation) => (vec![gate, up], down, *activation),
            MlpNames::Plain([up, down], activation) => (vec![up], down, *activation),
        };
        let tp_rank = declaration.tp_rank();
        let parts = AxisPartition::even(middle, tp_rank.size);
        let sizes = [middle, inputs];
        let mut declare =
            |name: &String| Linear::declare_column_parallel(declaration, name, sizes, has_bias, init, &parts);
        let inner = inner.into_iter().map(&mut declare).collect();
        let sizes = [outputs, middle];
        let down = Linear::declare_row_parallel(declaration, down, sizes, has_bias, init, &parts);
        Self { inner, down, activation, middle: parts.len(tp_rank.rank) }
    }

    fn is_gated(&self) -> bool {
        self.inner.len() == 2
    }

    fn stride(&self) -> usize {
        self.inner.len() * self.middle
    }

    /// Computes the MLP for rows, which are saved.
    pub fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: Tensor<D>,
        rows: usize,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let device = pass.device;
        let mut before = device.alloc(rows * self.stride())?;
        // gate and up are adjacent in one row, so that the gate is one operation
        for (index, layer) in self.inner.iter().enumerate() {
            let columns = Columns { first: index * self.middle, stride: self.stride() };
            layer.forward_into(pass, &x, rows, &mut before, columns)?;
        }
        let mut after = device.alloc(rows * self.middle)?;
        if self.is_gated() {
            device.gate(self.activation, &before, self.middle, &mut after)?;
        } else {
            device.activate(self.activation, &before, &mut after)?;
        }
        let y = self.down.forward(pass, &after, rows)?;
        for buffer in [x, before, after] {
            saved.keep(buffer);
        }
        Ok(y)
    }

    /// Accumulates parameter gradients and returns the row gradient.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        dy: &Tensor<D>,
        rows: usize,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let device = pass.device;
        let (after, before, x) = (saved.take(), saved.take(), saved.take());
        let mut d_after = self.down.backward(pass, after, dy, rows)?;
        let d_before = if self.is_gated() {
            let mut d_before = device.alloc(before.len())?;
            device.gate_backward(self.activation, &d_after, &before, self.middle, &mut d_before)?;
            d_before
        } else {
            device.activate_backward(self.activation, &before, &mut d_after)?;
            d_after
        };
        let mut dx = device.alloc(x.len())?;
        let columns = |index: usize| Columns { first: index * self.middle, stride: self.stride() };
        for (index, layer) in self.inner.iter().enumerate() {
            layer.backward_into(pass, &d_before, rows, columns(index), index > 0, &mut dx)?;
        }
        let layers =
            self.inner.iter().enumerate().map(|(index, layer)| layer.weights(columns(index))).collect();
        Linear::backward_weights(layers, pass, (x, d_before), rows)?;
        tensor_parallel::all_reduce(pass.tensor, &mut dx)?;
        Ok(dx)
    }
}
