//! Collects what an update needs of all ranks: losses, and the squares of all gradients.
//!
//! Every parameter counts once, on however many ranks it or its parts are ([`Ownership`]). Sums of squares of
//! tensors are exchanged and added in the order of the tensors' names: all ranks get the same bits. Another
//! cut into stages gives the same bits, too, as far as its gradients have them. All of it stays on the
//! device.
//!
//! # Source
//! Pascanu, Mikolov, Bengio: "On the difficulty of training Recurrent Neural Networks", 2012,
//! arXiv:1211.5063, as in `torch.nn.utils.clip_grad_norm_`.

use super::ownership::Ownership;
use crate::error::Result;
use crate::pipeline::UnreadStep;
use dflop_comm::StepContext;
use dflop_device::{Device, DeviceComm, Dtype, Tensor};
use dflop_models::Stage;

/// Figures of a step on a device: losses of all microbatches, sums of squares of all parameters.
pub(super) struct StepFigures<D: Device> {
    /// `f64`.
    pub(super) values: Tensor<D>,
    /// Number of losses.
    pub(super) losses: usize,
}

impl<D: Device> StepFigures<D> {
    /// Exchanges the figures of all ranks; all ranks of `comm` call it.
    ///
    /// Gradients must be of the whole global batch: summed over replicas and over both uses of a tied
    /// parameter.
    ///
    /// # Errors
    /// [`crate::Error::Comm`], [`crate::Error::Device`].
    pub(super) fn exchange(
        device: &D,
        stages: &[&mut (impl Stage<D> + ?Sized)],
        ownership: &Ownership,
        comm: &dyn DeviceComm<D>,
        step: u64,
        unread: Option<&UnreadStep<D>>,
    ) -> Result<Self> {
        let losses = unread.map_or(0, UnreadStep::microbatches);
        let mut values = device.zeros_as(Dtype::F64, losses + ownership.len())?;
        if let Some(unread) = unread {
            unread.write_losses(&mut values)?;
        }
        let mut is_counted = vec![false; ownership.len()];
        let mut counted = Vec::new();
        for stage in stages {
            for (_, spec, gradient) in stage.parameters().trained() {
                let Some(index) = ownership.own(spec).filter(|&index| !is_counted[index]) else { continue };
                // A tied parameter on two stages of this rank counts once.
                is_counted[index] = true;
                counted.push((gradient, losses + index));
            }
        }
        device.sums_of_squares(&counted, &mut values)?;
        // One rank owns each element and all others add 0: the sum is exact in any order.
        comm.all_reduce(StepContext::step(step, "norm of gradients"), &mut values)?;
        Ok(Self { values, losses })
    }
}
