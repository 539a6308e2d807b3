//! Reads the headers of AIFF, AIFF-C and Sun audio files.

use super::field::{u16_be, u32_be};
use super::wav::{PcmCoding, PcmFormat, PcmHeader};
use crate::media::DecodeError;

const FORMAT: &str = "aiff";

/// Returns whether the file is an AIFF or AIFF-C.
pub(super) fn is_aiff(bytes: &[u8]) -> bool {
    matches!(bytes, [b'F', b'O', b'R', b'M', _, _, _, _, b'A', b'I', b'F', b'F' | b'C', ..])
}

/// Reads the header from `prefix`, the first bytes of a file with `field_bytes` bytes.
pub(crate) fn read_aiff_header(prefix: &[u8], field_bytes: u64) -> Result<PcmHeader, DecodeError> {
    let ended = || DecodeError::truncated(FORMAT, prefix.len());
    let mut format = None;
    let mut position = 12;
    loop {
        let name = prefix.get(position..position + 4).ok_or_else(ended)?;
        let bytes = u32_be(prefix, position + 4).ok_or_else(ended)?;
        let start = position + 8;
        match name {
            b"COMM" => format = Some(read_format(prefix, start, bytes)?),
            b"SSND" => {
                let (format, declared_frames) = format.ok_or_else(|| {
                    DecodeError::malformed(FORMAT, position, "the sound data precede the common chunk")
                })?;
                // An offset and a block size precede the samples.
                let offset = u32_be(prefix, start).ok_or_else(ended)?;
                let samples = start.saturating_add(8).saturating_add(offset as usize);
                let declared = u64::from(bytes).saturating_sub(8 + u64::from(offset));
                let mut header = format.header(FORMAT, samples, Some(declared), field_bytes);
                header.is_short |= declared_frames > header.length.frames;
                header.length.frames = header.length.frames.min(declared_frames);
                return Ok(header);
            }
            _ => {}
        }
        // Chunks are padded to an even length.
        position = start.saturating_add(bytes as usize).saturating_add(bytes as usize & 1);
        if position > prefix.len() {
            return Err(ended());
        }
    }
}

/// Reads the sample format and the number of frames.
fn read_format(prefix: &[u8], start: usize, bytes: u32) -> Result<(PcmFormat, u64), DecodeError> {
    let ended = || DecodeError::truncated(FORMAT, prefix.len());
    if bytes < 18 {
        return Err(DecodeError::malformed(FORMAT, start, "the common chunk has fewer than 18 bytes"));
    }
    let channels = u16_be(prefix, start).ok_or_else(ended)?;
    let frames = u32_be(prefix, start + 2).ok_or_else(ended)?;
    let bits = u16_be(prefix, start + 6).ok_or_else(ended)?;
    let rate = prefix.get(start + 8..start + 18).ok_or_else(ended)?;
    let compression =
        if bytes >= 22 { prefix.get(start + 18..start + 22).ok_or_else(ended)? } else { b"NONE" };
    let coding = match (compression, bits) {
        (b"raw ", 8) => PcmCoding::Unsigned,
        (b"NONE" | b"twos" | b"sowt" | b"in24" | b"in32", 1..=32) => {
            PcmCoding::Signed { bytes: bits.div_ceil(8) }
        }
        (b"fl32" | b"FL32", _) => PcmCoding::Float { bytes: 4 },
        (b"fl64" | b"FL64", _) => PcmCoding::Float { bytes: 8 },
        (b"alaw" | b"ALAW", _) => PcmCoding::ALaw,
        (b"ulaw" | b"ULAW", _) => PcmCoding::MuLaw,
        _ => {
            let name = String::from_utf8_lossy(compression);
            return Err(DecodeError::unsupported(
                FORMAT,
                format!("coding `{}` of {bits} bits", name.escape_debug()),
            ));
        }
    };
    let is_little_endian = compression == b"sowt";
    let format = PcmFormat { coding, is_little_endian, channels, sample_rate_hz: sample_rate(rate) };
    Ok((format.checked(FORMAT, start)?, frames.into()))
}

/// Returns a rate stored as an 80-bit extended number: sign and exponent in 16 bits, then 64 bits with an
/// explicit leading 1.
fn sample_rate(bytes: &[u8]) -> u32 {
    const BIAS: i32 = 16_383;
    let exponent = i32::from(u16_be(bytes, 0).unwrap_or(0) & 0x7FFF) - BIAS;
    let high = u64::from(u32_be(bytes, 2).unwrap_or(0)) << 32 | u64::from(u32_be(bytes, 6).unwrap_or(0));
    match exponent {
        0..32 => (high >> (63 - exponent)) as u32,
        _ => 0,
    }
}

const AU_FORMAT: &str = "au";
/// Length stored by writers to a pipe, because they cannot know the length.
const UNKNOWN_LENGTH: u32 = u32::MAX;

/// Reads the header from `prefix`, the first bytes of a file with `field_bytes` bytes.
pub(crate) fn read_au_header(prefix: &[u8], field_bytes: u64) -> Result<PcmHeader, DecodeError> {
    let number = |at| u32_be(prefix, at).ok_or_else(|| DecodeError::truncated(AU_FORMAT, prefix.len()));
    let (start, declared, coding) = (number(4)?, number(8)?, number(12)?);
    let coding = match coding {
        1 => PcmCoding::MuLaw,
        2..=5 => PcmCoding::Signed { bytes: coding as u16 - 1 },
        6 => PcmCoding::Float { bytes: 4 },
        7 => PcmCoding::Float { bytes: 8 },
        27 => PcmCoding::ALaw,
        other => return Err(DecodeError::unsupported(AU_FORMAT, format!("coding {other}"))),
    };
    let channels = u16::try_from(number(20)?);
    let channels =
        channels.map_err(|_| DecodeError::malformed(AU_FORMAT, 20, "it has more than 65,535 channels"))?;
    let format = PcmFormat { coding, is_little_endian: false, channels, sample_rate_hz: number(16)? };
    let declared = (declared != UNKNOWN_LENGTH).then_some(u64::from(declared));
    Ok(format.checked(AU_FORMAT, 20)?.header(AU_FORMAT, start as usize, declared, field_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aiff(kind: [u8; 4], bits: u16, compression: &[u8], frames: u32, samples: &[u8]) -> Vec<u8> {
        let common = [
            &2_u16.to_be_bytes()[..],
            &frames.to_be_bytes(),
            &bits.to_be_bytes(),
            // 44,100 Hz
            &[0x40, 0x0E, 0xAC, 0x44, 0, 0, 0, 0, 0, 0],
            compression,
        ]
        .concat();
        let chunk =
            |name: &[u8; 4], body: &[u8]| [name, &(body.len() as u32).to_be_bytes()[..], body].concat();
        let sound = [&[0; 8][..], samples].concat();
        [
            b"FORM\0\0\0\0",
            &kind[..],
            &chunk(b"ANNO", b"words "),
            &chunk(b"COMM", &common),
            &chunk(b"SSND", &sound),
        ]
        .concat()
    }

    #[test]
    fn plain_and_named_codings_are_read() {
        let table = [
            (b"AIFF", 16, &b""[..], PcmCoding::Signed { bytes: 2 }, false),
            (b"AIFF", 8, b"", PcmCoding::Signed { bytes: 1 }, false),
            (b"AIFC", 16, b"sowt", PcmCoding::Signed { bytes: 2 }, true),
            (b"AIFC", 32, b"fl32", PcmCoding::Float { bytes: 4 }, false),
            (b"AIFC", 16, b"ulaw", PcmCoding::MuLaw, false),
        ];
        for (kind, bits, compression, coding, is_little_endian) in table {
            let file = aiff(*kind, bits, compression, 3, &[0; 24]);
            let header = read_aiff_header(&file, file.len() as u64).unwrap();
            assert_eq!((header.length.frames, header.length.sample_rate_hz, header.channels), (3, 44_100, 2));
            assert_eq!(
                (header.coding, header.is_little_endian, header.is_short),
                (coding, is_little_endian, false)
            );
        }
        let file = aiff(*b"AIFC", 16, b"ima4", 3, &[0; 24]);
        let refused = read_aiff_header(&file, file.len() as u64).unwrap_err().to_string();
        assert_eq!(refused, "unsupported aiff: coding `ima4` of 16 bits");
    }

    #[test]
    fn a_short_file_has_the_frames_that_are_there() {
        let file = aiff(*b"AIFF", 16, b"", 6, &[0; 24]);
        let header = read_aiff_header(&file[..file.len() - 5], file.len() as u64 - 5).unwrap();
        assert_eq!((header.length.frames, header.is_short), (4, true));
    }

    #[test]
    fn frames_follow_from_the_length_or_the_end_of_the_file() {
        let au = |length: u32, coding: u32| {
            let numbers = [24, length, coding, 22_050, 1];
            let file = [&b".snd"[..], &numbers.map(u32::to_be_bytes).concat(), &[0; 40]].concat();
            read_au_header(&file, file.len() as u64)
        };
        let header = au(40, 3).unwrap();
        assert_eq!((header.length.frames, header.length.sample_rate_hz, header.channels), (20, 22_050, 1));
        assert_eq!(au(UNKNOWN_LENGTH, 1).unwrap().length.frames, 40);
        assert_eq!(au(40, 23).unwrap_err().to_string(), "unsupported au: coding 23");
    }
}
