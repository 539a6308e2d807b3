//! Processors: what turns decoded samples into the inputs of a model.

use std::fmt::Debug;
use std::sync::Arc;

use dflop_costmodel::{Module, SampleShape};

use super::{Filler, ModelInputs, PrepareError, PreparedSample};
use crate::error::Result;
use crate::sample::{BatchLayout, Sample};

/// Turns decoded samples into the inputs of a model, and microbatches of them into tensors.
///
/// A balanced loader calls it on the threads of its pool. Everything is a pure function of its arguments, so
/// that all ranks and all runs get the same tensors.
pub trait SampleProcessor: Debug + Send + Sync {
    /// Prepares a decoded sample.
    ///
    /// # Errors
    /// The reason why the model cannot take the sample; if [`PrepareError::is_dropped`], a setting excludes
    /// it.
    fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError>;

    /// Makes the tensors of a microbatch that a model can run, whatever its samples; `filler` completes them.
    fn pack(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs;

    /// Makes what completes microbatches, in all of which `encoders` have to run.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if there is no blank medium for an encoder.
    fn filler(&self, encoders: &[Module]) -> Result<Filler>;

    /// Returns the same processor with a lower limit on the tokens of a sample, and with rows of a fixed
    /// number of tokens, where given.
    fn limited(&self, tokens_max: Option<u64>, pad_to_tokens: Option<usize>) -> Arc<dyn SampleProcessor>;

    /// Returns the arrangement of the samples of a microbatch in tensors.
    fn layout(&self) -> BatchLayout;

    /// Returns whether lengths or pixels are rounded up, so that a microbatch is longer than its samples.
    fn has_buckets(&self) -> bool;

    /// Returns whether a step in which no token is a training target is an error. Default: no.
    fn requires_targets(&self) -> bool {
        false
    }

    /// Returns whether images must be decoded; if not, their sizes are sufficient.
    fn reads_pixels(&self) -> bool;

    /// Estimates the bytes of the tensors of a sample's media.
    fn tensor_bytes(&self, shape: &SampleShape) -> u64;
}
