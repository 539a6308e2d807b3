//! Computes the norm of all gradients of a job, and the factor that clips it.
//!
//! Every parameter counts once, on however many ranks it or its parts are ([`Ownership`]). Sums of squares of
//! tensors are exchanged and added in the order of the tensors' names: all ranks get the same bits. Another
//! cut into stages gives the same bits, too, as far as its gradients have them.
//!
//! # Source
//! Pascanu, Mikolov, Bengio: "On the difficulty of training Recurrent Neural Networks", 2012,
//! arXiv:1211.5063, as in `torch.nn.utils.clip_grad_norm_`.

use super::ownership::Ownership;
use crate::error::{Error, Result};
use dflop_comm::{Comm, StepContext};
use dflop_device::Device;
use dflop_models::Stage;

/// Constant that `PyTorch` adds to the norm before it divides.
const EPSILON: f64 = 1e-6;

/// Returns the L2 norm of the gradients of all parameters on all ranks; all ranks of `comm` call it.
///
/// Gradients must be of the whole global batch: summed over replicas and over both uses of a tied parameter.
///
/// # Errors
/// [`Error::Gradient`] on a rank with a gradient that is not finite. This ends the job; all other ranks get
/// [`Error::Comm`].
pub fn gradient_norm<D: Device>(
    stages: &mut [&mut Stage<D>],
    ownership: &Ownership,
    comm: &dyn Comm,
    step: u64,
) -> Result<f64> {
    let at = StepContext::step(step, "norm of gradients");
    let mut squares = vec![0.0_f64; ownership.len()];
    let mut is_counted = vec![false; ownership.len()];
    for stage in stages {
        let (device, name) = (stage.device().clone(), stage.name().to_owned());
        for (spec, _, gradient) in stage.parameters_mut().trained_mut() {
            let Some(index) = ownership.own(spec).filter(|&index| !is_counted[index]) else { continue };
            // A tied parameter on two stages of this rank counts once.
            is_counted[index] = true;
            let sum = device.sum_of_squares(gradient)?;
            // Checked before any update, so that the weights stay usable.
            if !sum.is_finite() {
                let error = Error::Gradient { stage: name, tensor: spec.name.clone(), norm: sum.sqrt() };
                comm.abort(at, &error.to_string());
                return Err(error);
            }
            squares[index] = sum;
        }
    }
    // One rank owns each element and all others add 0: the sum is exact in any order.
    comm.all_reduce(at, squares.as_mut_slice().into())?;
    Ok(squares.iter().sum::<f64>().sqrt())
}

/// Returns the factor that scales gradients of this norm to at most `norm_max`; at most 1.
#[must_use]
pub fn clip_factor(norm: f64, norm_max: f64) -> f64 {
    (norm_max / (norm + EPSILON)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_norms_above_the_bound_are_scaled() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(0.0, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}
