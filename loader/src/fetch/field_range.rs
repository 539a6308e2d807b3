//! Locates a field in a shard, and checks that the shard has the field there.
//!
//! An index maps shard bytes to fields. If the index belongs to a different dataset, or the shard was
//! replaced by a file with the same length and time, the bytes belong to different samples. The tar headers
//! directly before a payload name sample, field and length, so they are read with the payload and compared.

use std::borrow::Cow;
use std::io::{Error, ErrorKind, Result};

use crate::error::{EXCERPT_CHARACTERS, excerpt};
use crate::index::{FieldRow, SampleRow};
use crate::shard::split_key;
use crate::shard::tar::Entry;
use crate::shard::tar::header::BLOCK_BYTES;
use crate::shard::tar::headers::{Headers, Next};
use crate::shard::tar::padded;

/// Maximum distance between two payloads in a sample that is read completely, in bytes: headers, extension
/// headers, and members that are no fields. Only the end of a longer distance is read.
const HEADERS_BYTES_MAX: u64 = 1 << 20;
/// Number of bytes read at the end of a longer distance: the field header, and the extension headers before
/// it.
const LAST_HEADERS_BYTES: u64 = 64 << 10;

/// Byte range of a field, with the headers before it; offsets refer to the uncompressed shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FieldRange {
    /// Payload offset, in bytes.
    pub(crate) offset: u64,
    /// Payload length, in bytes.
    pub(crate) bytes: u64,
    /// Length of the headers before the payload, in bytes.
    pub(crate) header_bytes: u64,
}

impl FieldRange {
    /// Returns the fields in a sample with byte ranges.
    pub(crate) fn row_fields<'a>(
        row: &SampleRow<'a>,
    ) -> impl Iterator<Item = (FieldRow<'a>, Self)> + use<'a> {
        let mut end = row.offset();
        row.fields().map(move |field| {
            let gap = field.offset.saturating_sub(end);
            let header_bytes = if gap > HEADERS_BYTES_MAX { LAST_HEADERS_BYTES } else { gap };
            end = field.offset.saturating_add(padded(field.bytes).unwrap_or(u64::MAX));
            (field, Self { offset: field.offset, bytes: field.bytes, header_bytes })
        })
    }

    /// Returns shard, offset and length of headers and payload, as
    /// [`ShardRanges::fetch`](super::ranges::ShardRanges::fetch) takes them.
    pub(crate) fn in_shard(self, shard: usize) -> (usize, u64, u64) {
        let (offset, bytes) = self.with_headers();
        (shard, offset, bytes)
    }

    /// Returns offset and length for headers and payload.
    pub(super) fn with_headers(self) -> (u64, u64) {
        (self.offset - self.header_bytes, self.header_bytes + self.bytes)
    }

    /// Checks the field headers.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if the headers belong to a different field, or are not headers.
    pub(crate) fn check(self, headers: &[u8], key: &str, extension: &str) -> Result<()> {
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
        Err(Error::new(ErrorKind::InvalidData, reason))
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
