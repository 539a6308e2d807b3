//! Walks the marker segments of a JPEG up to its first scan.
//!
//! One walk finds the frame size, the number of components, the Adobe color transform and the EXIF block,
//! which both the probe and the decoder need. Bytes between segments are skipped, as every decoder does.

use image::metadata::Orientation;

use super::exif;
use super::field::u16_be;
use crate::media::error::DecodeError;

const FORMAT: &str = "jpeg";

/// Header fields of a JPEG, gathered from the segments before the first scan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JpegHeader {
    /// Stored columns, before orientation.
    pub(crate) width: u32,
    /// Stored rows, before orientation.
    pub(crate) height: u32,
    /// Color components: 1, 3 or 4 in files that can be decoded.
    pub(crate) components: u8,
    /// Low byte of the start-of-frame marker: `C0` and `C1` sequential, `C2` progressive, others exotic.
    pub(crate) coding: u8,
    /// Bits per sample: 8 in files that can be decoded.
    pub(crate) precision_bits: u8,
    /// Offset and value of the color transform byte of the Adobe segment.
    pub(crate) adobe_transform: Option<(usize, u8)>,
    /// Rotation and mirroring that display the stored image upright.
    pub(crate) orientation: Orientation,
}

/// Reads the header of a JPEG that starts with its `FF D8`.
pub(crate) fn read_jpeg_header(bytes: &[u8]) -> Result<JpegHeader, DecodeError> {
    let mut frame = None;
    let mut adobe_transform = None;
    let mut orientation = Orientation::NoTransforms;
    let mut position = 2;
    while let Some((marker, start)) = next_marker(bytes, position) {
        // Markers without a segment: TEM, restarts and start of image.
        if matches!(marker, 0x01 | 0xD0..=0xD8) {
            position = start;
            continue;
        }
        if matches!(marker, 0xD9 | 0xDA) {
            break;
        }
        let Some(length) = u16_be(bytes, start).map(usize::from) else { break };
        if length < 2 {
            return Err(DecodeError::malformed(FORMAT, start, "the segment length is below 2"));
        }
        let body = bytes.get(start + 2..start + length).unwrap_or_default();
        match marker {
            // Starts of frames; the range also contains DHT, JPG and DAC.
            0xC0..=0xCF if !matches!(marker, 0xC4 | 0xC8 | 0xCC) => {
                frame = frame.or(read_frame(marker, bytes, start));
            }
            0xE1 if body.starts_with(b"Exif\0\0") => {
                orientation = exif::orientation_of_tiff(&body[6..]).unwrap_or(orientation);
            }
            0xEE if body.len() >= 12 && body.starts_with(b"Adobe") => {
                adobe_transform = Some((start + 13, body[11]));
            }
            _ => {}
        }
        position = start + length;
    }
    let frame = frame.ok_or_else(|| DecodeError::truncated(FORMAT, position.min(bytes.len())))?;
    Ok(JpegHeader { adobe_transform, orientation, ..frame })
}

/// Returns the next marker and the offset after it.
fn next_marker(bytes: &[u8], from: usize) -> Option<(u8, usize)> {
    let mut position = from + bytes.get(from..)?.iter().position(|&byte| byte == 0xFF)?;
    loop {
        match bytes.get(position + 1)? {
            // Any number of fill bytes may precede a marker; a stuffed zero follows an ordinary byte of 255.
            0xFF => position += 1,
            0x00 => return next_marker(bytes, position + 2),
            &marker => return Some((marker, position + 2)),
        }
    }
}

/// Reads a start-of-frame segment whose length field is at `start`.
fn read_frame(coding: u8, bytes: &[u8], start: usize) -> Option<JpegHeader> {
    Some(JpegHeader {
        width: u16_be(bytes, start + 5)?.into(),
        height: u16_be(bytes, start + 3)?.into(),
        components: *bytes.get(start + 7)?,
        coding,
        precision_bits: *bytes.get(start + 2)?,
        adobe_transform: None,
        orientation: Orientation::NoTransforms,
    })
}
