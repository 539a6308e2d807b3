//! Collects a shard's index rows, item by item.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use dflop_samples::inputs::TextCounter;
use dflop_samples::media::{
    DecodeLimits, MediaShape, Payload, TextLength, VideoSampling, decode, extension_codec,
};
use dflop_samples::sample::{FieldFault, MeasuredSample, measure_sample, measure_within};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use super::account::UnusedParts;
use super::columns::Columns;
use super::schema::{BLOCK_BYTES, IndexedBlock, IndexedShard};
use super::text_counts::ShardCounter;
use crate::error::{Result, Skipped, error_reason};
use crate::shard::tar::Entry;
use crate::shard::tar::entries::Archive;
use crate::shard::{
    Compression, FIELD_BYTES_MAX, FieldSelection, LocalArchive, OpenTable, RangedSamples, RawSample, Shard,
    ShardItem, StreamedSamples, TableFault, TableItems, decompress, split_key,
};
use crate::store::{FileBody, LocalShard};

/// Maximum payload size that is read whole from a local shard, in bytes.
const READ_WHOLE_BYTES: u64 = 128 << 10;

/// Rows, skipped entries and warnings for one shard.
#[derive(Debug)]
pub(super) struct BuiltShard {
    pub(super) shard: IndexedShard,
    pub(super) columns: Columns,
    pub(super) digest: [u8; 32],
    pub(super) skipped: Vec<Skipped>,
    pub(super) warnings: Vec<String>,
    pub(super) unused: UnusedParts,
}

/// Computes the digest over the shard name, length and hashed samples.
pub(super) fn shard_digest(hasher: Sha256, shard: &IndexedShard) -> [u8; 32] {
    hasher.chain_update(&shard.name).chain_update(shard.bytes.to_le_bytes()).finalize().into()
}

/// Collects a shard's rows, item by item.
#[derive(Debug)]
pub(super) struct Builder {
    built: BuiltShard,
    hasher: Sha256,
    /// Key digests so far, 128 bits each; the keys need several times as much memory.
    keys_seen: HashSet<u128>,
    has_repeated_key: bool,
    is_verified: bool,
    limits: DecodeLimits,
    counter: Option<ShardCounter>,
    /// Samples and bytes before the present block of a table.
    block_start: IndexedBlock,
}

impl Builder {
    /// Starts a shard. With `is_verified`, every field is decoded. `sampling` determines the number of video
    /// frames.
    pub(super) fn new(shard: IndexedShard, is_verified: bool, sampling: VideoSampling) -> Self {
        let built = BuiltShard {
            shard,
            columns: Columns::new(),
            digest: [0; 32],
            skipped: Vec::new(),
            warnings: Vec::new(),
            unused: UnusedParts::default(),
        };
        let (hasher, keys_seen) = (Sha256::new(), HashSet::new());
        let mut limits = DecodeLimits::default();
        limits.video.sampling = sampling;
        let block_start = IndexedBlock { samples: 0, bytes: 0 };
        Self {
            built,
            hasher,
            keys_seen,
            has_repeated_key: false,
            is_verified,
            limits,
            counter: None,
            block_start,
        }
    }

    /// Also counts text tokens.
    pub(super) fn counting(mut self, counter: Option<&Arc<dyn TextCounter>>) -> Self {
        self.counter = counter.cloned().map(|counter| ShardCounter::new(counter, self.limits));
        self
    }

    /// Reads an uncompressed shard.
    ///
    /// # Errors
    /// [`Error::Storage`] if it cannot be read, or changes meanwhile.
    pub(super) fn build_plain(mut self, shard: &Shard, archive: &LocalShard) -> Result<BuiltShard> {
        let read_error = |source| shard.read_error(source);
        let window = LocalArchive::new(archive.clone());
        push_plain(&mut self, shard, window, READ_WHOLE_BYTES).map_err(read_error)?;
        if let LocalShard::File(file) = archive {
            file.check_unchanged().map_err(read_error)?;
        }
        Ok(self.finish())
    }

    pub(super) async fn push_unpacked(&mut self, shard: &Shard, compression: Compression, body: FileBody) {
        let reader = decompress(compression, body);
        let mut samples = StreamedSamples::new(shard.url.clone(), reader, FIELD_BYTES_MAX).by_range();
        while let Some(item) = samples.next().await {
            self.push(item);
        }
        self.end_unpacked();
    }

    pub(super) fn is_verified(&self) -> bool {
        self.is_verified
    }

    /// Sets the shard compression.
    pub(super) fn compression(&mut self, compression: Compression) {
        self.built.shard.compression = compression;
    }

    /// Sets the unpacked length of a compressed shard to the end of the last sample.
    pub(super) fn end_unpacked(&mut self) {
        self.built.shard.unpacked_bytes = self.rows_end();
    }

    /// Ends a block of table rows; everything since the last block belongs to it.
    pub(super) fn end_block(&mut self) {
        let IndexedShard { blocks, samples, payload_bytes, .. } = &mut self.built.shard;
        let block = IndexedBlock {
            samples: *samples - self.block_start.samples,
            bytes: *payload_bytes - self.block_start.bytes,
        };
        self.block_start = IndexedBlock { samples: *samples, bytes: *payload_bytes };
        blocks.push(block);
    }

    /// Returns the end of the last good sample's payload.
    pub(super) fn rows_end(&self) -> u64 {
        let last = self.built.columns.offsets.last().copied().unwrap_or(0);
        last + self.built.columns.last_sample_bytes()
    }

    /// Returns the shard properties so far.
    pub(super) fn shard_mut(&mut self) -> &mut IndexedShard {
        &mut self.built.shard
    }

    /// Adds the next shard item.
    pub(super) fn push(&mut self, item: ShardItem) {
        match item {
            ShardItem::Skipped(skipped) => self.built.skipped.push(skipped),
            ShardItem::Sample(sample) => match self.check_sample(&sample) {
                Ok(measured) => {
                    self.push_sample(&sample, &measured.shapes);
                    self.built.unused.count(&sample.key, measured);
                }
                Err(fault) => self.built.skipped.push(fault.in_sample(&sample)),
            },
        }
    }

    fn check_sample(&self, sample: &RawSample) -> Result<MeasuredSample, FieldFault> {
        let measured = measure_within(sample, &self.limits)?;
        for field in &sample.fields {
            let fault = |reason| FieldFault { field: field.extension.clone(), reason };
            if (field.offset - sample.offset) / BLOCK_BYTES > u64::from(u32::MAX) {
                return Err(fault("lies more than 2 TiB after its sample's first header".into()));
            }
            if self.is_verified {
                let payload = field.payload.clone().unwrap_or_default();
                let decoded = decode(&field.extension, payload, &self.limits);
                decoded.map_err(|error| fault(error_reason(&error)))?;
            }
        }
        Ok(measured)
    }

    pub(super) fn skip_shard(&mut self, shard: &Shard, reason: String) {
        let shard = shard.url.to_string();
        self.built.skipped.push(Skipped { shard, offset: 0, key: None, field: None, reason });
    }

    fn push_sample(&mut self, sample: &RawSample, shapes: &[MediaShape]) {
        let repeated = !self.keys_seen.insert(xxh3_128(sample.key.as_bytes()));
        // One warning per shard, because keys that repeat usually repeat often.
        if repeated && !std::mem::replace(&mut self.has_repeated_key, true) {
            let warning = format!("key `{}` repeats in shard `{}`", sample.key, sample.shard);
            self.built
                .warnings
                .push(format!("{warning}; its entries are not consecutive, or it is present twice"));
        }
        let fields = sample.fields.iter().map(|field| (&*field.extension, field.offset, field.bytes));
        hash_sample(&mut self.hasher, &sample.key, sample.offset, fields);
        if let Some(counter) = &mut self.counter {
            counter.push(sample, shapes, estimated(shapes));
        }
        self.built.columns.push(sample, shapes);
        self.built.shard.samples += 1;
        self.built.shard.payload_bytes += sample.bytes();
    }

    /// Completes the shard.
    pub(super) fn finish(mut self) -> BuiltShard {
        if let Some(counter) = self.counter.take() {
            let (counted, warning) = counter.finish(&self.built.shard.name);
            self.built.columns.text_counts.push(counted);
            self.built.warnings.extend(warning);
        }
        // Without the name, so that a renamed shard keeps its digest.
        let nameless = self.hasher.clone().chain_update(self.built.shard.bytes.to_le_bytes()).finalize();
        self.built.shard.digest =
            nameless.iter().take(8).fold(0, |digest, &byte| digest << 8 | u64::from(byte));
        self.built.digest = shard_digest(self.hasher, &self.built.shard);
        self.built
    }
}

/// Returns a sample's text length as estimated in the field shapes.
fn estimated(shapes: &[MediaShape]) -> TextLength {
    shapes.iter().fold(TextLength::default(), |sum, shape| match shape {
        MediaShape::Text(length) => TextLength {
            tokens: sum.tokens.saturating_add(length.tokens),
            target_tokens: sum.target_tokens.saturating_add(length.target_tokens),
        },
        _ => sum,
    })
}

/// Hashes a sample: key, field extensions, offsets and lengths.
pub(super) fn hash_sample<'a>(
    hasher: &mut Sha256,
    key: &str,
    offset: u64,
    fields: impl Iterator<Item = (&'a str, u64, u64)> + Clone,
) {
    let mut update = |text: &str| {
        // Includes the length, so that different texts cannot have equal concatenations.
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    };
    update(key);
    fields.clone().for_each(|(extension, ..)| update(extension));
    hasher.update(offset.to_le_bytes());
    for (_, offset, bytes) in fields {
        hasher.update(offset.to_le_bytes());
        hasher.update(bytes.to_le_bytes());
    }
}

/// Number of bytes read from the start of a payload that is not read whole.
const PREFIX_BYTES: u64 = 64 << 10;

/// Reads an archive's samples into `builder`. Reads only the start of a medium over `whole_bytes_max` where
/// that determines the shape.
///
/// # Errors
/// The archive error.
pub(super) fn push_plain<A: Archive>(
    builder: &mut Builder,
    shard: &Shard,
    archive: A,
    whole_bytes_max: u64,
) -> io::Result<()> {
    let is_verified = builder.is_verified();
    let wanted = move |entry: &Entry| wanted_bytes(entry, is_verified, whole_bytes_max);
    let mut samples = RangedSamples::new(shard.url.clone(), archive, FIELD_BYTES_MAX, Box::new(wanted));
    while let Some(item) = samples.next() {
        push_completed(builder, item?, samples.archive())?;
    }
    Ok(())
}

/// Adds an item, after reading the missing bytes that the shape needs.
///
/// # Errors
/// The error of the archive.
fn push_completed<A: Archive>(builder: &mut Builder, mut item: ShardItem, archive: &mut A) -> io::Result<()> {
    if let ShardItem::Sample(sample) = &mut item {
        complete(sample, archive)?;
    }
    builder.push(item);
    Ok(())
}

/// Returns how much of a payload is needed for its shape, judged by its name; everything if it is decoded.
fn wanted_bytes(entry: &Entry, is_decoded: bool, whole_bytes_max: u64) -> u64 {
    if entry.sparse.is_some() {
        return 0;
    }
    if is_decoded || entry.bytes <= whole_bytes_max.max(PREFIX_BYTES) {
        return entry.bytes;
    }
    let extension = split_key(&entry.name).map(|(_, extension)| extension).unwrap_or_default();
    let is_whole = extension_codec(&extension).is_some_and(|codec| codec.payload() == Payload::Whole);
    if is_whole { entry.bytes } else { PREFIX_BYTES }
}

/// Reads the rest of sample fields whose start does not determine the shape: images that store the
/// orientation after the pixels, and everything that cannot be parsed.
fn complete<A: Archive>(sample: &mut RawSample, archive: &mut A) -> io::Result<()> {
    let is_cut = |payload: &Option<Bytes>, bytes: u64| {
        payload.as_ref().is_some_and(|payload| (payload.len() as u64) < bytes)
    };
    if !sample.fields.iter().any(|field| is_cut(&field.payload, field.bytes)) {
        return Ok(());
    }
    let is_understood = measure_sample(sample).is_ok();
    for field in &mut sample.fields {
        let prefix = field.payload.as_deref().unwrap_or_default();
        let is_settled = extension_codec(&field.extension).is_none_or(|codec| codec.is_settled(prefix));
        let is_enough = is_understood && is_settled;
        if is_cut(&field.payload, field.bytes) && !is_enough {
            field.payload = Some(archive.read(field.offset..field.offset + field.bytes)?);
        }
    }
    Ok(())
}

/// Reads all rows of a table into `builder`.
///
/// # Errors
/// The failed read of the file.
pub(super) fn push_table(
    builder: &mut Builder,
    shard: &Shard,
    opened: Result<OpenTable, TableFault>,
) -> io::Result<()> {
    builder.compression(Compression::Table);
    let table = match opened {
        Ok(table) => table,
        Err(TableFault::Read(source)) => return Err(source),
        Err(TableFault::Damaged(reason)) => {
            builder.skip_shard(shard, reason);
            return Ok(());
        }
    };
    for block in 0..table.blocks() {
        let rows = table.rows_in(block);
        let items = TableItems::new(table.clone(), rows, FieldSelection::ALL, FIELD_BYTES_MAX, Some);
        for item in items {
            builder.push(item?.1);
        }
        builder.end_block();
    }
    Ok(())
}
