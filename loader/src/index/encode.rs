//! Encodes an index as an Arrow IPC file, shard by shard.
//!
//! A built shard is encoded at once, as a separate Arrow file with a separate extension dictionary, and its
//! rows leave memory ([`Spill`]). Rows from small shards, whose files would be mostly headers, stay in memory
//! while there is room. The dataset dictionary and the metadata come first in the index file and are known
//! once all shards are built; the file is then written with one record batch in memory at a time.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::types::UInt32Type;
use arrow_array::{ArrayRef, PrimitiveArray, RecordBatch, StringArray};
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, Schema};
use bytes::Bytes;
use dflop_samples::media::codec::registered;
use dflop_samples::media::{Modality, VideoSampling, extension_modality};
use sha2::{Digest, Sha256};

use super::account::UnusedParts;
use super::builder::BuiltShard;
use super::columns::Columns;
use super::file::{
    CHECKSUM_DIGITS, CHECKSUM_KEY, ChecksumWriter, DecodedIndex, WriteFault, decode_rows, hex,
};
use super::rows::ShardRows;
use super::schema::{IndexedShard, Metadata, VERSION, counts_column, schema};
use super::spill::Spill;
use super::text_counts::CountedTexts;
use crate::error::Skipped;

/// Built shard without rows.
#[derive(Debug)]
pub(super) struct ShardSummary {
    pub(super) shard: IndexedShard,
    pub(super) digest: [u8; 32],
    pub(super) skipped: Vec<Skipped>,
    pub(super) warnings: Vec<String>,
    pub(super) unused: UnusedParts,
    /// Field extensions, in first-use order.
    pub(super) extension_names: Vec<Arc<str>>,
    /// Digests of the counters that counted the shard.
    pub(super) counters: Vec<String>,
}

impl ShardSummary {
    /// Returns whether any field has a video extension.
    pub(super) fn has_videos(&self) -> bool {
        self.extension_names.iter().any(|name| extension_modality(name) == Some(Modality::Video))
    }
}

/// Shard rows in memory.
#[derive(Debug)]
pub(super) enum EncodedRows {
    /// Arrow file.
    File(Bytes),
    /// Rows too few to be worth a file.
    Few(Box<Columns>),
}

/// Shard whose rows are in memory.
#[derive(Debug)]
pub(super) struct EncodedShard {
    pub(super) summary: ShardSummary,
    pub(super) rows: EncodedRows,
}

/// Location of spilled shard rows.
#[derive(Debug)]
pub(super) enum SpilledRows {
    /// Record in a [`Spill`]: an Arrow file.
    Record(Range<u64>),
    /// In memory, within the spill's memory limit.
    Held(Box<Columns>),
}

/// Shard whose rows are in a [`Spill`], or count towards the spill's memory limit.
#[derive(Debug)]
pub(super) struct SpilledShard {
    pub(super) summary: ShardSummary,
    pub(super) rows: SpilledRows,
}

/// Maximum number of samples in a shard that shares a record batch with neighboring shards.
const SHARED_SAMPLES_MAX: usize = 512;
/// Maximum number of samples in a record batch with several shards.
const BATCH_SAMPLES_MAX: usize = 8 << 10;
/// Maximum size of rows that are kept without a file, in bytes.
const FEW_BYTES_MAX: usize = 32 << 10;

impl BuiltShard {
    /// Encodes the rows.
    ///
    /// # Errors
    /// The Arrow writer error.
    pub(super) fn encode(self) -> Result<EncodedShard, ArrowError> {
        let Self { shard, columns, digest, skipped, warnings, unused } = self;
        let extension_names = columns.extension_names.clone();
        let counters: Vec<_> = columns.text_counts.iter().map(|counted| counted.digest.clone()).collect();
        let is_small = columns.len() <= SHARED_SAMPLES_MAX && columns.memory_bytes() <= FEW_BYTES_MAX;
        let rows = if is_small {
            EncodedRows::Few(Box::new(columns))
        } else {
            EncodedRows::File(encode_file(columns)?)
        };
        let summary = ShardSummary { shard, digest, skipped, warnings, unused, extension_names, counters };
        Ok(EncodedShard { summary, rows })
    }
}

impl EncodedShard {
    /// Moves the rows to `spill`.
    ///
    /// # Errors
    /// The Arrow writer error.
    pub(super) fn spill(self, spill: &mut Spill) -> Result<SpilledShard, ArrowError> {
        let rows = match self.rows {
            EncodedRows::File(file) => SpilledRows::Record(spill.append(&file)),
            EncodedRows::Few(rows) if spill.holds(rows.memory_bytes()) => SpilledRows::Held(rows),
            EncodedRows::Few(rows) => SpilledRows::Record(spill.append(&encode_file(*rows)?)),
        };
        Ok(SpilledShard { rows, summary: self.summary })
    }
}

/// Encodes shard rows as an Arrow file with a separate dictionary.
fn encode_file(columns: Columns) -> Result<Bytes, ArrowError> {
    let counters = columns.text_counts.iter().map(|counted| counted.digest.as_str());
    let schema = Arc::new(schema(String::new(), counters));
    let names = Arc::new(StringArray::from_iter_values(&columns.extension_names));
    let mut writer = FileWriter::try_new(Vec::new(), &schema)?;
    writer.write(&RecordBatch::try_new(schema, columns.into_arrays(names)?)?)?;
    Ok(writer.into_inner()?.into())
}

/// Index file with known content; rows are read while the file is written.
#[derive(Debug)]
pub(super) struct IndexFile {
    schema: Arc<Schema>,
    names: Arc<StringArray>,
    counters: Vec<String>,
    shards: Vec<ShardPlace>,
    /// Earlier index with the same samples, which has the counter columns that the shards lack.
    before: Option<DecodedIndex>,
}

/// Shard rows, with the file-wide number of each shard extension.
#[derive(Debug)]
struct ShardPlace {
    rows: SpilledRows,
    samples: usize,
    extensions: Vec<u16>,
}

impl IndexFile {
    /// Creates the index metadata for these shards, in order. Columns for other counters come from `before`
    /// if it has the same samples.
    ///
    /// # Errors
    /// [`ArrowError`] if there are too many different extensions.
    pub(super) fn new(
        shards: Vec<SpilledShard>,
        before: Option<DecodedIndex>,
        video_sampling: VideoSampling,
    ) -> Result<Self, ArrowError> {
        let before = before.filter(|before| has_same_samples(before, &shards));
        let names = extension_names(&shards)?;
        let counters = counters(&shards, before.as_ref());
        let mut metadata = Metadata {
            version: VERSION,
            fingerprint: fingerprint(&shards),
            shards: Vec::with_capacity(shards.len()),
            skipped: Vec::new(),
            warnings: Vec::new(),
            unused: UnusedParts::default(),
            video_sampling: cfg!(feature = "video").then_some(video_sampling),
            codecs: registered(names.iter().map(|name| &**name)).into_iter().map(str::to_owned).collect(),
        };
        let mut places = Vec::with_capacity(shards.len());
        for (number, SpilledShard { summary, rows }) in shards.into_iter().enumerate() {
            let samples = summary.shard.samples as usize;
            metadata.shards.push(summary.shard);
            metadata.skipped.extend(summary.skipped.into_iter().map(|skipped| (number, skipped)));
            metadata.warnings.extend(summary.warnings);
            metadata.unused.append(summary.unused);
            let extensions = summary.extension_names.iter().map(|name| name_number(&names, name)).collect();
            places.push(ShardPlace { rows, samples, extensions });
        }
        let document =
            serde_json::to_string(&metadata).map_err(|error| ArrowError::ExternalError(error.into()))?;
        let schema = Arc::new(schema(document, counters.iter().map(String::as_str)));
        let names = Arc::new(StringArray::from_iter_values(names));
        Ok(Self { schema, names, counters, shards: places, before })
    }

    /// Writes the file; reads the rows shard by shard.
    ///
    /// # Errors
    /// [`WriteFault`] if rows cannot be read, or the file cannot be encoded or written.
    pub(super) fn write<W: Write>(&self, spill: &Spill, sink: W) -> Result<W, WriteFault> {
        let mut writer = FileWriter::try_new(ChecksumWriter::new(sink), &self.schema)?;
        let mut first = 0;
        while first < self.shards.len() {
            let count = self.batch_shards(first);
            let arrays = match &self.shards[first].rows {
                SpilledRows::Record(record) if count == 1 => {
                    let rows = decode_rows(&spill.read(record).map_err(WriteFault::Rows)?)?;
                    self.arrays(first, &rows)?
                }
                _ => self.columns(first..first + count, spill)?.into_arrays(self.names.clone())?,
            };
            writer.write(&RecordBatch::try_new(self.schema.clone(), arrays)?)?;
            first += count;
        }
        // Reserves the checksum digits, which are replaced once the checksum is known.
        writer.write_metadata(CHECKSUM_KEY, "0".repeat(CHECKSUM_DIGITS));
        writer.get_mut().hold();
        writer.into_inner()?.finish()
    }

    /// Returns the number of shards in the batch that begins with shard `first`: small shards share a batch.
    /// The result depends only on sample counts, so equal shards produce equal files.
    fn batch_shards(&self, first: usize) -> usize {
        let mut samples = 0;
        let shared = self.shards[first..].iter().take_while(|place| {
            samples += place.samples;
            place.samples <= SHARED_SAMPLES_MAX && samples <= BATCH_SAMPLES_MAX
        });
        shared.count().max(1)
    }

    /// Returns a shard's columns with the file-wide dictionary and counters.
    fn arrays(&self, number: usize, rows: &ShardRows) -> Result<Vec<ArrayRef>, ArrowError> {
        let mut arrays = rows.arrays_with(&self.names, &self.shards[number].extensions)?;
        for digest in &self.counters {
            let counted = rows.counts(digest).or_else(|| self.carried(number, digest));
            let counted = counted.ok_or_else(|| not_counted(digest))?;
            arrays.push(counts_column(counted.clone())?);
        }
        Ok(arrays)
    }

    /// Returns the rows of small shards with the file-wide extensions and counters.
    fn columns(&self, shards: Range<usize>, spill: &Spill) -> Result<Columns, WriteFault> {
        let mut columns = Columns::new();
        let counted = |digest: &String| CountedTexts { digest: digest.clone(), lengths: Vec::new() };
        columns.text_counts = self.counters.iter().map(counted).collect();
        for number in shards {
            let ShardPlace { rows, extensions, .. } = &self.shards[number];
            let read;
            let rows = match rows {
                SpilledRows::Held(rows) => &**rows,
                SpilledRows::Record(record) => {
                    read = decode_rows(&spill.read(record).map_err(WriteFault::Rows)?)?.to_columns();
                    &read
                }
            };
            columns.append(rows, extensions);
            for counted in &mut columns.text_counts {
                let own = rows.text_counts.iter().find(|own| own.digest == counted.digest);
                let own = own.map(|own| &*own.lengths);
                let carried = || self.carried(number, &counted.digest).map(|carried| &**carried.values());
                let lengths = own.or_else(carried).ok_or_else(|| not_counted(&counted.digest))?;
                counted.lengths.extend_from_slice(lengths);
            }
        }
        Ok(columns)
    }

    /// Returns a shard's token counts from the earlier index with the same samples.
    fn carried(&self, number: usize, digest: &str) -> Option<&PrimitiveArray<UInt32Type>> {
        self.before.as_ref()?.rows[number].counts(digest)
    }
}

fn not_counted(digest: &str) -> ArrowError {
    ArrowError::SchemaError(format!("no counts of {digest}"))
}

/// Returns whether an index has the same samples as these shards.
fn has_same_samples(before: &DecodedIndex, shards: &[SpilledShard]) -> bool {
    let indexed = &before.metadata.shards;
    indexed.len() == shards.len()
        && indexed.iter().zip(shards).all(|(before, SpilledShard { summary, .. })| {
            (before.digest, before.samples) == (summary.shard.digest, summary.shard.samples)
        })
}

/// Collects the extensions from all shards in first-use order: one dictionary for the whole file.
fn extension_names(shards: &[SpilledShard]) -> Result<Vec<Arc<str>>, ArrowError> {
    let mut names: Vec<Arc<str>> = Vec::new();
    for name in shards.iter().flat_map(|shard| &shard.summary.extension_names) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    if names.len() > usize::from(u16::MAX) {
        let reason = format!(
            "{} different field extensions, expected at most 65,535; keys must not contain dots",
            names.len()
        );
        return Err(ArrowError::InvalidArgumentError(reason));
    }
    Ok(names)
}

fn name_number(names: &[Arc<str>], name: &Arc<str>) -> u16 {
    names.iter().position(|known| known == name).unwrap_or(0) as u16
}

/// Returns the digests of the counters that counted all shards.
fn counters(shards: &[SpilledShard], before: Option<&DecodedIndex>) -> Vec<String> {
    let has = |number: usize, digest: &String| {
        shards[number].summary.counters.contains(digest)
            || before.is_some_and(|before| before.rows[number].has_counts(digest))
    };
    let mut counters = shards.first().map(|first| first.summary.counters.clone()).unwrap_or_default();
    let carried = before.and_then(|before| before.rows.first()).into_iter().flat_map(ShardRows::counters);
    for digest in carried {
        if counters.iter().all(|known| known != digest) {
            counters.push(digest.to_owned());
        }
    }
    counters.retain(|digest| (0..shards.len()).all(|number| has(number, digest)));
    counters
}

fn fingerprint(shards: &[SpilledShard]) -> String {
    let mut hasher = Sha256::new();
    for shard in shards {
        hasher.update(shard.summary.digest);
    }
    hex(&hasher.finalize()[..16])
}
