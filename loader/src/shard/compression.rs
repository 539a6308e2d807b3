//! Detects shard compression, and the format of a file that was mistaken for a tar.
//!
//! The first bytes decide, never the name.

use super::table::is_table;
use crate::error::{DataError, Error, Result};
use async_compression::tokio::bufread::{GzipDecoder, ZstdDecoder};
use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncBufRead, AsyncRead, ReadBuf};

/// Maximum zstd window, as a power of two in bytes (128 MiB), the same limit as in the reference decoder.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// Maximum ratio of unpacked to compressed shard length, beyond [`UNPACKED_BYTES_FREE`]. Media hardly shrink,
/// texts by 20 times at most; a file that was made to exhaust memory shrinks by 1,000 times and more.
const UNPACKED_RATIO_MAX: u64 = 500;
/// Number of bytes that any file may unpack to, regardless of the ratio.
const UNPACKED_BYTES_FREE: u64 = 64 << 20;

/// Shard compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Uncompressed; the only kind that is read by range.
    None,
    /// gzip, any number of members.
    Gzip,
    /// Zstandard, any number of frames.
    Zstd,
    /// Table whose rows are samples, see [`TableFormat`](super::TableFormat); decoded block by block.
    Table,
}

/// Detects the compression from the first shard bytes.
///
/// # Errors
/// [`Error::Data`] if the format is not supported, such as bzip2, xz and lz4.
pub fn sniff_compression(shard: &Arc<str>, first: &[u8]) -> Result<Compression> {
    match (first, compression_name(first)) {
        // A skippable frame, which pzstd and seekable files start with.
        ([0x50..=0x5f, 0x2a, 0x4d, 0x18, ..], _) | (_, Some("Zstandard")) => Ok(Compression::Zstd),
        (_, Some("gzip")) => Ok(Compression::Gzip),
        _ if is_table(first) => Ok(Compression::Table),
        (_, Some(format)) => {
            Err(Error::Data(DataError::UnsupportedCompression { shard: shard.to_string(), format }))
        }
        (_, None) => Ok(Compression::None),
    }
}

/// Wraps a reader so that it yields uncompressed bytes.
pub(crate) fn decompress<'a, R>(compression: Compression, reader: R) -> Box<dyn AsyncRead + Send + Unpin + 'a>
where
    R: AsyncBufRead + Send + Unpin + 'a,
{
    match compression {
        // A table is not a stream: readers open it by range instead.
        Compression::None | Compression::Table => Box::new(reader),
        Compression::Gzip => Box::new(Unpacked::<GzipDecoder<_>, _>::new(Packed::new(reader))),
        Compression::Zstd => Box::new(Unpacked::<ZstdDecoder<_>, _>::new(Packed::new(reader))),
    }
}

/// Decoder for a single gzip member or zstd frame.
trait MemberDecoder<R>: AsyncRead + Unpin {
    /// Starts at a member.
    fn begin(packed: Packed<R>) -> Self;

    /// Returns the bytes after the member.
    fn end(self) -> Packed<R>;
}

impl<R: AsyncBufRead + Unpin> MemberDecoder<R> for GzipDecoder<Packed<R>> {
    fn begin(packed: Packed<R>) -> Self {
        Self::new(packed)
    }

    fn end(self) -> Packed<R> {
        self.into_inner()
    }
}

impl<R: AsyncBufRead + Unpin> MemberDecoder<R> for ZstdDecoder<Packed<R>> {
    fn begin(packed: Packed<R>) -> Self {
        let window = [async_compression::zstd::DParameter::window_log_max(ZSTD_WINDOW_LOG_MAX)];
        Self::with_params(packed, &window)
    }

    fn end(self) -> Packed<R> {
        self.into_inner()
    }
}

/// Compressed bytes, counted as they are consumed.
struct Packed<R> {
    reader: R,
    read: Arc<AtomicU64>,
}

impl<R> Packed<R> {
    fn new(reader: R) -> Self {
        Self { reader, read: Arc::default() }
    }
}

impl<R: AsyncBufRead + Unpin> AsyncBufRead for Packed<R> {
    fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult<&[u8]>> {
        Pin::new(&mut self.get_mut().reader).poll_fill_buf(context)
    }

    fn consume(mut self: Pin<&mut Self>, bytes: usize) {
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        Pin::new(&mut self.reader).consume(bytes);
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Packed<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<IoResult<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.reader).poll_read(context, buffer))?;
        self.read.fetch_add((buffer.filled().len() - before) as u64, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

/// Uncompressed bytes from all members; fails when they outgrow the compressed bytes too far.
struct Unpacked<D, R> {
    at: Position<D, R>,
    read: Arc<AtomicU64>,
    written: u64,
}

/// Position in a compressed file.
enum Position<D, R> {
    /// Inside a member.
    Inside(D),
    /// After a member. After zeros, which pad a tape, nothing else may follow.
    Behind { packed: Packed<R>, is_padded: bool },
    /// At the end, or after a member error.
    End,
}

impl<D: MemberDecoder<R>, R> Unpacked<D, R> {
    fn new(packed: Packed<R>) -> Self {
        let read = packed.read.clone();
        Self { at: Position::Inside(D::begin(packed)), read, written: 0 }
    }

    /// Checks that the unpacked size is within the ratio limit.
    fn check_ratio(&self) -> IoResult<()> {
        let read = self.read.load(Ordering::Relaxed);
        if self.written <= UNPACKED_BYTES_FREE || self.written / UNPACKED_RATIO_MAX <= read {
            return Ok(());
        }
        let written = self.written;
        let reason = format!(
            "{read} compressed bytes unpack to more than {written}, over {UNPACKED_RATIO_MAX} times as many"
        );
        Err(IoError::new(ErrorKind::InvalidData, reason))
    }
}

impl<R: AsyncBufRead + Unpin> Packed<R> {
    /// Skips zeros and sets `is_padded` if there are any; returns whether nonzero bytes follow.
    fn poll_skip_zeros(&mut self, context: &mut Context<'_>, is_padded: &mut bool) -> Poll<IoResult<bool>> {
        loop {
            let bytes = ready!(Pin::new(&mut *self).poll_fill_buf(context))?;
            let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
            let has_more = zeros < bytes.len();
            *is_padded |= zeros > 0;
            Pin::new(&mut *self).consume(zeros);
            if zeros == 0 || has_more {
                return Poll::Ready(Ok(has_more));
            }
        }
    }
}

impl<D: MemberDecoder<R>, R: AsyncBufRead + Unpin> AsyncRead for Unpacked<D, R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<IoResult<()>> {
        let unpacked = &mut *self;
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        unpacked.check_ratio()?;
        let before = buffer.filled().len();
        loop {
            match &mut unpacked.at {
                Position::Inside(decoder) => {
                    let decoded = ready!(Pin::new(decoder).poll_read(context, buffer));
                    decoded.inspect_err(|_| unpacked.at = Position::End)?;
                    let written = buffer.filled().len() - before;
                    if written > 0 {
                        unpacked.written += written as u64;
                        return Poll::Ready(Ok(()));
                    }
                    if let Position::Inside(decoder) = std::mem::replace(&mut unpacked.at, Position::End) {
                        unpacked.at = Position::Behind { packed: decoder.end(), is_padded: false };
                    }
                }
                Position::Behind { packed, is_padded } => {
                    let has_more = ready!(packed.poll_skip_zeros(context, is_padded))?;
                    if has_more && *is_padded {
                        let reason = "bytes other than zeros follow the padding behind the compressed data";
                        return Poll::Ready(Err(IoError::new(ErrorKind::InvalidData, reason)));
                    }
                    if let Position::Behind { packed, .. } =
                        std::mem::replace(&mut unpacked.at, Position::End)
                        && has_more
                    {
                        unpacked.at = Position::Inside(D::begin(packed));
                    }
                }
                Position::End => return Poll::Ready(Ok(())),
            }
        }
    }
}

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
    use std::io::Write;
    use tokio::io::AsyncReadExt;

    fn unpacked(compression: Compression, packed: &[u8]) -> IoResult<usize> {
        let mut bytes = Vec::new();
        futures::executor::block_on(decompress(compression, packed).read_to_end(&mut bytes))
    }

    #[test]
    fn a_file_that_unpacks_without_end_is_an_error() {
        let zeros = vec![0; 16 << 20];
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        let mut zstd = zstd::Encoder::new(Vec::new(), 3).unwrap();
        for _ in 0..8 {
            gzip.write_all(&zeros).unwrap();
            zstd.write_all(&zeros).unwrap();
        }
        let (gzip, zstd) = (gzip.finish().unwrap(), zstd.finish().unwrap());
        for (compression, packed) in [(Compression::Gzip, gzip), (Compression::Zstd, zstd)] {
            let error = unpacked(compression, &packed).unwrap_err();
            assert!(error.to_string().contains("over 500 times"), "{error}");
        }
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    #[test]
    fn members_are_joined_and_zeros_behind_the_last_one_are_padding() {
        let skippable = |magic: u8| [&[magic, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"any"].concat();
        let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 3).unwrap();
        let shard: Arc<str> = "s".into();
        for (packed, bytes) in [
            ([gzip(b"one"), gzip(b""), gzip(b"two")].concat(), 6),
            ([gzip(b"one"), vec![0; 100_000]].concat(), 3),
            ([zstd(b"one"), skippable(0x50), zstd(b"two"), vec![0; 700]].concat(), 6),
            ([skippable(0x50), skippable(0x5f), zstd(b"one")].concat(), 3),
            ([skippable(0x5a), vec![0; 3]].concat(), 0),
        ] {
            let compression = sniff_compression(&shard, &packed).unwrap();
            assert_eq!(unpacked(compression, &packed).unwrap(), bytes);
            // In steps of one byte, so that every state is entered and left.
            let trickle = tokio::io::BufReader::with_capacity(1, &packed[..]);
            let mut joined = Vec::new();
            futures::executor::block_on(decompress(compression, trickle).read_to_end(&mut joined)).unwrap();
            assert_eq!(joined.len(), bytes);
        }
        for (packed, reason) in [
            ([gzip(b"one"), b"junk".to_vec()].concat(), "header"),
            ([gzip(b"one"), vec![0; 9], gzip(b"two")].concat(), "padding"),
            ([zstd(b"one"), vec![0; 9], b"junk".to_vec()].concat(), "padding"),
            (gzip(b"one")[..20].to_vec(), "end of file"),
        ] {
            let compression = sniff_compression(&shard, &packed).unwrap();
            let error = unpacked(compression, &packed).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn other_compressions_are_named() {
        let shard: Arc<str> = "s".into();
        for (first, name) in
            [(&b"BZh91AY"[..], "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x04\x22\x4d\x18d@", "lz4")]
        {
            let error = sniff_compression(&shard, first).unwrap_err().to_string();
            assert!(error.contains(&format!("compressed with {name}")), "{error}");
        }
    }

    #[test]
    fn a_file_that_shrinks_well_is_read() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(&vec![0; 32 << 20]).unwrap();
        assert_eq!(unpacked(Compression::Gzip, &gzip.finish().unwrap()).unwrap(), 32 << 20);
    }

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
