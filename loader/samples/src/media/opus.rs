//! Decodes Opus packets to interleaved samples at 48 kHz.
//!
//! Uses `ropus`, a port of the fixed-point reference decoder: samples have 16 bits. The stream head has the
//! number of frames to skip, a gain, and the map from coded streams to channels, mono and stereo or surround.
//!
//! # Source
//! RFC 6716; the head: RFC 7845, section 5.1.

use ropus::OpusMSDecoder;

use super::DecodeError;

/// Decoded frames per second, regardless of the encoded rate.
const RATE_HZ: i32 = 48_000;
/// Maximum packet length in frames, 120 ms.
const FRAMES_MAX: usize = 5760;
/// Full scale for samples.
const SCALE: f32 = 32_768.0;
/// Gain steps per factor of ten.
const GAIN_DECADE: f32 = 20.0 * 256.0;

/// Packet decoder for a stream.
pub(super) struct OpusPackets {
    decoder: OpusMSDecoder,
    channels: usize,
    /// Sample factor.
    gain: f32,
    /// Number of frames at the stream start that still have to be dropped.
    skipped_frames: usize,
    pcm: Vec<i16>,
}

impl OpusPackets {
    /// Creates a decoder.
    ///
    /// - `head`: first packet in the stream
    pub(super) fn new(head: &[u8]) -> Result<Self, DecodeError> {
        let cut = || DecodeError::malformed("ogg", 0, "the head of the Opus stream is cut");
        let byte = |at: usize| head.get(at).copied().ok_or_else(cut);
        let two = |at: usize| Ok::<_, DecodeError>([byte(at)?, byte(at + 1)?]);
        let channels = byte(9)?;
        let (streams, coupled, map) = match byte(18)? {
            0 => (1, channels.saturating_sub(1), [0, 1].get(..usize::from(channels))),
            1 => (byte(19)?, byte(20)?, head.get(21..21 + usize::from(channels))),
            family => {
                let what = format!("Opus with channels of mapping family {family}");
                return Err(DecodeError::unsupported("ogg", what));
            }
        };
        let map = map.ok_or_else(cut)?;
        let [all, streams, coupled] = [channels, streams, coupled].map(i32::from);
        let decoder = OpusMSDecoder::new(RATE_HZ, all, streams, coupled, map)
            .map_err(|_| DecodeError::malformed("ogg", 0, "the Opus streams do not make its channels"))?;
        let steps = f32::from(i16::from_le_bytes(two(16)?));
        let channels = usize::from(channels);
        Ok(Self {
            decoder,
            channels,
            gain: 10.0_f32.powf(steps / GAIN_DECADE) / SCALE,
            skipped_frames: u16::from_le_bytes(two(10)?).into(),
            pcm: vec![0; FRAMES_MAX * channels],
        })
    }

    /// Decodes a packet, and appends the frames except those that the stream drops.
    ///
    /// - `trimmed_frames`: number of frames to drop at the packet end
    ///
    /// Returns whether the packet could be decoded.
    pub(super) fn decode(&mut self, packet: &[u8], trimmed_frames: u64, into: &mut Vec<f32>) -> bool {
        let Ok(bytes) = i32::try_from(packet.len()) else { return false };
        if bytes == 0 {
            return false;
        }
        let decoded = self.decoder.decode(Some(packet), bytes, &mut self.pcm, FRAMES_MAX as i32, false);
        let Ok(frames) = decoded.map(|frames| frames as usize) else { return false };
        let skipped = self.skipped_frames.min(frames);
        self.skipped_frames -= skipped;
        let trimmed = usize::try_from(trimmed_frames).unwrap_or(usize::MAX);
        let end = frames.saturating_sub(trimmed).max(skipped);
        let taken = &self.pcm[skipped * self.channels..end * self.channels];
        into.extend(taken.iter().map(|&sample| f32::from(sample) * self.gain));
        true
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use symphonia::core::checksum::Crc32;
    use symphonia::core::io::Monitor;

    use super::super::shape::AudioLimits;
    use super::*;
    use crate::media::probe::audio_shape;
    use crate::media::{Audio, decode_audio};

    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/opus");
    /// Maximum difference to the floating-point reference decoder, and root mean square difference.
    const APART: [f32; 2] = [6e-4, 8e-5];

    #[derive(Deserialize)]
    struct Recorded {
        name: String,
        channels: u16,
        frames: usize,
        /// Every 97th sample.
        samples: Vec<f32>,
    }

    fn recorded() -> Vec<Recorded> {
        serde_json::from_slice(&std::fs::read(format!("{GOLDEN}/samples.json")).unwrap()).unwrap()
    }

    fn file(name: &str) -> Vec<u8> {
        std::fs::read(format!("{GOLDEN}/{name}.opus")).unwrap()
    }

    fn decoded(bytes: &[u8]) -> Audio {
        decode_audio(bytes, &AudioLimits::default()).unwrap()
    }

    #[test]
    fn samples_are_those_of_the_reference_decoder() {
        let recorded = recorded();
        assert_eq!(recorded.len(), 6);
        for truth in recorded {
            let (name, bytes) = (&truth.name, file(&truth.name));
            let audio = decoded(&bytes);
            assert_eq!((audio.sample_rate_hz, audio.channels), (48_000, truth.channels), "{name}");
            assert_eq!((audio.frames(), audio.is_truncated), (truth.frames, false), "{name}");
            let (length, _) = audio_shape(&bytes, bytes.len() as u64).unwrap();
            assert_eq!(length.frames, truth.frames as u64, "{name}: of the shape");
            let own = audio.samples.iter().step_by(97);
            assert_eq!(own.len(), truth.samples.len(), "{name}");
            let apart: Vec<f32> = own.zip(&truth.samples).map(|(own, truth)| (own - truth).abs()).collect();
            let most = apart.iter().copied().fold(0.0, f32::max);
            let square = apart.iter().map(|apart| apart * apart).sum::<f32>() / apart.len() as f32;
            assert!(most <= APART[0] && square.sqrt() <= APART[1], "{name}: {most}, {}", square.sqrt());
            assert!(audio.samples.iter().any(|sample| sample.abs() > 0.1), "{name} is not silent");
        }
    }

    #[test]
    fn a_cut_or_damaged_file_is_an_error_or_flagged() {
        let bytes = file("hybrid");
        let whole = decoded(&bytes);
        let strict = AudioLimits::default();
        for at in (0..bytes.len()).step_by(7) {
            let mut rotten = bytes.clone();
            rotten[at] ^= 0x10;
            for damaged in [&bytes[..at], &rotten] {
                if let Ok(audio) = decode_audio(damaged, &strict) {
                    let is_same = audio.frames() == whole.frames();
                    assert!(audio.is_truncated || is_same, "byte {at}: {} frames", audio.frames());
                }
            }
        }
    }

    #[test]
    fn the_gain_of_the_head_scales_samples() {
        let mut head = b"OpusHead\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        let quiet = OpusPackets::new(&head).unwrap();
        assert!((quiet.gain * SCALE - 1.0).abs() < 1e-6);
        // 6.02 dB
        head[16..18].copy_from_slice(&1541_i16.to_le_bytes());
        assert!((OpusPackets::new(&head).unwrap().gain * SCALE - 2.0).abs() < 1e-3);
    }

    #[test]
    fn heads_that_make_no_channels_are_refused() {
        let refused = |head: &[u8]| OpusPackets::new(head).err().map(|error| error.to_string()).unwrap();
        let head = |channels: u8, rest: &[u8]| [b"OpusHead\x01", &[channels][..], &[0; 8], rest].concat();
        assert!(refused(&head(3, &[0])).contains("head of the Opus stream is cut"));
        assert!(refused(&head(2, &[])).contains("head of the Opus stream is cut"));
        assert!(refused(&head(6, &[1, 4, 2, 0, 1])).contains("head of the Opus stream is cut"));
        assert!(refused(&head(6, &[1, 1, 1, 0, 1, 2, 3, 4, 5])).contains("do not make its channels"));
        assert!(refused(&head(2, &[255, 2, 0, 0, 1])).contains("mapping family 255"));
    }

    /// Changes file pages: the position in frames, and the stream number.
    fn with_pages(file: &[u8], change: impl Fn(&mut u64, &mut u32)) -> Vec<u8> {
        let mut changed = Vec::new();
        let mut rest = file;
        while !rest.is_empty() {
            let segments = usize::from(rest[26]);
            let body: usize = rest[27..27 + segments].iter().map(|&length| usize::from(length)).sum();
            let (page, behind) = rest.split_at(27 + segments + body);
            let mut page = page.to_vec();
            let mut position = u64::from_le_bytes(page[6..14].try_into().unwrap());
            let mut serial = u32::from_le_bytes(page[14..18].try_into().unwrap());
            change(&mut position, &mut serial);
            page[6..14].copy_from_slice(&position.to_le_bytes());
            page[14..18].copy_from_slice(&serial.to_le_bytes());
            page[22..26].fill(0);
            let mut checksum = Crc32::new(0);
            checksum.process_buf_bytes(&page);
            page[22..26].copy_from_slice(&checksum.crc().to_le_bytes());
            changed.extend(page);
            rest = behind;
        }
        changed
    }

    #[test]
    fn a_stream_that_starts_late_has_the_frames_behind_its_start() {
        for name in ["hybrid", "stereo"] {
            let whole = file(name);
            let late = with_pages(&whole, |position, _| {
                if *position > 0 {
                    *position += 480_000;
                }
            });
            let (audio, truth) = (decoded(&late), decoded(&whole));
            // If the stream is a single page, padding cannot be distinguished from the start.
            let padding = audio.frames() - truth.frames();
            assert!(padding < 960 && !audio.is_truncated, "{name}: {padding} frames more");
            let (length, _) = audio_shape(&late, late.len() as u64).unwrap();
            assert_eq!(length.frames, audio.frames() as u64, "{name}: of the shape");
        }
    }

    #[test]
    fn the_first_of_chained_streams_is_delivered_and_flagged() {
        let (first, second) = (file("mono"), with_pages(&file("hybrid"), |_, serial| *serial ^= 1));
        let chained = [&first[..], &second].concat();
        let (audio, truth) = (decoded(&chained), decoded(&first));
        assert_eq!((audio.samples, audio.is_truncated), (truth.samples, true));
        let (length, _) = audio_shape(&chained, chained.len() as u64).unwrap();
        assert_eq!(length.frames as usize * usize::from(truth.channels), decoded(&chained).samples.len());
    }
}
