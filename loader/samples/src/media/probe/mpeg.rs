//! Reads MPEG audio frame headers, and finds the first frame after unrelated bytes.
//!
//! A header has four bytes: 11 sync bits, version, layer, bit rate, sample rate, padding, channel mode. The
//! header determines the frame length.

/// Number of bytes before the first frame that are searched.
const SEARCHED_BYTES: usize = 64 << 10;
/// Minimum number of consecutive frames.
const FRAMES_MIN: usize = 3;

/// Properties shared by all frames in a clip: version and layer, sample rate, one or two channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MpegKind {
    version_and_layer: u8,
    rate: u8,
    is_mono: bool,
}

impl MpegKind {
    /// Returns the kind of the frame that starts with these bytes.
    pub(crate) fn of(frame: &[u8]) -> Option<Self> {
        read_header(frame).map(|(kind, _)| kind)
    }

    /// Returns the samples per frame and channel.
    pub(super) fn samples(self) -> u64 {
        match (self.version_and_layer >> 1 & 3, self.version_and_layer >> 3) {
            (3, _) => 384,
            (1, 0 | 2) => 576,
            _ => 1152,
        }
    }
}

/// Returns the offset of the first of several consecutive frames with the same kind.
pub(super) fn first_frame(bytes: &[u8]) -> Option<usize> {
    (0..bytes.len().min(SEARCHED_BYTES)).find(|&start| is_stream(&bytes[start..]))
}

/// Returns whether consecutive frames with the same kind reach the end of the bytes, or the minimum number.
fn is_stream(bytes: &[u8]) -> bool {
    let Some((kind, mut position)) = read_header(bytes) else { return false };
    for _ in 1..FRAMES_MIN {
        match bytes.get(position..).map(read_header) {
            Some(Some((next, length))) if next == kind => position += length,
            _ => return position == bytes.len(),
        }
    }
    true
}

/// Returns a frame's kind and length in bytes.
fn read_header(bytes: &[u8]) -> Option<(MpegKind, usize)> {
    const FIRST_VERSION: u8 = 3;
    const KILOBITS_1: [[usize; 14]; 3] = [
        [32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
        [32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384],
        [32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448],
    ];
    const KILOBITS_2: [[usize; 14]; 3] = [
        [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
        [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
        [32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256],
    ];
    let &[0xFF, second, third, fourth, ..] = bytes else { return None };
    let (version, layer) = (second >> 3 & 3, second >> 1 & 3);
    let (rate, padding) = (third >> 2 & 3, usize::from(third >> 1 & 1));
    if second >> 5 != 7 || version == 1 || layer == 0 || rate == 3 {
        return None;
    }
    // Layer III has the number 1.
    let place = usize::from(layer) - 1;
    let kilobits = if version == FIRST_VERSION { KILOBITS_1[place] } else { KILOBITS_2[place] };
    let bits = 1000 * kilobits.get(usize::from(third >> 4).checked_sub(1)?)?;
    let hertz = [44_100, 48_000, 32_000][usize::from(rate)] / [4, 1, 2, 1][usize::from(version)];
    let length = match (layer, version) {
        (3, _) => 4 * (12 * bits / hertz + padding),
        (1, 0 | 2) => 72 * bits / hertz + padding,
        _ => 144 * bits / hertz + padding,
    };
    let kind = MpegKind { version_and_layer: second & 0x1E, rate, is_mono: fourth >> 6 == 3 };
    Some((kind, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::fixtures::{SINE_MP3, bytes_of_hex};

    #[test]
    fn frames_are_found_behind_zeros_and_junk() {
        let clip = bytes_of_hex(SINE_MP3);
        for junk in [vec![], vec![0; 1000], b"\xff\xe3\x48junk \xff\xfb\x90\xc4".repeat(30)] {
            assert_eq!(first_frame(&[&junk[..], &clip].concat()), Some(junk.len()));
        }
        assert_eq!(first_frame(&[0x55; 5000]), None);
        assert_eq!(first_frame(b"\xff\xfb\x90\xc4 one header alone"), None);
    }

    #[test]
    fn the_length_of_a_frame_follows_from_its_header() {
        let length = |header: [u8; 4]| read_header(&header).map(|(_, length)| length);
        assert_eq!(length([0xFF, 0xFB, 0x90, 0x00]), Some(417), "128 kbit/s at 44.1 kHz");
        assert_eq!(length([0xFF, 0xFD, 0xA4, 0x00]), Some(576), "layer II, 192 kbit/s at 48 kHz");
        assert_eq!(length([0xFF, 0xF3, 0x40, 0x00]), Some(104), "MPEG-2, 32 kbit/s at 22.05 kHz");
        assert_eq!(length([0xFF, 0xFB, 0xF0, 0x00]), None);
        assert_eq!(length([0xFF, 0xFB, 0x9C, 0x00]), None);
    }
}
