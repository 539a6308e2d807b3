//! Reads the header of a RIFF WAVE file: sample format and extent of the samples that are present.

use super::AudioLength;
use super::field::{u16_le, u32_le};
use crate::media::error::DecodeError;

const FORMAT: &str = "wav";
/// Length that writers to a pipe store because they cannot know it.
const UNKNOWN_LENGTH: u32 = u32::MAX;

/// Header fields of a WAV file, gathered from the chunks up to the samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WavHeader {
    pub(crate) channels: u16,
    /// Frames that are present.
    pub(crate) length: AudioLength,
    /// Offset of the length field of the data chunk.
    pub(crate) data_length_at: usize,
    /// Bytes of the whole frames that are present.
    pub(crate) data_bytes: u64,
    /// Whether the declared length is unknown or differs from the bytes present.
    pub(crate) is_length_wrong: bool,
    /// Whether some declared frames are missing.
    pub(crate) is_short: bool,
}

struct Format {
    channels: u16,
    sample_rate_hz: u32,
    frame_bytes: u16,
}

/// Reads the header of a WAV file of `field_bytes` bytes whose first bytes are `prefix`.
pub(crate) fn read_wav_header(prefix: &[u8], field_bytes: u64) -> Result<WavHeader, DecodeError> {
    let ended = || DecodeError::truncated(FORMAT, prefix.len());
    let mut format = None;
    let mut position = 12;
    loop {
        let name = prefix.get(position..position + 4).ok_or_else(ended)?;
        let declared = u32_le(prefix, position + 4).ok_or_else(ended)?;
        let start = position + 8;
        match name {
            b"fmt " => format = Some(read_format(prefix, start, declared)?),
            b"data" => {
                let format = format.ok_or_else(|| {
                    DecodeError::malformed(FORMAT, position, "the data chunk precedes the format chunk")
                })?;
                return Ok(header(&format, start, declared, field_bytes));
            }
            _ => {}
        }
        // RIFF chunks are padded to an even length.
        position = start.saturating_add(declared as usize).saturating_add(declared as usize & 1);
        if position > prefix.len() {
            return Err(ended());
        }
    }
}

fn header(format: &Format, start: usize, declared: u32, field_bytes: u64) -> WavHeader {
    let present = field_bytes.saturating_sub(start as u64);
    let frame_bytes = u64::from(format.frame_bytes);
    // Writers to a pipe declare the largest length and files may be truncated, so only present frames count.
    let data_bytes = u64::from(declared).min(present) / frame_bytes * frame_bytes;
    let is_unknown = declared == UNKNOWN_LENGTH;
    WavHeader {
        channels: format.channels,
        length: AudioLength { frames: data_bytes / frame_bytes, sample_rate_hz: format.sample_rate_hz },
        data_length_at: start - 4,
        data_bytes,
        is_length_wrong: is_unknown || u64::from(declared) != data_bytes,
        is_short: !is_unknown && u64::from(declared) > present,
    }
}

fn read_format(prefix: &[u8], start: usize, declared: u32) -> Result<Format, DecodeError> {
    const PCM: u16 = 1;
    const FLOAT: u16 = 3;
    const A_LAW: u16 = 6;
    const MU_LAW: u16 = 7;
    const EXTENSIBLE: u16 = 0xFFFE;
    if declared < 16 {
        return Err(DecodeError::malformed(FORMAT, start, "the format chunk has fewer than 16 bytes"));
    }
    let short =
        |offset| u16_le(prefix, start + offset).ok_or_else(|| DecodeError::truncated(FORMAT, prefix.len()));
    let tag = short(0)?;
    let channels = short(2)?;
    let sample_rate_hz =
        u32_le(prefix, start + 4).ok_or_else(|| DecodeError::truncated(FORMAT, prefix.len()))?;
    let frame_bytes = short(12)?;
    let bits = short(14)?;
    if !matches!(tag, PCM | FLOAT | A_LAW | MU_LAW | EXTENSIBLE) {
        return Err(DecodeError::unsupported(FORMAT, format!("coding {tag:#06x}")));
    }
    if channels == 0 || sample_rate_hz == 0 {
        return Err(DecodeError::malformed(FORMAT, start, "the number of channels or the sample rate is 0"));
    }
    if u32::from(frame_bytes) != u32::from(channels) * u32::from(bits.div_ceil(8)) || frame_bytes == 0 {
        return Err(DecodeError::malformed(
            FORMAT,
            start + 12,
            "the frame size does not match the channels and sample format",
        ));
    }
    Ok(Format { channels, sample_rate_hz, frame_bytes })
}
