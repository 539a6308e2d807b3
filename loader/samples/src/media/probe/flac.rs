//! Reads the stream header in a native FLAC file.

use super::AudioLength;
use super::field::{u16_be, u32_be};
use crate::media::error::DecodeError;

const FORMAT: &str = "flac";

/// Reads length and channels from the first metadata block, which must be the stream header; the length is 0
/// if the writer did not know the length.
///
/// - `bytes`: the file from the `fLaC` marker on
pub(super) fn read_flac_header(bytes: &[u8]) -> Result<(AudioLength, u16), DecodeError> {
    const RATE_AT: usize = 18;
    let ended = || DecodeError::truncated(FORMAT, bytes.len());
    if bytes.get(4).ok_or_else(ended)? & 0x7F != 0 {
        return Err(DecodeError::malformed(FORMAT, 4, "the first block is not the stream header"));
    }
    // 20 bits rate, 3 bits channels - 1, 5 bits depth - 1, 36 bits frames.
    let packed = u64::from(u32_be(bytes, RATE_AT).ok_or_else(ended)?) << 32
        | u64::from(u32_be(bytes, RATE_AT + 4).ok_or_else(ended)?);
    let sample_rate_hz = (packed >> 44) as u32;
    let channels = (packed >> 41 & 0x7) as u16 + 1;
    let frames = packed & ((1 << 36) - 1);
    let block_frames_max = u16_be(bytes, 10).ok_or_else(ended)?;
    if sample_rate_hz == 0 || block_frames_max == 0 {
        return Err(DecodeError::malformed(FORMAT, RATE_AT, "the sample rate or block size is 0"));
    }
    Ok((AudioLength { frames, sample_rate_hz }, channels))
}
