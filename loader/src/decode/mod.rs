//! Decodes samples on a thread pool and collates them into batches.
//!
//! Decodes a sample's fields in a decode pool job, and waits for them.

mod collate;
mod pool;
mod transform;

use super::error::{Error, Result, error_reason};
use super::flow::LoaderStage;
use super::shard::{RawField, RawSample};
use bytes::Bytes;
use dflop_costmodel::ImageSize;
use dflop_samples::inputs::{PrepareError, PreparedSample, SampleProcessor};
use dflop_samples::media::augment::{Augment, ImageAugment};
use dflop_samples::media::{DecodeLimits, Media, PixelLayout, RgbImage, decode};
use dflop_samples::sample::{Field, Sample};
use pool::Pending;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use transform::PendingTransforms;

pub use collate::Tensor;
pub(crate) use collate::{Collator, FinishedSample, PendingBatch, PendingSample};
pub(crate) use pool::{DecodePool, KernelSettings, SIDE_WITHOUT_PIXELS, WORKERS_MAX};
pub(crate) use transform::TransformStage;
pub use transform::{
    SampleAnswer, SampleInput, SampleTransform, Transform, TransformFault, TransformInput, Transforms,
};

/// Samples that are delivered together.
#[derive(Debug)]
pub struct Batch {
    /// Samples, in order.
    pub samples: Vec<Sample>,
    /// All images in the samples, if pixels were requested.
    pub pixels: Option<Pixels>,
    /// Dataset name for each entry of `samples`, where they are drawn through an index; else empty.
    pub sources: Vec<Arc<str>>,
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

/// Decoding of one field.
#[derive(Debug, Clone, Copy)]
enum FieldWork {
    /// Not decoded here: a transform decodes the field.
    Keep,
    /// Decoded by extension; an image is then augmented.
    Decode(Option<ImageAugment>),
}

/// Fields that are being decoded, or need no decoding.
#[derive(Debug)]
pub(crate) enum PendingFields {
    Ready(Vec<Field>),
    Decoding(Pending<Result<Decoded, FieldError>>),
    Transforming(PendingTransforms),
}

impl PendingFields {
    /// Waits for the fields; a panic in a decoder makes the sample bad.
    pub(crate) async fn finish(self) -> Result<Result<Decoded, FieldError>> {
        match self {
            Self::Ready(fields) => Ok(Ok((fields, None))),
            Self::Transforming(pending) => pending.finish().await,
            Self::Decoding(answer) => Ok(wait_for_job(answer).await?.unwrap_or_else(|reason| {
                Err(FieldError { field: None, reason, is_dropped: false, stage: LoaderStage::Decode })
            })),
        }
    }
}

/// Prepares samples for a model after the transforms.
#[derive(Debug)]
pub(crate) struct PrepareStage {
    pool: Arc<DecodePool>,
    preparer: Arc<dyn SampleProcessor>,
}

impl PrepareStage {
    /// Prepares the samples that are still good, on the decode pool.
    pub(crate) async fn run(
        self,
        samples: Vec<(RawSample, Result<Decoded, FieldError>)>,
    ) -> Result<Vec<Result<Decoded, FieldError>>> {
        let mut pending = Vec::with_capacity(samples.len());
        for (raw, outcome) in samples {
            pending.push(match outcome {
                Err(error) => Err(error),
                Ok((fields, _)) => {
                    let preparer = self.preparer.clone();
                    let job = self.pool.submit(move |_| prepare(&*preparer, &raw, fields)).await?;
                    Ok(PendingFields::Decoding(job))
                }
            });
        }
        let mut prepared = Vec::with_capacity(pending.len());
        for sample in pending {
            prepared.push(match sample {
                Err(error) => Err(error),
                Ok(pending) => Box::pin(pending.finish()).await?,
            });
        }
        Ok(prepared)
    }
}

/// Waits for a job; a panic inside it becomes the reason of a skip.
async fn wait_for_job<T>(answer: Pending<T>) -> Result<Result<T, String>> {
    let result = answer.await.map_err(|_| Error::StageEnded { stage: "decode" })?;
    Ok(result.map_err(|_| "the decoder panicked".to_owned()))
}

/// Wraps a field's stored bytes.
fn undecoded(field: &RawField) -> Field {
    let payload: Bytes = field.payload.clone().unwrap_or_default();
    Field { extension: field.extension.clone(), media: Media::Opaque(payload) }
}

/// Decodes all fields in a sample.
fn decode_fields(
    fields: &[RawField],
    work: &[FieldWork],
    limits: &DecodeLimits,
) -> Result<Vec<Field>, FieldError> {
    fields.iter().zip(work).map(|(field, work)| decode_field(field, work, limits)).collect()
}

fn decode_field(field: &RawField, work: &FieldWork, limits: &DecodeLimits) -> Result<Field, FieldError> {
    let extension = field.extension.clone();
    // Only the size was read: the preparer counts image tokens without pixels.
    if let Some(ImageSize { width, height }) = field.size {
        let media = Media::Image(RgbImage { width, height, pixels: Vec::new(), is_truncated: false });
        return Ok(Field { extension, media });
    }
    let FieldWork::Decode(augmentation) = work else { return Ok(undecoded(field)) };
    let payload = field.payload.clone().unwrap_or_default();
    let media = decode(&extension, payload, limits).and_then(|media| match (media, augmentation) {
        (Media::Image(image), Some(augmentation)) => {
            augmentation.apply(&image, image.width, image.height).map(Media::Image)
        }
        (media, _) => Ok(media),
    });
    match media {
        Ok(media) => Ok(Field { extension, media }),
        Err(error) => Err(FieldError {
            field: Some(extension.to_string()),
            reason: error_reason(&error),
            is_dropped: false,
            stage: LoaderStage::Decode,
        }),
    }
}

/// Prepares a decoded sample; images, audio and videos move from the fields into the tensors.
fn prepare(
    preparer: &dyn SampleProcessor,
    raw: &RawSample,
    fields: Vec<Field>,
) -> Result<Decoded, FieldError> {
    let sample = Sample::from_raw(raw.clone(), raw.bytes(), fields);
    let refusal = |error: PrepareError| FieldError {
        field: error.field().map(str::to_owned),
        is_dropped: error.is_dropped(),
        reason: error_reason(&error),
        stage: LoaderStage::Decode,
    };
    let prepared = preparer.prepare(&sample).map_err(refusal)?;
    let mut fields = sample.fields;
    fields.retain(|field| !matches!(field.media, Media::Image(_) | Media::Audio(_) | Media::Video(_)));
    Ok((fields, Some(prepared)))
}
