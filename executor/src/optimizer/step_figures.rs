//! Collects the figures that an update needs from all ranks: losses, and squares of all gradients.
//!
//! Every element of a parameter counts once, no matter how many ranks have it: on the rank that owns the
//! parameter ([`Ownership`]), or, if replicas divide the gradient, on the owner's replica that has the
//! element. Tensor sums of squares are exchanged and added in tensor name order: all ranks get the same bits.
//! Other partitions into stages also give the same bits, provided that the gradients have the same bits. A
//! divided gradient is summed in a different order than a complete gradient, so the norm may differ by `f32`
//! rounding. All figures stay on the device.
//!
//! # Source
//! Pascanu, Mikolov, Bengio: "On the difficulty of training Recurrent Neural Networks", 2012,
//! arXiv:1211.5063, as in `torch.nn.utils.clip_grad_norm_`.

use std::sync::Arc;

use super::gradient_pieces::GradientPieces;
use super::ownership::Ownership;
use crate::error::Result;
use crate::pipeline::UnreadStep;
use dflop_comm::StepContext;
use dflop_device::{Device, DeviceComm, Dtype, Tensor};
use dflop_models::Stage;
use dflop_models::weights::ParameterSpec;

/// Step figures on a device: losses of all microbatches, sums of squares of all parameters.
pub(super) struct StepFigures<D: Device> {
    /// Figure values, `f64`.
    pub(super) values: Tensor<D>,
    /// Number of losses.
    pub(super) losses: usize,
}

/// Parameters that a rank counts, and the ranks that count parts of them.
pub(super) struct Counting<'a, D: Device> {
    /// Parameter owners.
    pub(super) ownership: &'a Ownership,
    /// All ranks.
    pub(super) comm: &'a dyn DeviceComm<D>,
    /// Ranks that share the states of each stage.
    pub(super) replicas: &'a [Option<Arc<dyn DeviceComm<D>>>],
}

impl<D: Device> Counting<'_, D> {
    /// Returns the index of a parameter if this rank counts the elements.
    ///
    /// - `stage`: stage index if the stage replicas divide the gradient
    fn index(&self, spec: &ParameterSpec, stage: Option<usize>) -> Option<usize> {
        let (index, owner) = self.ownership.place(spec)?;
        let Some(group) = stage.and_then(|stage| self.replicas.get(stage)?.as_deref()) else {
            return self.ownership.own(spec);
        };
        let (owner, group) = (self.comm.host().world_rank(owner), group.host());
        (0..group.size()).any(|rank| group.world_rank(rank) == owner).then_some(index)
    }
}

impl<D: Device> StepFigures<D> {
    /// Exchanges the figures of all ranks; all ranks call it.
    ///
    /// Gradients must cover the complete global batch: summed over replicas, complete or divided, and over
    /// both uses of a tied parameter.
    ///
    /// # Errors
    /// [`crate::Error::InvalidSetting`] if gradients are divided and states are not;
    /// [`crate::Error::Comm`], [`crate::Error::Device`].
    pub(super) fn exchange(
        device: &D,
        stages: &mut [&mut (impl Stage<D> + ?Sized)],
        counting: &Counting<'_, D>,
        step: u64,
        unread: Option<&UnreadStep<D>>,
    ) -> Result<Self> {
        let losses = unread.map_or(0, UnreadStep::microbatches);
        let ownership = counting.ownership;
        let mut values = device.zeros_as(Dtype::F64, losses + ownership.len())?;
        if let Some(unread) = unread {
            unread.write_losses(&mut values)?;
        }
        let pieces = GradientPieces::take(stages, counting.replicas)?;
        let mut is_counted = vec![false; ownership.len()];
        let mut counted = Vec::new();
        for piece in pieces.iter(stages) {
            let spec = &stages[piece.stage].parameters().specs()[piece.parameter];
            let index = counting.index(spec, piece.is_divided.then_some(piece.stage));
            let Some(index) = index.filter(|&index| !is_counted[index] && !piece.elements.is_empty()) else {
                continue;
            };
            // A tied parameter on two stages in this rank counts once.
            is_counted[index] = true;
            counted.push((piece.elements, losses + index));
        }
        let squares = device.sums_of_squares(&counted, &mut values);
        pieces.put_back(stages);
        squares?;
        // Without divided gradients one rank has each element and all other ranks add 0: the sum is exact
        // then.
        counting.comm.all_reduce(StepContext::step(step, "norm of gradients"), &mut values)?;
        Ok(Self { values, losses })
    }
}
