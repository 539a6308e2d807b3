//! Decodes JPEG to RGB and rejects data that end too early.
//!
//! There are two decoders: a fast decoder for complete files of the usual kinds, and [`super::jpeg_scans`]
//! for all other files and, unless damage is an error, for damaged files.
//!
//! Colors follow Pillow's `convert("RGB")`: gray is repeated, CMYK is assumed to be stored inverted, as
//! Photoshop does.

use std::borrow::Cow;

use zune_core::bytestream::ZByteIoError;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;

use super::jpeg_source::{EndTrace, JpegSource};
use super::{Reduction, RgbImage, jpeg_scans};
use crate::media::DecodeError;
use crate::media::probe::{JpegColors, JpegHeader, read_jpeg_header};
use crate::media::shape::{ImageLimits, Strictness, check_limit};

const FORMAT: &str = "jpeg";
/// Width of the widest image whose subsampled components libjpeg does not interpolate.
const NARROW_WIDTH: u32 = 4;

/// Decodes the stored image, without orientation, into `image`; libjpeg-turbo may reduce the size.
pub(super) fn decode_into(
    bytes: &[u8],
    reduction: Reduction,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let header = read_jpeg_header(bytes)?;
    check_allocation(&header, limits)?;
    #[cfg(feature = "turbojpeg")]
    if let Some(verdict) = super::jpeg_turbo::decode_into(bytes, &header, reduction, limits.strictness, image)
    {
        return verdict;
    }
    #[cfg(not(feature = "turbojpeg"))]
    debug_assert_eq!(reduction, Reduction::NONE, "only libjpeg-turbo reduces");
    decode_in_full(bytes, &header, limits, image)
}

fn decode_in_full(
    bytes: &[u8],
    header: &JpegHeader,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    if let Some(plan) = ColorPlan::of(header) {
        let decoded = decode_fast(bytes, header, plan, limits.strictness, image);
        if decoded.is_ok() || limits.strictness == Strictness::Strict {
            return decoded;
        }
    }
    jpeg_scans::decode_into(bytes, header, limits, image)
}

/// Decodes a complete file of a usual kind; anything unusual is an error.
fn decode_fast(
    bytes: &[u8],
    header: &JpegHeader,
    plan: ColorPlan,
    strictness: Strictness,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let trace = EndTrace::new();
    let bytes = plan.source_bytes(bytes, header);
    let options = DecoderOptions::new_fast()
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(plan.decoded_as())
        .set_strict_mode(true);
    let mut decoder = JpegDecoder::new_with_options(JpegSource::new(&bytes, &trace), options);
    decoder.decode_headers().map_err(|error| refusal(&error, bytes.len()))?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    if (width, height) != (header.width as usize, header.height as usize) {
        return Err(DecodeError::malformed(FORMAT, 0, "two frame headers disagree about the size"));
    }
    if !header.is_progressive() {
        trace.watch_overrun();
    }
    let length = width * height * plan.decoded_as().num_components();
    image.pixels.resize(length, 0);
    decoder.decode_into(&mut image.pixels).map_err(|error| refusal(&error, bytes.len()))?;
    (image.width, image.height, image.is_truncated) = (header.width, header.height, false);
    trace.verdict(bytes.len(), strictness)
}

/// Decodes without libjpeg-turbo, for comparison in tests.
#[cfg(all(test, feature = "turbojpeg"))]
pub(super) fn decode_by_zune(bytes: &[u8]) -> Result<RgbImage, DecodeError> {
    let header = read_jpeg_header(bytes)?;
    let mut image = RgbImage::default();
    decode_in_full(bytes, &header, &ImageLimits::default(), &mut image)?;
    Ok(image)
}

/// Conversion from the stored components to RGB by the fast decoder.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ColorPlan {
    /// The decoder converts to RGB.
    Decoder,
    /// YCbCr with an Adobe segment that must be overruled.
    StoredYcc,
    /// RGB that the decoder would interpret as CMYK; when input and output are set to YCbCr, the decoder
    /// copies the values.
    StoredRgb,
}

impl ColorPlan {
    /// Returns the plan; `None` for files that the fast decoder does not decode as libjpeg does: arithmetic
    /// coding, sequential files with several scans, files whose first component is smaller than another
    /// component, narrow images.
    fn of(header: &JpegHeader) -> Option<Self> {
        let components = header.components();
        let is_in_one_scan =
            header.is_progressive() || usize::from(header.scan_components) == components.len();
        let is_first_largest = (components[0].across, components[0].down) == header.sampling_max();
        let is_narrow = header.width <= NARROW_WIDTH && header.sampling_max().0 > 1;
        if header.is_arithmetic() || !is_in_one_scan || !is_first_largest || is_narrow {
            return None;
        }
        let has_ids_of_rgb = components.iter().map(|component| component.id).eq(*b"RGB");
        match (header.colors, header.adobe_transform.map(|(_, transform)| transform)) {
            (JpegColors::Gray, _) | (JpegColors::Cmyk, None | Some(0)) | (JpegColors::Ycck, Some(2)) => {
                Some(Self::Decoder)
            }
            (JpegColors::YCbCr, None | Some(1 | 2)) if !has_ids_of_rgb => Some(Self::Decoder),
            (JpegColors::YCbCr, Some(_)) if !has_ids_of_rgb => Some(Self::StoredYcc),
            (JpegColors::Rgb, None) => Some(Self::Decoder),
            (JpegColors::Rgb, Some(_)) if !has_ids_of_rgb => Some(Self::StoredRgb),
            _ => None,
        }
    }

    fn decoded_as(self) -> ColorSpace {
        match self {
            Self::Decoder | Self::StoredYcc => ColorSpace::RGB,
            Self::StoredRgb => ColorSpace::YCbCr,
        }
    }

    fn source_bytes<'a>(self, bytes: &'a [u8], header: &JpegHeader) -> Cow<'a, [u8]> {
        match header.adobe_transform {
            Some((offset, _)) if self != Self::Decoder => {
                let mut patched = bytes.to_vec();
                patched[offset] = 1;
                Cow::Owned(patched)
            }
            _ => Cow::Borrowed(bytes),
        }
    }
}

/// Checks decoder allocations: the output, and all coefficients in a progressive image.
fn check_allocation(header: &JpegHeader, limits: &ImageLimits) -> Result<(), DecodeError> {
    const COEFFICIENT_BYTES: u64 = 2;
    let pixels = u64::from(header.width) * u64::from(header.height);
    let components = header.components().len() as u64;
    let coefficients = u64::from(header.is_progressive()) * pixels * components * COEFFICIENT_BYTES;
    check_limit(
        FORMAT,
        pixels * 3 + coefficients,
        "bytes to allocate",
        "alloc_bytes_max",
        limits.alloc_bytes_max,
    )
}

fn refusal(error: &DecodeErrors, bytes: usize) -> DecodeError {
    match error {
        DecodeErrors::Unsupported(scheme) => DecodeError::unsupported(FORMAT, format!("{scheme:?} coding")),
        DecodeErrors::ExhaustedData
        | DecodeErrors::FormatStatic("Premature end of buffer")
        | DecodeErrors::IoErrors(ZByteIoError::NotEnoughBytes(..)) => DecodeError::truncated(FORMAT, bytes),
        other => DecodeError::codec(FORMAT, other.to_string().trim_matches('"').to_owned()),
    }
}
