//! Reads the format, length, rate and channels of an audio clip.
//!
//! WAV and FLAC headers are parsed here; MP3 and Ogg lengths follow rules of their own (frame counts, encoder
//! delay, position of the last page), which the demultiplexers of [`crate::media`] implement.

use std::io::{Cursor, ErrorKind};

use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::CODEC_ID_OPUS;
use symphonia::core::errors::Error;
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackType};
use symphonia::core::io::{MediaSourceStream, MediaSourceStreamOptions};
use symphonia::default::formats::{FlacReader, MpaReader, OggReader, WavReader};

use super::{AudioLength, flac, ogg, wav};
use crate::media::error::DecodeError;

/// An audio container that [`crate::media::decode_audio`] reads, recognized by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each variant is named after its format")]
pub enum AudioFormat {
    Wav,
    Flac,
    Mp3,
    Ogg,
}

impl AudioFormat {
    /// Recognizes the format by its content, or returns `None`; a leading ID3 tag is skipped.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match without_tags(bytes) {
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Some(Self::Wav),
            [b'f', b'L', b'a', b'C', ..] => Some(Self::Flac),
            [b'O', b'g', b'g', b'S', ..] => Some(Self::Ogg),
            [0xFF, second, ..] if second & 0xE6 == 0xE2 => Some(Self::Mp3),
            _ => None,
        }
    }

    /// Returns the lower-case name used in errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wav => "wav",
            Self::Flac => "flac",
            Self::Mp3 => "mp3",
            Self::Ogg => "ogg",
        }
    }
}

/// Recognizes the audio format.
pub(crate) fn audio_format(bytes: &[u8]) -> Result<AudioFormat, DecodeError> {
    AudioFormat::from_bytes(bytes).ok_or_else(|| {
        if without_tags(bytes).len() < 12 {
            DecodeError::truncated("audio", bytes.len())
        } else {
            DecodeError::malformed("audio", 0, "expected a WAV, FLAC, MP3 or Ogg stream")
        }
    })
}

/// Reads the length and the channels, at least 1, of an audio clip of `field_bytes` bytes.
pub(crate) fn audio_shape(prefix: &[u8], field_bytes: u64) -> Result<(AudioLength, u16), DecodeError> {
    let format = audio_format(prefix)?;
    Ok(match format {
        AudioFormat::Wav => {
            let header = wav::read_wav_header(prefix, field_bytes)?;
            (header.length, header.channels)
        }
        AudioFormat::Flac => flac::read_flac_header(without_tags(prefix))?,
        AudioFormat::Mp3 | AudioFormat::Ogg => {
            // Their length depends on the end of the stream, so a prefix is not enough.
            if (prefix.len() as u64) < field_bytes {
                return Err(DecodeError::truncated(format.name(), prefix.len()));
            }
            let mut reader = open_reader(format, prefix)?;
            let track = audio_track(format, reader.as_ref())?;
            let is_estimated = format == AudioFormat::Mp3 && track.delay.is_none();
            let (id, (length, channels)) = (track.id, track_length(format, track, prefix)?);
            let frames = if is_estimated { packet_frames(reader.as_mut(), id) } else { length.frames };
            (AudioLength { frames, ..length }, channels)
        }
    })
}

/// Opens the demultiplexer of a format.
pub(crate) fn open_reader(
    format: AudioFormat,
    bytes: &[u8],
) -> Result<Box<dyn FormatReader + '_>, DecodeError> {
    let bytes = without_tags(bytes);
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), MediaSourceStreamOptions::default());
    let options = FormatOptions::default();
    let refusal = |error| symphonia_error(format, error, bytes.len());
    Ok(match format {
        AudioFormat::Wav => Box::new(WavReader::try_new(source, options).map_err(refusal)?),
        AudioFormat::Flac => Box::new(FlacReader::try_new(source, options).map_err(refusal)?),
        AudioFormat::Mp3 => Box::new(MpaReader::try_new(source, options).map_err(refusal)?),
        AudioFormat::Ogg => Box::new(OggReader::try_new(source, options).map_err(refusal)?),
    })
}

/// Returns the first audio track.
pub(crate) fn audio_track(format: AudioFormat, reader: &dyn FormatReader) -> Result<&Track, DecodeError> {
    reader
        .default_track(TrackType::Audio)
        .ok_or_else(|| DecodeError::unsupported(format.name(), "no audio track"))
}

/// Returns frames, rate and channels as declared by the container.
fn track_length(format: AudioFormat, track: &Track, bytes: &[u8]) -> Result<(AudioLength, u16), DecodeError> {
    let missing =
        || DecodeError::malformed(format.name(), 0, "the headers declare no length, rate or channels");
    let Some(CodecParameters::Audio(parameters)) = &track.codec_params else { return Err(missing()) };
    let sample_rate_hz = parameters.sample_rate.filter(|&rate| rate > 0).ok_or_else(missing)?;
    let channels = parameters.channels.as_ref().map_or(0, |channels| channels.count() as u16);
    let frames = counted_frames(format, track, bytes).or(track.num_frames);
    // A short MP3 allows no estimate.
    let frames = frames.or((format == AudioFormat::Mp3).then_some(0)).ok_or_else(missing)?;
    if channels == 0 {
        return Err(missing());
    }
    Ok((AudioLength { frames, sample_rate_hz }, channels))
}

/// Returns the number of frames in the packets of a track, up to the first packet that cannot be read: as
/// many as decoding delivers.
fn packet_frames(reader: &mut dyn FormatReader, track: u32) -> u64 {
    let packets = std::iter::from_fn(|| reader.next_packet().ok().flatten());
    let own = packets.filter(|packet| packet.track_id == track);
    own.map(|packet| packet.dur.get() + packet.trim_start.get() + packet.trim_end.get()).sum()
}

/// Returns the number of frames that the container declares, or `None` if it only allows an estimate.
pub(crate) fn counted_frames(format: AudioFormat, track: &Track, bytes: &[u8]) -> Option<u64> {
    let is_opus = |parameters: &CodecParameters| matches!(parameters, CodecParameters::Audio(audio) if audio.codec == CODEC_ID_OPUS);
    match format {
        AudioFormat::Mp3 if track.delay.is_none() => None,
        // Opus pages also count the encoder delay in their positions.
        AudioFormat::Ogg if track.codec_params.as_ref().is_some_and(is_opus) => {
            let end = track.num_frames.or_else(|| ogg::last_position(bytes, track.id));
            end.map(|end| end.saturating_sub(track.delay.unwrap_or(0).into()))
        }
        AudioFormat::Ogg if track.num_frames.is_none() => ogg::last_position(bytes, track.id),
        _ => track.num_frames,
    }
}

/// Converts an error of the audio decoders.
pub(crate) fn symphonia_error(format: AudioFormat, error: Error, bytes: usize) -> DecodeError {
    match error {
        Error::IoError(cause) if cause.kind() == ErrorKind::UnexpectedEof => {
            DecodeError::truncated(format.name(), bytes)
        }
        Error::Unsupported(reason) => DecodeError::unsupported(format.name(), reason),
        Error::ResetRequired => {
            DecodeError::unsupported(format.name(), "several streams in one file, expected one")
        }
        other => DecodeError::codec(format.name(), other),
    }
}

/// Strips leading `ID3v2` tags and zero bytes, and a trailing `ID3v1` tag.
fn without_tags(bytes: &[u8]) -> &[u8] {
    const HEADER_BYTES: usize = 10;
    const FOOTER_FLAG: u8 = 0x10;
    const TRAILER_BYTES: usize = 128;
    let mut rest = bytes;
    // Some writers stack several tags. Their sizes are stored with seven bits per byte.
    while let [b'I', b'D', b'3', _, _, flags, a, b, c, d, ..] = *rest {
        let body = [a, b, c, d].iter().fold(0, |size, &byte| size << 7 | usize::from(byte & 0x7F));
        let footer = if flags & FOOTER_FLAG == 0 { 0 } else { HEADER_BYTES };
        rest = rest.get(HEADER_BYTES + body + footer..).unwrap_or_default();
        let zeros = rest.iter().take_while(|&&byte| byte == 0).count();
        rest = &rest[zeros..];
    }
    match rest.len().checked_sub(TRAILER_BYTES) {
        Some(end) if rest[end..].starts_with(b"TAG") => &rest[..end],
        _ => rest,
    }
}
