//! Reads AVIF image properties: size, rotation, mirroring, colors.

use dflop_costmodel::ImageSize;
use image::metadata::Orientation;

use super::FORMAT;
use super::boxes::{Fields, Kind, kind_name};
use crate::media::error::DecodeError;

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
