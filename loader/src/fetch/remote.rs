//! Fetches the fields that a step needs of one remote shard, in the cheapest way.
//!
//! A cached shard is mapped. Of an uncompressed shard only the wanted fields are requested; with a cache, the
//! whole shard is copied in the background for later steps. A compressed shard is downloaded and decompressed
//! as a whole.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use bytes::Bytes;

use super::ranges::unpack;
use crate::index::IndexedShard;
use crate::shard::Compression;
use crate::store::{CacheKey, Identity, RemoteObject, Room, ShardBody, blocking, fetch_ranges, spawn};

/// Bytes of a compressed shard in flight while it is decompressed.
const PACKED_BYTES_AHEAD: u64 = 64 << 20;

/// Remote shard with its entry in the index.
pub(super) struct IndexedRemote {
    pub(super) object: RemoteObject,
    pub(super) known: IndexedShard,
}

/// Wanted offsets and lengths, and the whole shard if it is in memory.
pub(super) struct WantedRanges {
    pub(super) ranges: Vec<(u64, u64)>,
    pub(super) whole: Option<Bytes>,
}

/// Bytes fetched from a remote shard.
pub(super) struct Fetched {
    /// The wanted fields, by offset and length.
    pub(super) fields: Vec<((u64, u64), Bytes)>,
    /// The whole shard after decompression, if it had to be read.
    pub(super) whole: Option<Bytes>,
    /// Whether `whole` is mapped from the cache and takes no memory.
    pub(super) is_mapped: bool,
}

impl IndexedRemote {
    fn identity(&self) -> Identity {
        let IndexedShard { bytes, modified_ns, etag, .. } = &self.known;
        Identity { bytes: *bytes, modified_ns: *modified_ns, etag: etag.clone() }
    }

    /// Fetches the wanted fields.
    ///
    /// # Errors
    /// The read that failed, with its offset.
    pub(super) async fn fetch(&self, wanted: WantedRanges) -> io::Result<Fetched> {
        let WantedRanges { ranges, whole } = wanted;
        if let Some(whole) = whole {
            let fields = slices(&whole, ranges)?;
            return Ok(Fetched { fields, whole: None, is_mapped: false });
        }
        if self.known.compression != Compression::None {
            let (whole, is_mapped) = self.unpacked().await?;
            return Ok(Fetched { fields: slices(&whole, ranges)?, whole: Some(whole), is_mapped });
        }
        let identity = self.identity();
        let cached = (self.object.stores().cache(), CacheKey::packed(&self.object, &identity));
        if let (Some(cache), Some(key)) = cached {
            let (kept, wanted) = (cache.clone(), key.clone());
            if let Some(whole) = spawn(async move { kept.get(&wanted).await }).await?? {
                return Ok(Fetched { fields: slices(&whole, ranges)?, whole: Some(whole), is_mapped: true });
            }
            cache.copy_in_background(key, self.object.clone(), identity.clone());
        }
        let offsets: Vec<Range<u64>> = ranges.iter().map(|&(offset, bytes)| offset..offset + bytes).collect();
        let fields = fetch_ranges(&self.object, &identity, &offsets).await?;
        Ok(Fetched { fields: ranges.into_iter().zip(fields).collect(), whole: None, is_mapped: false })
    }

    /// Returns the whole shard, decompressed, and whether it is mapped from the cache.
    async fn unpacked(&self) -> io::Result<(Bytes, bool)> {
        let identity = self.identity();
        let key = CacheKey::unpacked(&self.object, &identity, self.known.unpacked_bytes);
        let (object, known) = (self.object.clone(), self.known.clone());
        let cached = match (object.stores().cache().cloned(), key) {
            (Some(cache), Some(key)) => {
                let fill = {
                    let (object, known, identity) = (object.clone(), known.clone(), identity.clone());
                    |file: std::sync::Arc<std::fs::File>| async move {
                        let whole = download_and_unpack(object, identity, known.clone()).await?;
                        if whole.len() as u64 != known.unpacked_bytes {
                            return Err(ends_early(whole.len() as u64));
                        }
                        blocking(move || file.write_all_at(&whole, 0)).await
                    }
                };
                spawn(async move { cache.get_or_fill(&key, Room::Any, fill).await }).await??
            }
            _ => None,
        };
        match cached {
            Some(whole) => Ok((whole, true)),
            None => Ok((spawn(download_and_unpack(object, identity, known)).await??, false)),
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

fn slices(whole: &Bytes, ranges: Vec<(u64, u64)>) -> io::Result<Vec<((u64, u64), Bytes)>> {
    let slice = |(offset, bytes): (u64, u64)| {
        let end = offset.checked_add(bytes).filter(|&end| end <= whole.len() as u64);
        let end = end.ok_or_else(|| ends_early(offset.saturating_add(bytes)))?;
        Ok(((offset, bytes), whole.slice(offset as usize..end as usize)))
    };
    ranges.into_iter().map(slice).collect()
}

fn ends_early(offset: u64) -> io::Error {
    let reason = format!("it ends before offset {offset}; it changed after it was indexed");
    io::Error::new(ErrorKind::UnexpectedEof, reason)
}
