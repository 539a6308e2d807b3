//! Decodes audio clips to interleaved f32 samples.
//!
//! WAV, FLAC, MP3, Ogg Vorbis and Ogg Opus, at their own rate and channels, Opus at 48 kHz; encoder delay and
//! padding are removed where the file declares them. FLAC frames and Ogg pages carry checksums: those that
//! fail are not counted, and a clip with fewer frames than declared is damaged, as is a FLAC whose samples
//! have another MD5 than declared.

use std::borrow::Cow;

use symphonia::core::audio::GenericAudioBufferRef;
use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::CODEC_ID_OPUS;
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::FormatReader;

use super::error::DecodeError;
use super::limits::{AudioLimits, Strictness, check_limit};
use super::opus::OpusPackets;
use super::probe::{
    AudioFormat, WavHeader, audio_format, audio_track, counted_frames, open_reader, read_wav_header,
    symphonia_error,
};

const SAMPLE_BYTES: u64 = size_of::<f32>() as u64;

/// Decoded audio clip.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Audio {
    /// Frames per second.
    pub sample_rate_hz: u32,
    /// Channels, at least 1.
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
/// A WAV, MP3 or Ogg stream that merely ends early is delivered with [`Audio::is_truncated`] set, if any of
/// it is left.
///
/// # Errors
/// See [`DecodeError`]. In strict mode a FLAC that ends early is [`DecodeError::Truncated`], and frames or
/// pages that fail their checksum, or samples with another MD5 than a FLAC declares, are
/// [`DecodeError::Malformed`]; in lenient mode the rest is delivered and flagged.
pub fn decode_audio(bytes: &[u8], limits: &AudioLimits) -> Result<Audio, DecodeError> {
    let format = audio_format(bytes)?;
    if format == AudioFormat::Wav {
        return decode_wav(bytes, limits);
    }
    let reader = open_reader(format, bytes)?;
    let declared_frames = counted_frames(format, audio_track(format, reader.as_ref())?, bytes);
    let mut clip = ClipDecoder::new(format, reader, bytes.len(), limits)?;
    if let Some(frames) = declared_frames {
        clip.check_size(frames)?;
    }
    let end = clip.decode()?;
    // Frames carry checksums of their own; the MD5 of the header finds frames that were replaced, or decoded
    // wrongly.
    let is_other = end == ClipEnd::Proper && clip.decoder.is_verified_other();
    let mut audio = clip.audio;
    let is_short = declared_frames.is_some_and(|declared| (audio.frames() as u64) < declared);
    if is_other && !is_short && limits.strictness == Strictness::Strict {
        let reason = "the decoded samples do not have the MD5 that its header declares";
        return Err(DecodeError::malformed(format.name(), 0, reason));
    }
    audio.is_truncated = is_short || is_other || end != ClipEnd::Proper;
    if limits.strictness == Strictness::Strict && audio.is_truncated {
        match (format, end) {
            _ if audio.samples.is_empty() => return Err(DecodeError::truncated(format.name(), bytes.len())),
            (AudioFormat::Flac, ClipEnd::Early) => {
                return Err(DecodeError::truncated(format.name(), bytes.len()));
            }
            (AudioFormat::Flac, _) | (AudioFormat::Ogg, ClipEnd::Proper) => {
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

fn decode_wav(bytes: &[u8], limits: &AudioLimits) -> Result<Audio, DecodeError> {
    let header = read_wav_header(bytes, bytes.len() as u64)?;
    check_limit(
        "wav",
        u64::from(header.channels),
        "channels",
        "channels_max",
        u64::from(limits.channels_max),
    )?;
    let bytes = with_actual_length(bytes, &header);
    let mut clip =
        ClipDecoder::new(AudioFormat::Wav, open_reader(AudioFormat::Wav, &bytes)?, bytes.len(), limits)?;
    if header.is_short && header.length.frames == 0 && limits.strictness == Strictness::Strict {
        return Err(DecodeError::truncated("wav", bytes.len()));
    }
    clip.check_size(header.length.frames)?;
    clip.decode()?;
    Ok(Audio { is_truncated: header.is_short, ..clip.audio })
}

/// Patches the length of the data chunk, because the demultiplexer would wait for the declared bytes.
fn with_actual_length<'a>(bytes: &'a [u8], header: &WavHeader) -> Cow<'a, [u8]> {
    if !header.is_length_wrong {
        return Cow::Borrowed(bytes);
    }
    let end = header.data_length_at + 4 + header.data_bytes as usize;
    let mut patched = bytes[..end].to_vec();
    let data_bytes = header.data_bytes as u32;
    patched[header.data_length_at..header.data_length_at + 4].copy_from_slice(&data_bytes.to_le_bytes());
    patched[4..8].copy_from_slice(&(end as u32 - 8).to_le_bytes());
    Cow::Owned(patched)
}

/// End of the packets of a clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClipEnd {
    /// All packets decoded.
    Proper,
    /// The stream ends before its last packet.
    Early,
    /// A packet could not be decoded.
    Broken,
}

/// Decoder of the packets of a clip.
enum PacketDecoder {
    /// Of Opus.
    Opus(Box<OpusPackets>),
    /// Of another codec.
    Other(Box<dyn AudioDecoder>),
}

impl PacketDecoder {
    /// Returns whether the samples have another checksum than declared.
    fn is_verified_other(&mut self) -> bool {
        match self {
            Self::Opus(_) => false,
            Self::Other(decoder) => decoder.finalize().verify_ok == Some(false),
        }
    }
}

/// Decoder state of one clip.
struct ClipDecoder<'a> {
    format: AudioFormat,
    reader: Box<dyn FormatReader + 'a>,
    decoder: PacketDecoder,
    track: u32,
    bytes: usize,
    limits: &'a AudioLimits,
    audio: Audio,
}

impl<'a> ClipDecoder<'a> {
    fn new(
        format: AudioFormat,
        reader: Box<dyn FormatReader + 'a>,
        bytes: usize,
        limits: &'a AudioLimits,
    ) -> Result<Self, DecodeError> {
        let track = audio_track(format, reader.as_ref())?;
        let Some(CodecParameters::Audio(parameters)) = &track.codec_params else {
            return Err(DecodeError::unsupported(format.name(), "unknown codec"));
        };
        let channels = parameters.channels.as_ref().map_or(0, |channels| channels.count() as u64);
        check_limit(format.name(), channels, "channels", "channels_max", u64::from(limits.channels_max))?;
        let sample_rate_hz = parameters.sample_rate.unwrap_or(0);
        if channels == 0 || sample_rate_hz == 0 {
            return Err(DecodeError::malformed(
                format.name(),
                0,
                "the number of channels or the sample rate is 0",
            ));
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
                .map_err(|error| symphonia_error(format, error, bytes))?;
            PacketDecoder::Other(decoder)
        };
        let audio = Audio { sample_rate_hz, channels: channels as u16, ..Audio::default() };
        Ok(Self { format, track: track.id, reader, decoder, bytes, limits, audio })
    }

    fn check_size(&self, frames: u64) -> Result<(), DecodeError> {
        let decoded_bytes = frames.saturating_mul(u64::from(self.audio.channels) * SAMPLE_BYTES);
        let limit = self.limits.decoded_bytes_max;
        check_limit(self.format.name(), decoded_bytes, "decoded bytes", "decoded_bytes_max", limit)
    }

    /// Decodes all packets; damage ends the clip or leaves a gap, as the result reports.
    fn decode(&mut self) -> Result<ClipEnd, DecodeError> {
        let mut end = ClipEnd::Proper;
        loop {
            let packet = match self.reader.next_packet() {
                Ok(Some(packet)) => packet,
                Ok(None) => return Ok(end),
                Err(Error::IoError(_)) => return Ok(ClipEnd::Early),
                Err(error) => return Err(symphonia_error(self.format, error, self.bytes)),
            };
            if packet.track_id != self.track {
                continue;
            }
            let decoder = match &mut self.decoder {
                PacketDecoder::Other(decoder) => decoder,
                PacketDecoder::Opus(opus) => {
                    let trimmed = packet.trim_end.get();
                    if !opus.decode(&packet.data, trimmed, &mut self.audio.samples) {
                        end = ClipEnd::Broken;
                    }
                    self.check_size(self.audio.frames() as u64)?;
                    continue;
                }
            };
            match decoder.decode(&packet) {
                Ok(buffer) => append(&buffer, self.format, self.limits, &mut self.audio)?,
                // Later packets may be intact; the gap shows in the number of frames.
                Err(Error::DecodeError(_) | Error::IoError(_)) => end = ClipEnd::Broken,
                Err(error) => return Err(symphonia_error(self.format, error, self.bytes)),
            }
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
        assert!(matches!(refused(wav(2, 8, 1, 8_000, &[0; 8])), DecodeError::Unsupported { .. }));
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
            let error = decode_audio(&other, &AudioLimits::default()).unwrap_err().to_string();
            assert!(error.contains("MD5"), "{error}");
            let audio = decoded_leniently(&other).unwrap();
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
        // The first frame declares the length of the others.
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
}
