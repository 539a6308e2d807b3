//! Queues activations.

use super::super::Deferred;
use crate::device::Device;
use crate::error::Result;
use crate::ops::activation::{Activate, Activation};
use crate::ops::clamped_gate::{ClampedGate, GateBounds};
use crate::ops::gate::Gate;
use crate::runtime::Tensor;

impl<D: Device> Activate for Deferred<D> {
    fn activate(&self, activation: Activation, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue([x], [y], move |inner, [x], [y]| inner.activate(activation, x, y))
    }

    fn activate_backward(
        &self,
        activation: Activation,
        x: &Tensor<Self>,
        d: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([x], [d], move |inner, [x], [d]| inner.activate_backward(activation, x, d))
    }
}

impl<D: Device> Gate for Deferred<D> {
    fn gate(
        &self,
        activation: Activation,
        gate_up: &Tensor<Self>,
        columns: usize,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([gate_up], [y], move |inner, [gate_up], [y]| inner.gate(activation, gate_up, columns, y))
    }

    fn gate_backward(
        &self,
        activation: Activation,
        dy: &Tensor<Self>,
        gate_up: &Tensor<Self>,
        columns: usize,
        d_gate_up: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([dy, gate_up], [d_gate_up], move |inner, [dy, gate_up], [d_gate_up]| {
            inner.gate_backward(activation, dy, gate_up, columns, d_gate_up)
        })
    }
}

impl<D: Device> ClampedGate for Deferred<D> {
    fn clamped_gate(&self, bounds: GateBounds, gate_up: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue([gate_up], [y], move |inner, [gate_up], [y]| inner.clamped_gate(bounds, gate_up, y))
    }

    fn clamped_gate_backward(
        &self,
        bounds: GateBounds,
        dy: &Tensor<Self>,
        gate_up: &Tensor<Self>,
        d_gate_up: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([dy, gate_up], [d_gate_up], move |inner, [dy, gate_up], [d_gate_up]| {
            inner.clamped_gate_backward(bounds, dy, gate_up, d_gate_up)
        })
    }
}
