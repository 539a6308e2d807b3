//! Decodes a sample's fields in a decode pool job, and waits for them.

use std::sync::Arc;

use bytes::Bytes;
use dflop_costmodel::ImageSize;
use dflop_samples::inputs::{PrepareError, SampleProcessor};
use dflop_samples::media::augment::ImageAugment;
use dflop_samples::media::{DecodeLimits, Media, RgbImage, decode};
use dflop_samples::sample::{Field, Sample};

use super::pool::{DecodePool, Pending};
use super::transform::PendingTransforms;
use super::{Decoded, FieldError};
use crate::error::{Error, Result, error_reason};
use crate::flow::LoaderStage;
use crate::shard::{RawField, RawSample};

/// Decoding of one field.
#[derive(Debug, Clone, Copy)]
pub(super) enum FieldWork {
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
    pub(super) pool: Arc<DecodePool>,
    pub(super) preparer: Arc<dyn SampleProcessor>,
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
pub(super) async fn wait_for_job<T>(answer: Pending<T>) -> Result<Result<T, String>> {
    let result = answer.await.map_err(|_| Error::StageEnded { stage: "decode" })?;
    Ok(result.map_err(|_| "the decoder panicked".to_owned()))
}

/// Wraps a field's stored bytes.
pub(super) fn undecoded(field: &RawField) -> Field {
    let payload: Bytes = field.payload.clone().unwrap_or_default();
    Field { extension: field.extension.clone(), media: Media::Opaque(payload) }
}

/// Decodes all fields in a sample.
pub(super) fn decode_fields(
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
pub(super) fn prepare(
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
