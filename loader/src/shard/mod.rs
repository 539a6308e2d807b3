//! Reads shards: tar files whose entries are grouped into samples.
//!
//! Reads a local archive by range, through a window that follows the headers.
//!
//! [`expand_shards`] names them, [`tar`] walks the entries, [`Grouper`] groups entries into samples by key,
//! and a reader streams the samples from a shard list on a separate thread, ahead of the decoders.

mod access;
mod braces;
mod compression;
mod directory;
mod field_selection;
mod glob;
mod group_entries;
mod list;
mod order;
mod reader;
mod samples;
mod table;
pub mod tar;
mod wids;

use super::store::LocalShard;
use bytes::Bytes;
use std::io;
use std::ops::Range;
use tar::entries::Archive;

pub use access::ShardAccess;
pub(crate) use braces::Expansion;
pub(crate) use compression::decompress;
pub use compression::{Compression, sniff_compression};
pub use dflop_samples::{RawField, RawSample, SampleId};
pub(crate) use directory::PARTIAL;
pub use field_selection::FieldSelection;
pub use glob::matches_name;
pub use group_entries::{DuplicateField, Grouper, RawPayload, SampleGroup, is_metadata, split_key};
pub(crate) use list::display_shards;
pub use list::{Shard, expand_shards, expand_shards_in};
pub(crate) use order::{
    ItemPosition, KnownShards, Position, ShardIdentity, ShardOrder, ShardPasses, is_rereadable,
};
pub use reader::scan_shards;
pub(crate) use reader::{ReaderItem, ReaderSettings, read_shards, read_through};
pub(crate) use samples::{Assembler, RangedSamples};
pub use samples::{FIELD_BYTES_MAX, MappedSamples, ShardItem, StreamedSamples};
pub(crate) use table::{OpenTable, TableItems, is_table_name};
pub use table::{RowBlock, Table, TableFault, TableFile, TableFormat, TableRow, register_tables};
pub use wids::{ListedShard, ShardList, parse_shard_list};

/// Bytes per read: many headers and short payloads, or the beginning of a long payload.
const WINDOW_BYTES: u64 = 32 << 10;

/// View of a local archive. Returned bytes are copied from the window, so that a short payload does not keep
/// the window alive; the rest of a long payload is read into a separate buffer.
#[derive(Debug)]
pub(crate) struct LocalArchive {
    shard: LocalShard,
    start: u64,
    window: Vec<u8>,
}

impl LocalArchive {
    /// Starts with an empty window.
    pub(crate) fn new(shard: LocalShard) -> Self {
        Self { shard, start: 0, window: Vec::new() }
    }

    /// Returns the part of a range that is in the window, from the range start.
    fn in_window(&self, range: &Range<u64>) -> &[u8] {
        let end = self.start + self.window.len() as u64;
        if range.start < self.start || range.start >= end {
            return &[];
        }
        &self.window[(range.start - self.start) as usize..(range.end.min(end) - self.start) as usize]
    }
}

impl Archive for LocalArchive {
    fn bytes(&self) -> u64 {
        self.shard.bytes()
    }

    fn read(&mut self, range: Range<u64>) -> io::Result<Bytes> {
        let bytes = range.end.saturating_sub(range.start);
        let file = match &self.shard {
            LocalShard::Mapped(_) => return self.shard.read(range.start, bytes),
            LocalShard::File(file) if range.end <= file.bytes() => file.clone(),
            LocalShard::File(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        if self.in_window(&range).is_empty() && bytes < WINDOW_BYTES {
            self.window.clear();
            self.start = range.start;
            let ahead = WINDOW_BYTES.min(file.bytes() - range.start);
            file.append(range.start, ahead, &mut self.window)?;
        }
        let begun = self.in_window(&range);
        let mut payload = Vec::with_capacity(bytes as usize);
        payload.extend_from_slice(begun);
        file.append(range.start + begun.len() as u64, bytes - begun.len() as u64, &mut payload)?;
        Ok(payload.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ReadMode;

    #[test]
    fn any_sequence_of_ranges_is_read_as_it_is() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..200_000u32).map(|at| (at * 31 % 251) as u8).collect();
        std::fs::write(file.path(), &content).unwrap();
        for mode in [ReadMode::Pread, ReadMode::Mmap] {
            let mut archive = LocalArchive::new(LocalShard::open(file.path(), mode).unwrap());
            for range in
                [0..512, 512..600, 600..90_000, 90_000..90_512, 90_512..90_512, 10..20, 199_000..200_000]
            {
                let expected = &content[range.start as usize..range.end as usize];
                assert_eq!(archive.read(range.clone()).unwrap(), expected, "{range:?}");
            }
            assert!(archive.read(199_999..200_001).is_err());
        }
    }
}
