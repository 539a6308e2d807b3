//! Decodes kinds of TIFF that [`super::raster`] does not: palettes, gray of unusual depths, YCbCr, CIE L*a*b*.
//!
//! Values follow Pillow's `convert("RGB")`: floating-point and signed or 32-bit gray is cut to 0 to 255, gray of up
//! to 16 bits is scaled.

use std::io::Cursor;

use tiff::decoder::{Decoder, Limits};
use tiff::TiffError;

use super::RgbImage;
use super::jpeg_scans::rgb_of_ycc;
use crate::media::error::DecodeError;
use crate::media::limits::{ImageLimits, check_limit};
use crate::media::probe::{TiffHeader, TiffKind};

const FORMAT: &str = "tiff";

/// Decodes the stored image, without its orientation, into `image`.
pub(super) fn decode_into(
    bytes: &[u8],
    header: &TiffHeader,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let (width, height) = (header.size.width as usize, header.size.height as usize);
    let row_bytes = (u64::from(header.size.width) * header.samples * header.bits).div_ceil(8);
    let decoded_bytes = row_bytes * u64::from(header.size.height) + 3 * (width * height) as u64;
    check_limit(FORMAT, decoded_bytes, "decoded bytes", "alloc_bytes_max", limits.alloc_bytes_max)?;
    let patched = as_samples(bytes, header);
    let samples = stored_samples(&patched, row_bytes as usize * height, limits)?;
    image.pixels.clear();
    image.pixels.reserve(3 * width * height);
    for row in samples.chunks_exact(row_bytes as usize).take(height) {
        convert_row(row, header, width, &mut image.pixels);
    }
    (image.width, image.height, image.is_truncated) = (header.size.width, header.size.height, false);
    Ok(())
}

/// Copies the file with gray in place of a meaning that the decoder refuses.
fn as_samples(bytes: &[u8], header: &TiffHeader) -> Vec<u8> {
    const GRAY: u8 = 1;
    let mut patched = bytes.to_vec();
    if matches!(header.kind, TiffKind::Palette(_) | TiffKind::Lab) {
        patched[header.meaning_at] = GRAY;
    }
    patched
}

/// Decodes the samples as stored, in the byte order of this machine.
fn stored_samples(bytes: &[u8], length: usize, limits: &ImageLimits) -> Result<Vec<u8>, DecodeError> {
    let refusal = |error: TiffError| refusal(error, bytes.len());
    let mut decoder_limits = Limits::default();
    decoder_limits.decoding_buffer_size = limits.alloc_bytes_max as usize;
    decoder_limits.intermediate_buffer_size = limits.alloc_bytes_max as usize;
    let mut decoder = Decoder::new(Cursor::new(bytes)).map_err(refusal)?.with_limits(decoder_limits);
    let mut samples = vec![0; length];
    decoder.read_image_bytes(&mut samples).map_err(refusal)?;
    Ok(samples)
}

fn refusal(error: TiffError, bytes: usize) -> DecodeError {
    match error {
        TiffError::UnsupportedError(what) => DecodeError::unsupported(FORMAT, what.to_string()),
        TiffError::IoError(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => {
            DecodeError::truncated(FORMAT, bytes)
        }
        other => DecodeError::codec(FORMAT, other),
    }
}

fn convert_row(row: &[u8], header: &TiffHeader, width: usize, pixels: &mut Vec<u8>) {
    let pixel = header.samples as usize;
    match &header.kind {
        TiffKind::Palette(colors) => {
            let count = colors.len() / 3;
            for x in 0..width {
                let index = small_sample(row, x * pixel, header.bits);
                pixels.extend([0, 1, 2].map(|channel| (colors[channel * count + index] >> 8) as u8));
            }
        }
        TiffKind::YCbCr => {
            for values in row.chunks_exact(pixel).take(width) {
                pixels.extend(rgb_of_ycc([values[0], values[1], values[2]]));
            }
        }
        TiffKind::Lab => {
            for values in row.chunks_exact(pixel).take(width) {
                pixels.extend(rgb_of_lab(values[0], values[1].cast_signed(), values[2].cast_signed()));
            }
        }
        TiffKind::Plain => {}
        &TiffKind::Gray { is_float, is_signed } => {
            for x in 0..width {
                let gray = gray_sample(row, x * pixel, header.bits, is_float, is_signed);
                pixels.extend([gray; 3]);
            }
        }
    }
}

/// Returns an unsigned sample of up to 12 bits, which are packed from the highest bit on.
fn small_sample(row: &[u8], place: usize, bits: u64) -> usize {
    let bits = bits as usize;
    let at = place * bits;
    let byte = |offset: usize| u32::from(row.get(at / 8 + offset).copied().unwrap_or(0));
    let window = byte(0) << 16 | byte(1) << 8 | byte(2);
    (window >> (24 - at % 8 - bits)) as usize & ((1 << bits) - 1)
}

fn gray_sample(row: &[u8], place: usize, bits: u64, is_float: bool, is_signed: bool) -> u8 {
    match bits {
        16 => {
            let bytes = [row[2 * place], row[2 * place + 1]];
            let sample = u16::from_ne_bytes(bytes);
            if is_signed { sample.cast_signed().clamp(0, 255) as u8 } else { (sample >> 8) as u8 }
        }
        32 => {
            let bytes = std::array::from_fn(|offset| row[4 * place + offset]);
            match (is_float, is_signed) {
                (true, _) => f32::from_ne_bytes(bytes).clamp(0.0, 255.0) as u8,
                (false, true) => i32::from_ne_bytes(bytes).clamp(0, 255) as u8,
                (false, false) => u32::from_ne_bytes(bytes).min(255) as u8,
            }
        }
        _ => {
            let largest = (1_usize << bits) - 1;
            ((small_sample(row, place, bits) * 255 + largest / 2) / largest) as u8
        }
    }
}

/// Converts a color of CIE L*a*b*, with the white of D50, to sRGB.
///
/// # Source
/// ICC.1:2022, annexes A and D; IEC 61966-2-1, in the adaptation of Bradford to D50.
fn rgb_of_lab(lightness: u8, a: i8, b: i8) -> [u8; 3] {
    const WHITE: [f64; 3] = [0.964_22, 1.0, 0.825_21];
    const TO_RGB: [[f64; 3]; 3] = [
        [3.133_856_1, -1.616_866_7, -0.490_614_6],
        [-0.978_768_4, 1.916_141_5, 0.033_454_0],
        [0.071_945_3, -0.228_991_4, 1.405_242_7],
    ];
    let y = (f64::from(lightness) / 2.55 + 16.0) / 116.0;
    let curve = |t: f64| if t > 6.0 / 29.0 { t.powi(3) } else { (t - 4.0 / 29.0) * 108.0 / 841.0 };
    let xyz = [curve(y + f64::from(a) / 500.0), curve(y), curve(y - f64::from(b) / 200.0)];
    TO_RGB.map(|row| {
        let linear: f64 = (0..3).map(|at| row[at] * WHITE[at] * xyz[at]).sum();
        let linear = linear.clamp(0.0, 1.0);
        let encoded = if linear <= 0.003_130_8 { 12.92 * linear } else { 1.055 * linear.powf(1.0 / 2.4) - 0.055 };
        (encoded * 255.0).round() as u8
    })
}
