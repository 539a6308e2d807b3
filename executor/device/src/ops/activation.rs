//! MLP activation functions, element by element.
//!
//! # Source
//! Hendrycks, Gimpel: "Gaussian Error Linear Units", 2016, arXiv:1606.08415; the sigmoid form is CLIP's.

use rayon::prelude::*;

use super::argument::values;
use super::operation::operation;
use super::parallel::{chunk_len, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// Activation functions.
    pub trait Activate: Runtime {
        /// Applies an activation function to every element.
        fn activate(&self, activation: Activation, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()>;
        /// Turns the gradient of the activations into the gradient of `x`.
        fn activate_backward(
            &self,
            activation: Activation,
            x: &Tensor<Self>,
            d: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl Activate for Cpu {
    fn activate(&self, activation: Activation, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        let x = self.operand(x)?;
        self.update(y, |y| self.on_pool(|| forward(activation, &x, y)))
    }

    fn activate_backward(
        &self,
        activation: Activation,
        x: &Tensor<Self>,
        d: &mut Tensor<Self>,
    ) -> Result<()> {
        let x = self.operand(x)?;
        self.update(d, |d| self.on_pool(|| backward(activation, &x, d)))
    }
}

/// Activation function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x Phi(x)`, with the error function.
    GeluExact,
    /// GELU approximation with a hyperbolic tangent.
    GeluTanh,
    /// `x sigmoid(1.702 x)`.
    GeluQuick,
    /// `x sigmoid(x)`.
    Silu,
}

values!(Activation);

const QUICK: f64 = 1.702;
/// Coefficient for the cubic term in the hyperbolic tangent approximation.
const CUBIC: f64 = 0.044_715;
const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;

impl Activation {
    /// Computes value and derivative.
    #[inline(always)]
    pub(super) fn both<F: Real>(self, x: F) -> (F, F) {
        let half = F::from_f64(0.5);
        match self {
            Self::GeluExact => {
                // `below` is Phi(x), the normal distribution function
                let below = half * (F::ONE + (x * F::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf());
                let density = (-half * x * x).exp() * F::from_f64(0.5 * SQRT_2_OVER_PI);
                (x * below, below + x * density)
            }
            Self::GeluTanh => {
                let inner = F::from_f64(SQRT_2_OVER_PI) * (x + F::from_f64(CUBIC) * x * x * x);
                let tanh = inner.tanh();
                let slope = F::from_f64(SQRT_2_OVER_PI) * (F::ONE + F::from_f64(3.0 * CUBIC) * x * x);
                let open = half * (F::ONE + tanh);
                (x * open, open + half * x * (F::ONE - tanh * tanh) * slope)
            }
            Self::GeluQuick => gated(x, F::from_f64(QUICK)),
            Self::Silu => gated(x, F::ONE),
        }
    }
}

#[inline(always)]
fn gated<F: Real>(x: F, steepness: F) -> (F, F) {
    let open = (steepness * x).sigmoid();
    (x * open, open * (F::ONE + steepness * x * (F::ONE - open)))
}

/// Writes the activations.
pub fn forward<F: Real>(activation: Activation, x: &[F], y: &mut [F]) {
    assert_eq!(x.len(), y.len(), "shapes agree");
    let chunk = chunk_len(1);
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(y, x)| {
        vectorized(
            #[inline(always)]
            || {
                // the match is outside the loop, so that the loop compiles to vector instructions
                macro_rules! run {
                    ($kind:ident) => {
                        for (y, &x) in y.iter_mut().zip(x) {
                            *y = Activation::$kind.both(x).0;
                        }
                    };
                }
                match activation {
                    Activation::GeluExact => run!(GeluExact),
                    Activation::GeluTanh => run!(GeluTanh),
                    Activation::GeluQuick => run!(GeluQuick),
                    Activation::Silu => run!(Silu),
                }
            },
        );
    });
}

/// Turns the gradient of the activations into the gradient of `x`, in place.
pub fn backward<F: Real>(activation: Activation, x: &[F], d: &mut [F]) {
    assert_eq!(x.len(), d.len(), "shapes agree");
    let chunk = chunk_len(1);
    d.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(d, x)| {
        vectorized(
            #[inline(always)]
            || {
                macro_rules! run {
                    ($kind:ident) => {
                        for (d, &x) in d.iter_mut().zip(x) {
                            *d *= Activation::$kind.both(x).1;
                        }
                    };
                }
                match activation {
                    Activation::GeluExact => run!(GeluExact),
                    Activation::GeluTanh => run!(GeluTanh),
                    Activation::GeluQuick => run!(GeluQuick),
                    Activation::Silu => run!(Silu),
                }
            },
        );
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{LEN, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let x = input(d, LEN, 1)?;
        let activation = Activation::GeluTanh;
        Ok(vec![
            ("activate", changed(d, LEN, 4, |y| d.activate(activation, &x, y))?),
            ("activate backward", changed(d, LEN, 4, |y| d.activate_backward(activation, &x, y))?),
        ])
    }

    const ALL: [Activation; 4] =
        [Activation::GeluExact, Activation::GeluTanh, Activation::GeluQuick, Activation::Silu];

    #[test]
    fn gradients_match_finite_differences() {
        for activation in ALL {
            let x: Vec<f64> = numbers(20_000, 1).iter().map(|x| 4.0 * x).collect();
            let dy = numbers(x.len(), 2);
            let mut dx = dy.clone();
            backward(activation, &x, &mut dx);
            check(&format!("{activation:?}"), &x, &dx, |x| {
                let mut y = vec![f64::NAN; x.len()];
                forward(activation, x, &mut y);
                project(&y, &dy)
            });
        }
    }

    #[test]
    fn the_approximations_are_close_to_the_exact_function() {
        let x: Vec<f64> = (-500..500).map(|step| f64::from(step) / 100.0).collect();
        let value = |activation| {
            let mut y = vec![0.0; x.len()];
            forward(activation, &x, &mut y);
            y
        };
        let exact = value(Activation::GeluExact);
        for (activation, bound) in [(Activation::GeluTanh, 5e-4), (Activation::GeluQuick, 0.021)] {
            let pairs = value(activation).into_iter().zip(&exact).map(|(a, b)| (a - b).abs());
            assert!(pairs.fold(0.0, f64::max) < bound);
        }
    }
}
