//! Reads tar archives: entry names, offsets and payloads.
//!
//! [`mod@slice`] walks an archive in memory or memory-mapped and returns payloads without a copy; [`stream`]
//! walks an archive that arrives as bytes, `ranged` an archive that is read by range. All use `walker`, so
//! they accept and reject the same archives. A damaged archive yields the good entries first and then a
//! [`TarFault`](crate::error::TarFault); nothing ends silently. Entries go to [`crate::shard`].

pub(crate) mod entries;
pub(crate) mod header;
pub(crate) mod headers;
mod pax;
pub mod slice;
mod sparse;
pub mod stream;
#[cfg(test)]
mod tests;
mod walker;

use self::header::BLOCK_BYTES;
pub use self::sparse::SparseMap;

/// Regular archive member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Full path inside the archive; bytes that are not UTF-8 are written `\xNN`.
    pub name: String,
    /// Offset of the member's first header block, including extension headers, in bytes.
    pub header_offset: u64,
    /// Offset of the first stored payload byte, in bytes.
    pub payload_offset: u64,
    /// Payload length with holes, in bytes.
    pub bytes: u64,
    /// Holes in a sparse member.
    pub sparse: Option<Box<SparseMap>>,
}

impl Entry {
    /// Returns the offset after the padded payload; `None` if it exceeds 64 bits.
    #[must_use]
    pub fn end_offset(&self) -> Option<u64> {
        self.payload_offset.checked_add(padded(self.stored_bytes())?)
    }

    /// Returns the payload length in the archive, without holes.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.sparse.as_ref().map_or(self.bytes, |sparse| sparse.stored_bytes())
    }
}

/// Rounds `bytes` up to whole blocks.
pub(crate) fn padded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BLOCK_BYTES as u64)
}
