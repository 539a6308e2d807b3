//! Parses image and audio headers, without decoding the content.
//!
//! Names content that no codec in this crate decodes, by the first bytes.
//!
//! The results agree with the output of [`crate::media::decode`], which a test checks.

mod aiff;
mod audio;
#[cfg(feature = "avif")]
mod avif;
mod image;
mod jpeg;
mod png;
mod tiff;
mod wav;

use dflop_costmodel::{AudioLength, ImageSize};

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
}
