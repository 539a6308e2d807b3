//! Joins header blocks and extension headers into entries, for any source of bytes.
//!
//! [`Headers`] is fed one block at a time and returns what to read next; [`super::walker`] adds offsets.

use std::fmt::Write;

use super::Entry;
use super::header::{BLOCK_BYTES, Header, Kind, parse_header, until_nul};
use super::pax::{PaxRecords, parse_pax};
use crate::error::TarFault;

/// Largest payload of an extension header; names are far shorter.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;
/// Most extension headers before one member.
const EXTENSIONS_MAX: u32 = 16;
/// Longest member name.
const NAME_BYTES_MAX: usize = 1 << 16;

/// Action of a reader after a header block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// A regular member; its payload of `entry.bytes` follows.
    Entry(Entry),
    /// An extension header: pass its payload to [`Headers::extension`].
    Extension { bytes: u64 },
    /// Nothing to deliver: skip this many bytes of payload.
    Skip { bytes: u64 },
    /// The end marker.
    End,
}

/// State of a reader between two header blocks.
#[derive(Debug, Default)]
pub(crate) struct Headers {
    pending_kind: Option<Kind>,
    pending_path: Option<Vec<u8>>,
    pending_size: Option<u64>,
    is_sparse: bool,
    extensions: u32,
    first_header_offset: Option<u64>,
}

impl Headers {
    /// Parses the block at `offset`.
    pub(crate) fn block(&mut self, offset: u64, block: &[u8; BLOCK_BYTES]) -> Result<Next, TarFault> {
        let Some(header) = parse_header(block)? else {
            return if self.extensions == 0 { Ok(Next::End) } else { Err(TarFault::DanglingExtension) };
        };
        match header.kind {
            Kind::PaxLocal | Kind::PaxGlobal | Kind::GnuLongName | Kind::GnuLongLink => {
                self.begin_extension(offset, &header)
            }
            Kind::GnuSparse => Err(TarFault::Sparse),
            Kind::Regular => self.entry(offset, header),
            Kind::WithoutPayload => {
                self.forget();
                Ok(Next::Skip { bytes: 0 })
            }
            Kind::Unknown => {
                let bytes = self.pending_size.unwrap_or(header.size);
                self.forget();
                Ok(Next::Skip { bytes })
            }
        }
    }

    /// Parses the payload of the extension header that the last block announced.
    pub(crate) fn extension(&mut self, payload: &[u8]) -> Result<(), TarFault> {
        match self.pending_kind.take() {
            Some(Kind::PaxLocal) => self.merge(parse_pax(payload)?),
            Some(Kind::PaxGlobal) => check_global(&parse_pax(payload)?)?,
            Some(Kind::GnuLongName) => self.pending_path = Some(until_nul(payload).to_vec()),
            _ => {}
        }
        Ok(())
    }

    /// Returns whether no extension header waits for its member.
    pub(crate) fn is_between_members(&self) -> bool {
        self.extensions == 0
    }

    fn begin_extension(&mut self, offset: u64, header: &Header) -> Result<Next, TarFault> {
        self.extensions += 1;
        if self.extensions > EXTENSIONS_MAX {
            return Err(TarFault::TooManyExtensions { most: EXTENSIONS_MAX });
        }
        if header.size > EXTENSION_BYTES_MAX {
            return Err(TarFault::ExtensionTooLarge { bytes: header.size, most: EXTENSION_BYTES_MAX });
        }
        self.first_header_offset.get_or_insert(offset);
        self.pending_kind = Some(header.kind);
        Ok(Next::Extension { bytes: header.size })
    }

    fn merge(&mut self, records: PaxRecords) {
        self.pending_path = records.path.or(self.pending_path.take());
        self.pending_size = records.size.or(self.pending_size);
        self.is_sparse |= records.is_sparse;
    }

    fn entry(&mut self, offset: u64, header: Header) -> Result<Next, TarFault> {
        if self.is_sparse {
            return Err(TarFault::Sparse);
        }
        let name = self.pending_path.take().unwrap_or(header.name);
        if name.len() > NAME_BYTES_MAX {
            return Err(TarFault::NameTooLong { bytes: name.len(), most: NAME_BYTES_MAX });
        }
        let entry = Entry {
            name: readable(&name),
            header_offset: self.first_header_offset.unwrap_or(offset),
            payload_offset: offset + BLOCK_BYTES as u64,
            bytes: self.pending_size.unwrap_or(header.size),
        };
        entry.end_offset().ok_or(TarFault::BadNumber { field: "size" })?;
        self.forget();
        Ok(Next::Entry(entry))
    }

    fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Rejects a global record that moves payloads or renames members: readers disagree about those, and the
/// tools in use write none.
fn check_global(records: &PaxRecords) -> Result<(), TarFault> {
    if *records == PaxRecords::default() { Ok(()) } else { Err(TarFault::GlobalOverride) }
}

/// Returns the name as text: bytes that are not UTF-8 become `\xNN`, so that different names stay different.
fn readable(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            // Writing to a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}
