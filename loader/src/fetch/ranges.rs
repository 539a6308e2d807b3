//! Plans the byte ranges to read for a step.
//!
//! Plain local shards are opened once and read by range. A compressed shard is decompressed as a whole, so
//! the result is kept for later samples; both caches evict the least recently used entry. The remote shard
//! ranges that a step needs are fetched beforehand, by [`remote`](super::remote), all in parallel, and so are
//! table rows, by [`tables`](super::tables).
//!
//! An index maps shard bytes to fields. If the index belongs to a different dataset, or the shard was
//! replaced by a file with the same length and time, the bytes belong to different samples. The tar headers
//! directly before a payload name sample, field and length, so they are read with the payload and compared.

use super::dataset_ranges::WantedFields;
use super::remote::{IndexedRemote, WantedRanges, Whole, identity, unpack};
use super::tables::{RowField, TableBlocks};
use crate::error::{EXCERPT_CHARACTERS, Error, Result, Skipped, StorageError, excerpt};
use crate::index::{FieldRow, Index, IndexedShard, SampleRow, identity_of_file, is_version};
use crate::order::StepSample;
use crate::plan::{StepPlan, StepPlanner};
use crate::shard::tar::header::BLOCK_BYTES;
use crate::shard::tar::headers::{Headers, Next};
use crate::shard::tar::{Entry, padded};
use crate::shard::{Compression, FieldSelection, OpenTable, RawField, RawSample, TableFault, split_key};
use crate::store::{Identity, LocalShard, Opened, Task, blocking, spawn};
use bytes::Bytes;
use dflop_samples::media::MediaShape;
use futures::future::try_join_all;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};

/// Maximum number of open shards; the operating system limits the files and maps per process.
const OPEN_SHARDS_MAX: u64 = 64;
/// Operating system error code for too many open files in a process.
const TOO_MANY_FILES: i32 = 24;

/// Reads ranges from the shards in an index.
#[derive(Debug)]
pub(crate) struct ShardRanges {
    index: Arc<Index>,
    /// Number of retried requests.
    retries: Arc<AtomicU64>,
    open: Recent<usize, LocalShard>,
    unpacked: Recent<usize, Bytes>,
    tables: TableBlocks,
    /// Remote fields that the next step reads, by shard.
    fetched: HashMap<(usize, FieldRange), Bytes>,
    /// Table fields that the next step reads, by shard.
    fetched_rows: HashMap<(usize, FieldRange), RowField>,
}

impl ShardRanges {
    /// Keeps at most `unpacked_bytes_max` bytes in decompressed shards, and as many in decoded table blocks,
    /// but always the last shard and the last block.
    pub(crate) fn new(index: Arc<Index>, unpacked_bytes_max: u64, retries: Arc<AtomicU64>) -> Self {
        let open = Recent::new(OPEN_SHARDS_MAX, |_| 1);
        let unpacked = Recent::new(unpacked_bytes_max, |bytes: &Bytes| bytes.len() as u64);
        let tables = TableBlocks::new(OPEN_SHARDS_MAX, unpacked_bytes_max);
        let (fetched, fetched_rows) = (HashMap::new(), HashMap::new());
        Self { index, retries, open, unpacked, tables, fetched, fetched_rows }
    }

    fn is_table(&self, shard: usize) -> bool {
        self.index.indexed_shards()[shard].compression == Compression::Table
    }

    /// Fetches the fields to read from remote shards and tables, by shard.
    ///
    /// # Errors
    /// [`Error::Storage`] with the shard and the offset that could not be read.
    pub(crate) async fn fetch(&mut self, wanted: Vec<(usize, FieldRange)>) -> Result<()> {
        let (rows, wanted): (Vec<_>, Vec<_>) =
            wanted.into_iter().partition(|(shard, _)| self.is_table(*shard));
        self.forget_fetched();
        self.fetch_rows(rows).await?;
        let mut by_shard: HashMap<usize, Vec<FieldRange>> = HashMap::new();
        for (shard, range) in wanted {
            by_shard.entry(shard).or_default().push(range);
        }
        let fetches = by_shard.into_iter().map(|(number, ranges)| {
            let shard = &self.index.shards()[number];
            let known = self.index.indexed_shards()[number].clone();
            let whole = self.open.get(&number).or_else(|| self.unpacked.get(&number).map(LocalShard::Mapped));
            let object = shard.remote().map(|object| object.clone().counted_by(self.retries.clone()));
            async move {
                let object = object.ok_or(Error::StageEnded { stage: "store" })?;
                let wanted = WantedRanges { ranges, whole };
                let fetched = IndexedRemote { object, known }.fetch(wanted).await;
                Ok::<_, Error>((number, fetched.map_err(|source| shard.read_error(source))?))
            }
        });
        let all = try_join_all(fetches.collect::<Vec<_>>()).await?;
        for (number, fetched) in all {
            match fetched.whole {
                Some(Whole::Kept(whole)) => self.open.put(number, whole),
                Some(Whole::Unpacked(whole)) => self.unpacked.put(number, whole),
                None => {}
            }
            let fields = fetched.fields.into_iter();
            self.fetched.extend(fields.map(|(range, field)| ((number, range), field)));
        }
        Ok(())
    }

    /// Decodes the blocks of the wanted table fields, each once.
    async fn fetch_rows(&mut self, wanted: Vec<(usize, FieldRange)>) -> Result<()> {
        let shards: BTreeSet<usize> = wanted.iter().map(|(shard, _)| *shard).collect();
        let (mut tables, mut opening) = (BTreeMap::new(), Vec::new());
        for shard in shards {
            match self.tables.table(shard) {
                Some(table) => drop(tables.insert(shard, table)),
                None => opening.push((shard, self.open_table(shard)?)),
            }
        }
        for (shard, table) in opening {
            let opened = table.await.flatten();
            let table = opened.map_err(|error| self.index.shards()[shard].read_error(error))?;
            self.tables.put(shard, table.clone());
            tables.insert(shard, table);
        }
        let fetched = self.tables.fetch(wanted, &tables).await;
        let fetched = fetched.map_err(|(shard, error)| self.index.shards()[shard].read_error(error))?;
        self.fetched_rows.extend(fetched);
        Ok(())
    }

    /// Starts to open a table in the indexed version.
    fn open_table(&mut self, shard: usize) -> Result<Task<io::Result<OpenTable>>> {
        let source = self.index.shards()[shard].clone();
        let identity = identity(&self.index.indexed_shards()[shard]);
        let remote = source.remote().map(|object| object.clone().counted_by(self.retries.clone()));
        let open: Box<dyn FnOnce() -> Result<OpenTable, TableFault> + Send> = if let Some(object) = remote {
            Box::new(move || OpenTable::remote(&source, object, identity))
        } else {
            let file = self.opened(shard)?;
            Box::new(move || OpenTable::local(&source, file))
        };
        Ok(spawn(blocking(move || open().map_err(TableFault::into_io))))
    }

    /// Drops the fetched fields; samples keep separate references.
    pub(crate) fn forget_fetched(&mut self) {
        self.fetched.clear();
        self.fetched_rows.clear();
    }

    /// Reads a range with the headers, or a fetched table field; blocks on a cold disk.
    ///
    /// # Errors
    /// [`Error::Storage`] if the shard cannot be opened, read or decompressed, or has changed since it was
    /// indexed.
    pub(crate) fn read(&mut self, shard: usize, range: FieldRange) -> Result<Bytes> {
        if self.index.is_fetched(shard) {
            let fetched = match self.fetched_rows.get(&(shard, range)) {
                Some(field) => Some(&field.payload),
                None => self.fetched.get(&(shard, range)),
            };
            return fetched.cloned().ok_or(Error::StageEnded { stage: "store" });
        }
        let (offset, bytes) = range.with_headers();
        let whole = match self.index.indexed_shards()[shard].compression {
            Compression::None => self.opened(shard)?,
            _ => LocalShard::Mapped(self.unpacked(shard)?),
        };
        whole.read(offset, bytes).map_err(|error| self.index.shards()[shard].read_error(error))
    }

    /// Reads a field, and checks that the shard has the field there; blocks on a cold disk.
    ///
    /// # Errors
    /// The same errors as [`Self::read`]; [`Error::Storage`] if the shard has a different field there.
    pub(crate) fn read_field(
        &mut self,
        shard: usize,
        range: FieldRange,
        key: &str,
        extension: &str,
    ) -> Result<Bytes> {
        if let Some(field) = self.fetched_rows.get(&(shard, range)) {
            let checked = field.check(range, key, extension);
            checked.map_err(|error| self.index.shards()[shard].read_error(error))?;
            return Ok(field.payload.clone());
        }
        let read = self.read(shard, range)?;
        let headers = range.header_bytes as usize;
        let checked = range.check(&read[..headers], key, extension);
        checked.map_err(|error| self.index.shards()[shard].read_error(error))?;
        Ok(read.slice(headers..))
    }

    /// Returns an open shard; opens it if needed.
    fn opened(&mut self, shard: usize) -> Result<LocalShard> {
        if let Some(open) = self.open.get(&shard) {
            return Ok(open);
        }
        let source = &self.index.shards()[shard];
        let opened = match source.open() {
            Err(Error::Storage(StorageError::Read { source: error, .. }))
                if error.raw_os_error() == Some(TOO_MANY_FILES) =>
            {
                self.open.clear();
                source.open()
            }
            opened => opened,
        };
        let Opened::Local(open) = opened? else { return Err(Error::StageEnded { stage: "store" }) };
        // After the file is open: its path then shows the opened version or a later version.
        let (indexed, found) = (&self.index.indexed_shards()[shard], identity_of_file(source)?);
        if open.bytes() != found.bytes || !is_version(indexed, &found) {
            return Err(source.read_error(changed(indexed, &found)));
        }
        self.open.put(shard, open.clone());
        Ok(open)
    }

    /// Returns a decompressed shard; decompresses it if needed.
    fn unpacked(&mut self, shard: usize) -> Result<Bytes> {
        if let Some(unpacked) = self.unpacked.get(&shard) {
            return Ok(unpacked);
        }
        let body = self.opened(shard)?.body();
        let failure = body.failure();
        let unpacked = unpack(body, &self.index.indexed_shards()[shard]);
        let failed = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        let unpacked = failed.map_or(unpacked, Err);
        let unpacked = unpacked.map_err(|error| self.index.shards()[shard].read_error(error))?;
        self.unpacked.put(shard, unpacked.clone());
        Ok(unpacked)
    }
}

/// Returns the error for a shard whose version differs from the indexed version.
fn changed(indexed: &IndexedShard, found: &Identity) -> std::io::Error {
    let how = if indexed.bytes == found.bytes {
        "it was written to".to_owned()
    } else {
        format!("it had {} bytes and has {}", indexed.bytes, found.bytes)
    };
    let reason = format!("it has changed since it was indexed: {how}");
    std::io::Error::new(std::io::ErrorKind::InvalidData, reason)
}

/// Least-recently-used cache, up to a total weight.
#[derive(Debug)]
pub(super) struct Recent<K, T> {
    entries: VecDeque<(K, T)>,
    weight_max: u64,
    weigh: fn(&T) -> u64,
}

impl<K: PartialEq, T: Clone> Recent<K, T> {
    pub(super) fn new(weight_max: u64, weigh: fn(&T) -> u64) -> Self {
        Self { entries: VecDeque::new(), weight_max, weigh }
    }

    pub(super) fn get(&mut self, key: &K) -> Option<T> {
        let at = self.entries.iter().position(|(held, _)| held == key)?;
        let entry = self.entries.remove(at)?;
        let held = entry.1.clone();
        self.entries.push_front(entry);
        Some(held)
    }

    pub(super) fn put(&mut self, key: K, held: T) {
        self.entries.retain(|(other, _)| *other != key);
        self.entries.push_front((key, held));
        let mut weight: u64 = self.entries.iter().map(|(_, held)| (self.weigh)(held)).sum();
        while weight > self.weight_max && self.entries.len() > 1 {
            weight -= self.entries.pop_back().map_or(0, |(_, held)| (self.weigh)(&held));
        }
    }

    fn clear(&mut self) {
        self.entries.clear();
    }
}

/// Maximum distance between two payloads in a sample that is read completely, in bytes: headers, extension
/// headers, and members that are no fields. Only the end of a longer distance is read.
const HEADERS_BYTES_MAX: u64 = 1 << 20;
/// Number of bytes read at the end of a longer distance: the field header, and the extension headers before
/// it.
const LAST_HEADERS_BYTES: u64 = 64 << 10;

/// Byte range of a field, with the headers before it; offsets refer to the uncompressed shard. In a table the
/// offset is the row number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FieldRange {
    /// Payload offset, in bytes.
    pub(crate) offset: u64,
    /// Payload length, in bytes.
    pub(crate) bytes: u64,
    /// Length of the headers before the payload, in bytes; 0 in a table.
    pub(crate) header_bytes: u64,
    /// Field number in the sample: all fields of a table row have the same offset.
    pub(crate) number: u32,
}

impl FieldRange {
    /// Returns the fields in a sample with byte ranges.
    pub(crate) fn row_fields<'a>(
        row: &SampleRow<'a>,
    ) -> impl Iterator<Item = (FieldRow<'a>, Self)> + use<'a> {
        let mut end = row.offset();
        row.fields().zip(0..).map(move |(field, number)| {
            let gap = field.offset.saturating_sub(end);
            let header_bytes = if gap > HEADERS_BYTES_MAX { LAST_HEADERS_BYTES } else { gap };
            end = field.offset.saturating_add(padded(field.bytes).unwrap_or(u64::MAX));
            (field, Self { offset: field.offset, bytes: field.bytes, header_bytes, number })
        })
    }

    /// Returns offset and length for headers and payload.
    pub(super) fn with_headers(self) -> (u64, u64) {
        (self.offset - self.header_bytes, self.header_bytes + self.bytes)
    }

    /// Checks the field headers.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if the headers belong to a different field, or are not headers.
    pub(crate) fn check(self, headers: &[u8], key: &str, extension: &str) -> io::Result<()> {
        let is_field = |entry: &Entry| {
            entry.bytes == self.bytes
                && split_key(&entry.name).is_some_and(|name| name == (key, extension.into()))
        };
        let entry = last_entry(headers);
        if entry.as_ref().is_some_and(is_field) {
            return Ok(());
        }
        // The end of a long distance may begin within a member: every block is tried as the first header.
        let is_end = self.header_bytes == LAST_HEADERS_BYTES;
        let ends = (1..=headers.len() / BLOCK_BYTES).filter(|_| is_end);
        let mut ends = ends.map(|blocks| &headers[headers.len() - blocks * BLOCK_BYTES..]);
        if ends.any(|end| last_entry(end).as_ref().is_some_and(is_field)) {
            return Ok(());
        }
        let entry = entry.or_else(|| last_entry(&headers[headers.len().saturating_sub(BLOCK_BYTES)..]));
        let (key, extension, offset) = (shown(key), shown(extension), self.offset);
        let found = entry.map_or_else(
            || "no header".to_owned(),
            |Entry { name, bytes, .. }| format!("`{}`, of {bytes} bytes", shown(&name)),
        );
        let reason = format!(
            "field `{extension}` of sample `{key}`, of {} bytes, is not at offset {offset} as indexed, where the \
             shard has {found}: it has changed since it was indexed, or the index is that of another dataset; \
             build the index again",
            self.bytes
        );
        Err(io::Error::new(ErrorKind::InvalidData, reason))
    }
}

fn shown(name: &str) -> Cow<'_, str> {
    excerpt(name, EXCERPT_CHARACTERS)
}

/// Returns the entry whose payload follows these headers and any earlier members.
fn last_entry(bytes: &[u8]) -> Option<Entry> {
    let (mut headers, mut offset, mut announced) = (Headers::default(), 0, None);
    loop {
        let next = if let Some(next) = announced.take() {
            next
        } else {
            let block = bytes.get(offset..)?.first_chunk()?;
            let next = headers.block(offset as u64, block).ok()?;
            offset += BLOCK_BYTES;
            next
        };
        let passed = match next {
            Next::Entry(entry) if offset == bytes.len() => return Some(entry),
            Next::Entry(entry) => entry.stored_bytes(),
            Next::Skip { bytes } => bytes,
            Next::Extension { bytes: length } => {
                let records = bytes.get(offset..)?.get(..usize::try_from(length).ok()?)?;
                let behind = offset as u64 + padded(length)?;
                announced = headers.extension(behind, records).ok()?;
                length
            }
            Next::End => return None,
        };
        offset = offset.checked_add(usize::try_from(padded(passed)?).ok()?)?;
    }
}

/// Reports what later stages need from a sample, so that nothing else is read.
pub(crate) trait Demand: Debug + Send + Sync {
    /// Returns whether an image field's pixels are needed, and not only the image size.
    fn needs_pixels(&self, extension: &str) -> bool;

    /// Returns whether another rank encodes an image in a sample that several ranks share, so that the image
    /// size is sufficient here.
    ///
    /// - `image`: image index in the sample
    fn is_encoded_elsewhere(&self, plan: &StepPlan, place: u32, image: u32, extension: &str) -> bool;

    /// Returns the total size of the tensors created from a sample, in bytes.
    fn tensor_bytes(&self, row: &SampleRow<'_>) -> u64;
}

/// Planned reads for a microbatch.
#[derive(Debug)]
pub(crate) struct ReadPlan {
    /// Samples to read; payloads are missing.
    pub(crate) samples: Vec<PlannedRead>,
    /// Shard and range for every field that is fetched, by dataset.
    pub(super) fetched: WantedFields,
    /// Samples that the cost model rejects, with dataset numbers; these samples are not read.
    pub(super) refused: Vec<(usize, Skipped)>,
    /// Memory size of the samples, decoded and prepared, estimated from the index shapes, in bytes.
    pub(crate) resident_bytes: u64,
}

/// Sample to read.
#[derive(Debug)]
pub(crate) struct PlannedRead {
    /// Sample position in [`StepPlan::samples`].
    pub(super) place: u32,
    pub(super) dataset: usize,
    /// Shard number in the dataset index.
    pub(super) shard: usize,
    pub(super) sample: RawSample,
    /// Field ranges, in field order.
    pub(super) ranges: Vec<FieldRange>,
}

impl ReadPlan {
    /// Plans the reads for the samples at `plan_indices` in the plan.
    pub(super) fn new(
        planner: &StepPlanner,
        plan: &StepPlan,
        plan_indices: &[u32],
        fields: &FieldSelection,
        demand: &dyn Demand,
    ) -> Self {
        let datasets = planner.datasets();
        let (mut refused, mut resident_bytes) = (Vec::new(), 0u64);
        let mut fetched = vec![Vec::new(); datasets.len()];
        let mut samples = Vec::with_capacity(plan_indices.len());
        for &place in plan_indices {
            let drawn = plan.samples[place as usize];
            let (row, index) = (planner.row(drawn), datasets[drawn.dataset].index());
            let url = &index.shards()[row.shard].url;
            // Rejected samples are listed in plan order.
            if let Ok(at) = plan.refused.binary_search_by_key(&(place as usize), |(at, _)| *at) {
                refused.push((drawn.dataset, skipped(&row, url, &plan.refused[at].1)));
                continue;
            }
            resident_bytes = resident_bytes.saturating_add(demand.tensor_bytes(&row));
            let mut sample = raw_sample(&row, url.clone(), drawn);
            let mut ranges = Vec::new();
            let wanted = FieldRange::row_fields(&row).filter(|(field, _)| fields.wants(field.extension));
            let mut images = 0;
            for (field, range) in wanted {
                let size = match field.shape {
                    MediaShape::Image(size) => {
                        images += 1;
                        let is_elsewhere =
                            || demand.is_encoded_elsewhere(plan, place, images - 1, field.extension);
                        Some(size).filter(|_| !demand.needs_pixels(field.extension) || is_elsewhere())
                    }
                    _ => None,
                };
                if size.is_none() {
                    resident_bytes = resident_bytes.saturating_add(field.shape.decoded_bytes(field.bytes));
                    if index.is_fetched(row.shard) {
                        fetched[drawn.dataset].push((row.shard, range));
                    }
                }
                let (extension, offset, bytes) = (field.extension.into(), field.offset, field.bytes);
                sample.fields.push(RawField { extension, offset, bytes, payload: None, size });
                ranges.push(range);
            }
            samples.push(PlannedRead { place, dataset: drawn.dataset, shard: row.shard, sample, ranges });
        }
        Self { samples, fetched, refused, resident_bytes }
    }

    /// Returns whether any field is fetched.
    pub(crate) fn is_fetched(&self) -> bool {
        self.fetched.iter().any(|fields| !fields.is_empty())
    }
}

fn raw_sample(row: &SampleRow<'_>, shard: Arc<str>, drawn: StepSample) -> RawSample {
    let key = row.key().to_owned();
    RawSample { key, shard, offset: row.offset(), epoch: drawn.epoch, fields: Vec::new() }
}

fn skipped(row: &SampleRow<'_>, url: &str, reason: &str) -> Skipped {
    let (shard, key, reason) = (url.to_owned(), Some(row.key().to_owned()), reason.to_owned());
    Skipped { shard, offset: row.offset(), key, field: None, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_shard_is_dropped_first() {
        let mut recent = Recent::new(25, |bytes: &Bytes| bytes.len() as u64);
        let ten = Bytes::from_static(b"0123456789");
        recent.put(0, ten.clone());
        recent.put(1, ten.clone());
        assert!(recent.get(&0).is_some());
        recent.put(2, ten.clone());
        assert!(recent.get(&1).is_none() && recent.get(&0).is_some() && recent.get(&2).is_some());
        recent.put(3, Bytes::from(vec![0; 100]));
        assert!(recent.get(&3).is_some() && recent.get(&0).is_none());
    }
}
