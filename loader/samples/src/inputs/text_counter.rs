//! Counts text tokens with a model's own tokenizer.

use std::fmt::Debug;

use crate::error::BoxError;
use crate::media::TextLength;
use crate::sample::Sample;

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
