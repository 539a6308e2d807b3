//! Specification of a parameter: name, shape, initialization, and the part that a rank holds.

use std::ops::Range;

use super::tensor_shard::TensorShard;

/// Initialization of a parameter without a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal distribution with this standard deviation.
    Normal(f64),
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
    /// The same value for all elements.
    Constant(f64),
    /// Whisper's positions: sines in the first half of the columns, cosines in the second.
    Sinusoids,
}

/// Parameter as in a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint; row-major.
    pub shape: Vec<usize>,
    /// Part of the tensor that this rank holds.
    pub shard: TensorShard,
    /// Initialization without a checkpoint.
    pub init: Init,
    /// Whether the parameter is trained.
    pub is_trained: bool,
    /// Parameter whose values this one shares, for a tied LM head. It has its own gradient until
    /// [`Parameters::fold_shared_gradients`](crate::parameters::Parameters::fold_shared_gradients).
    pub shares: Option<ParameterId>,
    /// Whether another block uses the parameter, too, in this stage or in another one.
    pub is_tied: bool,
}

impl ParameterSpec {
    /// Number of elements that this rank holds.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.held_shape().iter().product()
    }

    /// Shape of the part that this rank holds.
    #[must_use]
    pub fn held_shape(&self) -> Vec<usize> {
        self.shard.shape_of(self.shard.tp_rank().rank, &self.shape)
    }

    /// Ranges of the whole tensor that this rank holds, in order.
    #[must_use]
    pub fn spans(&self) -> Vec<Range<usize>> {
        self.shard.spans_of(self.shard.tp_rank().rank, &self.shape)
    }

    /// Cuts this rank's part out of a whole tensor: weights, or any other tensor with one element per weight.
    #[must_use]
    pub fn part_of(&self, whole: &[f32]) -> Vec<f32> {
        self.spans().into_iter().flat_map(|span| whole[span].iter().copied()).collect()
    }

    /// Returns whether sums over the elements of all ranks, such as gradient norms, include this rank's part,
    /// which is the case unless it is a copy of another rank's part.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.shard.is_counted()
    }
}

/// Index of a parameter of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParameterId(pub(crate) usize);

impl ParameterId {
    /// Position among the parameters of the stage.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}
