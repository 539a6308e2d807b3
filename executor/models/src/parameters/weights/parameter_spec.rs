//! Parameter specification: name, shape, initialization, and the part that a rank holds.

use std::ops::Range;

use super::tensor_shard::TensorShard;

/// Parameter initialization without a checkpoint.
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
    /// Whisper positions: sines in the first half of the columns, cosines in the second.
    Sinusoids,
}

/// Parameter as in a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint; row-major.
    pub shape: Vec<usize>,
    /// Tensor part that this rank holds.
    pub shard: TensorShard,
    /// Initialization without a checkpoint.
    pub init: Init,
    /// Whether the parameter is trained.
    pub is_trained: bool,
    /// Parameter whose values are shared, for a tied LM head. The sharing parameter has a separate gradient
    /// until [`Parameters::fold_shared_gradients`](crate::parameters::Parameters::fold_shared_gradients).
    pub shares: Option<ParameterId>,
    /// Whether another block also uses the parameter, in this or another stage.
    pub is_tied: bool,
}

impl ParameterSpec {
    /// Returns the number of elements that this rank holds.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.held_shape().iter().product()
    }

    /// Returns the shape of the part that this rank holds.
    #[must_use]
    pub fn held_shape(&self) -> Vec<usize> {
        self.shard.rank_shape(self.shard.tp_rank().rank, &self.shape)
    }

    /// Returns the ranges in the complete tensor that this rank holds, in order.
    #[must_use]
    pub fn spans(&self) -> Vec<Range<usize>> {
        self.shard.rank_spans(self.shard.tp_rank().rank, &self.shape)
    }

    /// Cuts the part for this rank out of a complete tensor: weights, or any tensor with an element per
    /// weight.
    #[must_use]
    pub fn cut_part(&self, whole: &[f32]) -> Vec<f32> {
        self.spans().into_iter().flat_map(|span| whole[span].iter().copied()).collect()
    }

    /// Returns whether sums over the elements on all ranks, such as gradient norms, include the part on this
    /// rank; false if the part is a copy of a part on another rank.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.shard.is_counted()
    }
}

/// Parameter index in a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParameterId(pub(crate) usize);

impl ParameterId {
    /// Returns the position among the stage parameters.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}
