//! Undecoded samples to batches: hands fields to the decode pool and puts the answers together in order.

use std::num::NonZeroU32;
use std::sync::Arc;

use bytes::Bytes;

use crate::augment::{Augment, PictureAugment};
use crate::batch::{Batch, Field, Pixels, Sample};
use crate::decode::{DecodeError, DecodeLimits, Media, decode};
use crate::error::{Error, Result};
use crate::measure::decoded_bytes;
use crate::pool::{DecodePool, Pending};
use crate::probe::{MediumKind, kind_of_extension};
use crate::sample::{RawField, RawSample};
use crate::skip::{SkipLog, Skipped, reason_of};
use crate::tensor::{Slot, Slots, TensorPool};

/// What is done with the bytes of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decode {
    /// Nothing: fields are delivered as stored.
    Raw,
    /// Every field becomes what its extension says: pixels, PCM, text, JSON, arrays.
    Media,
    /// Pictures only, into one tensor: shorter side to `side` (bilinear, antialiased), centre crop, normalised.
    Pixels {
        /// Height and width in pixels.
        side: NonZeroU32,
    },
}

/// Turns samples into batches.
#[derive(Debug, Clone)]
pub(crate) struct Collator {
    decode: Decode,
    pool: Arc<DecodePool>,
    tensors: TensorPool,
    skips: Arc<SkipLog>,
    augment: Option<Augment>,
}

/// Refuses to change pictures that stay undecoded.
pub(crate) fn check_augment(decode: Decode, augment: Option<&Augment>) -> Result<()> {
    if decode != Decode::Raw || augment.is_none() {
        return Ok(());
    }
    Err(Error::Config { setting: "augment", reason: "only decoded pictures can be changed".into() })
}

/// A batch whose fields are being decoded.
#[derive(Debug)]
pub(crate) enum PendingBatch {
    Fields(Vec<PendingSample>),
    Pixels(PendingPixels),
}

/// A sample whose fields are being decoded, or which needs no decoding.
#[derive(Debug)]
pub(crate) struct PendingSample {
    raw: RawSample,
    fields: PendingFields,
}

#[derive(Debug)]
enum PendingFields {
    Ready(Vec<Field>),
    Decoding(Pending<Result<Vec<Field>, FieldError>>),
}

/// A field that could not be decoded.
#[derive(Debug)]
struct FieldError {
    field: Arc<str>,
    error: DecodeError,
}

#[derive(Debug)]
pub(crate) struct PendingPixels {
    side: NonZeroU32,
    samples: Vec<PixelSample>,
    slots: Slots,
}

/// The slot comes back whatever the decoder says, so that the batch can be joined again.
type PendingPicture = Pending<(Slot, Result<bool, DecodeError>)>;

#[derive(Debug)]
struct PixelSample {
    raw: RawSample,
    pictures: Vec<(Arc<str>, PendingPicture)>,
}

impl Collator {
    pub(crate) fn new(decode: Decode, pool: Arc<DecodePool>, skips: Arc<SkipLog>) -> Self {
        Self { decode, pool, tensors: TensorPool::default(), skips, augment: None }
    }

    /// Changes pictures as they are decoded.
    pub(crate) fn augment(self, augment: Option<Augment>) -> Self {
        Self { augment, ..self }
    }

    /// The account of what was not delivered.
    pub(crate) fn skips(&self) -> Arc<SkipLog> {
        self.skips.clone()
    }

    /// Estimates what the decoded media of a batch take; nothing where it is delivered as stored, or in tensors,
    /// whose number is bounded instead.
    pub(crate) fn decoded_bytes(&self, samples: &[RawSample]) -> u64 {
        let is_decoded = self.decode == Decode::Media;
        samples.iter().filter(|_| is_decoded).map(decoded_bytes).sum()
    }

    /// Starts decoding a batch; waits only for room in the pool's queue.
    pub(crate) async fn begin(&self, samples: Vec<RawSample>) -> Result<PendingBatch> {
        if let Decode::Pixels { side } = self.decode {
            return Ok(PendingBatch::Pixels(self.begin_pixels(samples, side).await?));
        }
        let mut pending = Vec::with_capacity(samples.len());
        for raw in samples {
            pending.push(self.begin_sample(raw).await?);
        }
        Ok(PendingBatch::Fields(pending))
    }

    /// Starts decoding a sample.
    pub(crate) async fn begin_sample(&self, raw: RawSample) -> Result<PendingSample> {
        let fields = if self.decode == Decode::Raw {
            PendingFields::Ready(raw.fields.iter().map(undecoded).collect())
        } else {
            let (fields, changes) = (raw.fields.clone(), self.changes(&raw));
            PendingFields::Decoding(self.pool.submit(move |_| decode_fields(&fields, &changes)).await?)
        };
        Ok(PendingSample { raw, fields })
    }

    /// The changes of every field.
    fn changes(&self, raw: &RawSample) -> Vec<Option<PictureAugment>> {
        let change = |field: &RawField| {
            let augment = self.augment.filter(|_| is_picture(field))?;
            Some(augment.picture(raw.id(), raw.epoch, &field.extension))
        };
        raw.fields.iter().map(change).collect()
    }

    async fn begin_pixels(&self, samples: Vec<RawSample>, side: NonZeroU32) -> Result<PendingPixels> {
        let pictures = samples.iter().flat_map(|raw| &raw.fields).filter(|field| is_picture(field)).count();
        let row_values = 3 * side.get() as usize * side.get() as usize;
        let (slots, free) = self.tensors.slots(pictures, row_values);
        let mut free = free.into_iter();
        let mut pending = Vec::with_capacity(samples.len());
        for raw in samples {
            let mut pictures = Vec::new();
            let fields = raw.fields.iter().zip(self.changes(&raw)).filter(|(field, _)| is_picture(field));
            for (field, change) in fields {
                let mut slot = free.next().expect("one slot was cut for every picture");
                let payload = field.payload.clone().unwrap_or_default();
                let job = self.pool.submit(move |worker| {
                    let result = worker.decode_pixels(&payload, change.as_ref(), slot.values());
                    (slot, result)
                });
                pictures.push((field.extension.clone(), job.await?));
            }
            pending.push(PixelSample { raw, pictures });
        }
        Ok(PendingPixels { side, samples: pending, slots })
    }

    /// Waits for a batch; bad samples are left out and accounted for.
    pub(crate) async fn finish(&self, batch: PendingBatch) -> Result<Batch> {
        let batch = match batch {
            PendingBatch::Pixels(pixels) => self.finish_pixels(pixels).await?,
            PendingBatch::Fields(pending) => {
                let mut samples = Vec::with_capacity(pending.len());
                for sample in pending {
                    samples.extend(self.finish_sample(sample).await?);
                }
                Batch { samples, pixels: None }
            }
        };
        self.skips.delivered(batch.samples.len() as u64);
        Ok(batch)
    }

    /// Waits for a sample; a bad one is accounted for.
    pub(crate) async fn finish_sample(&self, pending: PendingSample) -> Result<Option<Sample>> {
        let bytes = pending.raw.bytes();
        let fields = match pending.fields {
            PendingFields::Ready(fields) => Ok(fields),
            PendingFields::Decoding(answer) => match answered(answer).await? {
                Ok(result) => {
                    result.map_err(|error| (Some(error.field.to_string()), reason_of(&error.error)))
                }
                Err(panic) => Err((None, panic)),
            },
        };
        match fields {
            Ok(fields) => Ok(Some(delivered(pending.raw, bytes, fields))),
            Err((field, reason)) => {
                self.skip(&pending.raw, field, reason);
                Ok(None)
            }
        }
    }

    async fn finish_pixels(&self, pending: PendingPixels) -> Result<Batch> {
        let (mut samples, mut rows) = (Vec::new(), Vec::new());
        let (mut slots, mut is_kept, mut kept) = (Vec::new(), Vec::new(), 0);
        for sample in pending.samples {
            let mut fault = None;
            let pictures = sample.pictures.len();
            let bytes = picture_bytes(&sample);
            for (extension, answer) in sample.pictures {
                let (slot, result) =
                    answered(answer).await?.map_err(|_| Error::StageEnded { stage: "decode" })?;
                slots.push(slot);
                if let Err(error) = result {
                    fault.get_or_insert((extension, error));
                }
            }
            is_kept.extend(std::iter::repeat_n(fault.is_none(), pictures));
            if let Some((extension, error)) = fault {
                self.skip(&sample.raw, Some(extension.to_string()), reason_of(&error));
            } else {
                rows.push(kept..kept + pictures);
                kept += pictures;
                samples.push(delivered(sample.raw, bytes, Vec::new()));
            }
        }
        let tensor = pending.slots.join(slots, &is_kept);
        Ok(Batch { samples, pixels: Some(Pixels { tensor, side: pending.side.get(), rows }) })
    }

    fn skip(&self, raw: &RawSample, field: Option<String>, reason: String) {
        let (shard, key) = (raw.shard.to_string(), Some(raw.key.clone()));
        self.skips.push(Skipped { shard, offset: raw.offset, key, field, reason });
    }
}

fn is_picture(field: &RawField) -> bool {
    kind_of_extension(&field.extension) == MediumKind::Image
}

fn picture_bytes(sample: &PixelSample) -> u64 {
    let is_picture =
        |field: &&RawField| sample.pictures.iter().any(|(extension, _)| *extension == field.extension);
    sample.raw.fields.iter().filter(is_picture).map(|field| field.bytes).sum()
}

fn delivered(raw: RawSample, bytes: u64, fields: Vec<Field>) -> Sample {
    Sample { key: raw.key, shard: raw.shard, offset: raw.offset, epoch: raw.epoch, bytes, fields }
}

fn undecoded(field: &RawField) -> Field {
    let payload: Bytes = field.payload.clone().unwrap_or_default();
    Field { extension: field.extension.clone(), media: Media::Opaque(payload) }
}

fn decode_fields(fields: &[RawField], changes: &[Option<PictureAugment>]) -> Result<Vec<Field>, FieldError> {
    let limits = DecodeLimits::default();
    let decoded = fields.iter().zip(changes).map(|(field, change)| {
        let payload = field.payload.clone().unwrap_or_default();
        let media = decode(&field.extension, payload, &limits).and_then(|media| match (media, change) {
            (Media::Image(image), Some(change)) => {
                change.apply(&image, image.width, image.height).map(Media::Image)
            }
            (media, _) => Ok(media),
        });
        let extension = field.extension.clone();
        match media {
            Ok(media) => Ok(Field { extension, media }),
            Err(error) => Err(FieldError { field: extension, error }),
        }
    });
    decoded.collect()
}

/// Waits for a job; a panic inside it becomes a reason to skip.
async fn answered<T>(answer: Pending<T>) -> Result<Result<T, String>> {
    let result = answer.await.map_err(|_| Error::StageEnded { stage: "decode" })?;
    Ok(result.map_err(|_| "the decoder panicked".to_owned()))
}
