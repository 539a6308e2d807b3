//! Describes uncompressed and simply compressed samples in WAV and AIFF files.

use std::ops::Range;

use super::AudioLength;
use crate::media::error::DecodeError;

/// Coding of the samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PcmCoding {
    /// Unsigned bytes.
    Unsigned,
    /// Signed integers, in the highest bits of a container of 1 to 4 bytes.
    Signed {
        /// Bytes of the container.
        bytes: u16,
    },
    /// Floating-point numbers of 32 or 64 bits.
    Float {
        /// Bytes of a number.
        bytes: u16,
    },
    /// Logarithmic bytes of ITU-T G.711, A-law.
    ALaw,
    /// Logarithmic bytes of ITU-T G.711, mu-law.
    MuLaw,
    /// Differences of four bits in blocks, by IMA.
    ImaAdpcm(AdpcmBlock),
    /// Differences of four bits in blocks, by Microsoft, with the pairs of prediction factors.
    MsAdpcm(AdpcmBlock, Vec<[i16; 2]>),
}

/// Block of differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdpcmBlock {
    /// Bytes of a block, over all channels.
    pub(crate) bytes: u16,
    /// Bytes per channel in front of the differences.
    pub(crate) header_bytes: u16,
    /// Frames in that header.
    pub(crate) header_frames: u16,
}

impl AdpcmBlock {
    /// Returns the frames of a block that may be cut.
    pub(crate) fn frames(self, bytes: u64, channels: u16) -> u64 {
        let header = u64::from(self.header_bytes) * u64::from(channels);
        match bytes.checked_sub(header) {
            Some(rest) => u64::from(self.header_frames) + rest * 2 / u64::from(channels),
            None => 0,
        }
    }
}

/// Header of a file of such samples.
#[derive(Clone, Debug)]
pub(crate) struct PcmHeader {
    /// Name of the format, for errors.
    pub(crate) format: &'static str,
    pub(crate) coding: PcmCoding,
    pub(crate) is_little_endian: bool,
    pub(crate) channels: u16,
    /// Frames that are present.
    pub(crate) length: AudioLength,
    /// Offset of the samples.
    pub(crate) start: usize,
    /// Bytes of the samples that are present.
    pub(crate) bytes: u64,
    /// Whether some declared samples are missing.
    pub(crate) is_short: bool,
}

/// Samples as a header declares them.
#[derive(Clone, Debug)]
pub(super) struct PcmFormat {
    pub(super) coding: PcmCoding,
    pub(super) is_little_endian: bool,
    pub(super) channels: u16,
    pub(super) sample_rate_hz: u32,
}

impl PcmFormat {
    /// Returns the bytes of a frame of all channels, if they are whole.
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

    /// Makes the header of samples from `start` on.
    ///
    /// - `declared`: length of the samples in bytes; `None` if it is unknown, so that they reach to the end
    /// - `field_bytes`: length of the file
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

    /// Checks that the format makes frames.
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
    /// Returns the range of the samples that are present.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes as usize
    }
}
