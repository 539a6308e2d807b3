//! Reads AVIF headers: size, orientation, colors, and AV1 data ranges.
//!
//! The image is the primary item; if the first brand is `avis`, the image is the first frame in the color
//! track, as in libavif. Rotation and mirroring are the orientation; the EXIF orientation is ignored, as the
//! format requires.
//!
//! # Source
//! AV1 Image File Format 1.1; ISO/IEC 14496-12 and 23008-12.

mod boxes;
mod items;
mod properties;
mod track;

use std::ops::Range;

use dflop_costmodel::ImageSize;
use image::metadata::Orientation;

use self::boxes::{kind_name, need_in_file};
use self::items::Items;
use crate::media::error::DecodeError;

pub(crate) use self::properties::ColorCoding;

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
        track::read_track(need_in_file(bytes, *b"moov")?)?
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
