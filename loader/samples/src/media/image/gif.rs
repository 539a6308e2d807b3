//! Decodes the first frame of a GIF as Pillow's `convert("RGB")` does.
//!
//! Transparent pixels have the color of their index. What the frame leaves uncovered has the color of the transparent
//! index, else of the first one.

use std::io::Cursor;
use std::num::NonZeroU64;

use gif::{ColorOutput, DecodeOptions, DecodingError, MemoryLimit};

use super::RgbImage;
use crate::media::error::DecodeError;
use crate::media::limits::{ImageLimits, check_limit};
use crate::media::probe::ImageHeader;

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

    let colors = Colors(frame.palette.as_deref().or(shared.as_deref()));
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

/// Palette: three bytes a color; without one indices are gray.
struct Colors<'a>(Option<&'a [u8]>);

impl Colors<'_> {
    fn of(&self, index: u8) -> [u8; 3] {
        let Some(palette) = self.0 else { return [index; 3] };
        let start = 3 * usize::from(index);
        // An index beyond the palette is black.
        palette.get(start..start + 3).map_or([0; 3], |color| [color[0], color[1], color[2]])
    }
}

fn refusal(error: DecodingError, bytes: usize) -> DecodeError {
    match error {
        DecodingError::Io(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => {
            DecodeError::truncated(FORMAT, bytes)
        }
        other => DecodeError::codec(FORMAT, other),
    }
}
