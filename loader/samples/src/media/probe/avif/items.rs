//! Reads the items that a `meta` box lists: types, properties, and file ranges.

use std::ops::Range;

use super::FORMAT;
use super::boxes::{Fields, Kind};
use super::properties::Properties;
use crate::media::error::DecodeError;

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
