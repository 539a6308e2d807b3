//! Decodes TIFF kinds that [`super::raster`] does not: palettes, gray with unusual depths, YCbCr, CIE L*a*b*.
//!
//! Values follow Pillow's `convert("RGB")`: floating-point and signed or 32-bit gray is clamped to 0 to 255,
//! gray with up to 16 bits is scaled.

use std::io::Cursor;

use tiff::TiffError;
use tiff::decoder::{Decoder, Limits};

use super::RgbImage;
use super::jpeg_scans::rgb_of_ycc;
use crate::media::DecodeError;
use crate::media::probe::{TiffHeader, TiffKind};
use crate::media::shape::{ImageLimits, check_limit};

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

/// Copies the file with gray in place of a photometric interpretation that the decoder rejects.
fn as_samples(bytes: &[u8], header: &TiffHeader) -> Vec<u8> {
    const GRAY: u8 = 1;
    let mut patched = bytes.to_vec();
    if matches!(header.kind, TiffKind::Palette(_) | TiffKind::Lab) {
        patched[header.meaning_at] = GRAY;
    }
    patched
}

/// Decodes the samples as stored, in this machine's byte order.
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

/// Returns an unsigned sample with up to 8 bits; samples are packed from the highest bit on.
fn small_sample(row: &[u8], place: usize, bits: u64) -> usize {
    let bits = bits as usize;
    let at = place * bits;
    usize::from(row[at / 8]) >> (8 - at % 8 - bits) & ((1 << bits) - 1)
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

/// Converts a CIE L*a*b* color, with white point D50, to sRGB.
///
/// # Source
/// ICC.1:2022, annexes A and D; IEC 61966-2-1, adapted to D50 with the Bradford transform.
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
        let encoded =
            if linear <= 0.003_130_8 { 12.92 * linear } else { 1.055 * linear.powf(1.0 / 2.4) - 0.055 };
        (encoded * 255.0).round() as u8
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::fixtures::tiff;
    use crate::media::image::decode_rgb;

    fn decoded(file: &[u8]) -> RgbImage {
        decode_rgb(file, &ImageLimits::default()).unwrap()
    }

    #[test]
    fn palettes_of_all_depths_are_looked_up() {
        for (bits, row) in
            [(1, vec![0b0100_0000]), (2, vec![0b0001_0000]), (4, vec![0x01, 0x00]), (8, vec![0, 1, 0])]
        {
            let mut colors = vec![0; 3 << bits];
            let count = 1 << bits;
            (colors[0], colors[1], colors[count + 1], colors[2 * count + 1]) =
                (0xFF00, 0x0180, 0x2000, 0x30FF);
            for is_little in [true, false] {
                let entries = [(256, vec![3]), (258, vec![bits]), (262, vec![3]), (320, colors.clone())];
                let image = decoded(&tiff(is_little, &entries, &row));
                assert_eq!(image.pixels, [255, 0, 0, 1, 32, 48, 255, 0, 0], "{bits} bits, {is_little}");
            }
        }
    }

    #[test]
    fn gray_of_unusual_depths_is_scaled_or_cut() {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        let shorts = |values: &[i16]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        let table = [
            (vec![(256, vec![3]), (258, vec![4])], vec![0x0F, 0x80], [0, 255, 136]),
            (vec![(256, vec![3]), (258, vec![2])], vec![0b0011_1000], [0, 255, 170]),
            (vec![(256, vec![3]), (258, vec![32]), (339, vec![3])], bytes(&[-3.0, 99.9, 1e9]), [0, 99, 255]),
            (vec![(256, vec![3]), (258, vec![16]), (339, vec![2])], shorts(&[-3, 99, 999]), [0, 99, 255]),
            (
                vec![(256, vec![3]), (258, vec![8, 8]), (277, vec![2]), (338, vec![2])],
                vec![1, 9, 2, 9, 3, 9],
                [1, 2, 3],
            ),
        ];
        for (entries, samples, gray) in table {
            let image = decoded(&tiff(true, &[&entries[..], &[(262, vec![1])]].concat(), &samples));
            assert_eq!(image.pixels, gray.map(|gray| [gray; 3]).concat(), "{entries:?}");
        }
        let inverted = tiff(true, &[(256, vec![3]), (258, vec![4]), (262, vec![0])], &[0x0F, 0x80]);
        assert_eq!(decoded(&inverted).pixels, [255, 0, 119].map(|gray| [gray; 3]).concat());
    }

    #[test]
    fn other_color_spaces_become_rgb() {
        let entries = |meaning| {
            [(256, vec![1]), (258, vec![8; 3]), (262, vec![meaning]), (277, vec![3]), (530, vec![1, 1])]
        };
        let ycc = decoded(&tiff(true, &entries(6), &[76, 85, 255]));
        assert_eq!(ycc.pixels, [254, 0, 0]);
        let white = decoded(&tiff(true, &entries(8), &[255, 0, 0]));
        assert_eq!(white.pixels, [255; 3]);
        // L* 53.24, a* 80, b* 67 is red.
        let red = decoded(&tiff(true, &entries(8), &[136, 80, 67])).pixels;
        assert!(red[0] > 245 && red[1] < 25 && red[2] < 25, "{red:?}");
    }

    #[test]
    fn a_file_that_ends_inside_its_samples_is_truncated() {
        let entries = [(256, vec![9]), (257, vec![5]), (258, vec![4]), (262, vec![1])];
        let file = tiff(true, &entries, &[0x55; 25]);
        let strip = file.windows(25).rposition(|window| window == [0x55; 25]).unwrap();
        let refused = decode_rgb(&file[..strip + 20], &ImageLimits::default());
        assert!(matches!(refused, Err(DecodeError::Truncated { .. })), "{refused:?}");
    }
}
