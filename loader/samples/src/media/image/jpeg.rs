//! Decodes JPEG to RGB and rejects data that end too early.
//!
//! There are two decoders: a fast decoder for complete files of the usual kinds, and [`super::jpeg_scans`]
//! for all other files and, unless damage is an error, for damaged files.
//!
//! Colors follow Pillow's `convert("RGB")`: gray is repeated, CMYK is assumed to be stored inverted, as
//! Photoshop does.
//!
//! A [`JpegSource`] feeds the decoder and watches how the entropy-coded data end. The decoder fills missing
//! data with zero bits and reports a complete image, so a truncated JPEG decodes without an error. The reads
//! reveal the truncation: a complete baseline scan is consumed within 8 bytes from the end marker, because
//! the decoder's bit buffer holds 64 bits. Instead of the end marker this source therefore first serves 9
//! padding bytes. A decoder that reads beyond the padding has run out of data. A decoder that looks for a
//! marker gets the end marker immediately; if the decoder skipped more than a few bytes to find the marker,
//! the decoder may have lost the position in damaged data.

use super::{Reduction, RgbImage, jpeg_scans};
use crate::media::DecodeError;
use crate::media::probe::{JpegColors, JpegHeader, read_jpeg_header};
use crate::media::shape::{ImageLimits, Strictness, check_limit};
use std::borrow::Cow;
use std::cell::Cell;
use std::ops::Range;
use zune_core::bytestream::{ZByteIoError, ZByteReaderTrait, ZSeekFrom};
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;

const FORMAT: &str = "jpeg";
/// Width of the widest image whose subsampled components libjpeg does not interpolate.
const NARROW_WIDTH: u32 = 4;
const PADDING_BYTES: u8 = 9;
const END_OF_IMAGE: u8 = 0xD9;
/// Maximum number of bytes that some writers insert between the scan and the end marker.
const SURPLUS_BYTES_MAX: usize = 4;

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

/// How the entropy-coded data end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanEnd {
    /// No end marker was read.
    Unseen,
    /// The decoder found the end marker when decoding was complete.
    Reached,
    /// The decoder read beyond the end marker.
    Overrun,
    /// The decoder finished long before the end marker: it lost the position, or a writer left extra bytes
    /// there.
    Surplus,
}

/// Observations made by a [`JpegSource`]; shared because the decoder owns the source.
struct EndTrace {
    end: Cell<ScanEnd>,
    is_padded: Cell<bool>,
}

impl EndTrace {
    fn new() -> Self {
        Self { end: Cell::new(ScanEnd::Unseen), is_padded: Cell::new(false) }
    }

    /// Starts to watch for overrun; must be called before the scans in a baseline JPEG are decoded.
    ///
    /// A progressive decoder must find the marker after each scan early, so progressive data are not padded
    /// and only a missing end marker is detected.
    fn watch_overrun(&self) {
        self.is_padded.set(true);
    }

    /// Returns the damage found at the end of the data: `Ok` if the decoder found the end marker when it had
    /// all required data; exactly then, if any damage is an error.
    ///
    /// - `bytes`: file length in bytes
    fn verdict(&self, bytes: usize, strictness: Strictness) -> Result<(), DecodeError> {
        match self.end.get() {
            ScanEnd::Reached => Ok(()),
            ScanEnd::Surplus if strictness != Strictness::Strict => Ok(()),
            ScanEnd::Unseen | ScanEnd::Overrun => Err(DecodeError::truncated("jpeg", bytes)),
            ScanEnd::Surplus => {
                Err(DecodeError::malformed("jpeg", bytes, "unused data before the end marker"))
            }
        }
    }

    fn record(&self, end: ScanEnd) {
        if self.end.get() == ScanEnd::Unseen {
            self.end.set(end);
        }
    }
}

/// Cursor over JPEG bytes.
struct JpegSource<'a> {
    bytes: &'a [u8],
    position: usize,
    /// Padding bytes still to be served; `None` while no padding is served.
    padding_left: Option<u8>,
    /// Range of a byte-by-byte marker search: start, and next byte to read.
    search: Range<usize>,
    trace: &'a EndTrace,
}

impl<'a> JpegSource<'a> {
    fn new(bytes: &'a [u8], trace: &'a EndTrace) -> Self {
        Self { bytes, position: 0, padding_left: None, search: 0..0, trace }
    }

    fn ends_at_marker(&self) -> bool {
        let start = self.position.wrapping_sub(2);
        self.bytes.get(start..self.position) == Some(&[0xFF, END_OF_IMAGE])
    }

    /// Serves the end marker to a bit buffer read: a stuffed `FF`, then padding.
    #[cold]
    fn start_padding(&mut self) -> u8 {
        if self.trace.is_padded.get() && self.trace.end.get() == ScanEnd::Unseen {
            self.padding_left = Some(PADDING_BYTES);
            0x00
        } else {
            self.trace.record(ScanEnd::Reached);
            END_OF_IMAGE
        }
    }

    #[cold]
    fn next_padding(&mut self, left: u8) -> u8 {
        if left > 0 {
            self.padding_left = Some(left - 1);
            return 0x00;
        }
        self.trace.record(ScanEnd::Overrun);
        self.stop_padding();
        self.position += 1;
        0xFF
    }

    /// Ends the padding and moves back to the end marker.
    fn stop_padding(&mut self) {
        if self.padding_left.take().is_some() {
            self.position -= 2;
        }
    }

    /// Records a single-byte read, which the decoder uses when looking for the next marker.
    fn record_search(&mut self, byte: u8) {
        if self.search.end != self.position - 1 {
            self.search.start = self.position - 1;
        }
        self.search.end = self.position;
        if byte == END_OF_IMAGE && self.ends_at_marker() {
            let is_surplus = self.trace.is_padded.get() && self.search.len() > 2 + SURPLUS_BYTES_MAX;
            self.trace.record(if is_surplus { ScanEnd::Surplus } else { ScanEnd::Reached });
        }
    }

    fn remaining(&self) -> &'a [u8] {
        self.bytes.get(self.position..).unwrap_or_default()
    }
}

impl ZByteReaderTrait for JpegSource<'_> {
    #[inline]
    fn read_byte_no_error(&mut self) -> u8 {
        if let Some(left) = self.padding_left {
            return self.next_padding(left);
        }
        let byte = self.bytes.get(self.position).copied().unwrap_or(0);
        self.position += 1;
        if byte == END_OF_IMAGE && self.ends_at_marker() { self.start_padding() } else { byte }
    }

    #[inline]
    fn read_exact_bytes(&mut self, buf: &mut [u8]) -> Result<(), ZByteIoError> {
        if self.padding_left.is_some() {
            if buf.len() > 1 {
                // The bit buffer reads four bytes at a time; failing this read makes the decoder read single
                // bytes.
                return Err(ZByteIoError::NotEnoughBytes(0, buf.len()));
            }
            self.stop_padding();
        }
        let Some(bytes) = self.remaining().get(..buf.len()) else {
            return Err(ZByteIoError::NotEnoughBytes(0, buf.len()));
        };
        buf.copy_from_slice(bytes);
        self.position += buf.len();
        if let [byte] = *buf {
            self.record_search(byte);
        }
        Ok(())
    }

    fn read_bytes(&mut self, buf: &mut [u8]) -> Result<usize, ZByteIoError> {
        let read = self.peek_bytes(buf)?;
        self.position += read;
        Ok(read)
    }

    fn peek_bytes(&mut self, buf: &mut [u8]) -> Result<usize, ZByteIoError> {
        let read = buf.len().min(self.remaining().len());
        buf[..read].copy_from_slice(&self.remaining()[..read]);
        Ok(read)
    }

    fn peek_exact_bytes(&mut self, buf: &mut [u8]) -> Result<(), ZByteIoError> {
        match self.peek_bytes(buf)? {
            read if read == buf.len() => Ok(()),
            read => Err(ZByteIoError::NotEnoughBytes(read, buf.len())),
        }
    }

    fn z_seek(&mut self, from: ZSeekFrom) -> Result<u64, ZByteIoError> {
        let target = match from {
            ZSeekFrom::Start(offset) => usize::try_from(offset).ok(),
            ZSeekFrom::End(offset) => self.bytes.len().checked_add_signed(offset as isize),
            ZSeekFrom::Current(offset) => self.position.checked_add_signed(offset as isize),
        };
        self.position = target.ok_or(ZByteIoError::SeekError("seek before the first byte"))?;
        Ok(self.position as u64)
    }

    #[inline]
    fn is_eof(&mut self) -> Result<bool, ZByteIoError> {
        Ok(self.position >= self.bytes.len() && self.padding_left.is_none())
    }

    fn z_position(&mut self) -> Result<u64, ZByteIoError> {
        Ok(self.position as u64)
    }

    fn read_remaining(&mut self, sink: &mut Vec<u8>) -> Result<usize, ZByteIoError> {
        sink.extend_from_slice(self.remaining());
        let read = self.remaining().len();
        self.position += read;
        Ok(read)
    }
}
