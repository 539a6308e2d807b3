//! `SwiGLU` and `GeGLU` gate: `y = activation(gate) up`, with gate and up in one row.
//!
//! # Source
//! Shazeer: "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.

use rayon::prelude::*;

use super::activation::Activation;
use super::operation::operation;
use super::parallel::{chunk_rows, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// MLP gates.
    pub trait Gate: Runtime {
        /// Computes `activation(gate) up`.
        fn gate(
            &self,
            activation: Activation,
            gate_up: &Tensor<Self>,
            columns: usize,
            y: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Writes gate and up gradients.
        fn gate_backward(
            &self,
            activation: Activation,
            dy: &Tensor<Self>,
            gate_up: &Tensor<Self>,
            columns: usize,
            d_gate_up: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl Gate for Cpu {
    fn gate(
        &self,
        activation: Activation,
        gate_up: &Tensor<Self>,
        columns: usize,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        let gate_up = self.operand(gate_up)?;
        self.update(y, |y| self.on_pool(|| forward(activation, &gate_up, columns, y)))
    }

    fn gate_backward(
        &self,
        activation: Activation,
        dy: &Tensor<Self>,
        gate_up: &Tensor<Self>,
        columns: usize,
        d_gate_up: &mut Tensor<Self>,
    ) -> Result<()> {
        let (dy, gate_up) = (self.operand(dy)?, self.operand(gate_up)?);
        self.update(d_gate_up, |d_gate_up| {
            self.on_pool(|| backward(activation, &dy, &gate_up, columns, d_gate_up));
        })
    }
}

/// Writes the gated rows.
///
/// - `gate_up`: `[rows, 2 * columns]`, `y`: `[rows, columns]`
pub fn forward<F: Real>(activation: Activation, gate_up: &[F], columns: usize, y: &mut [F]) {
    assert_eq!(gate_up.len(), 2 * y.len(), "a row has gate and up");
    let rows = chunk_rows(2 * columns);
    let chunks = y.par_chunks_mut(rows * columns).zip(gate_up.par_chunks(2 * rows * columns));
    chunks.for_each(|(y, gate_up)| {
        vectorized(
            #[inline(always)]
            || {
                for (y, row) in y.chunks_mut(columns).zip(gate_up.chunks(2 * columns)) {
                    let (gate, up) = row.split_at(columns);
                    // the match is outside the loop, so that the loop compiles to vector instructions
                    macro_rules! run {
                        ($kind:ident) => {
                            for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                                *y = Activation::$kind.both(gate).0 * up;
                            }
                        };
                    }
                    match activation {
                        Activation::GeluExact => run!(GeluExact),
                        Activation::GeluTanh => run!(GeluTanh),
                        Activation::GeluQuick => run!(GeluQuick),
                        Activation::Silu => run!(Silu),
                    }
                }
            },
        );
    });
}

/// Writes gate and up gradients, `[rows, 2 * columns]`.
pub fn backward<F: Real>(
    activation: Activation,
    dy: &[F],
    gate_up: &[F],
    columns: usize,
    d_gate_up: &mut [F],
) {
    assert!(gate_up.len() == 2 * dy.len() && d_gate_up.len() == gate_up.len(), "shapes agree");
    let rows = chunk_rows(2 * columns);
    let inputs = dy.par_chunks(rows * columns).zip(gate_up.par_chunks(2 * rows * columns));
    d_gate_up.par_chunks_mut(2 * rows * columns).zip(inputs).for_each(|(d, (dy, gate_up))| {
        vectorized(
            #[inline(always)]
            || {
                let rows = dy.chunks(columns).zip(gate_up.chunks(2 * columns));
                for (d, (dy, row)) in d.chunks_mut(2 * columns).zip(rows) {
                    let (gate, up) = row.split_at(columns);
                    let (d_gate, d_up) = d.split_at_mut(columns);
                    let inputs = dy.iter().zip(gate).zip(up);
                    let rows = d_gate.iter_mut().zip(d_up).zip(inputs);
                    macro_rules! run {
                        ($kind:ident) => {
                            for ((d_gate, d_up), ((&dy, &gate), &up)) in rows {
                                let (value, slope) = Activation::$kind.both(gate);
                                *d_gate = dy * up * slope;
                                *d_up = dy * value;
                            }
                        };
                    }
                    match activation {
                        Activation::GeluExact => run!(GeluExact),
                        Activation::GeluTanh => run!(GeluTanh),
                        Activation::GeluQuick => run!(GeluQuick),
                        Activation::Silu => {
                            for ((d_gate, d_up), ((&dy, &gate), &up)) in rows {
                                let open = gate.sigmoid();
                                *d_gate = dy * up * open * (F::ONE + gate * (F::ONE - open));
                                *d_up = dy * gate * open;
                            }
                        }
                    }
                }
            },
        );
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let (x, gate) = (input(d, LEN, 1)?, input(d, 2 * LEN, 2)?);
        let run = |dx: &mut Tensor<D>| d.gate_backward(Activation::Silu, &x, &gate, COLUMNS, dx);
        Ok(vec![
            ("silu gate", changed(d, LEN, 4, |y| d.gate(Activation::Silu, &gate, COLUMNS, y))?),
            ("gelu gate", changed(d, LEN, 4, |y| d.gate(Activation::GeluTanh, &gate, COLUMNS, y))?),
            ("silu gate backward", changed(d, 2 * LEN, 4, run)?),
        ])
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        let (rows, columns) = (700, 11);
        let (x, dy) = (numbers(rows * columns * 2, 1), numbers(rows * columns, 2));
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let mut dx = vec![f64::NAN; x.len()];
            backward(activation, &dy, &x, columns, &mut dx);
            check("gate and up", &x, &dx, |x| {
                let mut y = vec![f64::NAN; dy.len()];
                forward(activation, x, columns, &mut y);
                project(&y, &dy)
            });
        }
    }
}
