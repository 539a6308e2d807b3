//! Detects shard compression by the first bytes, never by the name.

use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use async_compression::tokio::bufread::{GzipDecoder, ZstdDecoder};
use tokio::io::{AsyncBufRead, AsyncRead, ReadBuf};

use super::format::compression_name;
use crate::error::{DataError, Error, Result};

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
        Compression::None => Box::new(reader),
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tokio::io::AsyncReadExt;

    use super::*;

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
}
