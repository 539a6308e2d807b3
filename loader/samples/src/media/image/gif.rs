//! Decodes the first GIF frame as Pillow's `convert("RGB")` does.
//!
//! Transparent pixels have the color of their index. Pixels outside the frame have the color of the
//! transparent index, else the first color.

use std::io::Cursor;
use std::num::NonZeroU64;

use gif::{ColorOutput, DecodeOptions, DecodingError, MemoryLimit};

use super::RgbImage;
use crate::media::DecodeError;
use crate::media::probe::ImageHeader;
use crate::media::shape::{ImageLimits, check_limit};

const FORMAT: &str = "gif";

/// Decodes the stored image into `image`.
pub(super) fn decode_into(
    bytes: &[u8],
    header: &ImageHeader,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let (width, height) = (header.stored.width as usize, header.stored.height as usize);
    let decoded_bytes = 4 * (width * height) as u64;
    check_limit(FORMAT, decoded_bytes, "decoded bytes", "alloc_bytes_max", limits.alloc_bytes_max)?;
    let refusal = |error: DecodingError| refusal(error, bytes.len());
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::Indexed);
    let memory = NonZeroU64::new(limits.alloc_bytes_max);
    options.set_memory_limit(memory.map_or(MemoryLimit::Unlimited, MemoryLimit::Bytes));
    let mut decoder = options.read_info(Cursor::new(bytes)).map_err(refusal)?;
    let shared: Option<Vec<u8>> = decoder.global_palette().map(<[u8]>::to_vec);
    let frame = decoder.read_next_frame().map_err(refusal)?;
    let frame = frame.ok_or_else(|| DecodeError::truncated(FORMAT, bytes.len()))?;

    let colors = Colors(frame.palette.as_deref().or(shared.as_deref()).unwrap_or_default());
    image.pixels.clear();
    let background = colors.of(frame.transparent.unwrap_or(0));
    image.pixels.extend(background.iter().copied().cycle().take(3 * width * height));
    let (left, top) = (usize::from(frame.left), usize::from(frame.top));
    let frame_width = usize::from(frame.width).max(1);
    for (row, indices) in frame.buffer.chunks_exact(frame_width).enumerate() {
        let start = 3 * ((top + row) * width + left);
        for (pixel, &index) in image.pixels[start..].chunks_exact_mut(3).zip(indices) {
            pixel.copy_from_slice(&colors.of(index));
        }
    }
    (image.width, image.height, image.is_truncated) = (header.stored.width, header.stored.height, false);
    Ok(())
}

/// Palette: three bytes per color.
struct Colors<'a>(&'a [u8]);

impl Colors<'_> {
    fn of(&self, index: u8) -> [u8; 3] {
        let start = 3 * usize::from(index);
        // An index beyond the palette is black.
        self.0.get(start..start + 3).map_or([0; 3], |color| [color[0], color[1], color[2]])
    }
}

fn refusal(error: DecodingError, bytes: usize) -> DecodeError {
    match error {
        DecodingError::UnexpectedEof => DecodeError::truncated(FORMAT, bytes),
        other => DecodeError::codec(FORMAT, other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::image::decode_rgb;

    const COLORS: [u8; 12] = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120];

    /// Creates a file whose frame has the indices 0 to 2 and then 1, in two rows with two pixels each.
    fn gif(canvas: (u8, u8), left: u8, transparent: Option<u8>) -> Vec<u8> {
        let mut file = b"GIF89a".to_vec();
        file.extend([canvas.0, 0, canvas.1, 0, 0x81, 0, 0]);
        file.extend(COLORS);
        if let Some(index) = transparent {
            file.extend([b'!', 0xF9, 4, 1, 0, 0, index, 0]);
        }
        file.extend([b',', left, 0, 0, 0, 2, 0, 2, 0, 0]);
        // 3-bit codes: clear, 0, 1, 2; then 4-bit codes: 1, end.
        file.extend([2, 3, 0b0100_0100, 0b0001_0100, 0b0000_0101, 0, b';']);
        file
    }

    fn decoded(file: &[u8]) -> RgbImage {
        decode_rgb(file, &ImageLimits::default()).unwrap()
    }

    fn color(index: usize) -> [u8; 3] {
        [COLORS[3 * index], COLORS[3 * index + 1], COLORS[3 * index + 2]]
    }

    #[test]
    fn transparent_pixels_have_the_color_of_their_index() {
        for transparent in [None, Some(1)] {
            let image = decoded(&gif((2, 2), 0, transparent));
            assert_eq!(image.pixels, [0, 1, 2, 1].map(color).concat());
        }
    }

    #[test]
    fn uncovered_pixels_have_the_transparent_or_the_first_color() {
        let image = decoded(&gif((3, 2), 1, None));
        assert_eq!(image.pixels, [0, 0, 1, 0, 2, 1].map(color).concat());
        let image = decoded(&gif((3, 2), 1, Some(3)));
        assert_eq!(image.pixels, [3, 0, 1, 3, 2, 1].map(color).concat());
    }

    #[test]
    fn a_canvas_grows_with_its_first_frame() {
        let image = decoded(&gif((0, 0), 0, None));
        assert_eq!((image.width, image.height), (2, 2));
        let image = decoded(&gif((1, 1), 1, None));
        assert_eq!((image.width, image.height), (3, 2));
    }

    #[test]
    fn every_cut_in_front_of_the_last_pixel_is_refused() {
        let file = gif((2, 2), 0, None);
        for length in 6..file.len() - 4 {
            assert!(decode_rgb(&file[..length], &ImageLimits::default()).is_err(), "cut to {length}");
        }
    }
}
