//! User code for whole samples: changes, adds and removes fields, and leaves samples out.

use std::fmt::Debug;

use dflop_samples::sample::{Field, Sample};

use crate::error::BoxError;

/// Sample passed to user code.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleInput {
    /// The sample with its decoded fields; of images that share a tensor, without these.
    pub sample: Sample,
    /// Seed derived from the configured seed, different for every sample, epoch and transform. All randomness
    /// of the transform must come from it.
    pub seed: u64,
}

/// Result for one sample: its fields, or `None` to leave it out.
pub type SampleAnswer = Result<Option<Vec<Field>>, BoxError>;

/// User code that changes whole samples.
pub trait SampleTransform: Debug + Send + Sync {
    /// Changes samples; returns one result per sample, in their order.
    ///
    /// Fields may be changed, added and removed. A sample that is left out is counted as dropped, outside the
    /// error budget. Called on a thread for transforms, on several at a time if so configured. It may block:
    /// read-ahead waits for it.
    ///
    /// # Errors
    /// An inner error makes the sample bad; the outer error ends the stream with
    /// [`crate::Error::UserCode`].
    fn apply(&self, samples: Vec<SampleInput>) -> Result<Vec<SampleAnswer>, BoxError>;
}
