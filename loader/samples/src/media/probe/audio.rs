//! Parses audio headers: FLAC, Ogg, MPEG, AIFF, AU.
//!
//! WAV, AIFF, AU and FLAC headers are parsed here; MPEG and Ogg lengths follow special rules (frame counts,
//! encoder delay, position of the last page), which the demultiplexers in [`crate::media`] implement. Where
//! only the demultiplexers know the length, the frames in all packets are counted, so that the length equals
//! the decoded length.
//!
//! The length of an Ogg stream that is truncated or damaged near the end is the position of the last intact
//! page. A page is 27 header bytes, a segment length table, and the segments. The granule position counts the
//! frames up to the page end; the checksum covers the whole page with the checksum field set to 0.
//!
//! # Source
//! Ogg pages: RFC 3533, section 6.
//!
//! A header has four bytes: 11 sync bits, version, layer, bit rate, sample rate, padding, channel mode. The
//! header determines the frame length.

use super::field::{u16_be, u32_be, u32_le};
use super::wav::PcmHeader;
use super::{AudioLength, content_name, is_aiff, read_aiff_header, read_au_header, wav};
use crate::media::DecodeError;
use std::io::{Cursor, ErrorKind};
use symphonia::core::checksum::Crc32;
use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::CODEC_ID_OPUS;
use symphonia::core::errors::Error;
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackType};
use symphonia::core::io::{MediaSourceStream, MediaSourceStreamOptions, Monitor};
use symphonia::core::packet::Packet;
use symphonia::default::formats::{FlacReader, MpaReader, OggReader};

/// An audio container that [`crate::media::decode_audio`] reads, recognized by the first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each variant is named after its format")]
pub enum AudioFormat {
    Wav,
    Aiff,
    Au,
    Flac,
    Mp3,
    Ogg,
}

impl AudioFormat {
    /// Recognizes the format by content, or returns `None`; a leading ID3 tag is skipped. MPEG layers I and
    /// II count as MP3, WAV relatives as WAV.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match without_tags(bytes) {
            rest if wav::is_wav(rest) => Some(Self::Wav),
            rest if is_aiff(rest) => Some(Self::Aiff),
            [b'.', b's', b'n', b'd', ..] => Some(Self::Au),
            [b'f', b'L', b'a', b'C', ..] => Some(Self::Flac),
            [b'O', b'g', b'g', b'S', ..] => Some(Self::Ogg),
            [0xFF, second, ..] if second & 0xE0 == 0xE0 && second & 0x06 != 0 => Some(Self::Mp3),
            _ => None,
        }
    }

    /// Returns the lower-case name used in errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wav => "wav",
            Self::Aiff => "aiff",
            Self::Au => "au",
            Self::Flac => "flac",
            Self::Mp3 => "mp3",
            Self::Ogg => "ogg",
        }
    }
}

/// Audio in a field: format, and bytes without tags or other data before MPEG frames.
#[derive(Clone, Copy)]
pub(crate) struct Content<'a> {
    pub(crate) format: AudioFormat,
    pub(crate) bytes: &'a [u8],
}

/// Recognizes the audio format of a field.
pub(crate) fn audio_content(bytes: &[u8]) -> Result<Content<'_>, DecodeError> {
    const EXPECTED: &str = "expected a WAV, AIFF, AU, FLAC, MP3 or Ogg stream";
    let rest = without_tags(bytes);
    if let Some(format) = AudioFormat::from_bytes(bytes) {
        return Ok(Content { format, bytes: rest });
    }
    if let Some(name) = content_name(rest).filter(|_| rest.len() >= 12) {
        return Err(DecodeError::unsupported("audio", format!("it is {name}; {EXPECTED}")));
    }
    if let Some(start) = first_frame(rest) {
        return Ok(Content { format: AudioFormat::Mp3, bytes: &rest[start..] });
    }
    Err(if rest.len() < 12 {
        DecodeError::truncated("audio", bytes.len())
    } else {
        DecodeError::malformed("audio", 0, EXPECTED)
    })
}

/// Reads the sample header in a WAV, AIFF or AU file with `field_bytes` bytes; `None` for other formats.
pub(crate) fn pcm_header(content: Content<'_>, field_bytes: u64) -> Option<Result<PcmHeader, DecodeError>> {
    match content.format {
        AudioFormat::Wav => Some(wav::read_wav_header(content.bytes, field_bytes)),
        AudioFormat::Aiff => Some(read_aiff_header(content.bytes, field_bytes)),
        AudioFormat::Au => Some(read_au_header(content.bytes, field_bytes)),
        AudioFormat::Flac | AudioFormat::Mp3 | AudioFormat::Ogg => None,
    }
}

/// Reads length and channels, at least 1, for an audio clip with `field_bytes` bytes.
pub(crate) fn audio_shape(prefix: &[u8], field_bytes: u64) -> Result<(AudioLength, u16), DecodeError> {
    let is_whole = prefix.len() as u64 == field_bytes;
    let content = match audio_content(prefix) {
        // More bytes may decide.
        Err(DecodeError::Malformed { .. }) if !is_whole => {
            return Err(DecodeError::truncated("audio", prefix.len()));
        }
        content => content?,
    };
    let tags_bytes = (prefix.len() - content.bytes.len()) as u64;
    if let Some(header) = pcm_header(content, field_bytes.saturating_sub(tags_bytes)) {
        let header = header?;
        return Ok((header.length, header.channels));
    }
    if content.format == AudioFormat::Flac {
        let (length, channels) = read_flac_header(content.bytes)?;
        if length.frames > 0 {
            return Ok((length, channels));
        }
    }
    // The length depends on the end of the stream, so a prefix is not enough.
    if !is_whole {
        return Err(DecodeError::truncated(content.format.name(), prefix.len()));
    }
    let mut reader = open_reader(content)?;
    let track = audio_track(content.format, reader.as_ref())?.clone();
    let (sample_rate_hz, channels) = rate_and_channels(content.format, &track)?;
    let frames = delivered_frames(content, reader.as_mut(), &track);
    Ok((AudioLength { frames, sample_rate_hz }, channels))
}

/// Opens the demultiplexer for a format.
pub(crate) fn open_reader(content: Content<'_>) -> Result<Box<dyn FormatReader + '_>, DecodeError> {
    let Content { format, bytes } = content;
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), MediaSourceStreamOptions::default());
    let options = FormatOptions::default();
    let refusal = |error| symphonia_error(format, error, bytes.len());
    Ok(match format {
        AudioFormat::Flac => Box::new(FlacReader::try_new(source, options).map_err(refusal)?),
        AudioFormat::Mp3 => Box::new(MpaReader::try_new(source, options).map_err(refusal)?),
        AudioFormat::Ogg => Box::new(OggReader::try_new(source, options).map_err(refusal)?),
        AudioFormat::Wav | AudioFormat::Aiff | AudioFormat::Au => {
            unreachable!("their samples are read by `pcm_header`")
        }
    })
}

/// Returns the first audio track.
pub(crate) fn audio_track(format: AudioFormat, reader: &dyn FormatReader) -> Result<&Track, DecodeError> {
    reader
        .default_track(TrackType::Audio)
        .ok_or_else(|| DecodeError::unsupported(format.name(), "no audio track"))
}

fn rate_and_channels(format: AudioFormat, track: &Track) -> Result<(u32, u16), DecodeError> {
    let missing = || DecodeError::malformed(format.name(), 0, "the headers declare no rate or channels");
    let Some(CodecParameters::Audio(parameters)) = &track.codec_params else { return Err(missing()) };
    let sample_rate_hz = parameters.sample_rate.filter(|&rate| rate > 0).ok_or_else(missing)?;
    let channels = parameters.channels.as_ref().map_or(0, |channels| channels.count() as u16);
    if channels == 0 {
        return Err(missing());
    }
    Ok((sample_rate_hz, channels))
}

/// Returns the number of frames that decoding delivers: all packets up to the first packet that cannot be
/// read, or that has a different kind.
fn delivered_frames(content: Content<'_>, reader: &mut dyn FormatReader, track: &Track) -> u64 {
    let packets = std::iter::from_fn(|| reader.next_packet().ok().flatten());
    let mut kind = None;
    let own = packets.filter(|packet| packet.track_id == track.id).take_while(|packet| {
        let own = MpegKind::of(&packet.data);
        content.format != AudioFormat::Mp3 || *kind.get_or_insert(own) == own
    });
    let frames: u64 = own.map(|packet| packet_frames(content.format, track, &packet)).sum();
    // Opus packets also count the encoder delay.
    if is_opus(track) { frames.saturating_sub(track.delay.unwrap_or(0).into()) } else { frames }
}

/// Returns the number of frames that a packet delivers. Without an encoder delay the length of an MP3 is an
/// estimate, and nothing is cut off.
pub(crate) fn packet_frames(format: AudioFormat, track: &Track, packet: &Packet) -> u64 {
    let Some(kind) = MpegKind::of(&packet.data).filter(|_| format == AudioFormat::Mp3) else {
        return packet.dur.get();
    };
    match track.delay {
        Some(_) => {
            kind.samples().saturating_sub(packet.trim_start.get()).saturating_sub(packet.trim_end.get())
        }
        None => kind.samples(),
    }
}

fn is_opus(track: &Track) -> bool {
    matches!(&track.codec_params, Some(CodecParameters::Audio(audio)) if audio.codec == CODEC_ID_OPUS)
}

/// Returns the number of frames that the container declares, or `None` if the container declares none or only
/// allows an estimate.
///
/// - `start`: position of the first frame in an Ogg stream, which was cut from a longer stream if it is not 0
pub(crate) fn declared_frames(content: Content<'_>, track: &Track, start: u64) -> Option<u64> {
    match content.format {
        AudioFormat::Ogg => {
            let end = track.num_frames.or_else(|| last_position(content.bytes, track.id))?;
            let delay = if is_opus(track) { track.delay.unwrap_or(0).into() } else { 0 };
            Some(end.saturating_sub(delay).saturating_sub(start))
        }
        AudioFormat::Mp3 if track.delay.is_none() => None,
        _ => track.num_frames,
    }
}

/// Converts an audio decoder error.
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
    // Some writers stack several tags. Tag sizes are stored with seven bits per byte.
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

const FORMAT: &str = "flac";

/// Reads length and channels from the first metadata block, which must be the stream header; the length is 0
/// if the writer did not know the length.
///
/// - `bytes`: the file from the `fLaC` marker on
fn read_flac_header(bytes: &[u8]) -> Result<(AudioLength, u16), DecodeError> {
    const RATE_AT: usize = 18;
    let ended = || DecodeError::truncated(FORMAT, bytes.len());
    if bytes.get(4).ok_or_else(ended)? & 0x7F != 0 {
        return Err(DecodeError::malformed(FORMAT, 4, "the first block is not the stream header"));
    }
    // 20 bits rate, 3 bits channels - 1, 5 bits depth - 1, 36 bits frames.
    let packed = u64::from(u32_be(bytes, RATE_AT).ok_or_else(ended)?) << 32
        | u64::from(u32_be(bytes, RATE_AT + 4).ok_or_else(ended)?);
    let sample_rate_hz = (packed >> 44) as u32;
    let channels = (packed >> 41 & 0x7) as u16 + 1;
    let frames = packed & ((1 << 36) - 1);
    let block_frames_max = u16_be(bytes, 10).ok_or_else(ended)?;
    if sample_rate_hz == 0 || block_frames_max == 0 {
        return Err(DecodeError::malformed(FORMAT, RATE_AT, "the sample rate or block size is 0"));
    }
    Ok((AudioLength { frames, sample_rate_hz }, channels))
}

const HEADER_BYTES: usize = 27;
const CHECKSUM_AT: usize = 22;
/// Granule position of a page without a packet end.
const NO_POSITION: u64 = u64::MAX;

/// Returns the granule position of the last intact page in the stream `serial`.
fn last_position(bytes: &[u8], serial: u32) -> Option<u64> {
    let mut last = None;
    let mut start = 0;
    while start < bytes.len() {
        let rest = &bytes[start..];
        let Some(page) = intact_page(rest) else {
            // Resynchronize at the next capture pattern after damage.
            start += 1 + rest[1..].windows(4).position(|window| window == b"OggS").unwrap_or(rest.len());
            continue;
        };
        if u32_le(page, 14) == Some(serial) {
            let position = u64::from(u32_le(page, 6)?) | u64::from(u32_le(page, 10)?) << 32;
            // A page without a packet end has no position, so the previous position stays valid.
            last = Some(position).filter(|&position| position != NO_POSITION).or(last);
        }
        start += page.len();
    }
    last
}

/// Returns the page at the start of the bytes if the page is complete and the checksum matches.
fn intact_page(bytes: &[u8]) -> Option<&[u8]> {
    let header = bytes.get(..HEADER_BYTES).filter(|header| header.starts_with(b"OggS"))?;
    let segments = bytes.get(HEADER_BYTES..HEADER_BYTES + usize::from(header[HEADER_BYTES - 1]))?;
    let body_bytes: usize = segments.iter().map(|&length| usize::from(length)).sum();
    let page = bytes.get(..HEADER_BYTES + segments.len() + body_bytes)?;
    let mut checksum = Crc32::new(0);
    checksum.process_buf_bytes(&page[..CHECKSUM_AT]);
    checksum.process_buf_bytes(&[0; 4]);
    checksum.process_buf_bytes(&page[CHECKSUM_AT + 4..]);
    (u32_le(page, CHECKSUM_AT) == Some(checksum.crc())).then_some(page)
}

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

    fn page(serial: u32, position: u64, body: &[u8]) -> Vec<u8> {
        let mut page = b"OggS\0\0".to_vec();
        page.extend(position.to_le_bytes());
        page.extend(serial.to_le_bytes());
        page.extend([0; 8]);
        page.extend([1, body.len() as u8]);
        page.extend(body);
        let mut checksum = Crc32::new(0);
        checksum.process_buf_bytes(&page);
        page[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.crc().to_le_bytes());
        page
    }

    #[test]
    fn last_sound_page_of_the_stream_counts() {
        let mut damaged = page(7, 400, b"damaged");
        damaged[30] ^= 1;
        let file = [
            page(7, 100, b"first"),
            page(7, 200, b"second"),
            page(8, 900, b"another stream"),
            page(7, NO_POSITION, b"packet continues"),
            damaged,
            b"garbage".to_vec(),
        ]
        .concat();
        assert_eq!(last_position(&file, 7), Some(200));
        assert_eq!(last_position(&file, 9), None);
        let resumed = [file, page(7, 500, b"behind garbage")].concat();
        assert_eq!(last_position(&resumed, 7), Some(500));
    }

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
