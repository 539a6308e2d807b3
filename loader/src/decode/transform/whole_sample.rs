//! User code for whole samples: changes, adds and removes fields, and drops samples.

use std::fmt::Debug;

use dflop_samples::sample::{Field, Sample};

use crate::error::BoxError;

/// Sample passed to user code.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleInput {
    /// Sample with decoded fields, but without the images that share a tensor.
    pub sample: Sample,
    /// Seed derived from the configured seed, different for every sample, epoch and transform. All randomness
    /// in the transform must come from it.
    pub seed: u64,
}

/// Result for a sample: the new fields, or `None` to drop it.
pub type SampleAnswer = Result<Option<Vec<Field>>, BoxError>;

/// User code that changes whole samples.
pub trait SampleTransform: Debug + Send + Sync {
    /// Changes samples; returns one result per sample, in the same order.
    ///
    /// Fields may be changed, added and removed. A sample answered with `None` is counted as dropped, outside
    /// the error budget. Called on a transform thread, on several at a time if so configured. It may block:
    /// read-ahead waits for it.
    ///
    /// # Errors
    /// An inner error makes the sample bad; the outer error ends the stream with [`crate::Error::UserCode`].
    fn apply(&self, samples: Vec<SampleInput>) -> Result<Vec<SampleAnswer>, BoxError>;
}
