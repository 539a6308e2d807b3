//! Describes damage in a tar archive.

/// Archive fault with an offset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{fault} at offset {offset}")]
pub struct ArchiveFault {
    /// Offset in the archive after decompression, in bytes.
    pub offset: u64,
    /// Name of the truncated member, if the fault is in a member.
    pub entry: Option<String>,
    /// Kind of damage.
    pub fault: TarFault,
}

impl ArchiveFault {
    /// Attributes the fault to the member that starts at `offset`.
    pub(crate) fn in_entry(self, name: &str, offset: u64) -> Self {
        Self { offset, entry: Some(name.to_owned()), ..self }
    }
}

impl TarFault {
    /// Locates the fault.
    pub(crate) fn at(self, offset: u64) -> ArchiveFault {
        ArchiveFault { offset, entry: None, fault: self }
    }
}

/// Reason why an archive cannot be read further. Everything before the fault is sound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum TarFault {
    /// The archive holds no bytes at all.
    #[error("the file is empty")]
    Empty,
    /// The header checksum is wrong.
    #[error("bad checksum")]
    BadChecksum,
    /// The file has a different format.
    #[error("this is {format}, not a tar; {advice}")]
    OtherFormat { format: &'static str, advice: &'static str },
    /// A number in a header is not octal or does not fit 64 bits.
    #[error("bad number in header field `{field}`")]
    BadNumber { field: &'static str },
    /// A PAX record is malformed.
    #[error("bad PAX {what}")]
    BadPax { what: &'static str },
    /// A global PAX header sets a path, a size or a sparse map.
    #[error("global PAX header overrides paths, sizes or sparse maps")]
    GlobalOverride,
    /// The archive ends inside a header or a payload.
    #[error("truncated: {missing} bytes are missing")]
    Truncated { missing: u64 },
    /// An extension header is followed by no member.
    #[error("an extension header is not followed by a member")]
    DanglingExtension,
    /// Too many extension headers before a member; no known writer creates that many.
    #[error("more than {most} extension headers in front of one member")]
    TooManyExtensions { most: u32 },
    /// An extension header is too large; no known writer creates such headers.
    #[error("extension header of {bytes} bytes, over {most}")]
    ExtensionTooLarge { bytes: u64, most: u64 },
    /// A member name is longer than any file system allows.
    #[error("name of {bytes} bytes, over {most}")]
    NameTooLong { bytes: usize, most: usize },
    /// Nonzero bytes follow the end mark, such as a second archive.
    #[error("non-zero bytes after the end mark; only the first archive of a file is read")]
    TrailingBytes,
    /// The compressed stream is damaged after the end mark; all members are whole.
    #[error("the bytes after the end mark cannot be read: {reason}")]
    UnreadableTail { reason: String },
}
