//! Activation functions and MLP gates.

use dflop_device::ops::activation::{Activate, Activation};
use dflop_device::ops::gate::Gate;
use dflop_device::{Result, Tensor};

use super::{same_type, width};
use crate::compiler::{Macros, Source};
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};

/// Returns the number of an activation in `activation.cu`.
const fn kind(activation: Activation) -> usize {
    match activation {
        Activation::GeluExact => 0,
        Activation::GeluTanh => 1,
        Activation::GeluQuick => 2,
        Activation::Silu => 3,
    }
}

impl Activate for Cuda {
    fn activate(&self, activation: Activation, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        assert_eq!(x.len(), y.len(), "shapes agree");
        let width = width(x.len(), &[x, y]);
        let macros = Macros::types(&[x.dtype(), y.dtype()]).number("WIDTH", width);
        let grid = Grid::elements(x.len(), width);
        let arguments = Arguments::default().read(x).write(y).long(x.len()).int(kind(activation));
        self.launch(Source::Activation, "activate", macros, grid, arguments)
    }

    fn activate_backward(
        &self,
        activation: Activation,
        x: &Tensor<Self>,
        d: &mut Tensor<Self>,
    ) -> Result<()> {
        assert_eq!(x.len(), d.len(), "shapes agree");
        let width = width(x.len(), &[x, d]);
        let macros = Macros::types(&[x.dtype(), d.dtype()]).number("WIDTH", width);
        let grid = Grid::elements(x.len(), width);
        let arguments = Arguments::default().read(x).write(d).long(x.len()).int(kind(activation));
        self.launch(Source::Activation, "activate_backward", macros, grid, arguments)
    }
}

impl Gate for Cuda {
    fn gate(
        &self,
        activation: Activation,
        gate_up: &Tensor<Self>,
        columns: usize,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        assert_eq!(gate_up.len(), 2 * y.len(), "a row has gate and up");
        let width = width(columns, &[gate_up, y]);
        let macros = Macros::types(&[gate_up.dtype(), y.dtype()]).number("WIDTH", width);
        let grid = Grid::elements(y.len(), width);
        let arguments = Arguments::default().read(gate_up).write(y).int(columns).long(y.len());
        let arguments = arguments.int(kind(activation));
        self.launch(Source::Gate, "gate", macros, grid, arguments)
    }

    fn gate_backward(
        &self,
        activation: Activation,
        dy: &Tensor<Self>,
        gate_up: &Tensor<Self>,
        columns: usize,
        d_gate_up: &mut Tensor<Self>,
    ) -> Result<()> {
        assert!(gate_up.len() == 2 * dy.len() && d_gate_up.len() == gate_up.len(), "shapes agree");
        let width = width(columns, &[dy, gate_up, d_gate_up]);
        let macros = Macros::types(&[same_type(&[dy, gate_up]), d_gate_up.dtype()]).number("WIDTH", width);
        let grid = Grid::elements(dy.len(), width);
        let arguments =
            Arguments::default().read(dy).read(gate_up).write(d_gate_up).int(columns).long(dy.len());
        let arguments = arguments.int(kind(activation));
        self.launch(Source::Gate, "gate_backward", macros, grid, arguments)
    }
}
