//! Collects the metrics that an update needs from all ranks: losses, and squares of all gradients.
//!
//! Every element of a parameter counts once, no matter how many ranks have it: on the rank that owns the
//! parameter ([`Ownership`]), or, if replicas divide the gradient, on the owner's replica that has the
//! element. Tensor sums of squares are exchanged and added in tensor name order: all ranks get the same bits.
//! Other partitions into stages also give the same bits, provided that the gradients have the same bits. A
//! divided gradient is summed in a different order than a complete gradient, so the norm may differ by `f32`
//! rounding. All metrics stay on the device.
//!
//! # Source
//! Pascanu, Mikolov, Bengio: "On the difficulty of training Recurrent Neural Networks", 2012,
//! arXiv:1211.5063, as in `torch.nn.utils.clip_grad_norm_`.
//!
//! Bucket gradients are split into complete and incomplete pieces on this rank.
//!
//! If replicas divide gradients, a rank has the sums for a range in every bucket. The range may begin and end
//! inside a parameter; the part of each parameter inside the range is a separate tensor while the pieces are
//! taken out.

use std::sync::Arc;

use dflop_comm::StepContext;
use dflop_device::{Device, DeviceComm, Dtype, Tensor};
use dflop_models::Stage;
use dflop_models::weights::ParameterSpec;

use super::bucket_state::Ownership;
use crate::error::{Error, Result};
use crate::pipeline::PendingStep;

/// Step metrics on a device: losses of all microbatches, sums of squares of all parameters.
pub(super) struct StepMetrics<D: Device> {
    /// Metric values, `f64`.
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

impl<D: Device> StepMetrics<D> {
    /// Exchanges the metrics of all ranks; all ranks call it.
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
        pending: Option<&PendingStep<D>>,
    ) -> Result<Self> {
        let losses = pending.map_or(0, PendingStep::microbatches);
        let ownership = counting.ownership;
        let mut values = device.zeros_as(Dtype::F64, losses + ownership.len())?;
        if let Some(pending) = pending {
            pending.write_losses(&mut values)?;
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

/// Number of pieces per parameter: before, inside and after the complete elements.
const PIECES: usize = 3;

/// Gradients in one bucket, taken out of the stage.
struct CutBucket<D: Device> {
    /// Stage index on this rank, and bucket index in the stage.
    place: (usize, usize),
    /// Lengths of the bucket tensors.
    lens: Vec<usize>,
    /// [`PIECES`] per parameter, in bucket order.
    pieces: Vec<Tensor<D>>,
    /// Whether other replicas have the remaining elements.
    is_divided: bool,
}

/// Complete gradients for a parameter on this rank.
pub(super) struct GradientPiece<'a, D: Device> {
    /// Stage index on this rank.
    pub(super) stage: usize,
    /// Parameter index in the stage.
    pub(super) parameter: usize,
    /// Gradient elements; none if other replicas have all elements.
    pub(super) elements: &'a Tensor<D>,
    /// Whether other replicas may have more elements of the parameter.
    pub(super) is_divided: bool,
}

/// Gradients of all stages on a rank, taken out of the stages.
pub(super) struct GradientPieces<D: Device>(Vec<CutBucket<D>>);

impl<D: Device> GradientPieces<D> {
    /// Takes the gradients out of the stages; [`put_back`](Self::put_back) undoes it.
    ///
    /// - `replicas`: ranks that share the states of each stage
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if gradients are divided and states are not; nothing is taken out then.
    pub(super) fn take(
        stages: &mut [&mut (impl Stage<D> + ?Sized)],
        replicas: &[Option<Arc<dyn DeviceComm<D>>>],
    ) -> Result<Self> {
        for (number, stage) in stages.iter().enumerate() {
            let is_shared = replicas.get(number).is_some_and(Option::is_some);
            let mut buckets = stage.parameters().buckets().iter();
            if !is_shared && buckets.any(|bucket| bucket.summed != (0..bucket.len())) {
                let reason = format!("replicas of {} share its gradients but no states", stage.name());
                return Err(Error::InvalidSetting { setting: "shard_states", reason });
            }
        }
        let mut all = Vec::new();
        for (number, stage) in stages.iter_mut().enumerate() {
            for (index, bucket) in stage.parameters_mut().buckets_mut().iter_mut().enumerate() {
                let summed = bucket.summed.clone();
                let is_divided = summed != (0..bucket.len());
                let (whole, lens) = bucket.gradients.open();
                let mut first = 0;
                let mut cut = Vec::with_capacity(PIECES * lens.len());
                for &len in &lens {
                    let begin = summed.start.clamp(first, first + len);
                    let end = summed.end.clamp(begin, first + len);
                    cut.extend([begin - first, end - begin, first + len - end]);
                    first += len;
                }
                let pieces = whole.split(&cut);
                all.push(CutBucket { place: (number, index), lens, pieces, is_divided });
            }
        }
        Ok(Self(all))
    }

    /// Iterates over the complete gradients of all parameters.
    pub(super) fn iter<'a, S: Stage<D> + ?Sized>(
        &'a self,
        stages: &'a [&mut S],
    ) -> impl Iterator<Item = GradientPiece<'a, D>> {
        self.0.iter().flat_map(|CutBucket { place: (stage, bucket), pieces, is_divided, .. }| {
            let parameters = &stages[*stage].parameters().buckets()[*bucket].parameters;
            let complete = pieces.iter().skip(1).step_by(PIECES);
            parameters.iter().zip(complete).map(|(&parameter, elements)| GradientPiece {
                stage: *stage,
                parameter,
                elements,
                is_divided: *is_divided,
            })
        })
    }

    /// Puts the gradients back.
    pub(super) fn put_back(self, stages: &mut [&mut (impl Stage<D> + ?Sized)]) {
        for CutBucket { place: (stage, bucket), lens, pieces, .. } in self.0 {
            let bucket = &mut stages[stage].parameters_mut().buckets_mut()[bucket];
            bucket.gradients.close(Tensor::join(pieces), &lens);
        }
    }
}
