//! Tar archives to entries: names, offsets and payloads.
//!
//! [`mod@slice`] walks an archive that is in memory or memory-mapped and hands out payloads without a copy;
//! [`stream`] walks one that arrives as bytes. Both follow `headers`, so they accept and refuse the same
//! archives. An archive that is damaged gives its good entries first and then a [`TarFault`]; nothing ends
//! silently. Entries go to [`crate::shard`].

pub(crate) mod header;
pub(crate) mod headers;
mod pax;
pub(crate) mod ranged;
pub mod slice;
pub mod stream;

use self::header::BLOCK_BYTES;

/// A regular member of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Full path inside the archive; bytes that are not UTF-8 are written `\xNN`.
    pub name: String,
    /// Offset of the member's first header block, extension headers included.
    pub header_offset: u64,
    /// Offset of the first payload byte.
    pub payload_offset: u64,
    /// Length of the payload.
    pub bytes: u64,
}

impl Entry {
    /// Offset behind the payload's padding; `None` if it does not fit 64 bits.
    #[must_use]
    pub fn end_offset(&self) -> Option<u64> {
        self.payload_offset.checked_add(padded(self.bytes)?)
    }
}

/// `bytes` rounded up to whole blocks.
pub(crate) fn padded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BLOCK_BYTES as u64)
}

/// A fault and where it lies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{fault} at offset {offset}")]
pub struct ArchiveFault {
    /// Offset in the archive, after decompression.
    pub offset: u64,
    /// Name of the member that is cut short, where the fault lies in one.
    pub entry: Option<String>,
    /// What is wrong.
    pub fault: TarFault,
}

impl ArchiveFault {
    fn in_entry(self, entry: &Entry) -> Self {
        Self { offset: entry.header_offset, entry: Some(entry.name.clone()), ..self }
    }
}

impl TarFault {
    fn at(self, offset: u64) -> ArchiveFault {
        ArchiveFault { offset, entry: None, fault: self }
    }
}

/// Why an archive cannot be read on. What came before it was good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum TarFault {
    /// The archive holds no bytes at all.
    #[error("the file is empty")]
    Empty,
    /// The header's bytes do not add up.
    #[error("bad checksum")]
    BadChecksum,
    /// A number in a header is not octal or does not fit 64 bits.
    #[error("bad number in header field `{field}`")]
    BadNumber { field: &'static str },
    /// A PAX record is malformed.
    #[error("bad PAX {what}")]
    BadPax { what: &'static str },
    /// A global PAX header sets a path, a size or a sparse map.
    #[error("global PAX header overrides paths, sizes or sparse maps")]
    GlobalOverride,
    /// Sparse members hold a map with holes, not their bytes.
    #[error("sparse members are not supported; write the archive without `--sparse`")]
    Sparse,
    /// The archive ends inside a header or a payload.
    #[error("truncated: {missing} bytes are missing")]
    Truncated { missing: u64 },
    /// An extension header is followed by no member.
    #[error("an extension header is not followed by a member")]
    DanglingExtension,
    /// A run of extension headers that no writer makes.
    #[error("more than {most} extension headers in front of one member")]
    TooManyExtensions { most: u32 },
    /// An extension header that no writer makes.
    #[error("extension header of {bytes} bytes, over {most}")]
    ExtensionTooLarge { bytes: u64, most: u64 },
    /// A name that no file system allows.
    #[error("name of {bytes} bytes, over {most}")]
    NameTooLong { bytes: usize, most: usize },
    /// Bytes other than zeros behind the end mark, such as a second archive.
    #[error("non-zero bytes behind the end mark; only the first archive of a file is read")]
    TrailingBytes,
    /// The compressed stream breaks behind the end mark; all members are whole.
    #[error("the bytes behind the end mark cannot be read: {reason}")]
    UnreadableTail { reason: String },
}
