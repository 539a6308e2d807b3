//! Parses WAV headers and PCM formats.

use super::AudioLength;
use super::field::{u16_be, u16_le, u32_be, u32_le};
use crate::media::DecodeError;
use std::ops::Range;

const FORMAT: &str = "wav";
/// Length stored by writers to a pipe, because they cannot know the length, and by RF64, because another
/// chunk has the length.
const UNKNOWN_LENGTH: u64 = u32::MAX as u64;
/// Prediction factor pairs for Microsoft ADPCM, if the header has none.
const MS_FACTORS: [[i16; 2]; 7] =
    [[256, 0], [512, -256], [0, 0], [192, 64], [240, 0], [460, -208], [392, -232]];

/// Chunk container format.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Container {
    Riff,
    Rifx,
    Rf64,
    W64,
}

impl Container {
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Some(Self::Riff),
            [b'R', b'I', b'F', b'X', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Some(Self::Rifx),
            [b'R', b'F', b'6', b'4', _, _, _, _, b'W', b'A', b'V', b'E', ..]
            | [b'B', b'W', b'6', b'4', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Some(Self::Rf64),
            [b'r', b'i', b'f', b'f', 0x2E, 0x91, 0xCF, 0x11, ..] => Some(Self::W64),
            _ => None,
        }
    }

    /// Returns the offset of the first chunk.
    fn start(self) -> usize {
        if self == Self::W64 { 40 } else { 12 }
    }

    fn u16(self) -> fn(&[u8], usize) -> Option<u16> {
        if self == Self::Rifx { u16_be } else { u16_le }
    }

    fn u32(self) -> fn(&[u8], usize) -> Option<u32> {
        if self == Self::Rifx { u32_be } else { u32_le }
    }
}

/// Chunk in a file.
struct Chunk<'a> {
    name: &'a [u8],
    /// Body offset.
    start: usize,
    /// Body length in bytes, as declared.
    bytes: u64,
    /// Next chunk's offset.
    next: usize,
}

/// Returns whether the file belongs to the WAV family.
pub(super) fn is_wav(bytes: &[u8]) -> bool {
    Container::from_bytes(bytes).is_some()
}

/// Reads the header from `prefix`, the first bytes of a file with `field_bytes` bytes.
pub(crate) fn read_wav_header(prefix: &[u8], field_bytes: u64) -> Result<PcmHeader, DecodeError> {
    let ended = || DecodeError::truncated(FORMAT, prefix.len());
    let container = Container::from_bytes(prefix).ok_or_else(ended)?;
    let mut format = None;
    let mut long_length = None;
    let mut position = container.start();
    loop {
        let chunk = read_chunk(container, prefix, position).ok_or_else(ended)?;
        match chunk.name {
            b"fmt " => format = Some(read_format(container, prefix, &chunk)?),
            b"ds64" => long_length = u64_le(prefix, chunk.start + 8),
            b"data" => {
                let format = format.ok_or_else(|| {
                    DecodeError::malformed(FORMAT, position, "the data chunk precedes the format chunk")
                })?;
                let declared = declared_length(container, prefix, &chunk, long_length);
                return Ok(format.header(FORMAT, chunk.start, declared, field_bytes));
            }
            _ => {}
        }
        if chunk.next > prefix.len() {
            return Err(ended());
        }
        position = chunk.next;
    }
}

fn read_chunk(container: Container, bytes: &[u8], position: usize) -> Option<Chunk<'_>> {
    let name = bytes.get(position..position + 4)?;
    let (start, declared, padding) = match container {
        // A GUID, and a 64-bit length that includes this header; chunks start at multiples of 8.
        Container::W64 => (position + 24, u64_le(bytes, position + 16)?.saturating_sub(24), 8),
        _ => (position + 8, u64::from(container.u32()(bytes, position + 4)?), 2),
    };
    let end = (start as u64).saturating_add(declared);
    let next = usize::try_from(end.div_ceil(padding).saturating_mul(padding)).unwrap_or(usize::MAX);
    Some(Chunk { name, start, bytes: declared, next })
}

/// Returns the length of the samples in bytes; `None` if the samples extend to the end of the file.
fn declared_length(container: Container, bytes: &[u8], data: &Chunk<'_>, long: Option<u64>) -> Option<u64> {
    let of_file = container.u32()(bytes, 4).map(u64::from);
    match (container, data.bytes) {
        (Container::W64, length) => Some(length),
        (Container::Rf64, UNKNOWN_LENGTH) => long,
        (_, UNKNOWN_LENGTH) => None,
        // Neither length was filled in.
        (_, 0) if matches!(of_file, Some(0 | UNKNOWN_LENGTH)) => None,
        (_, length) => Some(length),
    }
}

fn u64_le(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u32_le(bytes, at)?) | u64::from(u32_le(bytes, at + 4)?) << 32)
}

fn read_format(container: Container, prefix: &[u8], chunk: &Chunk<'_>) -> Result<PcmFormat, DecodeError> {
    const EXTENSIBLE: u16 = 0xFFFE;
    let start = chunk.start;
    if chunk.bytes < 16 {
        return Err(DecodeError::malformed(FORMAT, start, "the format chunk has fewer than 16 bytes"));
    }
    let ended = || DecodeError::truncated(FORMAT, prefix.len());
    let short = |offset| container.u16()(prefix, start + offset).ok_or_else(ended);
    let mut tag = short(0)?;
    let channels = short(2)?;
    let sample_rate_hz = container.u32()(prefix, start + 4).ok_or_else(ended)?;
    let block_bytes = short(12)?;
    let bits = short(14)?;
    if tag == EXTENSIBLE && chunk.bytes >= 26 {
        tag = short(24)?;
    }
    let coding = match tag {
        0x0002 => {
            let block = AdpcmBlock { bytes: block_bytes, header_bytes: 7, header_frames: 2 };
            PcmCoding::MsAdpcm(block, read_factors(container, prefix, chunk)?)
        }
        0x0011 => PcmCoding::ImaAdpcm(AdpcmBlock { bytes: block_bytes, header_bytes: 4, header_frames: 1 }),
        _ => read_plain_coding(tag, bits, block_bytes, channels.max(1), start)?,
    };
    let is_little_endian = container != Container::Rifx;
    PcmFormat { coding, is_little_endian, channels, sample_rate_hz }.checked(FORMAT, start)
}

/// Reads the prediction factor pairs for Microsoft ADPCM.
fn read_factors(
    container: Container,
    prefix: &[u8],
    chunk: &Chunk<'_>,
) -> Result<Vec<[i16; 2]>, DecodeError> {
    const COUNT_AT: usize = 20;
    if chunk.bytes < COUNT_AT as u64 + 2 {
        return Ok(MS_FACTORS.to_vec());
    }
    let short = |offset: usize| {
        let number = container.u16()(prefix, chunk.start + offset);
        number.map(u16::cast_signed).ok_or_else(|| DecodeError::truncated(FORMAT, prefix.len()))
    };
    let count = usize::from(short(COUNT_AT)?.cast_unsigned());
    let held = (chunk.bytes as usize - COUNT_AT - 2) / 4;
    let pairs = (0..count.min(held).min(256)).map(|pair| {
        let at = COUNT_AT + 2 + 4 * pair;
        Ok([short(at)?, short(at + 2)?])
    });
    pairs.collect()
}

/// Returns the coding for samples in whole bytes.
fn read_plain_coding(
    tag: u16,
    bits: u16,
    block_bytes: u16,
    channels: u16,
    start: usize,
) -> Result<PcmCoding, DecodeError> {
    let bytes = block_bytes / channels;
    let coding = match (tag, bits) {
        (1, 1..=8) if bytes == 1 => PcmCoding::Unsigned,
        (1, 9..=32) if (bits.div_ceil(8)..=4).contains(&bytes) => PcmCoding::Signed { bytes },
        (3, 32 | 64) if bytes == bits / 8 => PcmCoding::Float { bytes },
        (6, 8) if bytes == 1 => PcmCoding::ALaw,
        (7, 8) if bytes == 1 => PcmCoding::MuLaw,
        (1, 1..=32) | (3, 32 | 64) | (6 | 7, 8) => {
            let reason = "the frame size does not match the channels and sample format";
            return Err(DecodeError::malformed(FORMAT, start + 12, reason));
        }
        (1 | 3 | 6 | 7, _) => {
            return Err(DecodeError::unsupported(FORMAT, format!("{bits} bits in coding {tag:#06x}")));
        }
        _ => return Err(DecodeError::unsupported(FORMAT, coding_name(tag))),
    };
    if u32::from(bytes) * u32::from(channels) == u32::from(block_bytes) {
        return Ok(coding);
    }
    Err(DecodeError::malformed(
        FORMAT,
        start + 12,
        "the frame size does not match the channels and sample format",
    ))
}

/// Names an unsupported coding.
fn coding_name(tag: u16) -> String {
    let name = match tag {
        0x0010 => "OKI ADPCM",
        0x0014..=0x0016 | 0x0040 | 0x0045 | 0x0064 => "G.726 or G.721 ADPCM",
        0x0031 => "GSM 6.10",
        0x0050 => "MPEG layer 1 or 2",
        0x0055 => "MP3",
        0x0075 => "VoxWare",
        0x00FF | 0x1600 | 0x1602 => "AAC",
        0x0160..=0x0163 => "Windows Media Audio",
        0x2000 => "Dolby Digital (AC-3)",
        0x674F..=0x6771 => "Vorbis",
        _ => return format!("coding {tag:#06x}"),
    };
    format!("{name} (coding {tag:#06x})")
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::fixtures::wav;

    const PCM: u16 = 1;

    /// Writes a file with 10 frames, 2 channels and 16 bits in a container.
    fn made(container: Container, chunks: &[(&[u8; 4], Vec<u8>)], data_bytes: u32) -> Vec<u8> {
        let little = container != Container::Rifx;
        let short = |value: u16| if little { value.to_le_bytes() } else { value.to_be_bytes() };
        let long = |value: u32| if little { value.to_le_bytes() } else { value.to_be_bytes() };
        let mut file = match container {
            Container::Riff => b"RIFF\xff\xff\xff\xffWAVE".to_vec(),
            Container::Rifx => b"RIFX\0\0\0\0WAVE".to_vec(),
            Container::Rf64 => b"RF64\xff\xff\xff\xffWAVE".to_vec(),
            Container::W64 => [&b"riff\x2e\x91\xcf\x11"[..], &[0; 32]].concat(),
        };
        let format: Vec<u8> =
            [&short(PCM)[..], &short(2), &long(8_000), &long(32_000), &short(4), &short(16)].concat();
        let all = chunks.iter().cloned().chain([(b"fmt ", format), (b"data", vec![7; 40])]);
        for (name, body) in all {
            file.extend(name);
            let length = if name == b"data" { data_bytes } else { body.len() as u32 };
            if container == Container::W64 {
                file.extend([0; 12]);
                file.extend((u64::from(length) + 24).to_le_bytes());
                file.extend([&body[..], &vec![0; body.len().next_multiple_of(8) - body.len()]].concat());
            } else {
                file.extend(long(length));
                file.extend([&body[..], &vec![0; body.len() % 2]].concat());
            }
        }
        file
    }

    fn header(file: &[u8]) -> PcmHeader {
        read_wav_header(file, file.len() as u64).unwrap()
    }

    #[test]
    fn all_containers_are_read() {
        let sizes = [60_u64.to_le_bytes(), 40_u64.to_le_bytes(), 10_u64.to_le_bytes()].concat();
        let table = [
            (Container::Riff, vec![], 40),
            (Container::Rifx, vec![], 40),
            (Container::Rf64, vec![(b"ds64", sizes)], u32::MAX),
            (Container::W64, vec![], 40),
        ];
        for (container, chunks, data_bytes) in table {
            let header = header(&made(container, &chunks, data_bytes));
            assert_eq!((header.length.frames, header.length.sample_rate_hz, header.channels), (10, 8_000, 2));
            assert_eq!((header.coding, header.is_short), (PcmCoding::Signed { bytes: 2 }, false));
            assert_eq!(header.is_little_endian, container != Container::Rifx);
        }
    }

    #[test]
    fn chunks_other_than_format_and_samples_may_hold_anything() {
        for body in [&b""[..], b"a", b"INFOIART\xff\xff\xff\x7fx", b"INFO"] {
            for name in [b"LIST", b"bext", b"cue ", b"fact", b"\0\x01\x02\x03"] {
                let header = header(&made(Container::Riff, &[(name, body.to_vec())], 40));
                assert_eq!((header.length.frames, header.is_short), (10, false));
            }
        }
    }

    #[test]
    fn lengths_that_were_not_filled_in_reach_to_the_end() {
        for length in [0, u32::MAX] {
            assert_eq!(header(&made(Container::Riff, &[], length)).length.frames, 10);
        }
        let mut empty = made(Container::Riff, &[], 0);
        empty[4..8].copy_from_slice(&36_u32.to_le_bytes());
        assert_eq!(header(&empty).length.frames, 0, "the length of the file is known");
        let long = header(&made(Container::Riff, &[], 400));
        assert_eq!((long.length.frames, long.is_short), (10, true));
    }

    #[test]
    fn samples_may_be_narrower_than_their_container() {
        let format = |bits: u16, frame_bytes: u16| {
            let mut file = wav(PCM, bits, 1, 8_000, &[0; 24]);
            file[32..34].copy_from_slice(&frame_bytes.to_le_bytes());
            read_wav_header(&file, file.len() as u64).map(|header| (header.coding, header.length.frames))
        };
        assert_eq!(format(20, 3).unwrap(), (PcmCoding::Signed { bytes: 3 }, 8));
        assert_eq!(format(12, 2).unwrap(), (PcmCoding::Signed { bytes: 2 }, 12));
        assert_eq!(format(24, 4).unwrap(), (PcmCoding::Signed { bytes: 4 }, 6));
        assert!(matches!(format(24, 2), Err(DecodeError::Malformed { offset: 32, .. })));
        let refused = format(48, 6).unwrap_err().to_string();
        assert_eq!(refused, "unsupported wav: 48 bits in coding 0x0001");
    }

    #[test]
    fn blocks_of_differences_have_their_frames_and_others_are_named() {
        let frames = |tag: u16, block: u16, bytes: usize| {
            let mut file = wav(tag, 4, 2, 8_000, &vec![0; bytes]);
            file[32..34].copy_from_slice(&block.to_le_bytes());
            read_wav_header(&file, file.len() as u64).map(|header| header.length.frames)
        };
        assert_eq!(frames(0x11, 24, 48).unwrap(), 34);
        assert_eq!(frames(0x11, 24, 24 + 16).unwrap(), 17 + 9, "the last block is cut");
        assert_eq!(frames(0x02, 20, 40).unwrap(), 16);
        assert!(matches!(frames(0x11, 8, 48), Err(DecodeError::Malformed { .. })));
        let refused = frames(0x31, 65, 65).unwrap_err().to_string();
        assert_eq!(refused, "unsupported wav: GSM 6.10 (coding 0x0031)");
    }
}
