//! Fetches the fields that a step needs from a remote shard, in the cheapest way.
//!
//! A cached shard is read from the cache file. From an uncompressed shard, only the wanted fields are
//! requested; with a cache, the whole shard is copied in the background for later steps. A compressed shard
//! is downloaded and decompressed as a whole.

use std::io;
use std::io::ErrorKind;
use std::ops::Range;

use bytes::Bytes;
use tokio::io::{AsyncBufRead, AsyncReadExt};

use super::ranges::FieldRange;
use crate::index::IndexedShard;
use crate::shard::{Compression, decompress};
use crate::store::{
    CacheKey, Identity, LocalShard, PartWriter, RemoteObject, Room, ShardBody, blocking, download,
    fetch_ranges, spawn,
};

/// Maximum number of compressed bytes in flight during decompression.
const PACKED_BYTES_AHEAD: u64 = 64 << 20;

/// Remote shard with the index entry.
pub(super) struct IndexedRemote {
    pub(super) object: RemoteObject,
    pub(super) known: IndexedShard,
}

/// Wanted fields, and the whole shard if it is in memory.
pub(super) struct WantedRanges {
    pub(super) ranges: Vec<FieldRange>,
    pub(super) whole: Option<LocalShard>,
}

/// A whole shard.
pub(super) enum Whole {
    /// Cache file.
    Kept(LocalShard),
    /// In memory, after decompression.
    Unpacked(Bytes),
}

/// Bytes fetched from a remote shard.
pub(super) struct Fetched {
    /// The wanted fields with headers.
    pub(super) fields: Vec<(FieldRange, Bytes)>,
    /// The whole shard, if it is cached or had to be decompressed.
    pub(super) whole: Option<Whole>,
}

/// Returns the indexed version.
pub(super) fn identity(known: &IndexedShard) -> Identity {
    let IndexedShard { bytes, modified_ns, etag, .. } = known;
    Identity { bytes: *bytes, modified_ns: *modified_ns, etag: etag.clone() }
}

impl IndexedRemote {
    /// Fetches the wanted fields.
    ///
    /// # Errors
    /// The failed read, with the offset.
    pub(super) async fn fetch(&self, wanted: WantedRanges) -> io::Result<Fetched> {
        let WantedRanges { ranges, whole } = wanted;
        if let Some(whole) = whole {
            return Ok(Fetched { fields: read_ranges(&whole, ranges).await?, whole: None });
        }
        if self.known.compression != Compression::None {
            let whole = self.unpacked().await?;
            let shard = match &whole {
                Whole::Kept(kept) => kept.clone(),
                Whole::Unpacked(bytes) => LocalShard::Mapped(bytes.clone()),
            };
            return Ok(Fetched { fields: read_ranges(&shard, ranges).await?, whole: Some(whole) });
        }
        let identity = identity(&self.known);
        let cached = (self.object.stores().cache(), CacheKey::packed(self.object.url(), &identity));
        if let (Some(cache), Some(key)) = cached {
            let (kept, wanted) = (cache.clone(), key.clone());
            if let Some(whole) = spawn(async move { kept.get(&wanted).await }).await?? {
                let fields = read_ranges(&whole, ranges).await?;
                return Ok(Fetched { fields, whole: Some(Whole::Kept(whole)) });
            }
            let (object, identity) = (self.object.clone(), identity.clone());
            cache.copy_in_background(key, |part| download(object, identity, part));
        }
        let offset = |range: &FieldRange| {
            let (offset, bytes) = range.with_headers();
            offset..offset + bytes
        };
        let offsets: Vec<Range<u64>> = ranges.iter().map(offset).collect();
        let fields = fetch_ranges(&self.object, &identity, &offsets).await?;
        Ok(Fetched { fields: ranges.into_iter().zip(fields).collect(), whole: None })
    }

    /// Returns the whole shard, decompressed.
    async fn unpacked(&self) -> io::Result<Whole> {
        let identity = identity(&self.known);
        let key = CacheKey::unpacked(self.object.url(), &identity, self.known.unpacked_bytes);
        let (object, known) = (self.object.clone(), self.known.clone());
        let cached = match (object.stores().cache().cloned(), key) {
            (Some(cache), Some(key)) => {
                let fill = {
                    let (object, known, identity) = (object.clone(), known.clone(), identity.clone());
                    |part: PartWriter| async move {
                        let whole = download_and_unpack(object, identity, known.clone()).await?;
                        if whole.len() as u64 != known.unpacked_bytes {
                            return Err(ends_early(whole.len() as u64));
                        }
                        blocking(move || part.write_at(&whole, 0)).await
                    }
                };
                spawn(async move { cache.get_or_fill(&key, Room::Any, fill).await }).await??
            }
            _ => None,
        };
        match cached {
            Some(kept) => Ok(Whole::Kept(kept)),
            None => Ok(Whole::Unpacked(spawn(download_and_unpack(object, identity, known)).await??)),
        }
    }
}

async fn download_and_unpack(
    object: RemoteObject,
    identity: Identity,
    known: IndexedShard,
) -> io::Result<Bytes> {
    let body = ShardBody::of(object, identity, PACKED_BYTES_AHEAD);
    let failure = body.failure();
    let unpacked = blocking(move || unpack(body, &known)).await;
    match failure.lock().expect("no holder panics").take() {
        Some(failure) => Err(failure),
        None => unpacked,
    }
}

/// Reads shard ranges, outside the runtime threads where that may block.
async fn read_ranges(shard: &LocalShard, ranges: Vec<FieldRange>) -> io::Result<Vec<(FieldRange, Bytes)>> {
    let shard = shard.clone();
    let read = move || {
        let read = |range: FieldRange| {
            let (offset, bytes) = range.with_headers();
            Ok((range, shard.read(offset, bytes)?))
        };
        ranges.into_iter().map(read).collect()
    };
    spawn(blocking(read)).await?
}

fn ends_early(offset: u64) -> io::Error {
    let reason = format!("it ends before offset {offset}; it changed after it was indexed");
    io::Error::new(ErrorKind::UnexpectedEof, reason)
}

/// Decompresses a shard up to the end of its last sample; the rest is padding, or not part of the dataset.
pub(super) fn unpack(archive: impl AsyncBufRead + Send + Unpin, shard: &IndexedShard) -> io::Result<Bytes> {
    let mut unpacked = Vec::with_capacity(shard.unpacked_bytes as usize);
    let reader = decompress(shard.compression, archive);
    futures::executor::block_on(reader.take(shard.unpacked_bytes).read_to_end(&mut unpacked))?;
    Ok(unpacked.into())
}
