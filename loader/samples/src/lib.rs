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
mod raw_sample;
pub mod sample;

pub use self::error::{
    BoxError, EXCERPT_CHARACTERS, Error, Result, Skipped, error_reason, excerpt, guarded, json_excerpt,
};
pub use self::raw_sample::{RawField, RawSample, SampleId};
