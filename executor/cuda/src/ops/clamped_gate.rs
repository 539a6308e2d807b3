//! Bounded gates.

use dflop_device::ops::clamped_gate::{ClampedGate, GateBounds};
use dflop_device::{Result, Tensor};

use super::same_type;
use crate::compiler::{Macros, Source};
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};

/// Adds the number of gated numbers, and the constants.
fn with_bounds(arguments: Arguments, len: usize, bounds: GateBounds) -> Arguments {
    arguments.long(len).float(bounds.limit as f32).float(bounds.alpha as f32)
}

impl ClampedGate for Cuda {
    fn clamped_gate(&self, bounds: GateBounds, gate_up: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        let len = y.len();
        assert_eq!(gate_up.len(), 2 * len, "a number has gate and up");
        let macros = Macros::types(&[same_type(&[gate_up, y])]);
        let arguments = with_bounds(Arguments::default().read(gate_up).write(y), len, bounds);
        self.launch(Source::ClampedGate, "clamped_gate", macros, Grid::elements(len, 1), arguments)
    }

    fn clamped_gate_backward(
        &self,
        bounds: GateBounds,
        dy: &Tensor<Self>,
        gate_up: &Tensor<Self>,
        d_gate_up: &mut Tensor<Self>,
    ) -> Result<()> {
        let len = dy.len();
        assert!(gate_up.len() == 2 * len && d_gate_up.len() == gate_up.len(), "shapes agree");
        let macros = Macros::types(&[same_type(&[dy, gate_up, d_gate_up])]);
        let arguments = Arguments::default().read(dy).read(gate_up).write(d_gate_up);
        let arguments = with_bounds(arguments, len, bounds);
        self.launch(Source::ClampedGate, "clamped_gate_backward", macros, Grid::elements(len, 1), arguments)
    }
}
