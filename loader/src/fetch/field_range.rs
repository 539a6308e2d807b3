//! Locates a field in its shard, and checks that the shard has the field there.
//!
//! An index says which bytes of a shard are which field. If it is that of another dataset, or the shard was
//! replaced by one of the same length and time, the bytes are those of other samples. The tar headers
//! directly before a payload name its sample, its field and its length, so they are read with it and
//! compared.

use std::borrow::Cow;
use std::io::{Error, ErrorKind, Result};

use crate::error::{EXCERPT_CHARACTERS, excerpt};
use crate::index::{FieldRow, SampleRow};
use crate::shard::split_key;
use crate::shard::tar::Entry;
use crate::shard::tar::header::BLOCK_BYTES;
use crate::shard::tar::headers::{Headers, Next};
use crate::shard::tar::padded;

/// Longest distance between two payloads of a sample that is read: headers, extension headers, and members
/// that are no fields. Behind a longer one, only its end is read.
const HEADERS_BYTES_MAX: u64 = 1 << 20;
/// End of a longer distance: the header of the field, and the extension headers before it.
const LAST_HEADERS_BYTES: u64 = 64 << 10;

/// Bytes of a field, with the headers before them; offsets are those of the uncompressed shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FieldRange {
    /// Offset of the payload.
    pub(crate) offset: u64,
    /// Length of the payload.
    pub(crate) bytes: u64,
    /// Length of the headers before the payload.
    pub(crate) header_bytes: u64,
}

impl FieldRange {
    /// Returns the fields of a sample with their ranges.
    pub(crate) fn of_row<'a>(row: &SampleRow<'a>) -> impl Iterator<Item = (FieldRow<'a>, Self)> + use<'a> {
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

    /// Returns offset and length of headers and payload.
    pub(super) fn with_headers(self) -> (u64, u64) {
        (self.offset - self.header_bytes, self.header_bytes + self.bytes)
    }

    /// Checks the headers of a field.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if they are those of another field, or none.
    pub(crate) fn check(self, headers: &[u8], key: &str, extension: &str) -> Result<()> {
        let is_field = |entry: &Entry| {
            entry.bytes == self.bytes
                && split_key(&entry.name).is_some_and(|name| name == (key, extension.into()))
        };
        let entry = last_entry(headers);
        if entry.as_ref().is_some_and(is_field) {
            return Ok(());
        }
        // The end of a long distance may begin within a member: the first header is at one of its blocks.
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

/// Returns the entry whose payload follows these headers and other members.
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
