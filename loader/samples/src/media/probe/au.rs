//! Reads the header of a Sun audio file.

use super::field::u32_be;
use super::pcm::{PcmCoding, PcmFormat, PcmHeader};
use crate::media::error::DecodeError;

const FORMAT: &str = "au";
/// Length stored by writers to a pipe, because they cannot know the length.
const UNKNOWN_LENGTH: u32 = u32::MAX;

/// Reads the header from `prefix`, the first bytes of a file with `field_bytes` bytes.
pub(crate) fn read_au_header(prefix: &[u8], field_bytes: u64) -> Result<PcmHeader, DecodeError> {
    let number = |at| u32_be(prefix, at).ok_or_else(|| DecodeError::truncated(FORMAT, prefix.len()));
    let (start, declared, coding) = (number(4)?, number(8)?, number(12)?);
    let coding = match coding {
        1 => PcmCoding::MuLaw,
        2..=5 => PcmCoding::Signed { bytes: coding as u16 - 1 },
        6 => PcmCoding::Float { bytes: 4 },
        7 => PcmCoding::Float { bytes: 8 },
        27 => PcmCoding::ALaw,
        other => return Err(DecodeError::unsupported(FORMAT, format!("coding {other}"))),
    };
    let channels = u16::try_from(number(20)?);
    let channels =
        channels.map_err(|_| DecodeError::malformed(FORMAT, 20, "it has more than 65,535 channels"))?;
    let format = PcmFormat { coding, is_little_endian: false, channels, sample_rate_hz: number(16)? };
    let declared = (declared != UNKNOWN_LENGTH).then_some(u64::from(declared));
    Ok(format.checked(FORMAT, 20)?.header(FORMAT, start as usize, declared, field_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

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
