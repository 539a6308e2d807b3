//! Describes uncompressed and simply compressed samples in WAV and AIFF files.

use std::ops::Range;

use super::AudioLength;
use crate::media::error::DecodeError;

/// Sample coding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PcmCoding {
    /// Unsigned bytes.
    Unsigned,
    /// Signed integers, in the highest bits of a container with 1 to 4 bytes.
    Signed {
        /// Container size in bytes.
        bytes: u16,
    },
    /// Floating-point numbers with 32 or 64 bits.
    Float {
        /// Number size in bytes.
        bytes: u16,
    },
    /// Logarithmic ITU-T G.711 bytes, A-law.
    ALaw,
    /// Logarithmic ITU-T G.711 bytes, mu-law.
    MuLaw,
    /// 4-bit differences in blocks, IMA ADPCM.
    ImaAdpcm(AdpcmBlock),
    /// 4-bit differences in blocks, Microsoft ADPCM, with the prediction factor pairs.
    MsAdpcm(AdpcmBlock, Vec<[i16; 2]>),
}

/// ADPCM block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdpcmBlock {
    /// Block size in bytes, over all channels.
    pub(crate) bytes: u16,
    /// Bytes per channel before the differences.
    pub(crate) header_bytes: u16,
    /// Number of frames in the block header.
    pub(crate) header_frames: u16,
}

impl AdpcmBlock {
    /// Returns the number of frames in a block that may be truncated.
    pub(crate) fn frames(self, bytes: u64, channels: u16) -> u64 {
        let header = u64::from(self.header_bytes) * u64::from(channels);
        match bytes.checked_sub(header) {
            Some(rest) => u64::from(self.header_frames) + rest * 2 / u64::from(channels),
            None => 0,
        }
    }
}

/// Header for a file with PCM or ADPCM samples.
#[derive(Clone, Debug)]
pub(crate) struct PcmHeader {
    /// Format name, for errors.
    pub(crate) format: &'static str,
    pub(crate) coding: PcmCoding,
    pub(crate) is_little_endian: bool,
    pub(crate) channels: u16,
    /// Number of available frames, and sample rate.
    pub(crate) length: AudioLength,
    /// Offset of the samples.
    pub(crate) start: usize,
    /// Number of available sample bytes.
    pub(crate) bytes: u64,
    /// Whether some declared samples are missing.
    pub(crate) is_short: bool,
}

/// Sample format as declared by a header.
#[derive(Clone, Debug)]
pub(super) struct PcmFormat {
    pub(super) coding: PcmCoding,
    pub(super) is_little_endian: bool,
    pub(super) channels: u16,
    pub(super) sample_rate_hz: u32,
}

impl PcmFormat {
    /// Returns the bytes per frame over all channels, if samples are whole bytes.
    fn frame_bytes(&self) -> Option<u64> {
        let sample_bytes = match self.coding {
            PcmCoding::Unsigned | PcmCoding::ALaw | PcmCoding::MuLaw => 1,
            PcmCoding::Signed { bytes } | PcmCoding::Float { bytes } => bytes,
            PcmCoding::ImaAdpcm(_) | PcmCoding::MsAdpcm(..) => return None,
        };
        Some(u64::from(sample_bytes) * u64::from(self.channels))
    }

    fn frames(&self, bytes: u64) -> u64 {
        match (&self.coding, self.frame_bytes()) {
            (_, Some(frame_bytes)) => bytes / frame_bytes,
            (PcmCoding::ImaAdpcm(block) | PcmCoding::MsAdpcm(block, _), None) => {
                let whole = bytes / u64::from(block.bytes);
                let cut = block.frames(bytes % u64::from(block.bytes), self.channels);
                whole * block.frames(block.bytes.into(), self.channels) + cut
            }
            _ => 0,
        }
    }

    /// Creates the header for samples from `start` on.
    ///
    /// - `declared`: length of the samples in bytes; `None` if unknown, so that the samples extend to the
    ///   file end
    /// - `field_bytes`: file length in bytes
    pub(super) fn header(
        self,
        format: &'static str,
        start: usize,
        declared: Option<u64>,
        field_bytes: u64,
    ) -> PcmHeader {
        let present = field_bytes.saturating_sub(start as u64);
        let bytes = declared.unwrap_or(present).min(present);
        PcmHeader {
            format,
            length: AudioLength { frames: self.frames(bytes), sample_rate_hz: self.sample_rate_hz },
            coding: self.coding,
            is_little_endian: self.is_little_endian,
            channels: self.channels,
            start,
            bytes,
            is_short: declared.is_some_and(|declared| declared > present),
        }
    }

    /// Checks that the format defines frames.
    pub(super) fn checked(self, format: &'static str, offset: usize) -> Result<Self, DecodeError> {
        if self.channels == 0 || self.sample_rate_hz == 0 {
            let reason = "the number of channels or the sample rate is 0";
            return Err(DecodeError::malformed(format, offset, reason));
        }
        if let PcmCoding::ImaAdpcm(block) | PcmCoding::MsAdpcm(block, _) = &self.coding
            && block.frames(block.bytes.into(), self.channels) <= u64::from(block.header_frames)
        {
            return Err(DecodeError::malformed(format, offset, "a block holds no samples"));
        }
        Ok(self)
    }
}

impl PcmHeader {
    /// Returns the range of the available samples.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes as usize
    }
}
