//! Decodes JPEG to RGB and rejects data that end too early.
//!
//! Colors follow Pillow's `convert("RGB")`: gray is repeated, CMYK is assumed to be stored inverted, as
//! Photoshop does, three components with an Adobe transform of 0 are RGB.

use std::borrow::Cow;

use zune_core::bytestream::ZByteIoError;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;

use super::RgbImage;
use super::jpeg_source::{EndTrace, JpegSource};
use super::reduction::Reduction;
use crate::media::error::DecodeError;
use crate::media::limits::{ImageLimits, Strictness, check_limit};
use crate::media::probe::{JpegHeader, read_jpeg_header};

const FORMAT: &str = "jpeg";
/// Low byte of the frame marker of a progressive JPEG.
const PROGRESSIVE: u8 = 0xC2;

/// Decodes the stored image, without its orientation, into `image`; possibly reduced with libjpeg-turbo.
pub(super) fn decode_into(
    bytes: &[u8],
    reduction: Reduction,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let header = read_jpeg_header(bytes)?;
    let plan = ColorPlan::of(&header)?;
    check_allocation(&header, plan, limits)?;
    #[cfg(feature = "turbojpeg")]
    if limits.strictness == Strictness::Strict
        && plan == ColorPlan::Decoder
        && let Some(verdict) = super::jpeg_turbo::decode_into(bytes, &header, reduction, image)
    {
        return verdict;
    }
    #[cfg(not(feature = "turbojpeg"))]
    debug_assert_eq!(reduction, Reduction::NONE, "only libjpeg-turbo reduces");
    decode_in_full(bytes, &header, plan, limits, image)
}

fn decode_in_full(
    bytes: &[u8],
    header: &JpegHeader,
    plan: ColorPlan,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let trace = EndTrace::new();
    let bytes = plan.source_bytes(bytes, header);
    let is_strict = limits.strictness == Strictness::Strict;
    let options = DecoderOptions::new_fast()
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(plan.decoded_as())
        .set_strict_mode(is_strict);
    let mut decoder = JpegDecoder::new_with_options(JpegSource::new(&bytes, &trace), options);
    decoder.decode_headers().map_err(|error| refusal(&error, bytes.len()))?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    if (width, height) != (header.width as usize, header.height as usize) {
        return Err(DecodeError::malformed(FORMAT, 0, "two frame headers disagree about the size"));
    }
    if header.coding != PROGRESSIVE {
        trace.watch_overrun();
    }
    let length = width * height * plan.decoded_as().num_components();
    if !is_strict {
        // An incomplete scan leaves pixels unwritten; they must not show the previous image.
        image.pixels.clear();
    }
    image.pixels.resize(length, 0);
    decoder.decode_into(&mut image.pixels).map_err(|error| refusal(&error, bytes.len()))?;
    (image.width, image.height) = (header.width, header.height);
    match trace.verdict(bytes.len()) {
        Err(damage) if is_strict => Err(damage),
        verdict => {
            image.is_truncated = verdict.is_err();
            Ok(())
        }
    }
}

/// Decodes without libjpeg-turbo, for comparison in tests.
#[cfg(all(test, feature = "turbojpeg"))]
pub(super) fn decode_by_zune(bytes: &[u8]) -> Result<RgbImage, DecodeError> {
    let header = read_jpeg_header(bytes)?;
    let mut image = RgbImage::default();
    decode_in_full(bytes, &header, ColorPlan::of(&header)?, &ImageLimits::default(), &mut image)?;
    Ok(image)
}

/// Conversion from the stored components to RGB.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ColorPlan {
    /// The decoder converts to RGB.
    Decoder,
    /// RGB that the decoder would take for CMYK; if it is to read and to write YCbCr, it copies the values.
    StoredRgb,
}

impl ColorPlan {
    fn of(header: &JpegHeader) -> Result<Self, DecodeError> {
        if !matches!(header.coding, 0xC0..=PROGRESSIVE) || header.precision_bits != 8 {
            let reason = format!("{} bits in coding {:#04X}", header.precision_bits, header.coding);
            return Err(DecodeError::unsupported(FORMAT, reason));
        }
        match (header.components, header.adobe_transform) {
            (3, Some((_, 0))) => Ok(Self::StoredRgb),
            (1 | 3 | 4, _) => Ok(Self::Decoder),
            (components, _) => {
                Err(DecodeError::unsupported(FORMAT, format!("{components} color components")))
            }
        }
    }

    fn decoded_as(self) -> ColorSpace {
        match self {
            Self::Decoder => ColorSpace::RGB,
            Self::StoredRgb => ColorSpace::YCbCr,
        }
    }

    fn source_bytes<'a>(self, bytes: &'a [u8], header: &JpegHeader) -> Cow<'a, [u8]> {
        match header.adobe_transform {
            Some((offset, _)) if self == Self::StoredRgb => {
                let mut patched = bytes.to_vec();
                patched[offset] = 1;
                Cow::Owned(patched)
            }
            _ => Cow::Borrowed(bytes),
        }
    }
}

/// Checks the decoder's allocations: its output, and all coefficients of a progressive image.
fn check_allocation(header: &JpegHeader, plan: ColorPlan, limits: &ImageLimits) -> Result<(), DecodeError> {
    const COEFFICIENT_BYTES: u64 = 2;
    let pixels = u64::from(header.width) * u64::from(header.height);
    let output = pixels * plan.decoded_as().num_components() as u64;
    let coefficients =
        u64::from(header.coding == PROGRESSIVE) * pixels * u64::from(header.components) * COEFFICIENT_BYTES;
    check_limit(FORMAT, output + coefficients, "bytes to allocate", "alloc_bytes_max", limits.alloc_bytes_max)
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
