//! Encodes pixels as JPEG files.

use std::io;

use jpeg_encoder::{ColorType, Encoder, SamplingFactor};

/// Encodes 8-bit pixels, color at half the resolution.
///
/// # Errors
/// If a side is over 65,535 pixels.
pub(crate) fn encode_jpeg(
    pixels: &[u8],
    width: usize,
    height: usize,
    color: ColorType,
    quality: u8,
) -> io::Result<Vec<u8>> {
    let side = |pixels: usize| u16::try_from(pixels).map_err(io::Error::other);
    let mut file = Vec::with_capacity(pixels.len() / 8);
    let mut encoder = Encoder::new(&mut file, quality);
    encoder.set_sampling_factor(SamplingFactor::F_2_2);
    encoder.encode(pixels, side(width)?, side(height)?, color).map_err(io::Error::other)?;
    Ok(file)
}
