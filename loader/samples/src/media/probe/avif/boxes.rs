//! Reads boxes in the ISO base media file format.

use crate::media::error::DecodeError;

use super::FORMAT;

/// Box type, four letters.
pub(super) type Kind = [u8; 4];

/// Reads box fields, or inner boxes, in sequence.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    rest: &'a [u8],
    /// File offset where `rest` starts.
    offset: usize,
}

impl<'a> Fields<'a> {
    /// Reads a file from `offset` on.
    pub(super) fn from_file(bytes: &'a [u8], offset: usize) -> Self {
        Self { rest: bytes.get(offset..).unwrap_or_default(), offset }
    }

    /// Returns the file offset of the next byte.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the number of remaining bytes.
    pub(super) fn len(&self) -> usize {
        self.rest.len()
    }

    /// Reads the next bytes.
    ///
    /// # Errors
    /// [`DecodeError::Malformed`] if the box is shorter; all these functions return it.
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let Some((bytes, rest)) = self.rest.split_at_checked(count) else {
            return Err(self.malformed("a box ends inside its fields"));
        };
        (self.rest, self.offset) = (rest, self.offset + count);
        Ok(bytes)
    }

    /// Reads an unsigned integer with up to 8 bytes; without bytes the integer is 0.
    pub(super) fn uint(&mut self, bytes: usize) -> Result<u64, DecodeError> {
        Ok(self.bytes(bytes)?.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    pub(super) fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(self.uint(2)? as u16)
    }

    pub(super) fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(self.uint(4)? as u32)
    }

    pub(super) fn kind(&mut self) -> Result<Kind, DecodeError> {
        Ok(self.u32()?.to_be_bytes())
    }

    /// Reads version and flags, with which a full box starts.
    pub(super) fn version(&mut self) -> Result<(u8, u32), DecodeError> {
        let both = self.u32()?;
        Ok(((both >> 24) as u8, both & 0xFF_FFFF))
    }

    /// Reads the next box; `None` at the end.
    pub(super) fn next_box(&mut self) -> Result<Option<(Kind, Fields<'a>)>, DecodeError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let (kind, body_bytes) = self.box_header()?;
        let body_bytes = body_bytes.unwrap_or(self.rest.len() as u64);
        let offset = self.offset;
        let body = usize::try_from(body_bytes).ok().and_then(|count| self.bytes(count).ok());
        let rest = body.ok_or_else(|| self.malformed("a box is longer than the box around it"))?;
        Ok(Some((kind, Self { rest, offset })))
    }

    /// Reads a box header: type and body length, `None` if the box ends with the file.
    pub(super) fn box_header(&mut self) -> Result<(Kind, Option<u64>), DecodeError> {
        let size = self.u32()?;
        let kind = self.kind()?;
        let body_bytes = match size {
            0 => return Ok((kind, None)),
            1 => self.uint(8)?.checked_sub(16),
            _ => u64::from(size).checked_sub(8),
        };
        match body_bytes {
            Some(body_bytes) => Ok((kind, Some(body_bytes))),
            None => Err(self.malformed("a box is shorter than its header")),
        }
    }

    /// Finds a box by type.
    pub(super) fn find(mut self, wanted: Kind) -> Result<Option<Fields<'a>>, DecodeError> {
        while let Some((kind, body)) = self.next_box()? {
            if kind == wanted {
                return Ok(Some(body));
            }
        }
        Ok(None)
    }

    /// Finds a required box.
    pub(super) fn need(self, wanted: Kind) -> Result<Fields<'a>, DecodeError> {
        let missing = || self.malformed(format!("the box `{}` is missing", kind_name(wanted)));
        self.find(wanted)?.ok_or_else(missing)
    }

    pub(super) fn malformed(&self, reason: impl Into<String>) -> DecodeError {
        DecodeError::malformed(FORMAT, self.offset, reason)
    }
}

/// Returns the type as text, for messages.
pub(super) fn kind_name(kind: Kind) -> String {
    kind.escape_ascii().to_string()
}

/// Finds an outermost box by type.
///
/// # Errors
/// [`DecodeError::Truncated`] if the bytes end before the box.
pub(super) fn need_in_file(bytes: &[u8], wanted: Kind) -> Result<Fields<'_>, DecodeError> {
    const HEADER_BYTES_MAX: usize = 16;
    let ended = || DecodeError::truncated(FORMAT, bytes.len());
    let mut fields = Fields::from_file(bytes, 0);
    loop {
        if fields.len() < HEADER_BYTES_MAX {
            return Err(ended());
        }
        let (kind, body_bytes) = fields.box_header()?;
        let offset = fields.offset();
        let end = body_bytes.map(|count| (offset as u64).saturating_add(count));
        let end = usize::try_from(end.unwrap_or(bytes.len() as u64)).map_err(|_| ended())?;
        if end > bytes.len() {
            return Err(ended());
        }
        if kind == wanted {
            return Ok(Fields { rest: &bytes[offset..end], offset });
        }
        fields = Fields::from_file(bytes, end);
    }
}
