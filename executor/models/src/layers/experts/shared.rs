//! MLP that every token goes through in addition to the routed experts, with or without a gate.

use super::SharedExpertsSpec;
use crate::block::{BackwardPass, ForwardPass, SavedActivations};
use crate::error::Result;
use crate::layers::linear::Linear;
use crate::layers::mlp::Mlp;
use crate::parameters::Declaration;
use crate::parameters::weights::Init;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::experts::{ExpertScores, ExpertWeightShape};
use dflop_device::{Device, Dtype, Tensor};

use super::dispatch::{Dispatch, RowOrder};

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
