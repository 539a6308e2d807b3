//! Samples of multimodal training data, without shards, threads or models.
//!
//! [`RawSample`] is a sample as it is stored, [`sample::Sample`] the same after decoding. [`media`] decodes
//! fields and probes their headers, [`sample`] orders media and texts and measures their shapes, and
//! [`inputs`] holds what a model is given, with the trait that makes it: [`inputs::SampleProcessor`].
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
    BoxError, EXCERPT_CHARACTERS, Error, Result, Skipped, excerpt, excerpt_of, guarded, reason_of,
};
pub use self::raw_sample::{RawField, RawSample, SampleId};
