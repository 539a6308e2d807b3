//! Parses the boxes of an AVIF file: items and properties.

use super::FORMAT;
use crate::media::DecodeError;
use dflop_costmodel::ImageSize;
use image::metadata::Orientation;
use std::ops::Range;

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

/// Items that a `meta` box describes.
pub(super) struct Items<'a> {
    meta: Fields<'a>,
    primary: u32,
}

impl<'a> Items<'a> {
    /// Reads a `meta` box body.
    pub(super) fn read(mut meta: Fields<'a>) -> Result<Self, DecodeError> {
        meta.version()?;
        let mut body = meta.need(*b"pitm")?;
        let (version, _) = body.version()?;
        let primary = body.uint(if version == 0 { 2 } else { 4 })? as u32;
        Ok(Self { meta, primary })
    }

    /// Returns the number of the displayed item.
    pub(super) fn primary(&self) -> u32 {
        self.primary
    }

    /// Returns the item type.
    pub(super) fn kind(&self, item: u32) -> Result<Kind, DecodeError> {
        let mut infos = self.meta.need(*b"iinf")?;
        let (version, _) = infos.version()?;
        infos.uint(if version == 0 { 2 } else { 4 })?;
        while let Some((kind, mut info)) = infos.next_box()? {
            if &kind != b"infe" {
                continue;
            }
            let (version, _) = info.version()?;
            // Older versions have no types, and no images.
            if version >= 2 && info.uint(if version == 2 { 2 } else { 4 })? == u64::from(item) {
                info.u16()?;
                return info.kind();
            }
        }
        Err(infos.malformed(format!("item {item} is missing")))
    }

    /// Returns the item properties.
    pub(super) fn properties(&self, item: u32) -> Result<Properties, DecodeError> {
        let boxes = self.meta.need(*b"iprp")?;
        let mut stored = Vec::new();
        let mut container = boxes.need(*b"ipco")?;
        while let Some(property) = container.next_box()? {
            stored.push(property);
        }
        let mut properties = Properties::default();
        let mut maps = boxes;
        while let Some((kind, mut map)) = maps.next_box()? {
            if &kind != b"ipma" {
                continue;
            }
            let (version, flags) = map.version()?;
            let index_bytes = if flags & 1 == 0 { 1 } else { 2 };
            for _ in 0..map.u32()? {
                let owner = map.uint(if version == 0 { 2 } else { 4 })?;
                for _ in 0..map.uint(1)? {
                    let both = map.uint(index_bytes)?;
                    let essential = 0x80 << (8 * (index_bytes - 1));
                    let index = both & (essential - 1);
                    if owner != u64::from(item) || index == 0 {
                        continue;
                    }
                    let property = stored.get(index as usize - 1);
                    let &(kind, body) = property.ok_or_else(|| map.malformed("a property is missing"))?;
                    properties.add(kind, body, both & essential != 0)?;
                }
            }
        }
        Ok(properties)
    }

    /// Returns whether another item holds alpha values that colors are premultiplied with.
    pub(super) fn is_multiplied(&self, item: u32) -> Result<bool, DecodeError> {
        let Some(mut references) = self.meta.find(*b"iref")? else { return Ok(false) };
        let (version, _) = references.version()?;
        while let Some((kind, mut reference)) = references.next_box()? {
            let owner = reference.uint(if version == 0 { 2 } else { 4 })?;
            if &kind == b"prem" && owner == u64::from(item) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the file ranges that make up an item.
    pub(super) fn extents(&self, item: u32) -> Result<Vec<Range<u64>>, DecodeError> {
        let mut fields = self.meta.need(*b"iloc")?;
        let (version, _) = fields.version()?;
        let sizes = fields.u16()?;
        let nibble = |place: u32| usize::from(sizes >> place & 0xF).min(8);
        let (offset_bytes, length_bytes, base_bytes) = (nibble(12), nibble(8), nibble(4));
        let index_bytes = if version == 0 { 0 } else { nibble(0) };
        let id_bytes = if version < 2 { 2 } else { 4 };
        for _ in 0..fields.uint(id_bytes)? {
            let id = fields.uint(id_bytes)?;
            let method = if version == 0 { 0 } else { fields.u16()? & 0xF };
            let source = fields.u16()?;
            let base = fields.uint(base_bytes)?;
            let mut extents = Vec::new();
            for _ in 0..fields.u16()? {
                fields.uint(index_bytes)?;
                let start = base.saturating_add(fields.uint(offset_bytes)?);
                let length = fields.uint(length_bytes)?;
                // A length of 0 means all.
                let end = if length == 0 { u64::MAX } else { start.saturating_add(length) };
                extents.push(start..end);
            }
            if id == u64::from(item) {
                return if source == 0 { self.place(extents, method) } else { Err(elsewhere()) };
            }
        }
        Err(fields.malformed(format!("item {item} has no place in the file")))
    }

    /// Converts extents to file ranges.
    fn place(&self, extents: Vec<Range<u64>>, method: u16) -> Result<Vec<Range<u64>>, DecodeError> {
        match method {
            0 => Ok(extents),
            1 => {
                let body = self.meta.need(*b"idat")?;
                let (start, length) = (body.offset() as u64, body.len() as u64);
                let within = |extent: Range<u64>| {
                    let end = if extent.end == u64::MAX { length } else { extent.end };
                    let is_within = extent.start <= end && end <= length;
                    is_within.then(|| start + extent.start..start + end)
                };
                let ended = || body.malformed("an item is longer than the box `idat`");
                extents.into_iter().map(|extent| within(extent).ok_or_else(ended)).collect()
            }
            _ => Err(elsewhere()),
        }
    }
}

fn elsewhere() -> DecodeError {
    DecodeError::unsupported(FORMAT, "an item outside the file, or in another item")
}

/// Color coding, in numbers that ITU-T H.273 defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ColorCoding {
    /// Color primaries.
    pub(crate) primaries: u16,
    /// Matrix coefficients.
    pub(crate) matrix: u16,
    /// Whether samples use all values.
    pub(crate) is_full_range: bool,
}

/// Image properties.
#[derive(Clone, Debug, Default)]
pub(super) struct Properties {
    pub(super) size: Option<ImageSize>,
    pub(super) colors: Option<ColorCoding>,
    /// AV1 operating point.
    pub(super) operating_point: u8,
    /// Quarter turns counterclockwise.
    turns: u8,
    /// Mirroring: 0 exchanges top and bottom, 1 left and right.
    mirror: Option<u8>,
}

impl Properties {
    /// Adds the property in a box. Properties that change no pixel are ignored, and so is the `clap` crop,
    /// which Pillow ignores as well.
    ///
    /// # Errors
    /// [`DecodeError::Unsupported`] for an unknown essential property.
    pub(super) fn add(
        &mut self,
        kind: Kind,
        mut body: Fields<'_>,
        is_essential: bool,
    ) -> Result<(), DecodeError> {
        const HIGHEST_LAYER: u16 = 0xFFFF;
        match &kind {
            b"ispe" => {
                body.version()?;
                self.size = Some(ImageSize { width: body.u32()?, height: body.u32()? });
            }
            b"irot" => self.turns = body.uint(1)? as u8 & 3,
            b"imir" => self.mirror = Some(body.uint(1)? as u8 & 1),
            b"colr" => self.add_colors(body)?,
            b"a1op" => {
                self.operating_point = body.uint(1)? as u8;
                if self.operating_point > 31 {
                    return Err(body.malformed("an operating point is larger than 31"));
                }
            }
            b"lsel" if body.u16()? != HIGHEST_LAYER => {
                return Err(DecodeError::unsupported(FORMAT, "a layer that is not the highest"));
            }
            b"lsel" | b"av1C" | b"pixi" | b"pasp" | b"clap" | b"a1lx" | b"auxC" | b"clli" | b"mdcv"
            | b"cclv" | b"amve" => {}
            _ if is_essential => {
                return Err(DecodeError::unsupported(FORMAT, format!("the property `{}`", kind_name(kind))));
            }
            _ => {}
        }
        Ok(())
    }

    fn add_colors(&mut self, mut body: Fields<'_>) -> Result<(), DecodeError> {
        // Other kinds are ICC profiles.
        if &body.kind()? == b"nclx" && self.colors.is_none() {
            let primaries = body.u16()?;
            body.u16()?;
            let (matrix, range) = (body.u16()?, body.uint(1)?);
            self.colors = Some(ColorCoding { primaries, matrix, is_full_range: range & 0x80 != 0 });
        }
        Ok(())
    }

    /// Returns rotation and mirroring as one orientation. The rotation is first, as for libavif,
    /// also where the file lists it last.
    pub(super) fn orientation(&self) -> Orientation {
        const OF_EXIF: [[u8; 3]; 4] = [[1, 4, 2], [8, 5, 7], [3, 2, 4], [6, 7, 5]];
        let mirror = self.mirror.map_or(0, |axis| 1 + usize::from(axis));
        Orientation::from_exif(OF_EXIF[usize::from(self.turns)][mirror]).unwrap_or(Orientation::NoTransforms)
    }
}
