//! Samples for multimodal training, without shards, threads or models.
//!
//! [`RawSample`] is a sample as stored, [`sample::Sample`] a sample after decoding. [`media`] decodes fields
//! and probes headers, [`sample`] orders media and texts and measures shapes, and [`inputs`] holds model
//! inputs, with the trait that creates them: [`inputs::SampleProcessor`].
//!
//! # Examples
//! ```
//! use dflop_samples::media::{DecodeLimits, Media, decode};
//! use dflop_samples::sample::{Field, Sample};
//! let caption = decode("txt", "a red kite".into(), &DecodeLimits::default())?;
//! let sample = Sample::new("kite", vec![Field { extension: "txt".into(), media: caption }]);
//! assert_eq!(sample.field("txt"), Some(&Media::Text("a red kite".to_owned())));
//! # Ok::<(), dflop_samples::media::DecodeError>(())
//! ```

#[cfg(all(feature = "avif", feature = "video"))]
compile_error!("the features `avif` and `video` cannot be combined: both bring the symbols `dav1d_*`");

mod error;
pub mod file;
pub mod inputs;
pub mod media;
pub mod sample;

use std::sync::Arc;

use bytes::Bytes;
use dflop_costmodel::ImageSize;

pub use self::error::{
    BoxError, EXCERPT_CHARACTERS, Error, Result, Skipped, error_reason, excerpt, guarded, json_excerpt,
};

/// Field in an undecoded sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawField {
    /// Part of the entry name after the key's dot, lower-cased, such as `jpg` or `seg.png`.
    pub extension: Arc<str>,
    /// Offset of the payload in the shard, after decompression.
    pub offset: u64,
    /// Length of the payload in bytes.
    pub bytes: u64,
    /// Payload; `None` if the payload exceeds the limit or was not read.
    pub payload: Option<Bytes>,
    /// Image size, if the payload was not read, because only the size is needed.
    pub size: Option<ImageSize>,
}

/// Undecoded sample with fields in shard order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawSample {
    /// Entry path up to the first dot in the file name.
    pub key: String,
    /// URL of the shard.
    pub shard: Arc<str>,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Sample epoch, from 0.
    pub epoch: u64,
    /// The fields, in shard order; extensions are unique.
    pub fields: Vec<RawField>,
}

/// Sample identity within a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleId<'a> {
    /// URL of the shard; only the base name counts.
    pub shard: &'a str,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Sample key.
    pub key: &'a str,
}

impl RawSample {
    /// Returns the sample identity within the dataset.
    #[must_use]
    pub fn id(&self) -> SampleId<'_> {
        SampleId { shard: &self.shard, offset: self.offset, key: &self.key }
    }

    /// Returns the field with this extension.
    #[must_use]
    pub fn field(&self, extension: &str) -> Option<&RawField> {
        self.fields.iter().find(|field| &*field.extension == extension)
    }

    /// Returns the number of payload bytes in all fields.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.fields.iter().map(|field| field.bytes).fold(0, u64::saturating_add)
    }
}
