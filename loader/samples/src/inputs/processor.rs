//! Processors, which convert decoded samples to model inputs.

use std::fmt::Debug;
use std::sync::Arc;

use dflop_costmodel::{Module, SampleShape};

use super::{Filler, ModelInputs, PrepareError, PreparedSample};
use crate::error::Result;
use crate::sample::{BatchLayout, Sample};

/// Converts decoded samples to model inputs, and microbatches to tensors.
///
/// A balanced loader calls the processor on its pool threads. Every method is a pure function of the
/// arguments, so that all ranks and all runs get the same tensors.
pub trait SampleProcessor: Debug + Send + Sync {
    /// Prepares a decoded sample.
    ///
    /// # Errors
    /// The reason why the model rejects the sample; if [`PrepareError::is_dropped`], a setting excludes the
    /// sample.
    fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError>;

    /// Creates the tensors for a microbatch that a model can run, for any samples; `filler` completes the
    /// microbatch.
    fn pack(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs;

    /// Creates the filler for microbatches that all have to run `encoders`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if there is no blank medium for an encoder.
    fn filler(&self, encoders: &[Module]) -> Result<Filler>;

    /// Returns the same processor with a lower limit on tokens per sample, and with a fixed number of tokens
    /// per row, where given.
    fn limited(&self, tokens_max: Option<u64>, pad_to_tokens: Option<usize>) -> Arc<dyn SampleProcessor>;

    /// Returns how microbatch tensors arrange samples.
    fn layout(&self) -> BatchLayout;

    /// Returns whether lengths or pixels are rounded up, so that a microbatch is longer than the sum over
    /// samples.
    fn has_buckets(&self) -> bool;

    /// Returns whether a step without target tokens is an error. Default: no.
    fn requires_targets(&self) -> bool {
        false
    }

    /// Returns whether images must be decoded; if not, image sizes are sufficient.
    fn reads_pixels(&self) -> bool;

    /// Estimates the size of a sample's media tensors in bytes.
    fn tensor_bytes(&self, shape: &SampleShape) -> u64;
}
