//! Reads AVIF headers: size, orientation, colors, and AV1 data ranges.
//!
//! The image is the primary item; if the first brand is `avis`, the image is the first frame in the color
//! track, as in libavif. Rotation and mirroring are the orientation; the EXIF orientation is ignored, as the
//! format requires.
//!
//! # Source
//! AV1 Image File Format 1.1; ISO/IEC 14496-12 and 23008-12.

mod boxes;

use std::ops::Range;

use boxes::{Fields, Properties};
use dflop_costmodel::ImageSize;
use image::metadata::Orientation;

use self::boxes::{kind_name, need_in_file};
use crate::media::DecodeError;
use boxes::Items;

pub(crate) use boxes::ColorCoding;

/// Format name in errors.
const FORMAT: &str = "avif";

/// AVIF header.
#[derive(Debug)]
pub(crate) struct AvifHeader {
    /// Size as stored.
    pub(crate) size: ImageSize,
    /// Rotation and mirroring that display the stored image upright.
    pub(crate) orientation: Orientation,
    /// Color coding; if `None`, the color coding in the AV1 data counts.
    pub(crate) colors: Option<ColorCoding>,
    /// AV1 operating point.
    pub(crate) operating_point: u8,
    /// File ranges that make up the AV1 data; ranges may end after the file, at [`u64::MAX`] for "at the
    /// file's end".
    pub(crate) extents: Vec<Range<u64>>,
}

/// Reads the header, which may come after the AV1 data.
///
/// # Errors
/// [`DecodeError::Truncated`] if the bytes end inside the header, [`DecodeError::Unsupported`] with a name
/// for each unsupported kind.
pub(crate) fn read_avif_header(bytes: &[u8]) -> Result<AvifHeader, DecodeError> {
    let (properties, extents) = if bytes.get(8..12) == Some(b"avis") {
        read_track(need_in_file(bytes, *b"moov")?)?
    } else {
        let items = Items::read(need_in_file(bytes, *b"meta")?)?;
        let primary = items.primary();
        match &items.kind(primary)? {
            b"av01" => {}
            b"grid" => return Err(DecodeError::unsupported(FORMAT, "a grid of images")),
            other => {
                let reason = format!("an image of the type `{}`", kind_name(*other));
                return Err(DecodeError::unsupported(FORMAT, reason));
            }
        }
        if items.is_multiplied(primary)? {
            return Err(DecodeError::unsupported(FORMAT, "colors that are multiplied by alpha"));
        }
        (items.properties(primary)?, items.extents(primary)?)
    };
    let missing = || DecodeError::malformed(FORMAT, 0, "the image has no size");
    Ok(AvifHeader {
        size: properties.size.ok_or_else(missing)?,
        orientation: properties.orientation(),
        colors: properties.colors,
        operating_point: properties.operating_point,
        extents,
    })
}

/// Reads a `moov` box body: properties and first-frame file ranges of the first color track.
fn read_track(mut movie: Fields<'_>) -> Result<(Properties, Vec<Range<u64>>), DecodeError> {
    while let Some((kind, track)) = movie.next_box()? {
        if &kind == b"trak" && is_color_track(track)? {
            let table = track.need(*b"mdia")?.need(*b"minf")?.need(*b"stbl")?;
            let mut properties = entry_properties(table.need(*b"stsd")?)?;
            properties.size = Some(displayed_size(track.need(*b"tkhd")?)?);
            return Ok((properties, vec![first_sample(table)?]));
        }
    }
    Err(movie.malformed("no track has frames"))
}

/// Returns whether the track has frames that are not alpha or depth for another track.
fn is_color_track(track: Fields<'_>) -> Result<bool, DecodeError> {
    let mut handler = track.need(*b"mdia")?.need(*b"hdlr")?;
    handler.bytes(8)?;
    let has_frames = &handler.kind()? == b"pict";
    let is_auxiliary = match track.find(*b"tref")? {
        Some(references) => references.find(*b"auxl")?.is_some(),
        None => false,
    };
    Ok(has_frames && !is_auxiliary)
}

fn displayed_size(mut header: Fields<'_>) -> Result<ImageSize, DecodeError> {
    let (version, _) = header.version()?;
    // Times, track number, layer, volume and matrix come first.
    header.bytes(if version == 1 { 32 } else { 20 } + 52)?;
    let (width, height) = (header.u32()? >> 16, header.u32()? >> 16);
    Ok(ImageSize { width, height })
}

/// Reads the first sample entry, whose boxes are properties.
fn entry_properties(mut entries: Fields<'_>) -> Result<Properties, DecodeError> {
    const FIELDS_BYTES: usize = 78;
    entries.bytes(8)?;
    let Some((kind, mut entry)) = entries.next_box()? else {
        return Err(entries.malformed("a track has no sample entry"));
    };
    if &kind != b"av01" {
        return Err(DecodeError::unsupported(FORMAT, "a sequence that is not coded in AV1"));
    }
    entry.bytes(FIELDS_BYTES)?;
    let mut properties = Properties::default();
    while let Some((kind, body)) = entry.next_box()? {
        properties.add(kind, body, false)?;
    }
    Ok(properties)
}

/// Returns the file range of the first sample, which starts the first chunk.
fn first_sample(table: Fields<'_>) -> Result<Range<u64>, DecodeError> {
    let (mut chunks, offset_bytes) = match table.find(*b"stco")? {
        Some(chunks) => (chunks, 4),
        None => (table.need(*b"co64")?, 8),
    };
    chunks.bytes(8)?;
    let start = chunks.uint(offset_bytes)?;
    let mut sizes = table.need(*b"stsz")?;
    sizes.version()?;
    let shared = sizes.u32()?;
    sizes.u32()?;
    let length = if shared == 0 { sizes.u32()? } else { shared };
    Ok(start..start.saturating_add(length.into()))
}
