//! Tables as shards: files whose rows are samples, read in place by row group.
//!
//! A [`TableFormat`] from another crate, such as Parquet in `dflop-import`, is [registered](register_tables)
//! once per process; files that start like the format are then shards like tar files. A row is a sample: the
//! item number, and the offset in the index, is the row number. Rows are decoded in *blocks*, a row group or
//! a part of a long row group, because no format decodes a single row for less.

use super::field_selection::FieldSelection;
use super::list::Shard;
use super::samples::ShardItem;
use crate::error::Skipped;
use crate::store::{CacheKey, Identity, LocalShard, RemoteObject, download, fetch_ranges, spawn};
use bytes::Bytes;
use dflop_samples::{RawField, RawSample};
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

/// Number of bytes at the start of a file that determine the format.
const MAGIC_BYTES: usize = 8;

/// Approximate size of a decoded row without payloads, in bytes.
const ROW_BYTES: u64 = 256;

/// Bytes of a table file, by range. Reading blocks the thread.
pub trait TableFile: Debug + Send + Sync {
    /// Returns the file length in bytes.
    fn bytes(&self) -> u64;

    /// Reads ranges inside the file, in parallel where the file is remote.
    ///
    /// # Errors
    /// The failed read; also if the file has changed since it was opened.
    fn read(&self, ranges: &[Range<u64>]) -> io::Result<Vec<Bytes>>;
}

/// File format whose rows are samples.
pub trait TableFormat: Debug + Send + Sync {
    /// Returns the format name.
    fn name(&self) -> &'static str;

    /// Returns the file name extensions, in lower case, by which files in a directory are shards.
    fn extensions(&self) -> &'static [&'static str];

    /// Returns whether a file that starts with these bytes has the format; fewer than 8 are the whole file.
    fn is_format(&self, first: &[u8]) -> bool;

    /// Opens a file; reads only what describes it.
    ///
    /// - `name`: base name of the file, for keys and documents
    ///
    /// # Errors
    /// [`TableFault`] if the file cannot be read or is damaged.
    fn open(&self, name: &str, file: Box<dyn TableFile>) -> Result<Arc<dyn Table>, TableFault>;
}

/// Open table.
pub trait Table: Debug + Send + Sync {
    /// Returns the blocks, in row order, without gaps from row 0.
    fn blocks(&self) -> &[RowBlock];

    /// Reads rows: at least one, from `first_row` to the end of the block, or to an earlier row where the
    /// rows would need too much memory.
    ///
    /// # Errors
    /// [`TableFault`] if the file cannot be read or the row group is damaged.
    ///
    /// # Panics
    /// If there is no such block, or the row is outside the block.
    fn read(&self, block: usize, first_row: u64) -> Result<Vec<TableRow>, TableFault>;
}

/// Consecutive rows of a row group, which are decoded together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowBlock {
    /// Number of the row group in the file.
    pub group: usize,
    /// Row numbers in the file; not empty.
    pub rows: Range<u64>,
}

/// Decoded row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRow {
    /// Sample key.
    pub key: String,
    /// Extension and payload of each field, or the reason why the row is no sample.
    pub fields: Result<Vec<(Arc<str>, Bytes)>, String>,
}

impl TableRow {
    /// Returns the memory size in bytes: payloads, and about what a row needs beside them.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let payloads: u64 = self.fields.iter().flatten().map(|(_, payload)| payload.len() as u64).sum();
        payloads + ROW_BYTES
    }
}

/// Reason why rows cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TableFault {
    /// The file could not be read: try again.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// The content is damaged or not supported: replace the file.
    #[error("{0}")]
    Damaged(String),
}

impl TableFault {
    /// Converts the fault to an I/O error.
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            Self::Read(source) => source,
            Self::Damaged(reason) => io::Error::new(io::ErrorKind::InvalidData, reason),
        }
    }
}

/// Registered formats. The list is global to the process, because a file has the same meaning everywhere.
static FORMATS: RwLock<Vec<&'static dyn TableFormat>> = RwLock::new(Vec::new());

/// Registers a table format for this process, before any dataset is opened. A format that is registered
/// already stays in place.
pub fn register_tables(format: &'static dyn TableFormat) {
    let mut formats = FORMATS.write().unwrap_or_else(PoisonError::into_inner);
    if formats.iter().all(|known| known.name() != format.name()) {
        formats.push(format);
    }
}

fn find_format(is_such: impl Fn(&&'static dyn TableFormat) -> bool) -> Option<&'static dyn TableFormat> {
    FORMATS.read().unwrap_or_else(PoisonError::into_inner).iter().copied().find(is_such)
}

/// Returns whether a file that starts with these bytes is a table of a registered format.
pub(super) fn is_table(first: &[u8]) -> bool {
    find_format(|format| format.is_format(first)).is_some()
}

/// Returns whether a file name has an extension of a registered format.
pub(crate) fn is_table_name(name: &str) -> bool {
    let extension = name.rsplit('/').next().and_then(|base| base.rsplit_once('.')).map(|(_, end)| end);
    extension.is_some_and(|extension| {
        let is_known = |known: &&'static str| known.eq_ignore_ascii_case(extension);
        find_format(|format| format.extensions().iter().any(is_known)).is_some()
    })
}

/// Local file.
#[derive(Debug)]
struct LocalTable(LocalShard);

impl TableFile for LocalTable {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read(&self, ranges: &[Range<u64>]) -> io::Result<Vec<Bytes>> {
        ranges.iter().map(|range| self.0.read(range.start, range.end - range.start)).collect()
    }
}

/// Remote object, in the version that was indexed or found.
#[derive(Debug)]
struct RemoteTable {
    object: RemoteObject,
    identity: Identity,
}

impl TableFile for RemoteTable {
    fn bytes(&self) -> u64 {
        self.identity.bytes
    }

    fn read(&self, ranges: &[Range<u64>]) -> io::Result<Vec<Bytes>> {
        let (object, identity, ranges) = (self.object.clone(), self.identity.clone(), ranges.to_vec());
        spawn(async move { fetch_ranges(&object, &identity, &ranges).await }).wait()?
    }
}

/// Table that is open as a shard; clones share the table.
#[derive(Debug, Clone)]
pub(crate) struct OpenTable {
    shard: Arc<str>,
    table: Arc<dyn Table>,
}

impl OpenTable {
    /// Opens a local table.
    ///
    /// # Errors
    /// [`TableFault`] if the file cannot be read, or is no intact table of a registered format.
    pub(crate) fn local(shard: &Shard, file: LocalShard) -> Result<Self, TableFault> {
        Self::open(shard, Box::new(LocalTable(file)))
    }

    /// Opens a remote table: the copy in the shard cache if there is one, else by ranged requests, while the
    /// cache copies the file in the background.
    ///
    /// # Errors
    /// See [`Self::local`].
    pub(crate) fn remote(
        shard: &Shard,
        object: RemoteObject,
        identity: Identity,
    ) -> Result<Self, TableFault> {
        let key = CacheKey::packed(object.url(), &identity);
        if let (Some(cache), Some(key)) = (object.stores().cache(), key) {
            let (kept, wanted) = (cache.clone(), key.clone());
            if let Some(file) = spawn(async move { kept.get(&wanted).await }).wait()?? {
                return Self::local(shard, file);
            }
            let (object, identity) = (object.clone(), identity.clone());
            cache.copy_in_background(key, |part| download(object, identity, part));
        }
        Self::open(shard, Box::new(RemoteTable { object, identity }))
    }

    fn open(shard: &Shard, file: Box<dyn TableFile>) -> Result<Self, TableFault> {
        let first = file.read(&[0..file.bytes().min(MAGIC_BYTES as u64)])?;
        let first = first.first().cloned().unwrap_or_default();
        let unknown = || TableFault::Damaged("it is no table of a known format".to_owned());
        let format = find_format(|format| format.is_format(&first)).ok_or_else(unknown)?;
        let table = format.open(shard.base_name(), file).map_err(|fault| match fault {
            TableFault::Damaged(reason) => {
                TableFault::Damaged(format!("this {} file is damaged: {reason}", format.name()))
            }
            fault @ TableFault::Read(_) => fault,
        })?;
        Ok(Self { shard: shard.url.clone(), table })
    }

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> u64 {
        self.table.blocks().last().map_or(0, |block| block.rows.end)
    }

    /// Returns the number of blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.table.blocks().len()
    }

    /// Returns the block that contains a row.
    pub(crate) fn block_at(&self, row: u64) -> usize {
        self.table.blocks().partition_point(|block| block.rows.end <= row)
    }

    /// Returns the rows in a block.
    pub(crate) fn rows_in(&self, block: usize) -> Range<u64> {
        self.table.blocks()[block].rows.clone()
    }

    /// Reads rows from `first_row` on; see [`Table::read`].
    ///
    /// # Errors
    /// [`TableFault`] with the rows that cannot be read.
    pub(crate) fn read(&self, block: usize, first_row: u64) -> Result<Vec<TableRow>, TableFault> {
        let RowBlock { group, rows } = &self.table.blocks()[block];
        let located = |reason: String| {
            let last = rows.end - 1;
            TableFault::Damaged(format!(
                "row group {group} is damaged, rows {first_row} to {last} are lost: {reason}"
            ))
        };
        match self.table.read(block, first_row) {
            Ok(read) if read.is_empty() => Err(located("it has fewer rows than declared".to_owned())),
            Ok(read) => Ok(read),
            Err(TableFault::Damaged(reason)) => Err(located(reason)),
            Err(fault) => Err(fault),
        }
    }

    /// Returns a row as a shard item with the selected fields.
    pub(crate) fn item(
        &self,
        number: u64,
        row: TableRow,
        fields: &FieldSelection,
        field_bytes_max: u64,
    ) -> ShardItem {
        let TableRow { key, fields: payloads } = row;
        let group = self.table.blocks()[self.block_at(number)].group;
        let skipped = |key, field, reason| {
            let reason = format!("row {number} of row group {group}: {reason}");
            ShardItem::Skipped(Skipped { shard: self.shard.to_string(), offset: number, key, field, reason })
        };
        let payloads = match payloads {
            Ok(payloads) => payloads,
            Err(reason) => return skipped(Some(key), None, reason),
        };
        let wanted = payloads.into_iter().filter(|(extension, _)| fields.wants(extension));
        let field = |(extension, payload): (Arc<str>, Bytes)| {
            let bytes = payload.len() as u64;
            RawField { extension, offset: number, bytes, payload: Some(payload), size: None }
        };
        let wanted: Vec<RawField> = wanted.map(field).collect();
        if let Some(long) = wanted.iter().find(|field| field.bytes > field_bytes_max) {
            let reason = format!("field of {} bytes, over {field_bytes_max}", long.bytes);
            return skipped(Some(key), Some(long.extension.to_string()), reason);
        }
        let shard = self.shard.clone();
        ShardItem::Sample(RawSample { key, shard, offset: number, epoch: 0, fields: wanted })
    }

    /// Returns the item for rows that are lost.
    fn lost(&self, first_row: u64, reason: String) -> ShardItem {
        let shard = self.shard.to_string();
        ShardItem::Skipped(Skipped { shard, offset: first_row, key: None, field: None, reason })
    }
}

/// Items of a table with their numbers, which are the row numbers. The rest of a block that cannot be decoded
/// is one item, with the number of the last row.
#[derive(Debug)]
pub(crate) struct TableItems<W> {
    table: OpenTable,
    /// Returns the first wanted row from a row on; other rows are not delivered, nor decoded where all rows
    /// in a block are unwanted.
    next_wanted: W,
    fields: FieldSelection,
    field_bytes_max: u64,
    next: u64,
    end: u64,
    decoded: std::vec::IntoIter<TableRow>,
}

impl<W: Fn(u64) -> Option<u64>> TableItems<W> {
    /// Starts before the first row in `rows`.
    pub(crate) fn new(
        table: OpenTable,
        rows: Range<u64>,
        fields: FieldSelection,
        field_bytes_max: u64,
        next_wanted: W,
    ) -> Self {
        let decoded = Vec::new().into_iter();
        Self { table, next_wanted, fields, field_bytes_max, next: rows.start, end: rows.end, decoded }
    }
}

impl<W: Fn(u64) -> Option<u64>> Iterator for TableItems<W> {
    /// A failure to read the file is an error, and the last item that counts.
    type Item = io::Result<(u64, ShardItem)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let number = (self.next_wanted)(self.next).filter(|number| *number < self.end)?;
            let passed = (number - self.next) as usize;
            if passed < self.decoded.len()
                && let Some(row) = self.decoded.nth(passed)
            {
                self.next = number + 1;
                let item = self.table.item(number, row, &self.fields, self.field_bytes_max);
                return Some(Ok((number, item)));
            }
            let block = self.table.block_at(number);
            self.next = number;
            match self.table.read(block, number) {
                Ok(rows) => self.decoded = rows.into_iter(),
                Err(TableFault::Read(source)) => return Some(Err(source)),
                Err(TableFault::Damaged(reason)) => {
                    self.decoded = Vec::new().into_iter();
                    self.next = self.table.rows_in(block).end;
                    return Some(Ok((self.next - 1, self.table.lost(number, reason))));
                }
            }
        }
    }
}
