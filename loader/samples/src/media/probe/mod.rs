//! Parses image and audio headers, without decoding the content.
//!
//! Reads the headers of AIFF, AIFF-C and Sun audio files.
//!
//! Names content that no codec in this crate decodes, by the first bytes.
//!
//! The results agree with the output of [`crate::media::decode`], which a test checks.

mod audio;
#[cfg(feature = "avif")]
mod avif;
mod image;
mod jpeg;
mod png;
mod tiff;
mod wav;

use super::DecodeError;
use dflop_costmodel::{AudioLength, ImageSize};
use field::{u16_be, u32_be};
use wav::PcmFormat;

pub use audio::AudioFormat;
pub(crate) use audio::{
    Content, MpegKind, audio_content, audio_shape, audio_track, declared_frames, open_reader, packet_frames,
    pcm_header, symphonia_error,
};
#[cfg(feature = "avif")]
pub(crate) use avif::{AvifHeader, ColorCoding, read_avif_header};
pub use image::ImageFormat;
pub(crate) use image::{ImageHeader, ends_before_pixels, image_header};
pub(crate) use jpeg::{JpegColors, JpegHeader, read_jpeg_header};
pub(crate) use tiff::{TiffHeader, TiffKind, read_tiff_header};
pub(crate) use wav::{AdpcmBlock, PcmCoding, PcmHeader};

/// Reads big- and little-endian integers; returns `None` past the end.
pub(crate) mod field {
    fn array<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
        bytes.get(offset..offset.checked_add(N)?)?.try_into().ok()
    }

    pub(crate) fn u16_be(bytes: &[u8], offset: usize) -> Option<u16> {
        array(bytes, offset).map(u16::from_be_bytes)
    }

    pub(crate) fn u16_le(bytes: &[u8], offset: usize) -> Option<u16> {
        array(bytes, offset).map(u16::from_le_bytes)
    }

    pub(crate) fn u32_be(bytes: &[u8], offset: usize) -> Option<u32> {
        array(bytes, offset).map(u32::from_be_bytes)
    }

    pub(crate) fn u32_le(bytes: &[u8], offset: usize) -> Option<u32> {
        array(bytes, offset).map(u32::from_le_bytes)
    }
}

/// Content signature: byte offset, bytes, format name.
type Signature = (usize, &'static [u8], &'static str);

/// Signatures; the first match counts.
const SIGNATURES: &[Signature] = &[
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftypmsf1", "HEIF"),
    (4, b"ftypcrx ", "a camera's raw image (CR3)"),
    (4, b"ftypM4A", "AAC in MP4 (M4A)"),
    (4, b"ftypM4B", "AAC in MP4 (M4B)"),
    (4, b"ftypqt", "a QuickTime video"),
    (4, b"ftyp", "an MP4 file"),
    (4, b"moov", "a QuickTime video"),
    (0, b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"II\xbc", "JPEG XR"),
    (0, b"8BPS", "a Photoshop document"),
    (0, b"\x76\x2f\x31\x01", "OpenEXR"),
    (0, b"#?R", "Radiance HDR"),
    (0, b"qoif", "QOI"),
    (0, b"DDS ", "a DirectDraw surface"),
    (0, b"\0\0\x01\0", "an icon (ICO)"),
    (0, b"\0\0\x02\0", "a cursor (CUR)"),
    (0, b"farbfeld", "farbfeld"),
    (0, b"FUJIFILMCCD-RAW", "a camera's raw image (RAF)"),
    (0, b"DICM", "DICOM"),
    (128, b"DICM", "DICOM"),
    (0, b"SIMPLE  =", "FITS"),
    (0, b"GIF8", "a GIF of an unknown version"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x89HDF\r\n", "HDF5"),
    (0, b"%PDF-", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "Windows Media (ASF)"),
    (0, b"\x1a\x45\xdf\xa3", "Matroska or WebM"),
    (0, b"#!AMR", "AMR"),
    (0, b"caff", "Core Audio (CAF)"),
    (0, b".snd", "Sun audio (AU)"),
    (0, b"FORM", "an IFF file"),
    (0, b"fLaC", "FLAC"),
    (0, b"OggS", "an Ogg stream"),
    (8, b"WAVE", "a WAV file"),
    (0, b"ID3", "MP3"),
    (0, b"MThd", "MIDI"),
    (0, b"wvpk", "WavPack"),
    (0, b"MAC ", "Monkey's Audio"),
    (0, b"TTA1", "True Audio"),
    (0, b"MPCK", "Musepack"),
    (0, b"MP+", "Musepack"),
    (0, b"DSD ", "DSD audio"),
    (0, b"FRM8", "DSD audio"),
    (0, b"ADIF", "AAC"),
    (0, b"\x0b\x77", "Dolby Digital (AC-3)"),
    (0, b"\x7f\xfe\x80\x01", "DTS"),
    (0, b"SCRM", "a tracker module"),
    (8, b"AVI ", "an AVI video"),
    (8, b"RMID", "MIDI"),
    (0, b"FLV", "a Flash video"),
    (0, b".RMF", "RealMedia"),
    (0, b"\0\0\x01\xba", "an MPEG video"),
    (0, b"\0\0\x01\xb3", "an MPEG video"),
    (0, b"\x1f\x8b", "gzip data"),
    (0, b"\x28\xb5\x2f\xfd", "Zstandard data"),
    (0, b"BZh", "bzip2 data"),
    (0, b"\xfd7zXZ\0", "xz data"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"Rar!", "a RAR archive"),
    (0, b"7z\xbc\xaf", "a 7z archive"),
    (0, b"version https://git-lfs", "a Git LFS pointer instead of the file"),
];

/// Text starts, in lower case, and format names.
const TEXTS: &[(&str, &str)] = &[
    ("<svg", "SVG"),
    ("<!doctype svg", "SVG"),
    ("<!doctype html", "an HTML page"),
    ("<html", "an HTML page"),
    ("<head", "an HTML page"),
    ("<body", "an HTML page"),
    ("<?xml", "XML"),
    ("{", "JSON text"),
];

/// Returns the content name, with an article if the name needs one; `None` for unknown bytes.
fn content_name(bytes: &[u8]) -> Option<&'static str> {
    let matches =
        |(offset, start, _): &&Signature| bytes.get(*offset..).is_some_and(|rest| rest.starts_with(start));
    if let Some((_, _, name)) = SIGNATURES.iter().find(matches) {
        return Some(name);
    }
    match bytes {
        [0xFF, second, ..] if second & 0xF6 == 0xF0 => return Some("AAC"),
        [b'P', b'1'..=b'7' | b'F' | b'f', b'\n' | b' ' | b'\r' | b'\t' | b'#', ..] => {
            return Some("a portable pixmap (PNM)");
        }
        _ => {}
    }
    text_name(bytes)
}

/// Returns the name of a text format by the start of the text; XML is named by an early element.
fn text_name(bytes: &[u8]) -> Option<&'static str> {
    const SEARCHED_BYTES: usize = 1024;
    let start = &bytes[..bytes.len().min(SEARCHED_BYTES)];
    let start = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start);
    let text = String::from_utf8_lossy(start).trim_start().to_lowercase();
    let (_, name) = TEXTS.iter().find(|(beginning, _)| text.starts_with(beginning))?;
    let is_svg = *name == "XML" && text.contains("<svg");
    Some(if is_svg { "SVG" } else { name })
}

const FORMAT: &str = "aiff";

/// Returns whether the file is an AIFF or AIFF-C.
fn is_aiff(bytes: &[u8]) -> bool {
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

    #[test]
    fn content_is_named_by_its_first_bytes() {
        let table: [(&[u8], _); 12] = [
            (b"\0\0\0\x1cftypavif\0\0\0\0", Some("AVIF")),
            (b"\0\0\0\x1cftypheic\0\0\0\0", Some("HEIC")),
            (b"\0\0\0\x0cJXL \r\n\x87\n", Some("JPEG XL")),
            (b"\0\0\0\x0cjP  \r\n\x87\n", Some("JPEG 2000")),
            (b"\xef\xbb\xbf <svg xmlns=''>", Some("SVG")),
            (b"<?xml version='1.0'?>\n<!-- made -->\n<SVG>", Some("SVG")),
            (b"<?xml version='1.0'?><Error><Code>AccessDenied", Some("XML")),
            (b"\n<!DOCTYPE html><html>", Some("an HTML page")),
            (b"P6\n3 2\n255\n", Some("a portable pixmap (PNM)")),
            (b"\xff\xf1\x50\x80", Some("AAC")),
            (b"\xff\xfb\x90\x00", None),
            (b"any other text", None),
        ];
        for (bytes, name) in table {
            assert_eq!(content_name(bytes), name, "{bytes:?}");
        }
    }

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
