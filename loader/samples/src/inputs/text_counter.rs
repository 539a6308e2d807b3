//! Counters of text tokens by a model's own tokenizer.

use std::fmt::Debug;

use crate::error::BoxError;
use crate::media::TextLength;
use crate::sample::Sample;

/// Counts the tokens of a sample's texts.
pub trait TextCounter: Debug + Send + Sync {
    /// Returns 16 hex digits that are equal only for counters with equal results.
    fn digest(&self) -> String;

    /// Returns whether counts depend on the times of the frames of videos, which are written as text.
    /// Default: no.
    fn reads_video_times(&self) -> bool {
        false
    }

    /// Returns whether counts depend on the sizes of images, around whose crops there is text.
    /// Default: no.
    fn reads_image_sizes(&self) -> bool {
        false
    }

    /// Returns the tokens of a sample without those of its media, and how many of them are targets.
    ///
    /// - `sample`: its texts and JSON documents, its videos without pixels if the counter
    ///   [reads their times](Self::reads_video_times), and its images without pixels if it
    ///   [reads their sizes](Self::reads_image_sizes); all other fields are undecoded and empty
    ///
    /// # Errors
    /// The reason why it cannot be counted; the index then keeps the estimate.
    fn count(&self, sample: &Sample) -> Result<TextLength, BoxError>;
}
