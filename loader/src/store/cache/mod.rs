//! Caches whole remote shards on a local disk, shared by all processes on a machine.
//!
//! A shard is downloaded once, by the first process that needs it, while all other processes wait; then it is
//! read like a local file. The file name contains the URL, the version and the length, so a replaced object
//! receives a new file, and a file with a wrong length is never served. Only signature parameters are omitted
//! from the URL, so that a fresh signature finds the shard. [`directory`] makes this safe between processes.
//! An unusable cache does not end a run: shards are then read from the store. The cache must be on a local
//! disk, because locks on network file systems are unreliable.

mod directory;
#[cfg(test)]
mod interleavings;

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use self::directory::{CacheFault, Directory, Reserved, is_stuck};
pub(crate) use self::directory::{PartWriter, Room};

use super::answer::{Identity, comparable_tag};
use super::connect::detach;
use super::local::{LocalShard, ReadMode};
use super::settings::ShardCache;
use super::url_parts::without_signature;
use crate::error::Result;

/// Minimum time for which a process waits for a shard writer that makes no progress.
const WRITER_WAIT_MIN: Duration = Duration::from_secs(5);
/// Maximum time without a write before waiting for a writer ends.
const WRITER_IDLE_MAX: Duration = Duration::from_mins(1);
/// Interval at which a process checks whether a download by a different process has finished.
const POLL: Duration = Duration::from_millis(50);
/// Number of shards that are copied in the background in parallel.
const COPIES_AT_ONCE: usize = 4;

/// Cached shard version.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    /// File name without extension.
    stem: String,
    /// File length in bytes.
    bytes: u64,
}

impl CacheKey {
    /// Returns the key for the stored shard at a URL; `None` if the server does not distinguish versions.
    pub(crate) fn packed(url: &str, identity: &Identity) -> Option<Self> {
        Self::new(url, identity, "packed", identity.bytes)
    }

    /// Returns the key for a decompressed shard, of which `bytes` bytes are kept.
    pub(crate) fn unpacked(url: &str, identity: &Identity, bytes: u64) -> Option<Self> {
        Self::new(url, identity, "unpacked", bytes)
    }

    fn new(url: &str, identity: &Identity, form: &str, bytes: u64) -> Option<Self> {
        if identity.etag.is_none() && identity.modified_ns == 0 {
            return None;
        }
        let mut hasher = Sha256::new();
        let name = without_signature(url);
        for part in [form, &name, comparable_tag(identity.etag.as_deref().unwrap_or_default())] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let modified_ns = if identity.etag.is_some() { 0 } else { identity.modified_ns };
        hasher.update(modified_ns.to_le_bytes());
        hasher.update(identity.bytes.to_le_bytes());
        let digest = Bytes::copy_from_slice(&hasher.finalize()[..16]);
        Some(Self { stem: format!("{digest:x}-{bytes}"), bytes })
    }
}

/// Shard cache on a local disk.
#[derive(Debug)]
pub(crate) struct Cache {
    directory: Arc<Directory>,
    /// Shards that are being copied in the background, or could not be copied.
    begun: Mutex<HashSet<CacheKey>>,
    copies: Semaphore,
    /// Whether a disk fault was reported.
    is_reported: AtomicBool,
}

impl Cache {
    pub(super) fn open(settings: ShardCache, read: ReadMode) -> Result<Self> {
        let (begun, copies) = (Mutex::default(), Semaphore::new(COPIES_AT_ONCE));
        let directory = Arc::new(Directory::open(settings, read)?);
        Ok(Self { directory, begun, copies, is_reported: AtomicBool::new(false) })
    }

    /// Copies a shard for later use with `download`, unless that would remove shards in use.
    ///
    /// Nobody waits for the copy: readers that need the shard earlier read it by range, and report failures
    /// themselves.
    pub(crate) fn copy_in_background<F>(
        self: &Arc<Self>,
        key: CacheKey,
        download: impl FnOnce(PartWriter) -> F + Send + 'static,
    ) where
        F: Future<Output = io::Result<()>> + Send,
    {
        if !self.begun.lock().expect("no holder panics").insert(key.clone()) {
            return;
        }
        let cache = self.clone();
        detach(async move {
            let Ok(_permit) = cache.copies.acquire().await else { return };
            if let Ok(Some(_)) = cache.get_or_fill(&key, Room::Unused, download).await {
                cache.begun.lock().expect("no holder panics").remove(&key);
            }
        });
    }

    /// Opens a cached shard and marks it as used.
    pub(crate) async fn get(&self, key: &CacheKey) -> io::Result<Option<LocalShard>> {
        let (directory, key) = (self.directory.clone(), key.clone());
        blocking(move || directory.open_kept(&key)).await
    }

    /// Returns a cached shard, after making room and writing it with `fill` if needed.
    ///
    /// Other processes that need the shard wait. `None` if there is no room, or no room without removing
    /// shards in use.
    pub(crate) async fn get_or_fill<F>(
        &self,
        key: &CacheKey,
        room: Room,
        fill: impl FnOnce(PartWriter) -> F,
    ) -> io::Result<Option<LocalShard>>
    where
        F: Future<Output = io::Result<()>>,
    {
        if self.is_reported.load(Ordering::Relaxed) {
            // The disk has failed before; its content may still be readable.
            return Ok(self.get(key).await.unwrap_or(None));
        }
        match self.keep_filled(key, room, fill).await {
            Err(error) if CacheFault::is_in(&error) => {
                if !self.is_reported.swap(true, Ordering::Relaxed) {
                    tracing::warn!("{error}; shards that are not kept are read from their store");
                }
                Ok(None)
            }
            kept => kept,
        }
    }

    async fn keep_filled<F>(
        &self,
        key: &CacheKey,
        room: Room,
        fill: impl FnOnce(PartWriter) -> F,
    ) -> io::Result<Option<LocalShard>>
    where
        F: Future<Output = io::Result<()>>,
    {
        let started = Instant::now();
        let part = loop {
            let (directory, wanted) = (self.directory.clone(), key.clone());
            match blocking(move || directory.reserve(&wanted, room)).await? {
                Reserved::Kept(shard) => return Ok(Some(shard)),
                Reserved::ByOther(part) => {
                    let is_stuck = started.elapsed() > WRITER_WAIT_MIN
                        && blocking(move || Ok(is_stuck(&part, WRITER_IDLE_MAX))).await?;
                    if is_stuck {
                        return Ok(None);
                    }
                    tokio::time::sleep(POLL).await;
                }
                Reserved::NoRoom => return Ok(None),
                Reserved::PartialShard(part) => break part,
            }
        };
        fill(part.writer()).await?;
        let directory = self.directory.clone();
        blocking(move || directory.keep(part)).await.map(Some)
    }
}

/// Runs blocking file operations outside the runtime threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
