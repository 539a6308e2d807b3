//! Decompresses shards.

use std::io;

use bytes::Bytes;
use tokio::io::{AsyncBufRead, AsyncReadExt};

use crate::index::IndexedShard;
use crate::shard::decompress;

/// Decompresses a shard up to the end of its last sample; the rest is padding, or not part of the dataset.
pub(super) fn unpack(archive: impl AsyncBufRead + Send + Unpin, shard: &IndexedShard) -> io::Result<Bytes> {
    let mut unpacked = Vec::with_capacity(shard.unpacked_bytes as usize);
    let reader = decompress(shard.compression, archive);
    futures::executor::block_on(reader.take(shard.unpacked_bytes).read_to_end(&mut unpacked))?;
    Ok(unpacked.into())
}
