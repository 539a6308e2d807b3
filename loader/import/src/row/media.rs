//! Finds media in a row by content signatures.
//!
//! | value | medium |
//! | --- | --- |
//! | bytes, or an object with `bytes` and `path`, in any column | these bytes |
//! | a text `data:…;base64,…` in any column | the decoded bytes |
//! | base64 in a media column | the decoded bytes |
//! | any other text, or an object with `file` or `path`, in a media column | the file at this path |
//!
//! A media column is `image`, `audio`, `video` or a similar name, or is declared by the schema.

use super::cell::Cell;
use crate::record::{SHOWN_MAX, split_extension};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use bytes::Bytes;
use dflop_loader::error::excerpt;
use dflop_samples::media::extension_modality;

/// Extension for bytes in an unknown format.
const UNKNOWN: &str = "bin";
/// Names for the bytes in an object that represents a medium.
const BYTES_NAMES: [&str; 4] = ["bytes", "base64", "b64_json", "data"];
/// Names for the path in an object that represents a medium.
const PATH_NAMES: [&str; 2] = ["file", "path"];

/// Medium content.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Content {
    /// Bytes that the row holds.
    Bytes(Bytes),
    /// Path of a file, as named.
    File(String),
}

/// Medium in a row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowMedium {
    /// Row column that contains the medium.
    pub(crate) column: String,
    /// Format extension, lower-cased.
    pub(crate) extension: String,
    pub(crate) content: Content,
}

/// Moves the media out of a column value and appends them to `media`.
///
/// - `is_media`: whether the column holds media, so that texts are paths or base64
///
/// # Errors
/// The reason, if a value in a media column is not a medium.
pub(crate) fn take_media(
    column: &str,
    cell: &mut Cell,
    is_media: bool,
    media: &mut Vec<RowMedium>,
) -> Result<(), String> {
    let known = media.len();
    let mut taker = Taker { column, media, is_top: true };
    let taken = taker.take(cell, is_media);
    taken.map_err(|reason| {
        media.truncate(known);
        format!("column `{}`: {reason}", excerpt(column, SHOWN_MAX))
    })
}

/// Returns whether a value holds media even if the column is not known to.
pub(crate) fn has_embedded(cell: &Cell, is_media: bool) -> bool {
    match cell {
        Cell::Bytes(_) => true,
        Cell::Text(text) => data_url(text).is_some() || (is_media && bare_base64(text).is_some()),
        Cell::List(values) => values.iter().any(|value| has_embedded(value, is_media)),
        Cell::Object(values) => {
            values.iter().any(|(name, value)| has_embedded(value, is_media && is_bytes_name(name)))
        }
        _ => false,
    }
}

fn is_bytes_name(name: &str) -> bool {
    BYTES_NAMES.contains(&name)
}

struct Taker<'a> {
    column: &'a str,
    media: &'a mut Vec<RowMedium>,
    /// Whether the value is in the column itself, or in a list in it, rather than in an object.
    is_top: bool,
}

impl Taker<'_> {
    fn take(&mut self, cell: &mut Cell, is_media: bool) -> Result<(), String> {
        match cell {
            Cell::Bytes(bytes) if bytes.is_empty() => *cell = Cell::Null,
            Cell::Bytes(bytes) => *cell = self.add_bytes(bytes.clone(), None),
            Cell::Text(text) => {
                if let Some(medium) = self.take_text(text, is_media)? {
                    *cell = medium;
                }
            }
            Cell::List(values) => values.iter_mut().try_for_each(|value| self.take(value, is_media))?,
            Cell::Object(_) => self.take_object(cell, is_media)?,
            _ => {}
        }
        Ok(())
    }

    /// Returns the medium that a text represents, if it does.
    fn take_text(&mut self, text: &str, is_media: bool) -> Result<Option<Cell>, String> {
        if let Some(bytes) = data_url(text) {
            return Ok(Some(self.add_bytes(bytes?, None)));
        }
        if !is_media || text.trim().is_empty() {
            return Ok(None);
        }
        match bare_base64(text) {
            Some(bytes) => Ok(Some(self.add_bytes(bytes?, None))),
            None => Ok(Some(named(self.add_file(text)?, Some(text), self.is_top))),
        }
    }

    /// Extracts an object that represents a medium, or the media inside a different object.
    fn take_object(&mut self, cell: &mut Cell, is_media: bool) -> Result<(), String> {
        let path = PATH_NAMES.iter().find_map(|name| cell.get(name)?.as_text()).map(str::to_owned);
        let content = match BYTES_NAMES.iter().find_map(|name| Some((*name, cell.get(name)?))) {
            Some((_, Cell::Bytes(bytes))) if !bytes.is_empty() => Some(bytes.clone()),
            Some((_, Cell::Text(text))) if is_media => {
                Some(data_url(text).or_else(|| bare_base64(text)).ok_or("expected base64 or bytes")??)
            }
            _ => None,
        };
        let medium = match (content, &path) {
            (Some(bytes), path) => self.add_bytes(bytes, path.as_deref()),
            (None, Some(path)) if is_media => self.add_file(path)?,
            (None, None) if is_media && is_empty_medium(cell) => {
                *cell = Cell::Null;
                return Ok(());
            }
            (None, _) => {
                let Cell::Object(values) = cell else { return Ok(()) };
                let is_top = std::mem::replace(&mut self.is_top, false);
                let taken = values.iter_mut().try_for_each(|(_, value)| self.take(value, false));
                self.is_top = is_top;
                return taken;
            }
        };
        let Cell::Object(values) = cell.take() else { return Ok(()) };
        let is_rest = |name: &str| !is_bytes_name(name) && !PATH_NAMES.contains(&name);
        let rest = values.into_iter().filter(|(name, value)| is_rest(name) && *value != Cell::Null);
        *cell = with_rest(named(medium, path.as_deref(), self.is_top), rest.collect());
        Ok(())
    }

    fn add_bytes(&mut self, bytes: Bytes, path: Option<&str>) -> Cell {
        let of_path = || path.and_then(split_extension).map(|(_, extension)| extension);
        let of_column = || extension_modality(self.column).map(|_| self.column.to_lowercase());
        let known = detected_extension(&bytes).map(str::to_owned);
        let extension = known.or_else(of_path).or_else(of_column).unwrap_or_else(|| UNKNOWN.to_owned());
        self.add(extension, Content::Bytes(bytes))
    }

    fn add_file(&mut self, path: &str) -> Result<Cell, String> {
        if path.starts_with("http://") || path.starts_with("https://") {
            let shown = excerpt(path, SHOWN_MAX);
            return Err(format!("`{shown}` is a URL, and packing reads files only; download it first"));
        }
        let (_, extension) = split_extension(path)
            .ok_or_else(|| format!("expected a path or base64, found `{}`", excerpt(path, SHOWN_MAX)))?;
        Ok(self.add(extension, Content::File(path.to_owned())))
    }

    fn add(&mut self, extension: String, content: Content) -> Cell {
        self.media.push(RowMedium { column: self.column.to_owned(), extension, content });
        Cell::Medium(self.media.len() - 1)
    }
}

/// Returns whether an object has only the columns of a medium, and all are empty.
fn is_empty_medium(cell: &Cell) -> bool {
    let Cell::Object(values) = cell else { return false };
    let is_known = |name: &str| is_bytes_name(name) || PATH_NAMES.contains(&name);
    values.iter().all(|(name, value)| is_known(name) && !value.is_filled())
}

/// Returns the value that names a medium: the field name, with the original path next to it.
fn named(medium: Cell, path: Option<&str>, is_top: bool) -> Cell {
    let Some(path) = path else { return medium };
    // Message parts are looked up by `url`, columns by `file`.
    let name = if is_top { "file" } else { "url" };
    Cell::Object(vec![(name.to_owned(), medium), ("path".to_owned(), Cell::Text(path.to_owned()))])
}

/// Appends the remaining values from the object that represented a medium.
fn with_rest(medium: Cell, rest: Vec<(String, Cell)>) -> Cell {
    if rest.is_empty() {
        return medium;
    }
    let mut values = match medium {
        Cell::Object(values) => values,
        medium => vec![("file".to_owned(), medium)],
    };
    values.extend(rest);
    Cell::Object(values)
}

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
