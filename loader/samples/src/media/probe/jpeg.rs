//! Walks the JPEG marker segments up to the first scan.
//!
//! A single walk finds the frame, the color space and the EXIF block, which both the probe and the decoders
//! need. Bytes between segments are skipped, as every decoder does.

use image::metadata::Orientation;

use super::field::u16_be;
use super::tiff;
use crate::media::DecodeError;

const FORMAT: &str = "jpeg";

/// Maximum number of color components in a decodable file.
pub(crate) const COMPONENTS_MAX: usize = 4;

/// Color component in a frame.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JpegComponent {
    /// Component number that scans refer to.
    pub(crate) id: u8,
    /// Horizontal sampling factor, 1 to 4.
    pub(crate) across: u8,
    /// Vertical sampling factor, 1 to 4.
    pub(crate) down: u8,
    /// Quantization table number, 0 to 3.
    pub(crate) quantization: u8,
}

/// Meaning of the stored components.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JpegColors {
    Gray,
    YCbCr,
    Rgb,
    Cmyk,
    Ycck,
}

/// Header fields from the JPEG segments before the first scan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JpegHeader {
    /// Number of stored columns, before orientation.
    pub(crate) width: u32,
    /// Number of stored rows, before orientation.
    pub(crate) height: u32,
    /// Low byte of the start-of-frame marker: `C0`, `C1` sequential, `C2` progressive, `C9`, `CA` the same
    /// with arithmetic coding.
    pub(crate) coding: u8,
    /// Number of color components in the first scan; fewer than in the frame if the file has several scans, 0
    /// if the bytes end before.
    pub(crate) scan_components: u8,
    /// Offset and value of the Adobe segment's color transform byte.
    pub(crate) adobe_transform: Option<(usize, u8)>,
    /// Meaning of the components.
    pub(crate) colors: JpegColors,
    /// Rotation and mirroring that display the stored image upright.
    pub(crate) orientation: Orientation,
    components: [JpegComponent; COMPONENTS_MAX],
    component_count: usize,
}

impl JpegHeader {
    /// Returns the color components in the frame: 1, 3 or 4.
    pub(crate) fn components(&self) -> &[JpegComponent] {
        &self.components[..self.component_count]
    }

    /// Returns the largest sampling factors, horizontal and vertical.
    pub(crate) fn sampling_max(&self) -> (u8, u8) {
        let largest =
            |factor: fn(&JpegComponent) -> u8| self.components().iter().map(factor).max().unwrap_or(1);
        (largest(|component| component.across), largest(|component| component.down))
    }

    /// Returns whether coefficients come in several passes.
    pub(crate) fn is_progressive(&self) -> bool {
        matches!(self.coding, 0xC2 | 0xCA)
    }

    /// Returns whether the entropy coding is arithmetic.
    pub(crate) fn is_arithmetic(&self) -> bool {
        matches!(self.coding, 0xC9 | 0xCA)
    }
}

/// Reads the header of a JPEG that starts with `FF D8`.
///
/// # Errors
/// [`DecodeError::Unsupported`] if the coding process, the bit depth or the number of components is not
/// supported.
pub(crate) fn read_jpeg_header(bytes: &[u8]) -> Result<JpegHeader, DecodeError> {
    let mut frame = None;
    let mut scan_components = 0;
    let mut is_jfif = false;
    let mut adobe_transform = None;
    let mut orientation = None;
    let mut xmp = None;
    let mut position = 2;
    while let Some((marker, start)) = next_marker(bytes, position) {
        // Markers without a segment: TEM, restarts and start of image.
        if matches!(marker, 0x01 | 0xD0..=0xD8) {
            position = start;
            continue;
        }
        if marker == 0xDA {
            scan_components = bytes.get(start + 2).copied().unwrap_or(0);
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
            // Start-of-frame markers; the range also contains DHT, JPG and DAC.
            0xC0..=0xCF if !matches!(marker, 0xC4 | 0xC8 | 0xCC) && frame.is_none() && !body.is_empty() => {
                frame = Some(read_frame(marker, body, start)?);
            }
            0xE0 if body.len() >= 12 && body.starts_with(b"JFIF\0") => is_jfif = true,
            0xE1 if body.starts_with(b"Exif\0\0") && orientation.is_none() => {
                orientation = Some(tiff::orientation_of_tiff(&body[6..]));
            }
            0xE1 if body.starts_with(tiff::XMP_NAMESPACE) => {
                xmp = Some(body);
            }
            0xEE if body.len() >= 12 && body.starts_with(b"Adobe") => {
                adobe_transform = Some((start + 13, body[11]));
            }
            _ => {}
        }
        position = start + length;
    }
    let frame: JpegHeader = frame.ok_or_else(|| DecodeError::truncated(FORMAT, position.min(bytes.len())))?;
    let colors = colors(frame.components(), is_jfif, adobe_transform.map(|(_, transform)| transform));
    let of_xmp = || tiff::orientation_of_xmp(xmp?);
    let orientation = orientation.flatten().or_else(of_xmp).unwrap_or(Orientation::NoTransforms);
    Ok(JpegHeader { scan_components, adobe_transform, colors, orientation, ..frame })
}

/// Decides what the components mean: first by JFIF, then by the Adobe segment, then by component ids.
fn colors(components: &[JpegComponent], is_jfif: bool, adobe_transform: Option<u8>) -> JpegColors {
    match (components.len(), adobe_transform) {
        (1, _) => JpegColors::Gray,
        (3, _) if is_jfif => JpegColors::YCbCr,
        (3, Some(0)) => JpegColors::Rgb,
        (3, None) if components.iter().map(|component| component.id).eq(*b"RGB") => JpegColors::Rgb,
        (3, _) => JpegColors::YCbCr,
        (_, None | Some(0)) => JpegColors::Cmyk,
        _ => JpegColors::Ycck,
    }
}

/// Returns the next marker and the offset after the marker.
fn next_marker(bytes: &[u8], from: usize) -> Option<(u8, usize)> {
    let mut position = from + bytes.get(from..)?.iter().position(|&byte| byte == 0xFF)?;
    loop {
        match bytes.get(position + 1)? {
            // Any number of fill bytes may precede a marker; a stuffed zero follows an ordinary 255 byte.
            0xFF => position += 1,
            0x00 => return next_marker(bytes, position + 2),
            &marker => return Some((marker, position + 2)),
        }
    }
}

/// Reads a start-of-frame segment whose length field is at `start`.
fn read_frame(coding: u8, body: &[u8], start: usize) -> Result<JpegHeader, DecodeError> {
    let malformed = |reason: &str| DecodeError::malformed(FORMAT, start, reason);
    let &[bits, height_high, height_low, width_high, width_low, count, ref rest @ ..] = body else {
        return Err(malformed("the frame header is cut"));
    };
    let process = match coding {
        0xC0..=0xC2 | 0xC9 | 0xCA => None,
        0xC3 | 0xCB => Some("lossless"),
        0xC5 | 0xC6 | 0xCD | 0xCE => Some("hierarchical"),
        _ => Some("hierarchical lossless"),
    };
    if let Some(process) = process {
        return Err(DecodeError::unsupported(FORMAT, format!("{process} coding ({coding:#04X})")));
    }
    if bits != 8 {
        return Err(DecodeError::unsupported(FORMAT, format!("{bits} bits in coding {coding:#04X}")));
    }
    if !matches!(count, 1 | 3 | 4) {
        return Err(DecodeError::unsupported(FORMAT, format!("{count} color components")));
    }
    let mut components = [JpegComponent::default(); COMPONENTS_MAX];
    let component_count = usize::from(count);
    let fields = rest.chunks_exact(3);
    if fields.len() < component_count {
        return Err(malformed("the frame header is cut"));
    }
    for (component, field) in components.iter_mut().zip(fields).take(component_count) {
        let (across, down) = (field[1] >> 4, field[1] & 0xF);
        if !(1..=4).contains(&across) || !(1..=4).contains(&down) || field[2] > 3 {
            return Err(malformed(
                "a sampling factor is not within 1 to 4, or a table number not within 0 to 3",
            ));
        }
        *component = JpegComponent { id: field[0], across, down, quantization: field[2] };
    }
    Ok(JpegHeader {
        width: u16::from_be_bytes([width_high, width_low]).into(),
        height: u16::from_be_bytes([height_high, height_low]).into(),
        coding,
        scan_components: 0,
        adobe_transform: None,
        colors: JpegColors::Gray,
        orientation: Orientation::NoTransforms,
        components,
        component_count,
    })
}
