//! Undecoded samples to batches: hands fields to the decode pool and puts the answers together in order.

use std::num::NonZeroU32;
use std::sync::Arc;

use bytes::Bytes;
use dflop_costmodel::ImageSize;

use crate::augment::{Augment, PictureAugment};
use crate::batch::{Batch, Field, Pixels, Sample};
use crate::decode::{DecodeError, DecodeLimits, Media, RgbImage, VideoSampling, decode};
use crate::error::{Error, Result};
use crate::measure::decoded_bytes;
use crate::metrics::Metrics;
use crate::pool::{DecodePool, Pending};
use crate::prepare::{PrepareError, PreparedSample, Preparer};
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
    preparer: Option<Arc<Preparer>>,
    augment: Option<Augment>,
    limits: DecodeLimits,
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
    Decoding(Pending<Result<Decoded, FieldError>>),
}

/// What became of the fields of a sample.
type Decoded = (Vec<Field>, Option<PreparedSample>);

/// A field that could not be decoded, or a sample that could not be prepared.
#[derive(Debug)]
struct FieldError {
    field: Option<String>,
    reason: String,
    is_dropped: bool,
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
        Self {
            decode,
            pool,
            tensors: TensorPool::default(),
            skips,
            preparer: None,
            augment: None,
            limits: DecodeLimits::default(),
        }
    }

    /// Prepares every sample for a model, right behind its decoding.
    pub(crate) fn preparer(mut self, preparer: Option<Arc<Preparer>>) -> Self {
        self.preparer = preparer;
        self
    }

    /// Runs CPU work on the pool and waits for it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let answer = self.pool.submit(move |_| work()).await?;
        answered(answer).await?.map_err(|_| Error::StageEnded { stage: "decode" })
    }

    /// Changes pictures as they are decoded.
    pub(crate) fn augment(self, augment: Option<Augment>) -> Self {
        Self { augment, ..self }
    }

    /// Decodes these frames of videos.
    pub(crate) fn video_sampling(mut self, sampling: Option<VideoSampling>) -> Self {
        self.limits.video.sampling = sampling.unwrap_or_default();
        self
    }

    /// The account of what was not delivered.
    pub(crate) fn skips(&self) -> Arc<SkipLog> {
        self.skips.clone()
    }

    /// What is done with the bytes of a sample.
    pub(crate) fn decode_mode(&self) -> Decode {
        self.decode
    }

    /// The counters of the loader.
    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        self.pool.metrics()
    }

    /// Estimates what the decoded media of a batch take; nothing where it is delivered as stored, or in tensors,
    /// whose number is bounded instead.
    pub(crate) fn decoded_bytes(&self, samples: &[RawSample]) -> u64 {
        let is_decoded = self.decode == Decode::Media;
        let bytes = |sample| decoded_bytes(sample, &self.limits.video.sampling);
        samples.iter().filter(|_| is_decoded).map(bytes).sum()
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
        self.begin_leased(raw, ()).await
    }

    /// Starts decoding a sample; its undecoded bytes, and `lease`, go as soon as it is decoded.
    pub(crate) async fn begin_leased(
        &self,
        mut raw: RawSample,
        lease: impl Send + 'static,
    ) -> Result<PendingSample> {
        let fields = if self.decode == Decode::Raw {
            PendingFields::Ready(raw.fields.iter().map(undecoded).collect())
        } else {
            let (preparer, changes, limits) = (self.preparer.clone(), self.changes(&raw), self.limits);
            let encoded = raw.clone();
            raw.fields.iter_mut().for_each(|field| field.payload = None);
            let work = move |_: &mut _| {
                let decoded = decode_fields(&encoded.fields, &changes, &limits);
                let done = decoded.and_then(|fields| match preparer {
                    Some(preparer) => prepare(&preparer, &encoded, fields),
                    None => Ok((fields, None)),
                });
                drop((encoded, lease));
                done
            };
            PendingFields::Decoding(self.pool.submit(work).await?)
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
            PendingFields::Ready(fields) => Ok((fields, None)),
            PendingFields::Decoding(answer) => match answered(answer).await? {
                Ok(result) => result,
                Err(reason) => Err(FieldError { field: None, reason, is_dropped: false }),
            },
        };
        match fields {
            Ok((fields, prepared)) => {
                let sample = delivered(pending.raw, bytes, fields);
                Ok(Some(Sample { prepared: prepared.map(Box::new), ..sample }))
            }
            Err(error) if error.is_dropped => {
                self.skips.push_dropped(skipped(&pending.raw, error.field, error.reason));
                Ok(None)
            }
            Err(error) => {
                self.skip(&pending.raw, error.field, error.reason);
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
        self.skips.push(skipped(raw, field, reason));
    }
}

fn skipped(raw: &RawSample, field: Option<String>, reason: String) -> Skipped {
    let (shard, key) = (raw.shard.to_string(), Some(raw.key.clone()));
    Skipped { shard, offset: raw.offset, key, field, reason }
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
    let (shard, offset, epoch) = (raw.shard, raw.offset, raw.epoch);
    Sample { key: raw.key, shard, offset, epoch, bytes, fields, prepared: None }
}

fn undecoded(field: &RawField) -> Field {
    let payload: Bytes = field.payload.clone().unwrap_or_default();
    Field { extension: field.extension.clone(), media: Media::Opaque(payload) }
}

fn decode_fields(
    fields: &[RawField],
    changes: &[Option<PictureAugment>],
    limits: &DecodeLimits,
) -> Result<Vec<Field>, FieldError> {
    let decoded = fields.iter().zip(changes).map(|(field, change)| {
        if let Some(ImageSize { width, height }) = field.size {
            let media = Media::Image(RgbImage { width, height, pixels: Vec::new(), is_truncated: false });
            return Ok(Field { extension: field.extension.clone(), media });
        }
        let payload = field.payload.clone().unwrap_or_default();
        let media = decode(&field.extension, payload, limits).and_then(|media| match (media, change) {
            (Media::Image(image), Some(change)) => {
                change.apply(&image, image.width, image.height).map(Media::Image)
            }
            (media, _) => Ok(media),
        });
        let extension = field.extension.clone();
        match media {
            Ok(media) => Ok(Field { extension, media }),
            Err(error) => Err(FieldError {
                field: Some(extension.to_string()),
                reason: reason_of(&error),
                is_dropped: false,
            }),
        }
    });
    decoded.collect()
}

/// Prepares a decoded sample; its pictures, clips and videos are in the tensors then, and no longer among its fields.
fn prepare(preparer: &Preparer, raw: &RawSample, fields: Vec<Field>) -> Result<Decoded, FieldError> {
    let sample = delivered(raw.clone(), raw.bytes(), fields);
    let refusal = |error: PrepareError| FieldError {
        field: error.field().map(str::to_owned),
        is_dropped: error.is_dropped(),
        reason: reason_of(&error),
    };
    let prepared = preparer.prepare(&sample).map_err(refusal)?;
    let mut fields = sample.fields;
    fields.retain(|field| !matches!(field.media, Media::Image(_) | Media::Audio(_) | Media::Video(_)));
    Ok((fields, Some(prepared)))
}

/// Waits for a job; a panic inside it becomes a reason to skip.
async fn answered<T>(answer: Pending<T>) -> Result<Result<T, String>> {
    let result = answer.await.map_err(|_| Error::StageEnded { stage: "decode" })?;
    Ok(result.map_err(|_| "the decoder panicked".to_owned()))
}
