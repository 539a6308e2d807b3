//! Collates decoded fields into tensors.
//!
//! A buffer is cut into slots, one per row; each thread owns the slot that it fills, and the filled slots are
//! joined without a copy. When the finished [`Tensor`] is dropped, the memory returns to the pool, because
//! faulting in fresh pages costs more than filling them.

use super::pool::{DecodePool, Pending};
use super::transform::TransformStage;
use super::{
    Batch, Decode, FieldError, FieldWork, PendingFields, Pixels, PrepareStage, decode_fields, prepare,
    undecoded, wait_for_job,
};
use crate::error::{Error, Result, Skipped, error_reason};
use crate::flow::{LoaderStage, Metrics, SkipLog};
use crate::shard::{RawField, RawSample};
use bytes::BytesMut;
use dflop_samples::inputs::{PreparedSample, SampleProcessor};
use dflop_samples::media::augment::{Augment, ImageAugment};
use dflop_samples::media::codec::registered_codec;
use dflop_samples::media::{
    DecodeError, DecodeLimits, Modality, PixelFormat, PixelType, Strictness, VideoSampling,
    extension_modality,
};
use dflop_samples::sample::{Sample, decoded_bytes};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Decodes samples and assembles them into batches.
#[derive(Debug, Clone)]
pub(crate) struct Collator {
    decode: Decode,
    pool: Arc<DecodePool>,
    tensors: TensorPool,
    skips: Arc<SkipLog>,
    preparer: Option<Arc<dyn SampleProcessor>>,
    augment: Option<Augment>,
    transforms: Option<Arc<TransformStage>>,
    format: PixelFormat,
    limits: DecodeLimits,
}

/// Batch whose fields are being decoded.
#[derive(Debug)]
pub(crate) enum PendingBatch {
    Fields(Vec<PendingSample>),
    Pixels(PendingPixels),
}

/// Sample whose fields are being decoded, or which needs no decoding.
#[derive(Debug)]
pub(crate) struct PendingSample {
    raw: RawSample,
    fields: PendingFields,
}

/// Decoded sample.
#[derive(Debug)]
pub(crate) struct FinishedSample {
    pub(crate) sample: Sample,
    /// Model inputs, if samples are prepared.
    pub(crate) prepared: Option<PreparedSample>,
}

#[derive(Debug)]
pub(crate) struct PendingPixels {
    side: NonZeroU32,
    samples: Vec<PixelSample>,
    slots: Slots,
}

/// The slot is returned even if decoding fails, because joining a batch needs all slots.
type PendingImage = Pending<(Slot, Result<bool, DecodeError>)>;

#[derive(Debug)]
struct PixelSample {
    raw: RawSample,
    /// Payload size of the fields that were read, in bytes.
    bytes: u64,
    images: Vec<(Arc<str>, PendingImage)>,
    /// Selected fields other than images.
    others: PendingFields,
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
            transforms: None,
            format: PixelFormat::default(),
            limits: DecodeLimits::default(),
        }
    }

    /// Prepares every sample for a model, in the same job that decodes it.
    pub(crate) fn preparer(mut self, preparer: Option<Arc<dyn SampleProcessor>>) -> Self {
        self.preparer = preparer;
        self
    }

    /// Runs CPU work on the pool and waits for it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let answer = self.pool.submit(move |_| work()).await?;
        wait_for_job(answer).await?.map_err(|_| Error::StageEnded { stage: "decode" })
    }

    /// Augments images as they are decoded.
    pub(crate) fn augment(self, augment: Option<Augment>) -> Self {
        Self { augment, ..self }
    }

    /// Passes decoded fields through user code; callers that start samples then pass them to
    /// [`Self::transform`].
    pub(crate) fn transforms(self, transforms: Option<Arc<TransformStage>>) -> Self {
        Self { transforms, ..self }
    }

    /// Sets value type and axis order for images that share a tensor.
    pub(crate) fn pixel_format(self, format: PixelFormat) -> Self {
        Self { format, ..self }
    }

    /// Sets which media damage is an error.
    pub(crate) fn strictness(mut self, strictness: Strictness) -> Self {
        (self.limits.image.strictness, self.limits.audio.strictness) = (strictness, strictness);
        self
    }

    /// Selects the video frames to decode.
    pub(crate) fn video_sampling(mut self, sampling: Option<VideoSampling>) -> Self {
        self.limits.video.sampling = sampling.unwrap_or_default();
        self
    }

    /// Returns the transforms, if any.
    pub(crate) fn transform_stage(&self) -> Option<&TransformStage> {
        self.transforms.as_deref()
    }

    /// Returns the account of skipped samples.
    pub(crate) fn skips(&self) -> Arc<SkipLog> {
        self.skips.clone()
    }

    /// Returns the decode mode.
    pub(crate) fn decode_mode(&self) -> Decode {
        self.decode
    }

    /// Returns the loader's counters.
    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        self.pool.metrics()
    }

    /// Estimates the decoded media size for a batch in bytes; 0 where fields are delivered as stored, and
    /// where images go into tensors, whose number is bounded instead.
    pub(crate) fn decoded_bytes(&self, samples: &[RawSample]) -> u64 {
        let is_decoded = self.decode == Decode::Media;
        let bytes = |sample| decoded_bytes(sample, &self.limits);
        samples.iter().filter(|_| is_decoded).map(bytes).sum()
    }

    /// Starts decoding a batch; waits only for room in the pool's queue.
    pub(crate) async fn start(&self, samples: Vec<RawSample>) -> Result<PendingBatch> {
        if let Decode::Pixels { side } = self.decode {
            return Ok(PendingBatch::Pixels(self.start_pixels(samples, side).await?));
        }
        let mut pending = Vec::with_capacity(samples.len());
        for raw in samples {
            pending.push(self.start_sample(raw).await?);
        }
        Ok(PendingBatch::Fields(pending))
    }

    /// Starts decoding a sample.
    pub(crate) async fn start_sample(&self, raw: RawSample) -> Result<PendingSample> {
        self.start_leased(raw, ()).await
    }

    /// Starts decoding a sample; undecoded bytes and `lease` are dropped as soon as it is decoded.
    pub(crate) async fn start_leased(
        &self,
        mut raw: RawSample,
        lease: impl Send + 'static,
    ) -> Result<PendingSample> {
        let fields = if self.decode == Decode::Raw {
            PendingFields::Ready(raw.fields.iter().map(undecoded).collect())
        } else {
            // Transforms run between decoding and preparation, so the transform task prepares the samples.
            let preparer = self.preparer.clone().filter(|_| self.transforms.is_none());
            let (field_work, limits) = (self.field_work(&raw, &raw.fields), self.limits);
            let encoded = raw.clone();
            // Only the job holds the encoded bytes, so that they are freed as soon as they are decoded.
            raw.fields.iter_mut().for_each(|field| field.payload = None);
            let work = move |_: &mut _| {
                let decoded = decode_fields(&encoded.fields, &field_work, &limits);
                let done = decoded.and_then(|fields| match preparer {
                    Some(preparer) => prepare(&*preparer, &encoded, fields),
                    None => Ok((fields, None)),
                });
                drop((encoded, lease));
                done
            };
            PendingFields::Decoding(self.pool.submit(work).await?)
        };
        Ok(PendingSample { raw, fields })
    }

    /// Starts the transforms, if any, for samples whose decoding was started; a single call may process
    /// fields from all of them.
    pub(crate) fn transform<'a>(&self, samples: impl Iterator<Item = &'a mut PendingSample>) {
        self.transform_fields(samples.map(|sample| (&mut sample.raw, &mut sample.fields)));
    }

    fn transform_fields<'a>(
        &self,
        samples: impl Iterator<Item = (&'a mut RawSample, &'a mut PendingFields)>,
    ) {
        let Some(stage) = &self.transforms else { return };
        let (pool, preparer) = (self.pool.clone(), self.preparer.clone());
        let preparing = preparer.map(|preparer| PrepareStage { pool, preparer });
        let (mut started, mut places) = (Vec::new(), Vec::new());
        for (raw, fields) in samples {
            raw.fields.iter_mut().for_each(|field| field.payload = None);
            started.push((raw.clone(), std::mem::replace(fields, PendingFields::Ready(Vec::new()))));
            places.push(fields);
        }
        for (fields, pending) in places.into_iter().zip(stage.start(started, preparing)) {
            *fields = PendingFields::Transforming(pending);
        }
    }

    /// Returns how each field in a sample is decoded.
    fn field_work(&self, raw: &RawSample, fields: &[RawField]) -> Vec<FieldWork> {
        let is_kept = |field: &RawField| {
            self.transforms.as_ref().is_some_and(|transforms| transforms.decodes(&field.extension))
        };
        let work = |field| {
            if is_kept(field) { FieldWork::Keep } else { FieldWork::Decode(self.augmentation(raw, field)) }
        };
        fields.iter().map(work).collect()
    }

    /// Returns the augmentation for an image field.
    fn augmentation(&self, raw: &RawSample, field: &RawField) -> Option<ImageAugment> {
        let augment = self.augment.filter(|_| is_image(field))?;
        Some(augment.image(raw.id(), raw.epoch, &field.extension))
    }

    async fn start_pixels(&self, samples: Vec<RawSample>, side: NonZeroU32) -> Result<PendingPixels> {
        let images = samples.iter().flat_map(|raw| &raw.fields).filter(|field| is_image(field)).count();
        let row_values = 3 * side.get() as usize * side.get() as usize;
        let (slots, free) = self.tensors.slots(images, row_values, self.format.pixels);
        let (format, mut free) = (self.format, free.into_iter());
        let mut pending = Vec::with_capacity(samples.len());
        for raw in samples {
            let mut images = Vec::new();
            let others = self.start_others(&raw).await?;
            for field in raw.fields.iter().filter(|field| is_image(field)) {
                let augmentation = self.augmentation(&raw, field);
                let mut slot = free.next().expect("one slot per image was cut above");
                let payload = field.payload.clone().unwrap_or_default();
                let codec = registered_codec(&field.extension);
                let job = self.pool.submit(move |worker| {
                    let (augment, out) = (augmentation.as_ref(), slot.bytes());
                    let result = worker.decode_pixels(codec, payload, augment, format, out);
                    (slot, result)
                });
                images.push((field.extension.clone(), job.await?));
            }
            let bytes = read_bytes(&raw);
            pending.push(PixelSample { raw, bytes, images, others });
        }
        self.transform_fields(pending.iter_mut().map(|sample| (&mut sample.raw, &mut sample.others)));
        Ok(PendingPixels { side, samples: pending, slots })
    }

    /// Starts decoding the fields other than images that were read.
    async fn start_others(&self, raw: &RawSample) -> Result<PendingFields> {
        let mut others = raw.fields.clone();
        others.retain(|field| !is_image(field) && field.payload.is_some());
        if others.is_empty() {
            return Ok(PendingFields::Ready(Vec::new()));
        }
        let (work, limits) = (self.field_work(raw, &others), self.limits);
        let job = self.pool.submit(move |_| Ok((decode_fields(&others, &work, &limits)?, None)));
        Ok(PendingFields::Decoding(job.await?))
    }

    /// Waits for a batch. Returns the good samples, and for each sample whether it is good; bad samples are
    /// recorded as skipped.
    pub(crate) async fn finish(&self, batch: PendingBatch) -> Result<(Batch, Vec<bool>)> {
        let (batch, is_good) = match batch {
            PendingBatch::Pixels(pixels) => self.finish_pixels(pixels).await?,
            PendingBatch::Fields(pending) => {
                let mut samples = Vec::with_capacity(pending.len());
                let mut is_good = Vec::with_capacity(pending.len());
                for sample in pending {
                    let finished = self.finish_sample(sample).await?;
                    is_good.push(finished.is_some());
                    samples.extend(finished.map(|finished| finished.sample));
                }
                (Batch { samples, pixels: None, sources: Vec::new() }, is_good)
            }
        };
        self.skips.delivered(batch.samples.len() as u64);
        Ok((batch, is_good))
    }

    /// Copies images from several batch tensors into a single tensor, sample by sample.
    pub(crate) fn gather(&self, of: &[(Arc<Pixels>, Range<usize>)]) -> Pixels {
        let side = of.first().map_or(0, |(pixels, _)| pixels.side);
        let row_values = 3 * side as usize * side as usize;
        let (row_bytes, layout) = (row_values * self.format.pixels.bytes() as usize, self.format.layout);
        let images = of.iter().map(|(_, rows)| rows.len()).sum();
        let (slots, mut free) = self.tensors.slots(images, row_values, self.format.pixels);
        let sources = of.iter().flat_map(|(pixels, rows)| rows.clone().map(move |row| (pixels, row)));
        for (slot, (pixels, row)) in free.iter_mut().zip(sources) {
            let bytes = &pixels.tensor.bytes()[row * row_bytes..(row + 1) * row_bytes];
            slot.bytes().copy_from_slice(bytes);
        }
        let tensor = slots.join(free, &vec![true; images]);
        let mut end = 0;
        let rows = of.iter().map(|(_, rows)| {
            end += rows.len();
            end - rows.len()..end
        });
        Pixels { tensor, layout, side, rows: rows.collect() }
    }

    /// Waits for a sample; a bad sample is recorded as skipped.
    pub(crate) async fn finish_sample(&self, pending: PendingSample) -> Result<Option<FinishedSample>> {
        Ok(self.try_finish_sample(pending).await?.ok())
    }

    /// Waits for a sample; a bad sample is recorded as skipped, and the bad field returned, if one is bad.
    pub(crate) async fn try_finish_sample(
        &self,
        pending: PendingSample,
    ) -> Result<std::result::Result<FinishedSample, Option<String>>> {
        let bytes = pending.raw.bytes();
        match pending.fields.finish().await? {
            Ok((fields, prepared)) => {
                Ok(Ok(FinishedSample { sample: Sample::from_raw(pending.raw, bytes, fields), prepared }))
            }
            Err(error) => {
                let field = error.field.clone();
                self.skip(&pending.raw, error);
                Ok(Err(field))
            }
        }
    }

    async fn finish_pixels(&self, pending: PendingPixels) -> Result<(Batch, Vec<bool>)> {
        let (mut samples, mut rows, mut is_good) = (Vec::new(), Vec::new(), Vec::new());
        let (mut slots, mut is_kept, mut kept) = (Vec::new(), Vec::new(), 0);
        for sample in pending.samples {
            let mut fault = None;
            let images = sample.images.len();
            for (extension, answer) in sample.images {
                let (slot, result) =
                    wait_for_job(answer).await?.map_err(|_| Error::StageEnded { stage: "decode" })?;
                // Slots from bad samples are needed too, because joining restores the whole buffer.
                slots.push(slot);
                if let Err(error) = result {
                    let (field, reason) = (Some(extension.to_string()), error_reason(&error));
                    let error = FieldError { field, reason, is_dropped: false, stage: LoaderStage::Decode };
                    fault.get_or_insert(error);
                }
            }
            let others = sample.others.finish().await?.map_err(|error| fault.get_or_insert(error));
            let others = others.map_or_else(|_| Vec::new(), |(fields, _)| fields);
            is_kept.extend(std::iter::repeat_n(fault.is_none(), images));
            is_good.push(fault.is_none());
            if let Some(error) = fault {
                self.skip(&sample.raw, error);
            } else {
                rows.push(kept..kept + images);
                kept += images;
                samples.push(Sample::from_raw(sample.raw, sample.bytes, others));
            }
        }
        let tensor = pending.slots.join(slots, &is_kept);
        let pixels = Some(Pixels { tensor, layout: self.format.layout, side: pending.side.get(), rows });
        Ok((Batch { samples, pixels, sources: Vec::new() }, is_good))
    }

    fn skip(&self, raw: &RawSample, error: FieldError) {
        self.metrics().stage(error.stage).fail(1);
        let (shard, key) = (raw.shard.to_string(), Some(raw.key.clone()));
        let skipped = Skipped { shard, offset: raw.offset, key, field: error.field, reason: error.reason };
        if error.is_dropped { self.skips.push_dropped(skipped) } else { self.skips.push(skipped) }
    }
}

fn is_image(field: &RawField) -> bool {
    extension_modality(&field.extension) == Some(Modality::Image)
}

/// Returns the payload size of the fields that were read, in bytes.
fn read_bytes(raw: &RawSample) -> u64 {
    let is_read = |field: &&RawField| is_image(field) || field.payload.is_some();
    raw.fields.iter().filter(is_read).map(|field| field.bytes).sum()
}

/// Alignment of the first value in bytes, enough for any vector instruction and for `DLPack`.
const ALIGNMENT: usize = 64;
/// Maximum number of buffers kept for reuse: buffers for batches in flight, and a few that the consumer still
/// holds.
const BUFFERS_KEPT: usize = 6;

/// Pool of buffers from dropped batches.
#[derive(Debug, Clone, Default)]
pub(crate) struct TensorPool(Arc<Mutex<FreeBuffers>>);

#[derive(Debug, Default)]
struct FreeBuffers {
    buffers: Vec<BytesMut>,
    /// Size of the largest batch so far in bytes; new buffers have this size, so that any buffer fits any
    /// batch.
    bytes_max: usize,
}

/// Batch under construction, with equal row lengths.
#[derive(Debug)]
pub(crate) struct Slots {
    pool: TensorPool,
    padding: BytesMut,
    /// Unused end of the buffer; it must be joined again, or the allocation cannot be reused.
    rest: BytesMut,
    row_bytes: usize,
    pixels: PixelType,
}

/// Row owned by the thread that fills it.
#[derive(Debug)]
pub(crate) struct Slot(BytesMut);

impl Slot {
    /// Returns the value bytes of the row, aligned for the value type; stale until they are written.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl TensorPool {
    /// Cuts a buffer into `rows` slots with `row_values` values each.
    pub(crate) fn slots(&self, rows: usize, row_values: usize, pixels: PixelType) -> (Slots, Vec<Slot>) {
        let row_bytes = row_values * pixels.bytes() as usize;
        // Allocations are less aligned, so there must be room to start the first row at an aligned address.
        let wanted = rows * row_bytes + ALIGNMENT;
        let mut buffer = self.lock().take(wanted);
        buffer.resize(wanted, 0);
        let padding = buffer.as_ptr().align_offset(ALIGNMENT);
        let padding = buffer.split_to(padding);
        let slots = (0..rows).map(|_| Slot(buffer.split_to(row_bytes))).collect();
        (Slots { pool: self.clone(), padding, rest: buffer, row_bytes, pixels }, slots)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeBuffers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, buffer: BytesMut) {
        let mut free = self.lock();
        if free.buffers.len() < BUFFERS_KEPT {
            free.buffers.push(buffer);
        }
    }
}

impl FreeBuffers {
    /// Returns a kept or new buffer with at least `bytes` bytes; the content is stale.
    fn take(&mut self, bytes: usize) -> BytesMut {
        self.bytes_max = self.bytes_max.max(bytes);
        let fits = self.buffers.iter().rposition(|buffer| buffer.capacity() >= bytes);
        if let Some(place) = fits {
            return self.buffers.swap_remove(place);
        }
        // Sizes rarely shrink, so a buffer that is too small now would never be used again.
        self.buffers.pop();
        BytesMut::zeroed(self.bytes_max)
    }
}

impl Slots {
    /// Joins all slots in the order in which they were cut, keeping the rows for which `is_kept` is true.
    pub(crate) fn join(self, slots: Vec<Slot>, is_kept: &[bool]) -> Tensor {
        let (row_bytes, pixels) = (self.row_bytes, self.pixels);
        let padding = self.padding.len();
        let mut joined = self.padding;
        for slot in slots {
            joined.unsplit(slot.0);
        }
        let mut rows = 0;
        // Gaps from skipped samples are closed in place.
        for row in (0..is_kept.len()).filter(|&row| is_kept[row]) {
            if row != rows {
                let start = padding + row * row_bytes;
                joined.copy_within(start..start + row_bytes, padding + rows * row_bytes);
            }
            rows += 1;
        }
        joined.unsplit(self.rest);
        let end = padding + rows * row_bytes;
        Tensor { whole: joined, start: padding, end, rows, pixels, pool: self.pool }
    }
}

/// Finished batch of rows, 64-byte aligned; dropping it returns the memory to the pool.
#[derive(Debug)]
pub struct Tensor {
    whole: BytesMut,
    start: usize,
    end: usize,
    rows: usize,
    pixels: PixelType,
    pool: TensorPool,
}

impl Tensor {
    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the value type.
    #[must_use]
    pub fn pixel_type(&self) -> PixelType {
        self.pixels
    }

    /// Returns all values in single precision, row after row; empty for any other value type.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        if self.pixels == PixelType::Float32 { bytemuck::cast_slice(self.bytes()) } else { &[] }
    }

    /// Returns all value bytes, row after row, in native byte order.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.whole[self.start..self.end]
    }

    /// Returns all value bytes, row after row, for changes in place.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.whole[self.start..self.end]
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.whole));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(pool: &TensorPool, is_kept: &[bool]) -> Tensor {
        let (batch, mut slots) = pool.slots(is_kept.len(), 16, PixelType::Float32);
        for (row, slot) in slots.iter_mut().enumerate() {
            bytemuck::cast_slice_mut(slot.bytes()).fill(row as f32);
        }
        batch.join(slots, is_kept)
    }

    #[test]
    fn rows_keep_their_order_and_bad_ones_close_up() {
        let tensor = filled(&TensorPool::default(), &[true, false, true, true]);
        let first: Vec<f32> = tensor.values().chunks(16).map(|row| row[0]).collect();
        assert_eq!((tensor.rows(), first), (3, vec![0.0, 2.0, 3.0]));
        assert_eq!(tensor.values().as_ptr().align_offset(ALIGNMENT), 0);
    }

    #[test]
    fn memory_is_used_again() {
        let pool = TensorPool::default();
        let first = filled(&pool, &[true; 4]).values().as_ptr();
        assert_eq!(filled(&pool, &[true; 4]).values().as_ptr(), first);
        assert_eq!(filled(&pool, &[true; 2]).values().as_ptr(), first);
    }

    #[test]
    fn an_empty_batch_is_empty() {
        assert_eq!(filled(&TensorPool::default(), &[]).values().len(), 0);
        assert_eq!(filled(&TensorPool::default(), &[false]).rows(), 0);
    }
}
