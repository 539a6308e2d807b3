//! Index files and where they are.
//!
//! The file is written under a random name and then renamed, in the first directory that accepts it. The lock
//! lets one process on a machine build while other processes wait.

use super::account::UnusedParts;
use super::builder::BuiltShard;
use super::checksum::{
    CHECKSUM_DIGITS, CHECKSUM_KEY, ChecksumWriter, WriteFault, checksum, checksum_place, damaged, file_footer,
};
use super::rows::ShardRows;
use super::schema::{
    Columns, CountedTexts, IndexedShard, METADATA_KEY, Metadata, VERSION, counts_column, schema,
};
use super::spill::Spill;
use crate::error::{Error, Result, Skipped, StorageError, guarded};
use crate::files::{REPLACEMENT, Replacement, open_own, parent_directory};
use crate::flow::{cores, in_parallel};
use crate::store::{Patience, lock_patiently};
use arrow_array::types::UInt32Type;
use arrow_array::{ArrayRef, PrimitiveArray, RecordBatch, StringArray};
use arrow_buffer::Buffer;
use arrow_ipc::convert::fb_to_schema;
use arrow_ipc::reader::FileDecoder;
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, Schema, SchemaRef};
use bytes::Bytes;
use dflop_samples::media::codec::registered;
use dflop_samples::media::{Modality, VideoSampling, extension_modality};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Returns the lower-case hex digits of `bytes`.
pub(super) fn hex(bytes: &[u8]) -> String {
    format!("{:x}", Bytes::copy_from_slice(bytes))
}

/// Decoded index file; the arrays are views into the file.
#[derive(Debug)]
pub(super) struct DecodedIndex {
    pub(super) metadata: Metadata,
    pub(super) rows: Vec<ShardRows>,
}

/// Decodes an index; the arrays are views into `file`.
///
/// # Errors
/// The reason why the file is damaged, or that it has a different version.
pub(super) fn decode_index(file: &Bytes) -> Result<DecodedIndex, ArrowError> {
    // The checksum guards against accidents; Arrow's reader panics on many files that were made up.
    guarded(|| decode_checked(file)).map_err(|reason| damaged(&reason))?
}

fn decode_checked(file: &Bytes) -> Result<DecodedIndex, ArrowError> {
    let footer = file_footer(file)?;
    let digits = checksum_place(file, &footer)?;
    if !cfg!(fuzzing) && checksum(file, &digits).as_bytes() != &file[digits] {
        return Err(damaged("the checksum differs"));
    }
    let schema = Arc::new(fb_to_schema(footer.schema().ok_or_else(|| damaged("no schema"))?));
    let document = schema.metadata().get(METADATA_KEY).ok_or_else(|| damaged("no metadata"))?;
    let metadata: Metadata = serde_json::from_str(document).map_err(|error| damaged(&error.to_string()))?;
    if metadata.version != VERSION {
        return Err(ArrowError::SchemaError(format!("version {} instead of {VERSION}", metadata.version)));
    }
    let batches = read_batches(file, &footer, schema)?;
    let counts = metadata.shards.iter().map(|shard| shard.samples);
    let rows = split_batches(&batches, counts).ok_or_else(|| damaged("the numbers of samples differ"))?;
    Ok(DecodedIndex { metadata, rows })
}

/// Splits batches into shard rows; each shard is in one batch. `None` if the sample counts differ from
/// `counts`.
fn split_batches(batches: &[ShardRows], counts: impl Iterator<Item = u64>) -> Option<Vec<ShardRows>> {
    let mut batches = batches.iter();
    let (mut batch, mut at) = (batches.next(), 0);
    let mut rows = Vec::new();
    for count in counts {
        let count = usize::try_from(count).ok()?;
        while count > 0 && batch.is_some_and(|batch| batch.len() == at) {
            (batch, at) = (batches.next(), 0);
        }
        rows.push(batch?.slice(at, count)?);
        at += count;
    }
    let is_end = batch.is_none_or(|batch| batch.len() == at) && batches.all(|batch| batch.len() == 0);
    is_end.then_some(rows)
}

/// Decodes a shard's rows; ignores metadata and checksum, if any.
///
/// # Errors
/// The Arrow reader error.
pub(super) fn decode_rows(file: &Bytes) -> Result<ShardRows, ArrowError> {
    let footer = file_footer(file)?;
    let schema = Arc::new(fb_to_schema(footer.schema().ok_or_else(|| damaged("no schema"))?));
    let mut rows = read_batches(file, &footer, schema)?;
    rows.pop().filter(|_| rows.is_empty()).ok_or_else(|| damaged("several shards where one is expected"))
}

/// Reads all batches, in parallel.
fn read_batches(
    file: &Bytes,
    footer: &arrow_ipc::Footer<'_>,
    schema: SchemaRef,
) -> Result<Vec<ShardRows>, ArrowError> {
    let buffer = Buffer::from(file.clone());
    let mut decoder = FileDecoder::new(schema, footer.version());
    let block_of = |block: &arrow_ipc::Block| {
        let start = usize::try_from(block.offset()).unwrap_or(usize::MAX);
        let length = block.metaDataLength() as usize + block.bodyLength() as usize;
        let is_inside = start.checked_add(length).is_some_and(|end| end <= buffer.len());
        if is_inside {
            Ok(buffer.slice_with_length(start, length))
        } else {
            Err(damaged("a block lies outside of the file"))
        }
    };
    for block in footer.dictionaries().iter().flatten() {
        decoder.read_dictionary(block, &block_of(block)?)?;
    }
    let blocks: Vec<_> = footer.recordBatches().iter().flatten().collect();
    let rows_of = |block: &&arrow_ipc::Block| {
        let batch = decoder.read_record_batch(block, &block_of(block)?)?;
        let batch = batch.ok_or_else(|| damaged("a block has no batch"))?;
        ShardRows::new(&batch).ok_or_else(|| damaged("columns differ"))
    };
    // On a separate thread, a panic in Arrow's reader would be printed.
    let guarded_rows = |block: &_| guarded(|| rows_of(block)).map_err(|reason| damaged(&reason))?;
    in_parallel(cores(), &blocks, guarded_rows).into_iter().collect()
}

/// Maximum wait for a process that builds the same index, which may read many shards.
const PATIENCE: Patience = Patience {
    until_report: Duration::from_secs(10),
    for_stopped: Duration::from_secs(20),
    for_any: Duration::from_hours(6),
};
/// Minimum age of a temporary file that counts as abandoned.
const LEFTOVER_AGE: Duration = Duration::from_mins(10);

/// Acquires the lock in the first writable directory. Waits while a different process builds there, but not
/// for a stopped process.
pub(super) fn lock_first_writable(directories: &[PathBuf], name: &str) -> std::io::Result<(PathBuf, File)> {
    let mut refused =
        std::io::Error::new(std::io::ErrorKind::NotFound, "no directory for the index is writable");
    for directory in directories {
        let lock = std::fs::create_dir_all(directory).and_then(|()| {
            let path = lock_path(directory, name);
            let file = open_own(&path)?;
            lock_patiently(&file, &path, PATIENCE).map(|()| file)
        });
        match lock {
            Ok(file) => {
                remove_leftovers(directory, name);
                return Ok((directory.clone(), file));
            }
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

fn lock_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(name.replace(".arrow", ".lock"))
}

/// Removes files that killed builders left; a younger file may belong to a builder on a different machine.
fn remove_leftovers(directory: &Path, name: &str) {
    let start = format!(".{name}-");
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_temporary = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(&start) && name.ends_with(REPLACEMENT));
        let age = entry
            .metadata()
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if is_temporary && age.is_some_and(|age| age > LEFTOVER_AGE) {
            // A leftover file does no harm.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Writes the index to the first directory that accepts it, so that a full disk is skipped.
///
/// # Errors
/// [`Error::Storage`] if no directory accepts the index, if the rows cannot be read back, or if it cannot be
/// encoded.
pub(super) fn write_to_first(
    directories: &[PathBuf],
    name: &str,
    index: &IndexFile,
    spill: &mut Spill,
) -> Result<PathBuf> {
    let written = try_each(directories, name, index, spill);
    if matches!(written, Err(Error::Storage(StorageError::File { .. }))) && spill.has_files() {
        // The rows, which need as much room as the index, may be what fills the disk.
        spill
            .hold_all()
            .map_err(|source| Error::Storage(StorageError::File { path: name.to_owned(), source }))?;
        return try_each(directories, name, index, spill);
    }
    written
}

fn try_each(directories: &[PathBuf], name: &str, index: &IndexFile, spill: &Spill) -> Result<PathBuf> {
    let mut refused = None;
    for directory in directories {
        let path = directory.join(name);
        match write_atomically(&path, index, spill) {
            Ok(()) => return Ok(path),
            Err(WriteFault::Write(source)) => {
                refused = refused.or(Some(Error::file(&path, source)));
            }
            Err(fault) => return Err(fault_in(&path.display().to_string(), fault)),
        }
    }
    let source = std::io::Error::new(std::io::ErrorKind::NotFound, "no directory for the index is writable");
    Err(refused.unwrap_or(Error::Storage(StorageError::File { path: name.to_owned(), source })))
}

/// Path in errors about an index in memory.
pub(super) const IN_MEMORY: &str = "in memory";

/// Returns the error for an index that cannot be encoded or decoded; `None` means an index in memory.
pub(super) fn index_error(path: Option<&Path>, error: &arrow_schema::ArrowError) -> Error {
    let path = path.map_or_else(|| IN_MEMORY.to_owned(), |path| path.display().to_string());
    Error::Storage(StorageError::Index { path, reason: error.to_string() })
}

/// Returns the error for an index file that cannot be written.
pub(super) fn fault_in(path: &str, fault: WriteFault) -> Error {
    match fault {
        WriteFault::Encode(error) => {
            Error::Storage(StorageError::Index { path: path.to_owned(), reason: error.to_string() })
        }
        WriteFault::Rows(source) | WriteFault::Write(source) => {
            Error::Storage(StorageError::File { path: path.to_owned(), source })
        }
    }
}

fn write_atomically(path: &Path, index: &IndexFile, spill: &Spill) -> Result<(), WriteFault> {
    let begin = || {
        std::fs::create_dir_all(parent_directory(path))?;
        Replacement::begin(path)
    };
    let replacement = begin().map_err(WriteFault::Write)?;
    index.write(spill, replacement.file())?;
    replacement.publish().map_err(WriteFault::Write)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    /// Guards a fixed bug: the checksum once omitted the footer, where a wrong fingerprint digit changed the
    /// order.
    #[test]
    fn no_byte_of_an_index_changes_unnoticed() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = crate::write::ShardWriter::builder(directory.path().join("shards")).build().unwrap();
        for key in ["a", "b"] {
            writer.write(key, &[("txt", b"a kite")]).unwrap();
        }
        let index = std::fs::read(writer.finish().unwrap().index.unwrap()).unwrap();
        assert!(decode_index(&index.clone().into()).is_ok());
        for at in 0..index.len() {
            for flipped in [0x01, 0x80] {
                let mut damaged = index.clone();
                damaged[at] ^= flipped;
                assert!(decode_index(&damaged.into()).is_err(), "byte {at} of {}", index.len());
            }
        }
    }
}
