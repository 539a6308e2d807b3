//! Decodes AVIF: the primary item, or the first frame if the file is a sequence.
//!
//! Pixels equal Pillow's `convert("RGB")`: alpha is dropped, the crop property `clap` is not applied. The
//! caller applies rotation and mirroring, as for other formats.

mod colors;
mod obu;
#[cfg(test)]
mod tests;

use std::ops::Range;

use re_rav1d::dav1d::{Decoder, Error, Picture, PixelLayout, PlanarImageComponent, Settings};

use self::colors::{Frame, Plane};
use self::obu::Sequence;
use super::RgbImage;
use crate::media::error::DecodeError;
use crate::media::limits::{ImageLimits, check_limit};
use crate::media::probe::{AvifHeader, ColorCoding, read_avif_header};

const FORMAT: &str = "avif";

/// Decodes the stored image, without its orientation, into `image`.
pub(super) fn decode_into(
    bytes: &[u8],
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let header = read_avif_header(bytes)?;
    let units = obu::read_units(&coded_bytes(bytes, &header.extents)?)?;
    let (width, height) = (header.size.width, header.size.height);
    let pixel_bytes = pixel_bytes(&units.sequence);
    let decoded_bytes = (u64::from(width) * u64::from(height)).saturating_mul(pixel_bytes);
    check_limit(FORMAT, decoded_bytes, "decoded bytes", "alloc_bytes_max", limits.alloc_bytes_max)?;
    let frame_pixels_max = limits.pixels_max.min(limits.alloc_bytes_max / pixel_bytes);
    let picture = first_picture(units.bytes, &header, frame_pixels_max)?;
    if (picture.width(), picture.height()) != (width, height) {
        let coded = format!("the frame is of {} x {} pixels", picture.width(), picture.height());
        return Err(DecodeError::malformed(FORMAT, 0, format!("{coded}, the header has {width} x {height}")));
    }
    convert(&picture, header.colors.unwrap_or(units.sequence.colors), &mut image.pixels)?;
    (image.width, image.height, image.is_truncated) = (width, height, false);
    Ok(())
}

/// Joins the AV1 data.
fn coded_bytes(bytes: &[u8], extents: &[Range<u64>]) -> Result<Vec<u8>, DecodeError> {
    let ended = || DecodeError::truncated(FORMAT, bytes.len());
    let mut data = Vec::new();
    for extent in extents {
        let end = if extent.end == u64::MAX { bytes.len() as u64 } else { extent.end };
        let range = usize::try_from(extent.start).ok().zip(usize::try_from(end).ok());
        let part = range.and_then(|(start, end)| bytes.get(start..end)).ok_or_else(ended)?;
        if data.len() + part.len() > bytes.len() {
            return Err(DecodeError::malformed(FORMAT, 0, "the AV1 data are longer than the file"));
        }
        data.extend(part);
    }
    Ok(data)
}

/// Returns the bytes per pixel: in a frame, in a copy with film grain, and as RGB.
fn pixel_bytes(sequence: &Sequence) -> u64 {
    let planes = if sequence.is_gray { 1 } else { 3 };
    let sample_bytes = if sequence.depth > 8 { 2 } else { 1 };
    3 + 2 * planes * sample_bytes
}

/// Decodes up to the first visible frame.
fn first_picture(units: Vec<u8>, header: &AvifHeader, pixels_max: u64) -> Result<Picture, DecodeError> {
    let refusal = |error: Error| DecodeError::codec(FORMAT, error);
    let mut settings = Settings::new();
    settings.set_n_threads(1);
    settings.set_max_frame_delay(1);
    settings.set_all_layers(false);
    settings.set_operating_point(header.operating_point.into());
    settings.set_frame_size_limit(u32::try_from(pixels_max.max(1)).unwrap_or(u32::MAX));
    let mut decoder = Decoder::with_settings(&settings).map_err(refusal)?;
    let mut sent = decoder.send_data(units, None, None, None);
    loop {
        let is_all_sent = match sent {
            Ok(()) => true,
            Err(error) if error.is_again() => false,
            Err(error) => return Err(refusal(error)),
        };
        match decoder.get_picture() {
            Ok(picture) => return Ok(picture),
            Err(error) if !error.is_again() => return Err(refusal(error)),
            Err(_) if is_all_sent => {
                return Err(DecodeError::malformed(FORMAT, 0, "no frame of the AV1 data is shown"));
            }
            Err(_) => sent = decoder.send_pending_data(),
        }
    }
}

fn convert(picture: &Picture, colors: ColorCoding, pixels: &mut Vec<u8>) -> Result<(), DecodeError> {
    use PlanarImageComponent::{U, V, Y};
    let depth = picture.bit_depth() as u32;
    let layout = picture.pixel_layout();
    let plane =
        |component, bytes| Plane { bytes, stride: picture.stride(component) as usize, is_wide: depth > 8 };
    let luma = picture.plane(Y);
    let chroma = (layout != PixelLayout::I400).then(|| [picture.plane(U), picture.plane(V)]);
    let frame = Frame {
        width: picture.width() as usize,
        height: picture.height() as usize,
        depth,
        luma: plane(Y, luma.as_ref()),
        chroma: chroma.as_ref().map(|[blue, red]| [plane(U, blue.as_ref()), plane(V, red.as_ref())]),
        is_halved: (matches!(layout, PixelLayout::I420 | PixelLayout::I422), layout == PixelLayout::I420),
        colors,
    };
    colors::convert(&frame, pixels)
}
