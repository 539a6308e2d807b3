//! Processors, which convert decoded samples to model inputs, count text tokens, and report samples that they
//! cannot prepare.

use std::fmt::Debug;
use std::sync::Arc;

use dflop_costmodel::{Module, SampleShape};

use super::{Filler, ModelInputs, PreparedSample};
use crate::error::{BoxError, Result};
use crate::media::{Modality, TextLength};
use crate::sample::document::MediaFault;
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

/// Reason why a sample cannot be converted to model inputs; the sample is skipped and recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum PrepareError {
    /// The turns cannot be read, or placeholders and media do not match.
    #[error("{reason}")]
    Conversation { field: Option<String>, reason: String },
    /// The chat template rejects the turns.
    #[error("the chat template rejects the sample: {reason}")]
    ChatTemplate { reason: String },
    /// The tokenizer rejects the text.
    #[error("the tokenizer rejects the text: {reason}")]
    Tokenizer { reason: String },
    /// The number of placeholder tokens in the text differs from the number of media.
    #[error("the text has {found} `{token}` tokens for {media} {}", modality.plural())]
    MediaTokens { token: String, modality: Modality, found: usize, media: usize },
    /// The modality's processor rejects a medium.
    #[error("could not convert the medium to model inputs")]
    Medium { field: String, source: BoxError },
    /// The sample has more tokens than the limit.
    #[error("{tokens} tokens exceed the limit of {tokens_max}{note}")]
    TooLong { tokens: usize, tokens_max: usize, note: &'static str, is_dropped: bool },
}

impl PrepareError {
    /// Returns the field that caused the error, if a single field did.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Conversation { field, .. } => field.as_deref(),
            Self::Medium { field, .. } => Some(field),
            _ => None,
        }
    }

    /// Returns whether a setting excluded the sample, rather than a fault in the sample.
    #[must_use]
    pub fn is_dropped(&self) -> bool {
        matches!(self, Self::TooLong { is_dropped: true, .. })
    }

    /// Creates the error for turns that cannot be read, at a field or at the sample.
    pub fn conversation(field: Option<&str>, reason: impl Into<String>) -> Self {
        Self::Conversation { field: field.map(str::to_owned), reason: reason.into() }
    }
}

impl From<MediaFault> for PrepareError {
    fn from(fault: MediaFault) -> Self {
        Self::Conversation {
            field: Some(fault.field).filter(|field| !field.is_empty()),
            reason: fault.reason,
        }
    }
}

/// Counts the tokens in a sample's texts.
pub trait TextCounter: Debug + Send + Sync {
    /// Returns 16 hex digits that are equal only for counters with equal results.
    fn digest(&self) -> String;

    /// Returns whether counts depend on video frame times, which are written as text. Default: no.
    fn reads_video_times(&self) -> bool {
        false
    }

    /// Returns whether counts depend on image sizes, because image crops are surrounded by text. Default: no.
    fn reads_image_sizes(&self) -> bool {
        false
    }

    /// Returns the number of sample tokens without media tokens, and how many are targets.
    ///
    /// - `sample`: texts and JSON documents, videos without pixels if the counter
    ///   [reads their times](Self::reads_video_times), and images without pixels if the counter
    ///   [reads their sizes](Self::reads_image_sizes); all other fields are undecoded and empty
    ///
    /// # Errors
    /// The reason why the sample cannot be counted; the index then keeps the estimate.
    fn count(&self, sample: &Sample) -> Result<TextLength, BoxError>;
}
