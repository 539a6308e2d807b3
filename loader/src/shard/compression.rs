//! Detects the compression of a shard by its first bytes, never by its name.

use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use async_compression::tokio::bufread::{GzipDecoder, ZstdDecoder};
use tokio::io::{AsyncBufRead, AsyncRead, ReadBuf};

use crate::error::{DataError, Error, Result};

/// Largest window of a zstd frame, as a power of two in bytes (128 MiB), the same limit as in the reference
/// decoder.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// Largest ratio of a shard's length to its compressed length, beyond [`UNPACKED_BYTES_FREE`]. Media hardly
/// shrink, texts by 20 times at most; a file that was made to exhaust memory shrinks by 1,000 times and more.
const UNPACKED_RATIO_MAX: u64 = 500;
/// Bytes that any file may unpack to.
const UNPACKED_BYTES_FREE: u64 = 64 << 20;

/// Compression of a shard.
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

/// Detects the compression from the first bytes of a shard.
///
/// # Errors
/// [`Error::Data`] if the format is not supported: bzip2 or xz.
pub fn sniff_compression(shard: &Arc<str>, first: &[u8]) -> Result<Compression> {
    let unsupported = |format: &'static str| {
        Err(Error::Data(DataError::UnsupportedCompression { shard: shard.to_string(), format }))
    };
    match first {
        [0x1f, 0x8b, ..] => Ok(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(Compression::Zstd),
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => unsupported("bzip2"),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => unsupported("xz"),
        _ => Ok(Compression::None),
    }
}

/// Wraps a reader so that it yields uncompressed bytes.
pub(crate) fn decompress<'a, R>(compression: Compression, reader: R) -> Box<dyn AsyncRead + Send + Unpin + 'a>
where
    R: AsyncBufRead + Send + Unpin + 'a,
{
    match compression {
        Compression::None => Box::new(reader),
        Compression::Gzip => {
            let packed = Packed::new(reader);
            let read = packed.read.clone();
            let mut decoder = GzipDecoder::new(packed);
            decoder.multiple_members(true);
            Box::new(Unpacked { decoder, read, written: 0 })
        }
        Compression::Zstd => {
            let window = [async_compression::zstd::DParameter::window_log_max(ZSTD_WINDOW_LOG_MAX)];
            let packed = Packed::new(reader);
            let read = packed.read.clone();
            let mut decoder = ZstdDecoder::with_params(packed, &window);
            decoder.multiple_members(true);
            Box::new(Unpacked { decoder, read, written: 0 })
        }
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

/// Uncompressed bytes, which end with an error where they outgrow the compressed ones.
struct Unpacked<D> {
    decoder: D,
    read: Arc<AtomicU64>,
    written: u64,
}

impl<D: AsyncRead + Unpin> AsyncRead for Unpacked<D> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<IoResult<()>> {
        let read = self.read.load(Ordering::Relaxed);
        if self.written > UNPACKED_BYTES_FREE && self.written / UNPACKED_RATIO_MAX > read {
            let written = self.written;
            let reason = format!(
                "{read} compressed bytes unpack to more than {written}, over {UNPACKED_RATIO_MAX} times as many"
            );
            return Poll::Ready(Err(IoError::new(ErrorKind::InvalidData, reason)));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.decoder).poll_read(context, buffer))?;
        self.written += (buffer.filled().len() - before) as u64;
        Poll::Ready(Ok(()))
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

    #[test]
    fn a_file_that_shrinks_well_is_read() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(&vec![0; 32 << 20]).unwrap();
        assert_eq!(unpacked(Compression::Gzip, &gzip.finish().unwrap()).unwrap(), 32 << 20);
    }
}
