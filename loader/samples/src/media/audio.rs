//! Decodes audio clips to interleaved f32 samples.
//!
//! Reads WAV, AIFF, AU, FLAC, MP3, Ogg Vorbis and Ogg Opus with the stored rate and channels, Opus at 48 kHz;
//! encoder delay and padding are removed where the file declares them. FLAC frames and Ogg pages have
//! checksums: frames and pages with a wrong checksum are not counted, and a clip with fewer frames than
//! declared is damaged. In strict mode, a FLAC file whose samples do not match the declared MD5 is damaged as
//! well.

use symphonia::core::audio::GenericAudioBufferRef;
use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::CODEC_ID_OPUS;
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::{FormatReader, Track};
use symphonia::core::packet::Packet;

use super::DecodeError;
use super::opus::OpusPackets;
use super::pcm::decode_pcm;
use super::probe::{
    AudioFormat, Content, MpegKind, PcmHeader, audio_content, audio_track, declared_frames, open_reader,
    packet_frames, pcm_header, symphonia_error,
};
use super::shape::{AudioLimits, Strictness, check_limit};

const SAMPLE_BYTES: u64 = size_of::<f32>() as u64;

/// Decoded audio clip.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Audio {
    /// Sample rate in frames per second.
    pub sample_rate_hz: u32,
    /// Number of channels, at least 1.
    pub channels: u16,
    /// `[frames, channels]`, full scale at -1 to 1; lossy formats may overshoot.
    pub samples: Vec<f32>,
    /// Whether the clip is shorter than its header declares.
    pub is_truncated: bool,
}

impl Audio {
    /// Returns the number of frames: samples per channel.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.samples.len() / usize::from(self.channels.max(1))
    }
}

/// Decodes an audio clip.
///
/// A WAV, AIFF, AU, MP3 or Ogg stream that merely ends early is delivered with [`Audio::is_truncated`] set,
/// if any data are left. If a file has several Ogg streams in sequence, the first is delivered, and flagged.
///
/// # Errors
/// See [`DecodeError`]. Unless decoding is lenient, a FLAC that ends early is [`DecodeError::Truncated`], and
/// frames or pages with a wrong checksum are [`DecodeError::Malformed`], in strict mode also samples that do
/// not match the declared FLAC MD5; else the rest is delivered and flagged.
pub fn decode_audio(bytes: &[u8], limits: &AudioLimits) -> Result<Audio, DecodeError> {
    let content = audio_content(bytes)?;
    if let Some(header) = pcm_header(content, content.bytes.len() as u64) {
        return decode_samples(content.bytes, &header?, limits);
    }
    let format = content.format;
    let reader = open_reader(content)?;
    let track = audio_track(format, reader.as_ref())?.clone();
    let mut clip = ClipDecoder::new(content, reader, track, limits)?;
    if let Some(frames) = clip.declared_frames() {
        clip.check_size(frames)?;
    }
    let end = clip.decode()?;
    // Frames have checksums; the MD5 in the header finds frames that were replaced, or decoded wrongly.
    let is_other = end == ClipEnd::Proper && clip.decoder.is_verified_other();
    let declared_frames = clip.declared_frames();
    let mut audio = clip.audio;
    let is_short =
        end != ClipEnd::Next && declared_frames.is_some_and(|declared| (audio.frames() as u64) < declared);
    if is_other && !is_short && limits.strictness == Strictness::Strict {
        let reason = "the decoded samples do not have the MD5 that its header declares";
        return Err(DecodeError::malformed(format.name(), 0, reason));
    }
    audio.is_truncated = is_short || is_other || end != ClipEnd::Proper;
    if limits.strictness != Strictness::Lenient && audio.is_truncated {
        match (format, end) {
            _ if audio.samples.is_empty() => return Err(DecodeError::truncated(format.name(), bytes.len())),
            (AudioFormat::Flac, ClipEnd::Early) => {
                return Err(DecodeError::truncated(format.name(), bytes.len()));
            }
            (AudioFormat::Flac, _) | (AudioFormat::Ogg, ClipEnd::Proper)
                if is_short || end == ClipEnd::Broken =>
            {
                return Err(missing_frames(format, &audio));
            }
            _ => {}
        }
    }
    Ok(audio)
}

fn missing_frames(format: AudioFormat, audio: &Audio) -> DecodeError {
    let reason = format!("frames are missing: only {} passed their checksums", audio.frames());
    DecodeError::malformed(format.name(), 0, reason)
}

/// Decodes samples that a WAV, AIFF or AU header describes.
fn decode_samples(bytes: &[u8], header: &PcmHeader, limits: &AudioLimits) -> Result<Audio, DecodeError> {
    check_channels(header.format, header.channels.into(), limits)?;
    if header.is_short && header.length.frames == 0 && limits.strictness != Strictness::Lenient {
        return Err(DecodeError::truncated(header.format, bytes.len()));
    }
    check_decoded(header.format, header.length.frames, header.channels, limits)?;
    Ok(Audio {
        sample_rate_hz: header.length.sample_rate_hz,
        channels: header.channels,
        samples: decode_pcm(bytes, header),
        is_truncated: header.is_short,
    })
}

fn check_channels(format: &'static str, channels: u64, limits: &AudioLimits) -> Result<(), DecodeError> {
    check_limit(format, channels, "channels", "channels_max", u64::from(limits.channels_max))
}

fn check_decoded(
    format: &'static str,
    frames: u64,
    channels: u16,
    limits: &AudioLimits,
) -> Result<(), DecodeError> {
    let decoded_bytes = frames.saturating_mul(u64::from(channels) * SAMPLE_BYTES);
    check_limit(format, decoded_bytes, "decoded bytes", "decoded_bytes_max", limits.decoded_bytes_max)
}

/// How a clip's packets end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClipEnd {
    /// All packets decoded.
    Proper,
    /// The stream ends before the last packet.
    Early,
    /// A packet could not be decoded.
    Broken,
    /// Another stream follows, or frames with a different format.
    Next,
}

/// Packet decoder of a clip.
enum PacketDecoder {
    /// Opus decoder.
    Opus(Box<OpusPackets>),
    /// Decoder for any other codec.
    Other(Box<dyn AudioDecoder>),
}

impl PacketDecoder {
    /// Returns whether the samples do not match the declared checksum.
    fn is_verified_other(&mut self) -> bool {
        match self {
            Self::Opus(_) => false,
            Self::Other(decoder) => decoder.finalize().verify_ok == Some(false),
        }
    }
}

/// Decoder state for a clip.
struct ClipDecoder<'a> {
    content: Content<'a>,
    reader: Box<dyn FormatReader + 'a>,
    decoder: PacketDecoder,
    track: Track,
    limits: &'a AudioLimits,
    audio: Audio,
    /// Position of the first frame, if not 0.
    start: u64,
}

impl<'a> ClipDecoder<'a> {
    fn new(
        content: Content<'a>,
        reader: Box<dyn FormatReader + 'a>,
        track: Track,
        limits: &'a AudioLimits,
    ) -> Result<Self, DecodeError> {
        let format = content.format;
        let Some(CodecParameters::Audio(parameters)) = &track.codec_params else {
            return Err(DecodeError::unsupported(format.name(), "unknown codec"));
        };
        let channels = parameters.channels.as_ref().map_or(0, |channels| channels.count() as u64);
        check_channels(format.name(), channels, limits)?;
        let sample_rate_hz = parameters.sample_rate.unwrap_or(0);
        if channels == 0 || sample_rate_hz == 0 {
            let reason = "the number of channels or the sample rate is 0";
            return Err(DecodeError::malformed(format.name(), 0, reason));
        }
        // Without an encoder delay the length is an estimate, and gapless decoding would cut off frames
        // beyond it.
        let is_gapless = format != AudioFormat::Mp3 || track.delay.is_some();
        let options = AudioDecoderOptions::default();
        let options = options.gapless(is_gapless).verify(parameters.verification_check.is_some());
        let decoder = if parameters.codec == CODEC_ID_OPUS {
            let head = parameters.extra_data.as_deref().unwrap_or_default();
            PacketDecoder::Opus(Box::new(OpusPackets::new(head)?))
        } else {
            let decoder = symphonia::default::get_codecs()
                .make_audio_decoder(parameters, &options)
                .map_err(|error| symphonia_error(format, error, content.bytes.len()))?;
            PacketDecoder::Other(decoder)
        };
        let audio = Audio { sample_rate_hz, channels: channels as u16, ..Audio::default() };
        Ok(Self { content, track, reader, decoder, limits, audio, start: 0 })
    }

    /// Returns the number of declared frames without the frames before the clip's first frame, as far as
    /// packets were read.
    fn declared_frames(&self) -> Option<u64> {
        declared_frames(self.content, &self.track, self.start)
    }

    fn check_size(&self, frames: u64) -> Result<(), DecodeError> {
        check_decoded(self.content.format.name(), frames, self.audio.channels, self.limits)
    }

    /// Decodes all packets; damage ends the clip or leaves a gap, as the result reports.
    fn decode(&mut self) -> Result<ClipEnd, DecodeError> {
        let mut end = ClipEnd::Proper;
        let mut kind = None;
        let mut is_first = true;
        loop {
            let packet = match self.reader.next_packet() {
                Ok(Some(packet)) => packet,
                Ok(None) => return Ok(end),
                Err(Error::IoError(_)) => return Ok(ClipEnd::Early),
                Err(Error::ResetRequired) => return Ok(ClipEnd::Next),
                Err(error) => {
                    return Err(symphonia_error(self.content.format, error, self.content.bytes.len()));
                }
            };
            if packet.track_id != self.track.id {
                continue;
            }
            if std::mem::take(&mut is_first) {
                self.start = (packet.pts.get() + packet.trim_start.get() as i64).max(0) as u64;
            }
            if self.content.format == AudioFormat::Mp3 {
                let own = MpegKind::of(&packet.data);
                if *kind.get_or_insert(own) != own {
                    return Ok(ClipEnd::Next);
                }
            }
            if !self.decode_packet(&packet)? {
                end = ClipEnd::Broken;
            }
        }
    }

    /// Decodes a packet; returns whether decoding succeeded.
    fn decode_packet(&mut self, packet: &Packet) -> Result<bool, DecodeError> {
        let format = self.content.format;
        let decoder = match &mut self.decoder {
            PacketDecoder::Other(decoder) => decoder,
            PacketDecoder::Opus(opus) => {
                let is_decoded = opus.decode(&packet.data, packet.trim_end.get(), &mut self.audio.samples);
                self.check_size(self.audio.frames() as u64)?;
                return Ok(is_decoded);
            }
        };
        match decoder.decode(packet) {
            Ok(buffer) => append(&buffer, format, self.limits, &mut self.audio).map(|()| true),
            // Later packets may be intact. MPEG frames have no checksum, so the length must not have a gap.
            Err(Error::DecodeError(_) | Error::IoError(_)) if format == AudioFormat::Mp3 => {
                let frames = self.audio.frames() as u64 + packet_frames(format, &self.track, packet);
                self.check_size(frames)?;
                self.audio.samples.resize(frames as usize * usize::from(self.audio.channels), 0.0);
                Ok(false)
            }
            // The gap is visible in the number of frames.
            Err(Error::DecodeError(_) | Error::IoError(_)) => Ok(false),
            Err(error) => Err(symphonia_error(format, error, self.content.bytes.len())),
        }
    }
}

fn append(
    buffer: &GenericAudioBufferRef<'_>,
    format: AudioFormat,
    limits: &AudioLimits,
    audio: &mut Audio,
) -> Result<(), DecodeError> {
    let spec = buffer.spec();
    if spec.rate() != audio.sample_rate_hz || spec.channels().count() != usize::from(audio.channels) {
        return Err(DecodeError::unsupported(format.name(), "the rate or channels change inside the clip"));
    }
    let start = audio.samples.len();
    let end = start + buffer.frames() * usize::from(audio.channels);
    let decoded_bytes = end as u64 * SAMPLE_BYTES;
    check_limit(
        format.name(),
        decoded_bytes,
        "decoded bytes",
        "decoded_bytes_max",
        limits.decoded_bytes_max,
    )?;
    audio.samples.resize(end, 0.0);
    buffer.copy_to_slice_interleaved(&mut audio.samples[start..]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::AudioLength;

    use super::*;
    use crate::media::fixtures::{RAMP_FLAC, SINE_MP3, bytes_of_hex, wav};
    use crate::media::probe::audio_shape;

    const PCM: u16 = 1;
    const FLOAT: u16 = 3;

    fn decoded(bytes: &[u8]) -> Audio {
        decode_audio(bytes, &AudioLimits::default()).unwrap()
    }

    fn decoded_leniently(bytes: &[u8]) -> Result<Audio, DecodeError> {
        decode_audio(bytes, &AudioLimits { strictness: Strictness::Lenient, ..AudioLimits::default() })
    }

    fn pcm16(values: &[i16]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn every_wav_sample_type_has_the_right_scale() {
        let half = [
            (PCM, 8, vec![192]),
            (PCM, 16, vec![0, 64]),
            (PCM, 24, vec![0, 0, 64]),
            (PCM, 32, vec![0, 0, 0, 64]),
            (FLOAT, 32, 0.5f32.to_le_bytes().to_vec()),
            (FLOAT, 64, 0.5f64.to_le_bytes().to_vec()),
        ];
        for (tag, bits, sample) in half {
            let audio = decoded(&wav(tag, bits, 1, 8_000, &sample.repeat(3)));
            assert_eq!(audio.samples, [0.5; 3], "{bits} bits, format {tag}");
            assert!(!audio.is_truncated);
        }
    }

    #[test]
    fn channels_are_interleaved_and_empty_clips_are_fine() {
        let values: Vec<i16> = (0..32).map(|value| value * 1024).collect();
        let audio = decoded(&wav(PCM, 16, 16, 48_000, &pcm16(&values)));
        assert_eq!((audio.channels, audio.frames(), audio.sample_rate_hz), (16, 2, 48_000));
        assert!(audio.samples.iter().zip(&values).all(|(sample, value)| (sample * 32768.0) as i16 == *value));
        assert_eq!(decoded(&wav(PCM, 16, 1, 8_000, &[])).frames(), 0);
    }

    #[test]
    fn short_wav_delivers_what_is_there() {
        let file = wav(PCM, 16, 1, 8_000, &pcm16(&[100; 5_000]));
        for missing in [1, 2, 999, 9_998] {
            let audio = decoded(&file[..file.len() - missing]);
            assert_eq!((audio.frames(), audio.is_truncated), ((10_000 - missing) / 2, true));
        }
        let empty = &file[..44];
        let refused = decode_audio(empty, &AudioLimits::default());
        assert!(matches!(refused, Err(DecodeError::Truncated { offset: 44, .. })));
        assert!(decoded_leniently(empty).unwrap().is_truncated);
    }

    #[test]
    fn wav_of_unknown_length_reaches_to_the_end() {
        let mut file = wav(PCM, 16, 2, 8_000, &pcm16(&[7; 2_400]));
        file[4..8].fill(0xFF);
        file[40..44].fill(0xFF);
        let audio = decoded(&file);
        assert_eq!((audio.frames(), audio.is_truncated), (1_200, false));
    }

    #[test]
    fn absurd_wav_headers_are_refused() {
        let refused = |file: Vec<u8>| decode_audio(&file, &AudioLimits::default()).unwrap_err();
        assert!(matches!(refused(wav(PCM, 16, 1, 0, &[0; 8])), DecodeError::Malformed { .. }));
        assert!(matches!(refused(wav(PCM, 16, u16::MAX, 8_000, &[0; 8])), DecodeError::Malformed { .. }));
        let many = refused(wav(PCM, 8, 65, 8_000, &[0; 650]));
        assert!(matches!(many, DecodeError::TooLarge { limit: "channels_max", actual: 65, .. }));
        assert!(matches!(refused(wav(0x31, 8, 1, 8_000, &[0; 8])), DecodeError::Unsupported { .. }));
        let limits = AudioLimits { decoded_bytes_max: 100, ..AudioLimits::default() };
        let long = decode_audio(&wav(PCM, 16, 1, 8_000, &[0; 52]), &limits);
        assert!(matches!(long, Err(DecodeError::TooLarge { limit: "decoded_bytes_max", actual: 104, .. })));
    }

    #[test]
    fn flac_is_exact() {
        let audio = decoded(&bytes_of_hex(RAMP_FLAC));
        assert_eq!((audio.frames(), audio.sample_rate_hz, audio.channels), (10_000, 16_000, 1));
        assert!(
            audio.samples.iter().zip(-5_000i16..).all(|(sample, value)| (sample * 32768.0) as i16 == value)
        );
    }

    #[test]
    fn a_flac_whose_samples_have_another_md5_is_an_error_or_flagged() {
        const MD5: std::ops::Range<usize> = 26..42;
        let file = bytes_of_hex(RAMP_FLAC);
        for at in MD5 {
            let mut other = file.clone();
            other[at] ^= 1;
            let strict = AudioLimits { strictness: Strictness::Strict, ..AudioLimits::default() };
            let error = decode_audio(&other, &strict).unwrap_err().to_string();
            assert!(error.contains("MD5"), "{error}");
            let audio = decoded(&other);
            assert_eq!((audio.frames(), audio.is_truncated), (10_000, true));
        }
        let mut unknown = file;
        unknown[MD5].fill(0);
        assert!(!decoded(&unknown).is_truncated);
    }

    #[test]
    fn every_cut_and_every_flipped_bit_of_flac_frames_is_an_error_or_flagged() {
        const FRAMES_START: usize = 42;
        let file = bytes_of_hex(RAMP_FLAC);
        for at in FRAMES_START..file.len() {
            let mut rotten = file.clone();
            rotten[at] ^= 0x10;
            for damaged in [&file[..at], &rotten] {
                assert!(decode_audio(damaged, &AudioLimits::default()).is_err(), "byte {at}");
                if let Ok(audio) = decoded_leniently(damaged) {
                    assert!(audio.is_truncated && audio.frames() < 10_000, "byte {at}");
                }
            }
        }
    }

    #[test]
    fn mp3_delay_and_padding_are_cut_off() {
        let audio = decoded(&bytes_of_hex(SINE_MP3));
        assert_eq!((audio.frames(), audio.sample_rate_hz, audio.is_truncated), (1_600, 8_000, false));
        let error = audio.samples.iter().enumerate().map(|(frame, sample)| {
            let angle = std::f32::consts::TAU * 440.0 * frame as f32 / 8_000.0;
            (sample - 0.5 * angle.sin()).abs()
        });
        assert!(error.sum::<f32>() / 1_600.0 < 0.05);
    }

    #[test]
    fn the_frames_of_an_mp3_without_their_number_are_counted() {
        let file = bytes_of_hex(SINE_MP3);
        let starts: Vec<_> = (0..file.len()).filter(|&at| file[at..].starts_with(&file[..2])).collect();
        // The first frame declares the total length.
        for frames in 1..starts.len() {
            let end = starts.get(frames + 1).copied().unwrap_or(file.len());
            let rest = &file[starts[1]..end];
            let audio = decoded(rest);
            let shape = audio_shape(rest, rest.len() as u64).unwrap();
            let length = AudioLength { frames: audio.frames() as u64, sample_rate_hz: 8000 };
            assert_eq!(shape, (length, 1), "{frames} frames");
            assert!(audio.frames() > 0 && !audio.is_truncated, "{frames} frames");
        }
        assert!(starts.len() > 3);
    }

    #[test]
    fn cut_mp3_is_delivered_and_flagged() {
        let file = bytes_of_hex(SINE_MP3);
        let audio = decoded(&file[..file.len() - 100]);
        assert!(audio.is_truncated && (1..1_600).contains(&audio.frames()), "{} frames", audio.frames());
        assert!(decode_audio(&file[..3], &AudioLimits::default()).is_err());
    }

    /// Returns the frame counts according to the index and the decoder.
    fn frames(bytes: &[u8]) -> (u64, u64) {
        let (length, _) = audio_shape(bytes, bytes.len() as u64).unwrap();
        (length.frames, decoded(bytes).frames() as u64)
    }

    #[test]
    fn a_flac_of_unknown_length_is_counted() {
        let mut file = bytes_of_hex(RAMP_FLAC);
        file[21] &= 0xF0;
        file[22..26].fill(0);
        assert_eq!(frames(&file), (10_000, 10_000));
        assert_eq!(decoded(&file).samples, decoded(&bytes_of_hex(RAMP_FLAC)).samples);
        let prefix = audio_shape(&file[..60], file.len() as u64);
        assert!(matches!(prefix, Err(DecodeError::Truncated { .. })), "its end has to be read");
    }

    #[test]
    fn an_mp3_may_start_with_zeros_or_junk() {
        let file = bytes_of_hex(SINE_MP3);
        for front in [vec![0; 1_000], b"junk \xff\xe3 and more ".repeat(15)] {
            let other = [&front[..], &file].concat();
            assert_eq!(decoded(&other), decoded(&file));
            assert_eq!(frames(&other), (1_600, 1_600));
        }
    }

    #[test]
    fn the_index_and_the_decoder_agree_about_a_cut_mp3() {
        let file = bytes_of_hex(SINE_MP3);
        let mut decoded = 0;
        for length in (500..file.len()).step_by(50) {
            let cut = &file[..length];
            let Ok(audio) = decode_audio(cut, &AudioLimits::default()) else { continue };
            let (indexed, _) = audio_shape(cut, length as u64).unwrap();
            assert_eq!(indexed.frames, audio.frames() as u64, "cut to {length}");
            decoded += 1;
        }
        assert!(decoded > 3);
    }

    #[test]
    fn unknown_audio_is_named() {
        let refused = |bytes: &[u8]| decode_audio(bytes, &AudioLimits::default()).unwrap_err().to_string();
        assert!(refused(b"\0\0\0\x20ftypM4A \0\0\0\0").contains("it is AAC in MP4 (M4A); expected a WAV"));
        assert!(refused(b"\x1a\x45\xdf\xa3 and the rest").contains("it is Matroska or WebM"));
        assert!(
            refused(b"no audio in this text").contains("expected a WAV, AIFF, AU, FLAC, MP3 or Ogg stream")
        );
    }
}
