//! Joins header blocks and extension headers into entries, for any byte source.
//!
//! [`Headers`] receives one block at a time and returns what to read next; [`super`] adds offsets.

use std::fmt::Write;

use super::Entry;
use super::header::{
    BLOCK_BYTES, Header, Kind, MapReader, MapStep, PaxRecords, PaxSparse, Pieces, SparseMap, parse_header,
    parse_pax, until_nul,
};
use crate::error::TarFault;

/// Maximum extension header payload in bytes; names are far shorter.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of extension headers before a member.
const EXTENSIONS_MAX: u32 = 16;
/// Maximum member name length in bytes.
const NAME_BYTES_MAX: usize = 1 << 16;

/// Reader action after a header block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Regular member; the stored payload bytes follow.
    Entry(Entry),
    /// Extension header, or part of a sparse map: pass the payload to [`Headers::extension`].
    Extension { bytes: u64 },
    /// Nothing to deliver: skip this many payload bytes.
    Skip { bytes: u64 },
    /// End marker.
    End,
}

/// Reader state between two header blocks.
#[derive(Debug, Default)]
pub(crate) struct Headers {
    pending_kind: Option<Kind>,
    /// Name from PAX records, which takes precedence over a GNU header name.
    pax_path: Option<Vec<u8>>,
    gnu_path: Option<Vec<u8>>,
    pending_size: Option<u64>,
    sparse: Option<PaxSparse>,
    /// Sparse member whose map is being read.
    mapped: Option<(MapReader, Entry)>,
    extensions: u32,
    first_header_offset: Option<u64>,
    /// Last member if it was a link with a size.
    link: Option<LinkWithSize>,
}

/// Member without a payload whose header states a size, which most writers omit.
#[derive(Debug)]
struct LinkWithSize {
    name: String,
    bytes: u64,
}

impl Headers {
    /// Parses the block at `offset`.
    pub(crate) fn block(&mut self, offset: u64, block: &[u8; BLOCK_BYTES]) -> Result<Next, TarFault> {
        let header = match (parse_header(block), self.link.take()) {
            // Few writers store a link's payload; then this block is the payload's first block.
            (Err(TarFault::BadChecksum), Some(LinkWithSize { name, bytes })) => {
                tracing::warn!(link = %name, bytes, "the payload of a link in an archive is passed over");
                return Ok(Next::Skip { bytes: bytes.saturating_sub(BLOCK_BYTES as u64) });
            }
            (header, _) => header?,
        };
        let Some(header) = header else {
            return if self.extensions == 0 { Ok(Next::End) } else { Err(TarFault::DanglingExtension) };
        };
        match header.kind {
            Kind::PaxLocal | Kind::PaxGlobal | Kind::GnuLongName | Kind::GnuLongLink => {
                self.begin_extension(offset, &header)
            }
            Kind::GnuSparse => self.gnu_sparse(offset, header, block),
            Kind::Regular => self.regular(offset, header),
            Kind::WithoutPayload => {
                let bytes = self.pending_size.unwrap_or(header.size);
                let link =
                    (bytes > 0).then(|| LinkWithSize { name: readable(&self.name(header.name)), bytes });
                self.forget();
                self.link = link;
                Ok(Next::Skip { bytes: 0 })
            }
            Kind::Unknown => {
                let bytes = self.pending_size.unwrap_or(header.size);
                self.forget();
                Ok(Next::Skip { bytes })
            }
        }
    }

    /// Parses the payload announced by the last [`Next::Extension`]; returns what follows if that is not a
    /// header.
    ///
    /// - `offset`: first byte after the payload
    pub(crate) fn extension(&mut self, offset: u64, payload: &[u8]) -> Result<Option<Next>, TarFault> {
        if let Some((mut reader, entry)) = self.mapped.take() {
            let step = reader.take(payload);
            return self.mapped_step(offset, reader, step, entry).map(Some);
        }
        match self.pending_kind.take() {
            Some(Kind::PaxLocal) => self.merge(parse_pax(payload)?),
            Some(Kind::PaxGlobal) => check_global(&parse_pax(payload)?)?,
            Some(Kind::GnuLongName) => self.gnu_path = Some(until_nul(payload).to_vec()),
            _ => {}
        }
        Ok(None)
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
        self.pax_path = records.path.or(self.pax_path.take());
        self.pending_size = records.size.or(self.pending_size);
        self.sparse = records.sparse.or(self.sparse.take());
    }

    fn regular(&mut self, offset: u64, header: Header) -> Result<Next, TarFault> {
        let payload_offset = offset + BLOCK_BYTES as u64;
        let Some(sparse) = self.sparse.take() else {
            let entry = self.entry(offset, header)?;
            self.forget();
            return Ok(Next::Entry(entry));
        };
        self.pax_path = sparse.name.or(self.pax_path.take());
        let mut entry = self.entry(offset, header)?;
        let stored_bytes = entry.bytes;
        let unknown = || Pieces::faulty("its map is of an unknown version");
        let pieces = match (sparse.major, sparse.bytes) {
            (Some(1), Some(bytes)) => {
                entry.bytes = bytes;
                let (reader, step) = MapReader::text(stored_bytes);
                return self.mapped_step(payload_offset, reader, step, entry);
            }
            (None | Some(0), Some(bytes)) => {
                entry.bytes = bytes;
                sparse.pieces
            }
            _ => unknown(),
        };
        entry.sparse = Some(Box::new(SparseMap::new(pieces, entry.bytes, stored_bytes)));
        self.forget();
        Ok(Next::Entry(entry))
    }

    fn gnu_sparse(
        &mut self,
        offset: u64,
        header: Header,
        block: &[u8; BLOCK_BYTES],
    ) -> Result<Next, TarFault> {
        let mut entry = self.entry(offset, header)?;
        let (reader, step, bytes) = MapReader::gnu(block);
        let stored_bytes = entry.bytes;
        entry.bytes = bytes.ok_or(TarFault::BadNumber { field: "real size" })?;
        // Until the map is complete, it carries the stored length.
        entry.sparse = Some(Box::new(SparseMap::new(Pieces::default(), 0, stored_bytes)));
        self.mapped_step(offset + BLOCK_BYTES as u64, reader, step, entry)
    }

    /// Continues a sparse member whose map is read up to `offset`.
    fn mapped_step(
        &mut self,
        offset: u64,
        reader: MapReader,
        step: MapStep,
        mut entry: Entry,
    ) -> Result<Next, TarFault> {
        match step {
            MapStep::More { bytes } => {
                self.mapped = Some((reader, entry));
                Ok(Next::Extension { bytes })
            }
            MapStep::Done { pieces, rest_bytes } => {
                let stored_bytes = rest_bytes.unwrap_or_else(|| entry.stored_bytes());
                entry.payload_offset = offset;
                entry.sparse = Some(Box::new(SparseMap::new(pieces, entry.bytes, stored_bytes)));
                entry.end_offset().ok_or(TarFault::BadNumber { field: "size" })?;
                self.forget();
                Ok(Next::Entry(entry))
            }
        }
    }

    /// Returns the entry for a header, with the stored length.
    fn entry(&mut self, offset: u64, header: Header) -> Result<Entry, TarFault> {
        let name = self.name(header.name);
        if name.len() > NAME_BYTES_MAX {
            return Err(TarFault::NameTooLong { bytes: name.len(), most: NAME_BYTES_MAX });
        }
        let entry = Entry {
            name: readable(&name),
            header_offset: self.first_header_offset.unwrap_or(offset),
            payload_offset: offset + BLOCK_BYTES as u64,
            bytes: self.pending_size.unwrap_or(header.size),
            sparse: None,
        };
        entry.end_offset().ok_or(TarFault::BadNumber { field: "size" })?;
        Ok(entry)
    }

    /// Returns the name of a member with a short name in the header.
    fn name(&mut self, short: Vec<u8>) -> Vec<u8> {
        self.pax_path.take().or(self.gnu_path.take()).unwrap_or(short)
    }

    fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Rejects a global record that moves payloads or renames members: readers interpret such records
/// differently, and current tools never write them.
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
