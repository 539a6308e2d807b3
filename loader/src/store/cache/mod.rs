//! Caches whole remote shards on a local disk, shared by all processes of a machine.
//!
//! A shard is downloaded once, by the first process that needs it, while the others wait; then it is mapped
//! like a local file. Its file name contains the URL, the version and the length, so a replaced object gets
//! another file and a file of another length is never served. [`directory`] makes this safe between
//! processes. The cache must be on a local disk, because locks of network file systems are unreliable.

mod directory;

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

pub(crate) use self::directory::Room;
use self::directory::{Directory, Reserved};

use super::object::{Identity, RemoteObject};
use super::settings::ShardCache;
use super::tasks::detach;
use super::url::without_query;
use crate::error::Result;

/// Interval at which a process checks whether another one has finished its download.
const POLL: Duration = Duration::from_millis(50);
/// Shards that are copied in the background in parallel.
const COPIES_AT_ONCE: usize = 4;
/// Chunks of one shard that are downloaded in parallel.
const CHUNKS_AT_ONCE: usize = 8;

/// Cached version of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    /// File name without extension.
    stem: String,
    /// Length of the file.
    bytes: u64,
}

impl CacheKey {
    /// Returns the key of a shard as stored; `None` if the server does not distinguish versions.
    pub(crate) fn packed(object: &RemoteObject, identity: &Identity) -> Option<Self> {
        Self::new(object, identity, "packed", identity.bytes)
    }

    /// Returns the key of a decompressed shard, of which `bytes` are kept.
    pub(crate) fn unpacked(object: &RemoteObject, identity: &Identity, bytes: u64) -> Option<Self> {
        Self::new(object, identity, "unpacked", bytes)
    }

    fn new(object: &RemoteObject, identity: &Identity, form: &str, bytes: u64) -> Option<Self> {
        if identity.etag.is_none() && identity.modified_ns == 0 {
            return None;
        }
        let mut hasher = Sha256::new();
        for part in [form, without_query(object.url()), identity.etag.as_deref().unwrap_or_default()] {
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

/// Cache of shards on a local disk.
#[derive(Debug)]
pub(crate) struct Cache {
    directory: Arc<Directory>,
    /// Shards that are being copied in the background, or could not be copied.
    begun: Mutex<HashSet<CacheKey>>,
    copies: Semaphore,
}

impl Cache {
    pub(super) fn open(settings: ShardCache) -> Result<Self> {
        let (begun, copies) = (Mutex::default(), Semaphore::new(COPIES_AT_ONCE));
        Ok(Self { directory: Arc::new(Directory::open(settings)?), begun, copies })
    }

    /// Copies a shard for later use, unless that would remove shards in use.
    ///
    /// Nobody waits for it: readers that need the shard earlier read it by range, and report failures
    /// themselves.
    pub(crate) fn copy_in_background(
        self: &Arc<Self>,
        key: CacheKey,
        object: RemoteObject,
        identity: Identity,
    ) {
        if !self.begun.lock().expect("no holder panics").insert(key.clone()) {
            return;
        }
        let cache = self.clone();
        detach(async move {
            let Ok(_permit) = cache.copies.acquire().await else { return };
            let download = |file| download(object, identity, file);
            if let Ok(Some(_)) = cache.get_or_fill(&key, Room::Unused, download).await {
                cache.begun.lock().expect("no holder panics").remove(&key);
            }
        });
    }

    /// Returns a cached shard, mapped, and marks it as used.
    pub(crate) async fn get(&self, key: &CacheKey) -> io::Result<Option<Bytes>> {
        let (directory, key) = (self.directory.clone(), key.clone());
        blocking(move || directory.open_kept(&key)).await
    }

    /// Returns a shard as stored, after downloading it if needed; `None` if it is larger than the cache.
    pub(crate) async fn get_or_copy(
        &self,
        key: &CacheKey,
        object: &RemoteObject,
        identity: &Identity,
    ) -> io::Result<Option<Bytes>> {
        let download = |file: Arc<File>| download(object.clone(), identity.clone(), file);
        self.get_or_fill(key, Room::Any, download).await
    }

    /// Returns a cached shard, after making room and writing it with `fill` if needed.
    ///
    /// Other processes that need it wait. `None` if there is no room, or none without removing shards in use.
    pub(crate) async fn get_or_fill<F>(
        &self,
        key: &CacheKey,
        room: Room,
        fill: impl FnOnce(Arc<File>) -> F,
    ) -> io::Result<Option<Bytes>>
    where
        F: Future<Output = io::Result<()>>,
    {
        let part = loop {
            let (directory, wanted) = (self.directory.clone(), key.clone());
            match blocking(move || directory.reserve(&wanted, room)).await? {
                Reserved::Kept(bytes) => return Ok(Some(bytes)),
                Reserved::ByOther => tokio::time::sleep(POLL).await,
                Reserved::NoRoom => return Ok(None),
                Reserved::PartialShard(part) => break part,
            }
        };
        fill(part.file().clone()).await?;
        let directory = self.directory.clone();
        blocking(move || directory.keep(part)).await.map(Some)
    }
}

/// Downloads a whole object into a file.
async fn download(object: RemoteObject, identity: Identity, file: Arc<File>) -> io::Result<()> {
    let chunk_bytes = object.stores().chunk_bytes();
    let starts = (0..identity.bytes).step_by(chunk_bytes as usize);
    let write = |start: u64| {
        let (object, identity, file) = (object.clone(), identity.clone(), file.clone());
        let range = start..identity.bytes.min(start + chunk_bytes);
        async move {
            let (bytes, _) = object.read(range, &identity).await?;
            blocking(move || file.write_all_at(&bytes, start)).await
        }
    };
    let mut written = futures::stream::iter(starts).map(write).buffer_unordered(CHUNKS_AT_ONCE);
    while let Some(chunk) = written.next().await {
        chunk?;
    }
    Ok(())
}

/// Runs blocking file operations outside of the runtime's threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
