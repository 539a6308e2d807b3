//! Reads the displayed size of the first GIF frame.

use super::ImageSize;
use super::field::u16_le;
use crate::media::error::DecodeError;

const FORMAT: &str = "gif";
/// Color table flag, and color table size bits.
const TABLE_FLAG: u8 = 0x80;
const TABLE_SIZE: u8 = 0x07;

/// Returns the canvas size, which grows with a first frame that exceeds the canvas.
///
/// # Errors
/// [`DecodeError::Truncated`] if the bytes end before the first frame.
pub(super) fn displayed_size(bytes: &[u8]) -> Result<ImageSize, DecodeError> {
    let ended = || DecodeError::truncated(FORMAT, bytes.len());
    let side = |at: usize| u16_le(bytes, at).map(u32::from).ok_or_else(ended);
    let canvas = (side(6)?, side(8)?);
    let flags = *bytes.get(10).ok_or_else(ended)?;
    let table_bytes = if flags & TABLE_FLAG == 0 { 0 } else { 3 << ((flags & TABLE_SIZE) + 1) };
    let mut position = 13 + table_bytes;
    loop {
        match *bytes.get(position).ok_or_else(ended)? {
            b'!' => position = blocks_end(bytes, position + 2).ok_or_else(ended)?,
            b',' => break,
            _ => return Err(DecodeError::malformed(FORMAT, position, "there is no frame")),
        }
    }
    let frame_flags = *bytes.get(position + 9).ok_or_else(ended)?;
    if (flags | frame_flags) & TABLE_FLAG == 0 {
        return Err(DecodeError::unsupported(FORMAT, "a frame without a table of colors"));
    }
    let right = side(position + 1)? + side(position + 5)?;
    let bottom = side(position + 3)? + side(position + 7)?;
    Ok(ImageSize { width: canvas.0.max(right), height: canvas.1.max(bottom) })
}

/// Returns the offset after a list of length-prefixed blocks, which ends with an empty block.
fn blocks_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut position = from;
    loop {
        match usize::from(*bytes.get(position)?) {
            0 => return Some(position + 1),
            length => position += 1 + length,
        }
    }
}
