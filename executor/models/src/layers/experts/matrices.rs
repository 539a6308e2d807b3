//! Matrices for all experts in a layer: separate parameters, or a shared parameter.
//!
//! MLP that every token goes through in addition to the routed experts, with or without a gate.

use super::SharedExpertsSpec;
use super::router::{Dispatch, RowOrder};
use crate::block::{BackwardPass, ForwardPass, SavedActivations};
use crate::error::Result;
use crate::layers::linear::Linear;
use crate::layers::mlp::Mlp;
use crate::parameters::weights::{AxisPartition, Init, ParameterId};
use crate::parameters::{Declaration, LayerWeights, WeightMatrix};
use dflop_device::ops::bias::Columns;
use dflop_device::ops::experts::{ExpertScores, ExpertWeightShape};
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Dtype, Tensor};
use std::ops::Range;

/// Linear layers without biases, one per expert, which each read some rows.
#[derive(Debug)]
pub(super) struct Matrices {
    /// A parameter per expert, or a single parameter for all experts.
    weights: Vec<ParameterId>,
    inputs: usize,
    outputs: usize,
    /// Output columns in rows that may be wider.
    columns: Columns,
    is_by_inputs: bool,
}

/// Matrix axis that tensor-parallel ranks divide.
#[derive(Debug, Clone, Copy)]
pub(super) enum Divided<'a> {
    /// Outputs: column-parallel.
    Outputs(&'a AxisPartition),
    /// Inputs: row-parallel.
    Inputs(&'a AxisPartition),
}

impl Divided<'_> {
    /// Returns the sizes of the part of `[outputs, inputs]` on this rank.
    fn held(self, declaration: &Declaration, [outputs, inputs]: [usize; 2]) -> [usize; 2] {
        let rank = declaration.tp_rank().rank;
        match self {
            Divided::Outputs(parts) => [parts.len(rank), inputs],
            Divided::Inputs(parts) => [outputs, parts.len(rank)],
        }
    }
}

impl Matrices {
    /// Declares a parameter per expert, `[outputs, inputs]`.
    ///
    /// - `columns`: output columns on this rank
    pub(super) fn separate(
        declaration: &mut Declaration,
        names: Vec<String>,
        [outputs, inputs]: [usize; 2],
        init: Init,
        divided: Divided<'_>,
        columns: Columns,
    ) -> Self {
        let cut = match divided {
            Divided::Outputs(parts) => (0, parts),
            Divided::Inputs(parts) => (1, parts),
        };
        let weights =
            names.into_iter().map(|name| declaration.add_cut(name, &[outputs, inputs], init, cut)).collect();
        let [outputs, inputs] = divided.held(declaration, [outputs, inputs]);
        Self { weights, inputs, outputs, columns, is_by_inputs: false }
    }

    /// Declares a single parameter for all experts, `[experts, inputs, outputs]`; outputs are complete rows.
    pub(super) fn fused(
        declaration: &mut Declaration,
        name: &str,
        [experts, inputs, outputs]: [usize; 3],
        init: Init,
        divided: Divided<'_>,
    ) -> Self {
        let cut = match divided {
            Divided::Outputs(parts) => (2, parts),
            Divided::Inputs(parts) => (1, parts),
        };
        let weights = vec![declaration.add_cut(name, &[experts, inputs, outputs], init, cut)];
        let [outputs, inputs] = divided.held(declaration, [outputs, inputs]);
        Self { weights, inputs, outputs, columns: Columns::all(outputs), is_by_inputs: true }
    }

    /// Returns the parameter of an expert, and the matrix location in the parameter.
    fn matrix(&self, expert: usize) -> (ParameterId, WeightMatrix) {
        let is_by_inputs = self.is_by_inputs;
        match self.weights[..] {
            [all] if is_by_inputs => {
                (all, WeightMatrix { first: expert * self.inputs * self.outputs, is_by_inputs })
            }
            _ => (self.weights[expert], WeightMatrix { first: 0, is_by_inputs }),
        }
    }

    /// Returns an expert matrix as `[inputs, outputs]`.
    fn layout(&self, matrix: WeightMatrix) -> MatrixLayout {
        if matrix.is_by_inputs {
            MatrixLayout::rows(self.outputs).at(matrix.first)
        } else {
            MatrixLayout::rows(self.inputs).at(matrix.first).transposed()
        }
    }

    /// Returns an expert matrix as `[outputs, inputs]`.
    fn layout_backward(&self, matrix: WeightMatrix) -> MatrixLayout {
        if matrix.is_by_inputs {
            MatrixLayout::rows(self.outputs).at(matrix.first).transposed()
        } else {
            MatrixLayout::rows(self.inputs).at(matrix.first)
        }
    }

    fn outputs_at(&self, rows: &Range<usize>) -> MatrixLayout {
        MatrixLayout::rows(self.columns.stride).at(rows.start * self.columns.stride + self.columns.first)
    }

    fn inputs_at(&self, rows: &Range<usize>) -> MatrixLayout {
        MatrixLayout::rows(self.inputs).at(rows.start * self.inputs)
    }

    /// Computes outputs from the rows of an expert.
    pub(super) fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        (expert, rows): (usize, &Range<usize>),
        x: &Tensor<D>,
        y: &mut Tensor<D>,
    ) -> Result<()> {
        let (weight, matrix) = self.matrix(expert);
        let shape = GemmShape { rows: rows.len(), columns: self.outputs, inner: self.inputs };
        let weight = (pass.parameters.value(weight), self.layout(matrix));
        let (x, y) = ((x, self.inputs_at(rows)), (y, self.outputs_at(rows)));
        Ok(pass.device.gemm(shape, x, weight, false, y, Epilogue::None)?)
    }

    /// Writes or adds input gradients for the rows of an expert.
    pub(super) fn backward<D: Device>(
        &self,
        pass: &BackwardPass<'_, D>,
        (expert, rows): (usize, &Range<usize>),
        dy: &Tensor<D>,
        is_added: bool,
        dx: &mut Tensor<D>,
    ) -> Result<()> {
        let (weight, matrix) = self.matrix(expert);
        let shape = GemmShape { rows: rows.len(), columns: self.inputs, inner: self.outputs };
        let weight = (pass.parameters.value(weight), self.layout_backward(matrix));
        let (dy, dx) = ((dy, self.outputs_at(rows)), (dx, self.inputs_at(rows)));
        Ok(pass.device.gemm(shape, dy, weight, is_added, dx, Epilogue::None)?)
    }

    /// Returns the weight of an expert, for the weight gradient.
    pub(super) fn weights(&self, expert: usize) -> LayerWeights {
        let (weight, matrix) = self.matrix(expert);
        let Self { inputs, outputs, columns, .. } = *self;
        LayerWeights { weight, matrix, bias: None, inputs, outputs, columns }
    }
}

/// Gate as the weight for a single expert.
const GATE: ExpertWeightShape =
    ExpertWeightShape { experts: 1, chosen: 1, scores: ExpertScores::Sigmoid, scale: 1.0 };

/// Shared experts.
#[derive(Debug)]
pub(super) struct SharedExperts {
    mlp: Mlp,
    gate: Option<Linear>,
    hidden: usize,
}

impl SharedExperts {
    pub(super) fn declare(declaration: &mut Declaration, spec: &SharedExpertsSpec) -> Self {
        let (hidden, init): (usize, Init) = (spec.mlp.inputs, spec.mlp.init);
        let mlp = Mlp::declare(declaration, &spec.mlp);
        let gate =
            spec.gate.as_ref().map(|name| Linear::declare(declaration, name, [1, hidden], false, init));
        Self { mlp, gate, hidden }
    }

    /// Adds the outputs to rows.
    pub(super) fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
        rows: usize,
        y: &mut Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<()> {
        let device = pass.device;
        let output = self.mlp.forward(pass, device.copy(x)?, rows, saved)?;
        let Some(gate) = &self.gate else { return Ok(device.add(&output, y)?) };
        let mut logits = device.alloc_as(Dtype::F32, rows)?;
        gate.forward_into(pass, x, rows, &mut logits, Columns::all(1))?;
        let chosen = device.upload_indices(&vec![0; rows])?;
        let mut weights = device.alloc_as(Dtype::F32, rows)?;
        device.expert_weights(&GATE, &logits, &chosen, &mut weights)?;
        let mut dispatch = Dispatch::new(device, &RowOrder::new(&vec![0; rows], 1), 1, weights)?;
        device.add(&dispatch.collect(device, self.hidden, &output, true)?, y)?;
        dispatch.keep(saved);
        for buffer in [device.copy(x)?, logits, chosen, output] {
            saved.keep(buffer);
        }
        Ok(())
    }

    /// Accumulates parameter gradients, and adds the input gradient.
    pub(super) fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        dy: &Tensor<D>,
        rows: usize,
        dx: &mut Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<()> {
        let device = pass.device;
        let Some(gate) = &self.gate else {
            return Ok(device.add(&self.mlp.backward(pass, dy, rows, saved)?, dx)?);
        };
        let (output, chosen, logits, x) = (saved.take(), saved.take(), saved.take(), saved.take());
        let mut dispatch = Dispatch::take(saved);
        let mut d_weights = device.alloc_as(Dtype::F32, rows)?;
        device.row_products(self.hidden, dy, &output, dispatch.places(), &mut d_weights)?;
        let d_output = dispatch.spread(device, self.hidden, dy, true)?;
        device.add(&self.mlp.backward(pass, &d_output, rows, saved)?, dx)?;
        let mut d_logits = device.alloc(rows)?;
        device.expert_weights_backward(&GATE, &logits, &chosen, &d_weights, &mut d_logits)?;
        gate.backward_into(pass, &d_logits, rows, Columns::all(1), true, dx)?;
        gate.backward_weight(pass, x, &d_logits, rows)
    }
}
