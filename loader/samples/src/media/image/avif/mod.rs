//! Decodes AVIF: the primary item, or the first frame if the file is a sequence.
//!
//! Checks AV1 units before they are decoded, and reads the sequence header.
//!
//! Pixels equal Pillow's `convert("RGB")`: alpha is dropped, the crop property `clap` is not applied. The
//! caller applies rotation and mirroring, as for other formats.
//!
//! The decoder gets only units that pixels depend on: it panics on some damaged metadata, which ends the
//! process.
//!
//! # Source
//! AV1 Bitstream & Decoding Process Specification, sections 5.3 to 5.5.

mod colors;
#[cfg(test)]
mod tests;

use super::RgbImage;
use crate::media::DecodeError;
use crate::media::probe::{AvifHeader, ColorCoding, read_avif_header};
use crate::media::shape::{ImageLimits, check_limit};
use colors::{Frame, Plane};
use re_rav1d::dav1d::{Decoder, Error, Picture, PixelLayout, PlanarImageComponent, Settings};
use std::ops::Range;

const FORMAT: &str = "avif";

/// Decodes the stored image, without its orientation, into `image`.
pub(super) fn decode_into(
    bytes: &[u8],
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let header = read_avif_header(bytes)?;
    let units = read_units(&coded_bytes(bytes, &header.extents)?)?;
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

/// Maximum number of frames per image; layers and hidden frames come before the visible frame.
const FRAMES_MAX: usize = 32;

/// AV1 units, in decoding order.
struct Units {
    /// Sequence headers, frames and tile groups, each with the length.
    bytes: Vec<u8>,
    sequence: Sequence,
}

/// Sample coding in a sequence header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sequence {
    /// Bits per sample: 8, 10 or 12.
    depth: u32,
    /// Whether there is no chroma.
    is_gray: bool,
    colors: ColorCoding,
}

/// Splits the data into units and keeps the units that pixels depend on.
///
/// # Errors
/// [`DecodeError::Truncated`] if the last unit is cut, [`DecodeError::Malformed`] without a sequence header
/// or a frame. Offsets count from the first byte of the AV1 data.
fn read_units(data: &[u8]) -> Result<Units, DecodeError> {
    const SEQUENCE_HEADER: u8 = 1;
    let mut kept = Vec::with_capacity(data.len());
    let mut sequence = None;
    let mut frames = 0;
    let mut position = 0;
    while position < data.len() {
        let start = position;
        let (head, body) = next_unit(data, &mut position)?;
        match head[0] >> 3 & 0xF {
            SEQUENCE_HEADER => {
                let missing = || DecodeError::malformed(FORMAT, start, "the sequence header is damaged");
                sequence = Some(read_sequence(body).ok_or_else(missing)?);
            }
            // Frame header; frame.
            3 | 6 => frames += 1,
            // Delimiter; tile group.
            2 | 4 => {}
            _ => continue,
        }
        kept.extend([head[0] | HAS_LENGTH]);
        kept.extend(&head[1..]);
        push_length(body.len(), &mut kept);
        kept.extend(body);
    }
    let malformed = |reason: &str| DecodeError::malformed(FORMAT, 0, reason);
    let sequence = sequence.ok_or_else(|| malformed("the AV1 data have no sequence header"))?;
    match frames {
        0 => Err(malformed("the AV1 data have no frame")),
        1..=FRAMES_MAX => Ok(Units { bytes: kept, sequence }),
        _ => Err(malformed("the AV1 data of one image have more than 32 frames")),
    }
}

/// Header bit: a length follows.
const HAS_LENGTH: u8 = 2;

/// Returns the header, without the length, and the body of the unit at `position`, and advances `position` to
/// the next unit.
fn next_unit<'a>(data: &'a [u8], position: &mut usize) -> Result<(&'a [u8], &'a [u8]), DecodeError> {
    const FORBIDDEN: u8 = 0x80;
    const HAS_EXTENSION: u8 = 4;
    let ended = || DecodeError::truncated(FORMAT, data.len());
    let start = *position;
    let first = data[start];
    if first & FORBIDDEN != 0 {
        return Err(DecodeError::malformed(FORMAT, start, "no unit of AV1 starts here"));
    }
    let mut at = start + if first & HAS_EXTENSION == 0 { 1 } else { 2 };
    let head = data.get(start..at).ok_or_else(ended)?;
    let mut length = data.len() - at;
    if first & HAS_LENGTH != 0 {
        length = 0;
        for place in 0.. {
            let byte = *data.get(at).ok_or_else(ended)?;
            at += 1;
            length |= usize::from(byte & 0x7F) << (7 * place);
            match byte {
                0..0x80 => break,
                _ if place == 3 => {
                    return Err(DecodeError::malformed(FORMAT, start, "a unit of AV1 is too long"));
                }
                _ => {}
            }
        }
    }
    let body = data.get(at..at + length).ok_or_else(ended)?;
    *position = at + length;
    Ok((head, body))
}

fn push_length(mut length: usize, bytes: &mut Vec<u8>) {
    while length >= 0x80 {
        bytes.push(length as u8 | 0x80);
        length >>= 7;
    }
    bytes.push(length as u8);
}

/// Reads bits, highest first; `None` past the end.
struct Bits<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl Bits<'_> {
    fn flag(&mut self) -> Option<bool> {
        let byte = self.bytes.get(self.position / 8)?;
        let bit = byte >> (7 - self.position % 8) & 1;
        self.position += 1;
        Some(bit == 1)
    }

    fn number(&mut self, bits: u32) -> Option<u32> {
        let mut value = 0;
        for _ in 0..bits {
            value = value << 1 | u32::from(self.flag()?);
        }
        Some(value)
    }

    /// Skips a number with a variable length.
    fn skip_variable(&mut self) -> Option<()> {
        let mut zeros = 0;
        while !self.flag()? {
            zeros += 1;
        }
        self.number(zeros.min(32)).map(|_| ())
    }
}

fn read_sequence(body: &[u8]) -> Option<Sequence> {
    let mut bits = Bits { bytes: body, position: 0 };
    let profile = bits.number(3)?;
    let is_still = bits.flag()?;
    let is_reduced = bits.flag()?;
    if profile > 2 || (is_reduced && !is_still) {
        return None;
    }
    if is_reduced {
        bits.number(5)?;
    } else {
        skip_operating_points(&mut bits)?;
    }
    let (width_bits, height_bits) = (bits.number(4)? + 1, bits.number(4)? + 1);
    bits.number(width_bits)?;
    bits.number(height_bits)?;
    if !is_reduced && bits.flag()? {
        bits.number(7)?;
    }
    // Large superblocks, filtered intra prediction, filtered edges.
    bits.number(3)?;
    if !is_reduced {
        skip_inter_tools(&mut bits)?;
    }
    // Super-resolution, directional enhancement, restoration.
    bits.number(3)?;
    read_samples(&mut bits, profile)
}

fn skip_operating_points(bits: &mut Bits<'_>) -> Option<()> {
    let mut delay_bits = None;
    if bits.flag()? {
        bits.number(32)?;
        bits.number(32)?;
        if bits.flag()? {
            bits.skip_variable()?;
        }
        if bits.flag()? {
            delay_bits = Some(bits.number(5)? + 1);
            bits.number(32)?;
            bits.number(10)?;
        }
    }
    let has_delays = bits.flag()?;
    for _ in 0..=bits.number(5)? {
        bits.number(12)?;
        let level = bits.number(5)?;
        if level > 7 {
            bits.flag()?;
        }
        if let Some(delay_bits) = delay_bits
            && bits.flag()?
        {
            bits.number(delay_bits)?;
            bits.number(delay_bits)?;
            bits.flag()?;
        }
        if has_delays && bits.flag()? {
            bits.number(4)?;
        }
    }
    Some(())
}

fn skip_inter_tools(bits: &mut Bits<'_>) -> Option<()> {
    bits.number(4)?;
    let has_order = bits.flag()?;
    if has_order {
        bits.number(2)?;
    }
    let is_screen_content = bits.flag()? || bits.flag()?;
    if is_screen_content && !bits.flag()? {
        bits.flag()?;
    }
    if has_order {
        bits.number(3)?;
    }
    Some(())
}

fn read_samples(bits: &mut Bits<'_>, profile: u32) -> Option<Sequence> {
    const UNSPECIFIED: u32 = 2;
    const SRGB: [u32; 3] = [1, 13, 0];
    let is_deep = bits.flag()?;
    let is_deeper = profile == 2 && is_deep && bits.flag()?;
    let depth = if is_deeper { 12 } else { 8 + 2 * u32::from(is_deep) };
    let is_gray = profile != 1 && bits.flag()?;
    let mut numbers = [UNSPECIFIED; 3];
    if bits.flag()? {
        numbers = [bits.number(8)?, bits.number(8)?, bits.number(8)?];
    }
    let is_full_range = (!is_gray && numbers == SRGB) || bits.flag()?;
    let colors = ColorCoding { primaries: numbers[0] as u16, matrix: numbers[2] as u16, is_full_range };
    Some(Sequence { depth, is_gray, colors })
}
