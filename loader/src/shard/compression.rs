//! Detects the compression of a shard by its first bytes, never by its name.

use std::sync::Arc;

use async_compression::tokio::bufread::{GzipDecoder, ZstdDecoder};
use tokio::io::{AsyncBufRead, AsyncRead};

use crate::error::{Error, Result};

/// Largest window of a zstd frame, as a power of two in bytes (128 MiB), the same limit as in the reference
/// decoder.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

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
/// [`Error::Shard`] if the format is not supported: bzip2 or xz.
pub fn sniff_compression(shard: &Arc<str>, first: &[u8]) -> Result<Compression> {
    let unsupported =
        |format: &'static str| Err(Error::UnsupportedCompression { shard: shard.to_string(), format });
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
            let mut decoder = GzipDecoder::new(reader);
            decoder.multiple_members(true);
            Box::new(decoder)
        }
        Compression::Zstd => {
            let window = [async_compression::zstd::DParameter::window_log_max(ZSTD_WINDOW_LOG_MAX)];
            let mut decoder = ZstdDecoder::with_params(reader, &window);
            decoder.multiple_members(true);
            Box::new(decoder)
        }
    }
}
