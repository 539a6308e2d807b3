//! Detects the medium format from the first bytes, and media that are written as base64.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;

/// Minimum length of a text that is decoded as base64 without `data:` before it.
const BASE64_CHARACTERS_MIN: usize = 64;
/// Number of text characters that are inspected to distinguish base64 from a path.
const BASE64_LOOKED_AT: usize = 4096;

/// Returns the field extension for these bytes; `None` if the format is not known.
pub(crate) fn detected_extension(bytes: &[u8]) -> Option<&'static str> {
    let at = |offset: usize, wanted: &[u8]| bytes.get(offset..).is_some_and(|rest| rest.starts_with(wanted));
    let head = &bytes[..bytes.len().min(64)];
    let has = |wanted: &[u8]| head.windows(wanted.len()).any(|window| window == wanted);
    Some(match bytes {
        [0xff, 0xd8, 0xff, ..] => "jpg",
        [0x89, b'P', b'N', b'G', ..] => "png",
        [b'G', b'I', b'F', b'8', ..] => "gif",
        [b'R', b'I', b'F', b'F', ..] if at(8, b"WEBP") => "webp",
        [b'R', b'I', b'F', b'F', ..] if at(8, b"WAVE") => "wav",
        [b'R', b'I', b'F', b'F', ..] if at(8, b"AVI ") => "avi",
        [b'I', b'I', b'*', 0, ..] | [b'M', b'M', 0, b'*', ..] => "tiff",
        [b'B', b'M', ..] if at(6, &[0, 0, 0, 0]) => "bmp",
        [b'f', b'L', b'a', b'C', ..] => "flac",
        [b'O', b'g', b'g', b'S', ..] if has(b"OpusHead") => "opus",
        [b'O', b'g', b'g', b'S', ..] => "ogg",
        [b'I', b'D', b'3', ..] | [0xff, 0xfb | 0xfa | 0xf3 | 0xf2, ..] => "mp3",
        [0x1a, 0x45, 0xdf, 0xa3, ..] if has(b"webm") => "webm",
        [0x1a, 0x45, 0xdf, 0xa3, ..] => "mkv",
        [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => "npy",
        [b'%', b'P', b'D', b'F', ..] => "pdf",
        _ if at(4, b"ftyp") => match bytes.get(8..12)? {
            b"avif" => "avif",
            b"heic" | b"heix" | b"mif1" => "heic",
            b"M4A " => "m4a",
            b"qt  " => "mov",
            _ => "mp4",
        },
        _ => return None,
    })
}

/// Returns the bytes in a data URL, such as `data:image/png;base64,iVBOR…`; `None` for any other text.
pub(crate) fn data_url(text: &str) -> Option<Result<Bytes, String>> {
    let (head, content) = text.trim_start().strip_prefix("data:")?.split_once(',')?;
    head.ends_with(";base64").then(|| decode_base64(content))
}

/// Returns the bytes of a text that is a base64 medium, not a path: longer, without a dot, with base64
/// letters only.
pub(crate) fn bare_base64(text: &str) -> Option<Result<Bytes, String>> {
    let text = text.trim();
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"+/-_=\r\n".contains(&byte);
    let is_base64 = text.len() >= BASE64_CHARACTERS_MIN && text.bytes().take(BASE64_LOOKED_AT).all(is_letter);
    is_base64.then(|| {
        let bytes = decode_base64(text)?;
        match detected_extension(&bytes) {
            Some(_) => Ok(bytes),
            None => Err("its base64 holds no medium of a known format".to_owned()),
        }
    })
}

/// Decodes base64 in either alphabet, with or without padding and line breaks.
pub(crate) fn decode_base64(text: &str) -> Result<Bytes, String> {
    let compact: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let is_url_safe = compact.iter().any(|byte| b"-_".contains(byte));
    let alphabet = if is_url_safe { &alphabet::URL_SAFE } else { &alphabet::STANDARD };
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let decoded = GeneralPurpose::new(alphabet, config).decode(compact);
    decoded.map(Bytes::from).map_err(|error| format!("its base64 cannot be decoded: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_first_bytes() {
        let table: [(&[u8], Option<&str>); 14] = [
            (b"\xff\xd8\xff\xe0", Some("jpg")),
            (b"\x89PNG\r\n", Some("png")),
            (b"RIFF\0\0\0\0WEBPVP8 ", Some("webp")),
            (b"RIFF\0\0\0\0WAVEfmt ", Some("wav")),
            (b"fLaC", Some("flac")),
            (b"OggS\0\x02aaaaaaaaaaaaaaaaaaaaaaOpusHead", Some("opus")),
            (b"OggS\0\x02aaaaaaaaaaaaaaaaaaaaaavorbis", Some("ogg")),
            (b"ID3\x04", Some("mp3")),
            (b"\0\0\0\x20ftypisom", Some("mp4")),
            (b"\0\0\0\x20ftypavif", Some("avif")),
            (b"\x1a\x45\xdf\xa3\x01\x42\x82\x84webm", Some("webm")),
            (b"BM is a text", None),
            (b"", None),
            (b"\0\0\0\x20ftyp", None),
        ];
        for (bytes, extension) in table {
            assert_eq!(detected_extension(bytes), extension, "{bytes:?}");
        }
    }

    #[test]
    fn base64_is_decoded_in_every_spelling() {
        let bytes: Vec<u8> = b"GIF89a".iter().copied().chain(0..=255).collect();
        let encode = |engine: &GeneralPurpose| engine.encode(&bytes);
        let standard = encode(&base64::engine::general_purpose::STANDARD);
        let url_safe = encode(&base64::engine::general_purpose::URL_SAFE_NO_PAD);
        let broken: Vec<&str> = standard.as_bytes().chunks(76).map(|l| str::from_utf8(l).unwrap()).collect();
        for text in [standard.clone(), url_safe, broken.join("\r\n")] {
            assert_eq!(bare_base64(&text).unwrap().unwrap(), bytes);
        }
        assert_eq!(data_url(&format!("data:image/png;base64,{standard}")).unwrap().unwrap(), bytes);
    }

    #[test]
    fn paths_and_other_urls_are_no_base64() {
        let path = format!("{}/1.jpg", "directory".repeat(20));
        assert!(bare_base64(&path).is_none() && bare_base64("abcd").is_none());
        assert!(data_url("data:text/plain,hello").is_none() && data_url("https://host/a.jpg").is_none());
        assert!(data_url("data:image/png;base64,%%%").unwrap().unwrap_err().contains("base64"));
    }
}
