//! Gate between expert matrices.

use crate::error::Result;
use dflop_device::ops::activation::Activation;
use dflop_device::ops::clamped_gate::GateBounds;
use dflop_device::{Device, Tensor};

/// Gate between the matrices in an expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertGate {
    /// Activation for gates, which come before all ups.
    Halves(Activation),
    /// Clamped gates and ups, interleaved.
    Clamped(GateBounds),
}

impl ExpertGate {
    /// Writes the gated rows.
    pub(super) fn forward<D: Device>(
        self,
        device: &D,
        gate_up: &Tensor<D>,
        columns: usize,
        y: &mut Tensor<D>,
    ) -> Result<()> {
        match self {
            Self::Halves(activation) => Ok(device.gate(activation, gate_up, columns, y)?),
            Self::Clamped(bounds) => Ok(device.clamped_gate(bounds, gate_up, y)?),
        }
    }

    /// Writes gate and up gradients.
    pub(super) fn backward<D: Device>(
        self,
        device: &D,
        dy: &Tensor<D>,
        gate_up: &Tensor<D>,
        columns: usize,
        d_gate_up: &mut Tensor<D>,
    ) -> Result<()> {
        match self {
            Self::Halves(activation) => {
                Ok(device.gate_backward(activation, dy, gate_up, columns, d_gate_up)?)
            }
            Self::Clamped(bounds) => Ok(device.clamped_gate_backward(bounds, dy, gate_up, d_gate_up)?),
        }
    }
}
