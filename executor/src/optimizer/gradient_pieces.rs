//! Splits bucket gradients into complete and incomplete pieces on this rank.
//!
//! If replicas divide gradients, a rank has the sums for a range in every bucket. The range may begin and end
//! inside a parameter; the part of each parameter inside the range is a separate tensor while the pieces are
//! taken out.

use crate::error::{Error, Result};
use dflop_device::{Device, DeviceComm, Tensor};
use dflop_models::Stage;
use std::sync::Arc;

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
