//! Bounded gate: `y = (up + 1) gate sigmoid(alpha gate)`, with interleaved gate and up, both clamped.
//!
//! # Source
//! OpenAI: "gpt-oss-120b & gpt-oss-20b Model Card", 2025, arXiv:2508.10925, section 2.2, as implemented in
//! transformers.

use rayon::prelude::*;

use super::argument::values;
use super::operation::operation;
use super::parallel::chunk_len;
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Gate constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateBounds {
    /// Maximum gate, and maximum magnitude of up.
    pub limit: f64,
    /// Gate factor in the logistic function.
    pub alpha: f64,
}

values!(GateBounds);

operation! {
    /// Bounded gates.
    pub trait ClampedGate: Runtime {
        /// Computes the gated numbers; each gate is followed by the matching up.
        fn clamped_gate(&self, bounds: GateBounds, gate_up: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()>;
        /// Writes gate and up gradients.
        fn clamped_gate_backward(
            &self,
            bounds: GateBounds,
            dy: &Tensor<Self>,
            gate_up: &Tensor<Self>,
            d_gate_up: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl ClampedGate for Cpu {
    fn clamped_gate(&self, bounds: GateBounds, gate_up: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        let gate_up = self.operand(gate_up)?;
        self.update(y, |y| self.on_pool(|| forward(bounds, &gate_up, y)))
    }

    fn clamped_gate_backward(
        &self,
        bounds: GateBounds,
        dy: &Tensor<Self>,
        gate_up: &Tensor<Self>,
        d_gate_up: &mut Tensor<Self>,
    ) -> Result<()> {
        let (dy, gate_up) = (self.operand(dy)?, self.operand(gate_up)?);
        self.update(d_gate_up, |d| self.on_pool(|| backward(bounds, &dy, &gate_up, d)))
    }
}

/// Returns gate and up clamped to the bounds, and whether each was in bounds.
fn clamped<F: Real>(bounds: GateBounds, gate: F, up: F) -> [(F, bool); 2] {
    let limit = F::from_f64(bounds.limit);
    let gate = if gate > limit { (limit, false) } else { (gate, true) };
    let up = match up {
        up if up > limit => (limit, false),
        up if up < -limit => (-limit, false),
        up => (up, true),
    };
    [gate, up]
}

/// Writes the gated numbers.
///
/// # Panics
/// If there is not exactly a gate and an up for each number.
pub fn forward<F: Real>(bounds: GateBounds, gate_up: &[F], y: &mut [F]) {
    assert_eq!(gate_up.len(), 2 * y.len(), "a number has gate and up");
    let chunk = chunk_len(1);
    y.par_chunks_mut(chunk).zip(gate_up.par_chunks(2 * chunk)).for_each(|(y, gate_up)| {
        for (y, pair) in y.iter_mut().zip(gate_up.chunks(2)) {
            let [(gate, _), (up, _)] = clamped(bounds, pair[0], pair[1]);
            *y = (up + F::ONE) * gate * (F::from_f64(bounds.alpha) * gate).sigmoid();
        }
    });
}

/// Writes gate and up gradients; gradients of clamped numbers are zero.
///
/// # Panics
/// As [`forward`].
pub fn backward<F: Real>(bounds: GateBounds, dy: &[F], gate_up: &[F], d_gate_up: &mut [F]) {
    assert!(gate_up.len() == 2 * dy.len() && d_gate_up.len() == gate_up.len(), "shapes agree");
    let chunk = chunk_len(1);
    let inputs = dy.par_chunks(chunk).zip(gate_up.par_chunks(2 * chunk));
    d_gate_up.par_chunks_mut(2 * chunk).zip(inputs).for_each(|(d, (dy, gate_up))| {
        for (d, (&dy, pair)) in d.chunks_mut(2).zip(dy.iter().zip(gate_up.chunks(2))) {
            let [(gate, is_gate_free), (up, is_up_free)] = clamped(bounds, pair[0], pair[1]);
            let alpha = F::from_f64(bounds.alpha);
            let open = (alpha * gate).sigmoid();
            let d_gate = dy * (up + F::ONE) * open * (F::ONE + alpha * gate * (F::ONE - open));
            d[0] = if is_gate_free { d_gate } else { F::ZERO };
            d[1] = if is_up_free { dy * gate * open } else { F::ZERO };
        }
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{LEN, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let bounds = GateBounds { limit: 0.5, alpha: 1.702 };
        let (dy, gate_up) = (input(d, LEN, 1)?, input(d, 2 * LEN, 7)?);
        let run = |dx: &mut Tensor<D>| d.clamped_gate_backward(bounds, &dy, &gate_up, dx);
        Ok(vec![
            ("clamped gate", changed(d, LEN, 8, |y| d.clamped_gate(bounds, &gate_up, y))?),
            ("clamped gate backward", changed(d, 2 * LEN, 9, run)?),
        ])
    }

    const BOUNDS: GateBounds = GateBounds { limit: 0.8, alpha: 1.702 };

    #[test]
    fn the_gradient_matches_finite_differences() {
        let x: Vec<f64> = numbers(2 * 9000, 1).iter().map(|x| 2.0 * x).collect();
        assert!(x.iter().any(|x| x.abs() > BOUNDS.limit), "some numbers are clamped");
        let dy = numbers(9000, 2);
        let mut dx = vec![f64::NAN; x.len()];
        backward(BOUNDS, &dy, &x, &mut dx);
        check("gate and up", &x, &dx, |x| {
            let mut y = vec![f64::NAN; dy.len()];
            forward(BOUNDS, x, &mut y);
            project(&y, &dy)
        });
    }

    #[test]
    fn clamped_numbers_have_no_gradient() {
        let mut d = [f64::NAN; 4];
        backward(BOUNDS, &[1.0, 1.0], &[2.0, -3.0, -2.0, 0.5], &mut d);
        assert!(d[0] == 0.0 && d[1] == 0.0 && d[2] != 0.0 && d[3] != 0.0);
    }
}
