//! Fetches rows of tables: every block that the wanted rows are in is decoded once, in parallel.
//!
//! Decoded blocks are kept, the least recently used are dropped; fields of wanted rows are kept until they
//! are read, so that a row group is never decoded once per row.

use super::ranges::{FieldRange, Recent};
use crate::error::{EXCERPT_CHARACTERS, excerpt};
use crate::flow::cores;
use crate::shard::{OpenTable, TableFault, TableRow};
use crate::store::{blocking, spawn};
use bytes::Bytes;
use futures::{StreamExt, stream};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// Field of a decoded row.
#[derive(Debug, Clone)]
pub(super) struct RowField {
    key: Arc<str>,
    extension: Arc<str>,
    pub(super) payload: Bytes,
}

impl RowField {
    /// Checks that the row has the indexed field.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if the key, the extension or the length differs.
    pub(super) fn check(&self, range: FieldRange, key: &str, extension: &str) -> io::Result<()> {
        let bytes = self.payload.len() as u64;
        if &*self.key == key && &*self.extension == extension && bytes == range.bytes {
            return Ok(());
        }
        let shown = |name: &str| excerpt(name, EXCERPT_CHARACTERS).into_owned();
        Err(stale(&format!(
            "row {} is indexed with field `{}` of sample `{}`, of {} bytes, and has field `{}` of sample `{}`, of \
             {bytes} bytes",
            range.offset,
            shown(extension),
            shown(key),
            range.bytes,
            shown(&self.extension),
            shown(&self.key),
        )))
    }
}

/// Returns the error for a table that differs from the index.
fn stale(what: &str) -> io::Error {
    let reason = format!("{what}: it has changed since it was indexed; build the index again");
    io::Error::new(ErrorKind::InvalidData, reason)
}

/// Consecutive decoded rows.
#[derive(Debug)]
struct DecodedRows {
    first: u64,
    rows: Vec<TableRow>,
    bytes: u64,
}

impl DecodedRows {
    fn end(&self) -> u64 {
        self.first + self.rows.len() as u64
    }
}

/// Open tables and recently decoded blocks of an index.
#[derive(Debug)]
pub(super) struct TableBlocks {
    open: Recent<usize, OpenTable>,
    /// By shard and first row.
    decoded: Recent<(usize, u64), Arc<DecodedRows>>,
}

/// A block to decode, the parts that are decoded already, and the wanted fields in row order.
struct BlockRead {
    shard: usize,
    table: OpenTable,
    block: usize,
    known: BTreeMap<u64, Arc<DecodedRows>>,
    wanted: Vec<FieldRange>,
}

/// Result of a [`BlockRead`].
struct BlockFields {
    shard: usize,
    decoded: Vec<Arc<DecodedRows>>,
    fields: Vec<(FieldRange, RowField)>,
}

impl TableBlocks {
    /// - `bytes_max`: maximum payload size of kept blocks; the last block is always kept
    pub(super) fn new(open_max: u64, bytes_max: u64) -> Self {
        let weigh = |rows: &Arc<DecodedRows>| rows.bytes;
        Self { open: Recent::new(open_max, |_| 1), decoded: Recent::new(bytes_max, weigh) }
    }

    /// Returns a table, if it is open.
    pub(super) fn table(&mut self, shard: usize) -> Option<OpenTable> {
        self.open.get(&shard)
    }

    /// Adds an open table.
    pub(super) fn put(&mut self, shard: usize, table: OpenTable) {
        self.open.put(shard, table);
    }

    /// Decodes the rows with the wanted fields; `tables` holds the wanted shards.
    ///
    /// # Errors
    /// The shard, and why a block cannot be read, or lacks a wanted field.
    pub(super) async fn fetch(
        &mut self,
        wanted: Vec<(usize, FieldRange)>,
        tables: &BTreeMap<usize, OpenTable>,
    ) -> Result<Vec<((usize, FieldRange), RowField)>, (usize, io::Error)> {
        let reads = self.plan(wanted, tables)?;
        let read = |read: BlockRead| async move {
            let shard = read.shard;
            spawn(blocking(move || read.run())).await.flatten().map_err(|error| (shard, error))
        };
        let mut reads = stream::iter(reads).map(read).buffer_unordered(cores());
        let mut fetched = Vec::new();
        while let Some(read) = reads.next().await {
            let BlockFields { shard, decoded, fields } = read?;
            for rows in decoded {
                self.decoded.put((shard, rows.first), rows);
            }
            fetched.extend(fields.into_iter().map(|(range, field)| ((shard, range), field)));
        }
        Ok(fetched)
    }

    /// Groups the wanted fields by block.
    fn plan(
        &mut self,
        wanted: Vec<(usize, FieldRange)>,
        tables: &BTreeMap<usize, OpenTable>,
    ) -> Result<Vec<BlockRead>, (usize, io::Error)> {
        let mut by_block: BTreeMap<(usize, usize), Vec<FieldRange>> = BTreeMap::new();
        for (shard, range) in wanted {
            let table = &tables[&shard];
            if range.offset >= table.rows() {
                let (row, rows) = (range.offset, table.rows());
                return Err((shard, stale(&format!("row {row} is indexed, and there are {rows} rows"))));
            }
            by_block.entry((shard, table.block_at(range.offset))).or_default().push(range);
        }
        let read = |((shard, block), mut wanted): ((usize, usize), Vec<FieldRange>)| {
            wanted.sort_unstable_by_key(|range| (range.offset, range.number));
            let table = tables[&shard].clone();
            let (mut known, mut at) = (BTreeMap::new(), table.rows_in(block).start);
            while let Some(rows) = self.decoded.get(&(shard, at)) {
                at = rows.end();
                known.insert(rows.first, rows);
                if at >= table.rows_in(block).end {
                    break;
                }
            }
            BlockRead { shard, table, block, known, wanted }
        };
        Ok(by_block.into_iter().map(read).collect())
    }
}

impl BlockRead {
    /// Decodes the block up to the last wanted row, and keeps the wanted fields.
    fn run(mut self) -> io::Result<BlockFields> {
        let (mut decoded, mut fields) = (Vec::new(), Vec::with_capacity(self.wanted.len()));
        let mut wanted = std::mem::take(&mut self.wanted).into_iter().peekable();
        let mut first = self.table.rows_in(self.block).start;
        while wanted.peek().is_some() {
            let rows = if let Some(rows) = self.known.remove(&first) {
                rows
            } else {
                let rows = self.table.read(self.block, first).map_err(TableFault::into_io)?;
                let bytes = rows.iter().map(TableRow::memory_bytes).sum();
                let rows = Arc::new(DecodedRows { first, rows, bytes });
                decoded.push(rows.clone());
                rows
            };
            while let Some(range) = wanted.next_if(|range| range.offset < rows.end()) {
                let row = &rows.rows[(range.offset - rows.first) as usize];
                fields.push((range, field(row, range)?));
            }
            first = rows.end();
        }
        Ok(BlockFields { shard: self.shard, decoded, fields })
    }
}

/// Returns the field of a row.
///
/// # Errors
/// If the row has no such field.
fn field(row: &TableRow, range: FieldRange) -> io::Result<RowField> {
    let found = row.fields.as_ref().ok().and_then(|fields| fields.get(range.number as usize));
    let missing = || stale(&format!("row {} has no field number {}", range.offset, range.number));
    let (extension, payload) = found.ok_or_else(missing)?;
    Ok(RowField { key: row.key.as_str().into(), extension: extension.clone(), payload: payload.clone() })
}
