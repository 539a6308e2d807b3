//! Decodes samples on a thread pool and collates them into batches.

mod collate;
mod fields;
mod pool;
mod tensor;
mod transform;

use std::num::NonZeroU32;
use std::ops::Range;

use dflop_samples::inputs::PreparedSample;
use dflop_samples::media::PixelLayout;
use dflop_samples::media::augment::Augment;
use dflop_samples::sample::{Field, Sample};

use crate::error::{Error, Result};
use crate::flow::LoaderStage;

pub(crate) use self::collate::{Collator, PendingBatch, PendingSample};
pub(crate) use self::pool::{DecodePool, KernelSettings, SIDE_WITHOUT_PIXELS, WORKERS_MAX};
pub use self::tensor::Tensor;
pub(crate) use self::transform::TransformStage;
pub use self::transform::{
    SampleAnswer, SampleInput, SampleTransform, Transform, TransformFault, TransformInput, Transforms,
};

/// Samples that are delivered together.
#[derive(Debug)]
pub struct Batch {
    /// Samples, in order.
    pub samples: Vec<Sample>,
    /// All images in the samples, if pixels were requested.
    pub pixels: Option<Pixels>,
}

/// Batch images as a single tensor.
#[derive(Debug)]
pub struct Pixels {
    /// `[images, 3, side, side]`, or `[images, side, side, 3]` by `layout`: resized and cropped; normalized,
    /// unless the values are bytes.
    pub tensor: Tensor,
    /// Axis order within an image.
    pub layout: PixelLayout,
    /// Height and width of every image, in pixels.
    pub side: u32,
    /// Image rows in the tensor for every sample; empty for a sample without an image.
    pub rows: Vec<Range<usize>>,
}

/// Decode mode for sample fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decode {
    /// No decoding: fields are delivered as stored.
    Raw,
    /// Every field is decoded by extension: pixels, PCM, text, JSON, arrays.
    Media,
    /// Images are decoded into a single tensor: shorter side to `side` (bilinear, antialiased), center crop,
    /// normalized. Further fields that are selected by name are decoded by extension.
    Pixels {
        /// Height and width in pixels.
        side: NonZeroU32,
    },
}

/// Rejects image augmentation where images stay undecoded.
pub(crate) fn check_augment(decode: Decode, augment: Option<&Augment>) -> Result<()> {
    if decode != Decode::Raw || augment.is_none() {
        return Ok(());
    }
    Err(Error::Config {
        setting: "augment",
        reason: "only decoded images can be augmented; decode to media or pixels".into(),
    })
}

/// Decoded fields of a sample, and its model inputs if it was prepared.
type Decoded = (Vec<Field>, Option<PreparedSample>);

/// Failure to decode a field or to prepare a sample.
#[derive(Debug)]
pub(crate) struct FieldError {
    pub(crate) field: Option<String>,
    pub(crate) reason: String,
    is_dropped: bool,
    /// Stage of the loader that failed.
    pub(crate) stage: LoaderStage,
}
