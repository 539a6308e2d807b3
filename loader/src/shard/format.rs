//! Names the format of a file that was mistaken for a tar, by its first bytes.

/// Format other than tar, and what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OtherFormat {
    /// Format name, with an article.
    pub(crate) name: &'static str,
    /// Advice, as a clause.
    pub(crate) advice: &'static str,
}

const CONVERTED: &str = "`dflop pack` converts it (`dflop.from_parquet` in Python)";
const PACKED: &str = "`dflop pack` makes shards of such files";
const UNPACKED: &str = "unpack it and write a tar, or let `dflop pack` make shards of its files";
const PAGE: &str = "the server may ask for a login, or report an error; open the address in a browser";
const TWICE: &str = "it is compressed twice; unpack it once";
const NO_ARCHIVE: &str = "check the name of the shard";

/// Formats that start with fixed bytes.
const BY_MAGIC: [(&[u8], &str, &str); 22] = [
    (b"PAR1", "Parquet", CONVERTED),
    (b"ARROW1", "an Arrow file", CONVERTED),
    (b"PK\x03\x04", "a zip archive", UNPACKED),
    (b"PK\x05\x06", "an empty zip archive", UNPACKED),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACKED),
    (b"Rar!\x1a\x07", "a rar archive", UNPACKED),
    (b"!<arch>\n", "an ar archive", UNPACKED),
    (b"070701", "a cpio archive", UNPACKED),
    (b"%PDF-", "a PDF document", NO_ARCHIVE),
    (b"SQLite format 3\0", "an SQLite database", NO_ARCHIVE),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", NO_ARCHIVE),
    (b"hsqs", "a SquashFS image", "mount it and name the shards in it"),
    (b"\x93NUMPY", "a NumPy array", PACKED),
    (b"\x89PNG\r\n\x1a\n", "a PNG image", PACKED),
    (b"\xff\xd8\xff", "a JPEG image", PACKED),
    (b"RIFF", "a RIFF file, such as WAV or WebP", PACKED),
    (b"fLaC", "a FLAC file", PACKED),
    (b"OggS", "an Ogg file", PACKED),
    (b"ID3", "an MP3 file", PACKED),
    (b"GIF8", "a GIF image", PACKED),
    (b"\x7fELF", "a program", NO_ARCHIVE),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS", "`git lfs pull` fetches the file"),
];

/// Compressions by first bytes; the last entries are not supported.
const COMPRESSIONS: [(&[u8], &str); 9] = [
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "Zstandard"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"\x02\x21\x4c\x18", "lz4"),
    (b"LZIP", "lzip"),
    (b"\x1f\x9d", "compress"),
    (b"\xff\x06\0\0sN", "snappy"),
];

/// Names the compression format of bytes; `None` if they are not compressed.
pub(crate) fn compression_name(first: &[u8]) -> Option<&'static str> {
    let (_, name) = COMPRESSIONS.iter().find(|(magic, _)| first.starts_with(magic))?;
    let is_bzip2 = first.get(3).is_some_and(|level| (b'1'..=b'9').contains(level));
    (*name != "bzip2" || is_bzip2).then_some(*name)
}

/// Names the format of a file that is not a tar; `None` if it is unknown.
///
/// - `first`: first block, or less
pub(crate) fn other_format(first: &[u8]) -> Option<OtherFormat> {
    if let Some((_, name, advice)) = BY_MAGIC.iter().find(|(magic, ..)| first.starts_with(magic)) {
        return Some(OtherFormat { name, advice });
    }
    if let [0xff, 0xff, 0xff, 0xff, _, _, 0, 0, ..] = first {
        return Some(OtherFormat { name: "an Arrow stream", advice: CONVERTED });
    }
    if first.get(4..8) == Some(b"ftyp") {
        return Some(OtherFormat { name: "an MP4, HEIC or AVIF file", advice: PACKED });
    }
    if let Some(name) = compression_name(first) {
        return Some(OtherFormat { name: compressed_data(name), advice: TWICE });
    }
    text_format(first)
}

fn compressed_data(compression: &str) -> &'static str {
    match compression {
        "gzip" => "gzip data",
        "Zstandard" => "Zstandard data",
        "bzip2" => "bzip2 data",
        "xz" => "xz data",
        "lz4" => "lz4 data",
        "lzip" => "lzip data",
        _ => "compressed data",
    }
}

/// Names a text format by the first characters.
fn text_format(first: &[u8]) -> Option<OtherFormat> {
    let text = readable(first)?;
    let text = text.trim_start_matches('\u{feff}').trim_start().to_ascii_lowercase();
    let starts = |with: &[&str]| with.iter().any(|start| text.starts_with(start));
    let (name, advice) = if starts(&["<!doctype html", "<html", "<head", "<body", "<script"]) {
        ("an HTML page", PAGE)
    } else if starts(&["<?xml", "<"]) {
        let is_page = text.contains("<html");
        if is_page { ("an HTML page", PAGE) } else { ("an XML document", PAGE) }
    } else if starts(&["{", "["]) {
        ("JSON", "a server may report an error; `dflop pack` makes shards of JSON Lines")
    } else {
        ("a text", "a server may report an error; `dflop pack` makes shards of tables and files")
    };
    Some(OtherFormat { name, advice })
}

/// Returns a block as text; the last character may be cut.
fn readable(first: &[u8]) -> Option<&str> {
    let text = match std::str::from_utf8(first) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&first[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let is_text = |character: char| !character.is_control() || "\t\r\n\u{c}".contains(character);
    (!text.is_empty() && text.chars().all(is_text)).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(first: &[u8]) -> Option<&'static str> {
        other_format(first).map(|format| format.name)
    }

    #[test]
    fn formats_are_told_apart_by_their_first_bytes() {
        for (first, expected) in [
            (&b"PAR1\x15\x04"[..], "Parquet"),
            (b"\xff\xff\xff\xff\x80\x02\0\0", "an Arrow stream"),
            (b"PK\x03\x04\x14\0", "a zip archive"),
            (b"\0\0\0\x1cftypavif", "an MP4, HEIC or AVIF file"),
            (b"\x1f\x8b\x08\0", "gzip data"),
            (b"\x04\x22\x4d\x18\x64", "lz4 data"),
            (b"BZh91AY", "bzip2 data"),
            (b"\n <!DOCTYPE html><html>", "an HTML page"),
            (b"<?xml version='1.0'?><!DOCTYPE x><html>", "an HTML page"),
            (b"\xef\xbb\xbf<?xml version='1.0'?><Error>", "an XML document"),
            (b"<Error><Code>AccessDenied</Code>", "an XML document"),
            (b"{\"error\": 1}", "JSON"),
            (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
            ("größe und maß".as_bytes(), "a text"),
            (&"größe".as_bytes()[..4], "a text"),
        ] {
            assert_eq!(name(first), Some(expected), "{first:?}");
        }
        for first in [&b"a.txt\0\0\0"[..], b"\xc3\x28 text", b""] {
            assert_eq!(name(first), None, "{first:?}");
        }
    }
}
