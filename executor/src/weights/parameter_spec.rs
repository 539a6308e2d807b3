//! A parameter as checkpoints have it: name, shape, initialization, and the part that a rank holds.

use std::ops::Range;

use super::tensor_shard::TensorShard;

/// How a parameter begins where there is no checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal with this standard deviation.
    Normal(f64),
    /// 1 everywhere.
    Ones,
    /// 0 everywhere.
    Zeros,
    /// The same value everywhere.
    Constant(f64),
    /// Whisper's positions: sines in the first half of the columns, cosines in the second.
    Sinusoids,
}

/// A parameter as checkpoints have it.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint; row-major.
    pub shape: Vec<usize>,
    /// Which part of it this rank holds.
    pub shard: TensorShard,
    /// Beginning without a checkpoint.
    pub init: Init,
    /// Whether it is trained.
    pub is_trained: bool,
    /// The parameter whose values this one shares: a tied LM head. It has its own gradient until
    /// [`Parameters::fold_shared_gradients`](crate::model::parameters::Parameters::fold_shared_gradients).
    pub shares: Option<ParameterId>,
}

impl ParameterSpec {
    /// Returns the elements that this rank holds.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.held_shape().iter().product()
    }

    /// Returns the shape of what this rank holds.
    #[must_use]
    pub fn held_shape(&self) -> Vec<usize> {
        self.shard.shape_of(self.shard.tp_rank().rank, &self.shape)
    }

    /// Returns where what this rank holds lies in the whole tensor, in order.
    #[must_use]
    pub fn spans(&self) -> Vec<Range<usize>> {
        self.shard.spans_of(self.shard.tp_rank().rank, &self.shape)
    }

    /// Returns what this rank holds of a whole tensor: weights, or anything else with an element for each of them.
    #[must_use]
    pub fn part_of(&self, whole: &[f32]) -> Vec<f32> {
        self.spans().into_iter().flat_map(|span| whole[span].iter().copied()).collect()
    }

    /// Returns whether sums over all ranks' elements, such as the norm of gradients, take this rank's part: it is no copy
    /// of another rank's.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.shard.is_counted()
    }
}

/// Index of a parameter of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParameterId(pub(crate) usize);

impl ParameterId {
    /// Returns the place among the parameters of the stage.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}
