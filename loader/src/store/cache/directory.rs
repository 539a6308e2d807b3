//! Manages the cache directory: files, writers, and removal.
//!
//! `STEM.shard` is a complete shard, `STEM.part` a shard under construction. A part has the full shard length
//! from the start, so reserved space counts. The writer holds a lock on the file; the kernel releases the
//! lock when the writer dies, and an unlocked part is a leftover that the next process removes. Reserving,
//! keeping and removing hold `lock`, so the added lengths are consistent. A removed shard stays complete for
//! every process that has it open.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::CacheKey;
use crate::error::{Error, Result};
use crate::files::open_own;
use crate::store::local::{Holder, LocalShard, Patience, ReadMode, lock_patiently};
use crate::store::settings::ShardCache;

/// Maximum wait for a process that changes the directory, which takes milliseconds.
const PATIENCE: Patience = Patience {
    until_report: Duration::from_secs(5),
    for_stopped: Duration::from_secs(5),
    for_any: Duration::from_mins(1),
};
/// Name of the directory's lock file.
const LOCK: &str = "lock";
/// File time granularity: the file clock ticks every few milliseconds, so a file time may precede a time that
/// was read earlier.
const CLOCK_TICK: Duration = Duration::from_millis(100);
const SHARD: &str = "shard";
const PART: &str = "part";

/// Shards that may be removed to make room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// The least recently used shards.
    Any,
    /// Only shards that nobody has used since this process opened the cache.
    Unused,
}

/// Cache reservation result.
pub(super) enum Reserved {
    /// The shard is already cached.
    Kept(LocalShard),
    /// A different writer is downloading the shard.
    ByOther(PathBuf),
    /// The shard does not fit.
    NoRoom,
    /// The caller must write the shard.
    PartialShard(PartialShard),
}

/// Shard under construction; dropping it removes the file unless it was kept.
pub(super) struct PartialShard {
    file: Arc<File>,
    path: PathBuf,
    bytes: u64,
    is_kept: bool,
}

impl PartialShard {
    /// Creates a file that nobody else writes.
    fn begin(path: PathBuf, bytes: u64) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|error| in_file(&path, &error))?;
        let part = Self { file: Arc::new(file), path, bytes, is_kept: false };
        let begun = part.file.try_lock().map_err(io::Error::from).and_then(|()| part.file.set_len(bytes));
        begun.map_err(|error| in_file(&part.path, &error))?;
        Ok(part)
    }

    /// Returns the file to write to.
    pub(super) fn writer(&self) -> PartWriter {
        PartWriter { file: self.file.clone(), path: self.path.clone() }
    }

    /// Leaves the part in the same state as a killed writer.
    #[cfg(test)]
    pub(super) fn abandon(mut self) {
        self.is_kept = true;
    }
}

/// File for a shard under construction, which has the full shard length.
#[derive(Debug, Clone)]
pub(crate) struct PartWriter {
    file: Arc<File>,
    path: PathBuf,
}

impl PartWriter {
    /// Writes bytes at an offset.
    ///
    /// # Errors
    /// The local disk error, as a cache error.
    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|error| in_file(&self.path, &error))
    }
}

impl Drop for PartialShard {
    fn drop(&mut self) {
        if !self.is_kept {
            // The file is still locked, so no other process uses it; if it stays, it is removed as a
            // leftover.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Cache directory.
#[derive(Debug)]
pub(super) struct Directory {
    settings: ShardCache,
    read: ReadMode,
    opened: SystemTime,
}

/// File in the directory.
struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
    is_part: bool,
}

impl Directory {
    pub(super) fn open(settings: ShardCache, read: ReadMode) -> Result<Self> {
        let directory = Self { settings, read, opened: SystemTime::now() - CLOCK_TICK };
        let path = &directory.settings.directory;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.and_then(|()| check_owner(path))
            .and_then(|()| directory.shrink())
            .map_err(|source| Error::file(path, source))?;
        Ok(directory)
    }

    /// Removes least recently used shards over the limit, which may be lower than in an earlier run.
    fn shrink(&self) -> io::Result<()> {
        let _lock = self.lock()?;
        self.make_room(0, self.entries()?, Room::Any);
        Ok(())
    }

    /// Opens a cached shard and marks it as used.
    pub(super) fn open_kept(&self, key: &CacheKey) -> io::Result<Option<LocalShard>> {
        let path = self.path(key, SHARD);
        let kept = match LocalShard::open_marked(&path, self.read) {
            Ok(kept) => kept,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(in_file(&path, &error)),
        };
        if kept.bytes() != key.bytes {
            // This cache never writes such a file, so it is damaged and the shard is downloaded again.
            let _ = fs::remove_file(&path);
            return Ok(None);
        }
        // A different process may have removed the shard meanwhile, which then needs no mark.
        let _ =
            File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Ok(Some(kept))
    }

    /// Finds a shard, or reserves room for it.
    pub(super) fn reserve(&self, key: &CacheKey, room: Room) -> io::Result<Reserved> {
        if let Some(kept) = self.open_kept(key)? {
            return Ok(Reserved::Kept(kept));
        }
        if key.bytes > self.settings.bytes_max {
            return Ok(Reserved::NoRoom);
        }
        let _lock = self.lock()?;
        if let Some(kept) = self.open_kept(key)? {
            return Ok(Reserved::Kept(kept));
        }
        let entries = self.entries()?;
        let path = self.path(key, PART);
        if entries.iter().any(|entry| entry.is_part && entry.path == path) {
            return Ok(Reserved::ByOther(path));
        }
        if !self.make_room(key.bytes, entries, room) {
            return Ok(Reserved::NoRoom);
        }
        PartialShard::begin(path, key.bytes).map(Reserved::PartialShard)
    }

    /// Publishes a completely written part as a shard.
    pub(super) fn keep(&self, mut part: PartialShard) -> io::Result<LocalShard> {
        part.file.sync_all().map_err(|error| in_file(&part.path, &error))?;
        let path = part.path.with_extension(SHARD);
        let _lock = self.lock()?;
        fs::rename(&part.path, &path).map_err(|error| in_file(&path, &error))?;
        part.is_kept = true;
        let kept = LocalShard::open_marked(&path, self.read).map_err(|error| in_file(&path, &error))?;
        if kept.bytes() != part.bytes {
            return Err(in_file(&path, &io::Error::other("its length changed while it was written")));
        }
        Ok(kept)
    }

    /// Removes least recently used shards until `bytes` more bytes fit; removes nothing if that is
    /// impossible.
    fn make_room(&self, bytes: u64, mut entries: Vec<Entry>, room: Room) -> bool {
        let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let most = self.settings.bytes_max - bytes;
        entries.retain(|entry| !entry.is_part && (room == Room::Any || entry.used < self.opened));
        let removable: u64 = entries.iter().map(|entry| entry.bytes).sum();
        if total - removable > most {
            return false;
        }
        entries.sort_by_key(|entry| entry.used);
        for entry in entries {
            if total <= most {
                break;
            }
            if fs::remove_file(&entry.path).is_ok() {
                total -= entry.bytes;
            }
        }
        total <= most
    }

    /// Lists shards and parts; removes parts whose writers died.
    fn entries(&self) -> io::Result<Vec<Entry>> {
        let directory = &self.settings.directory;
        let mut entries = Vec::new();
        for entry in fs::read_dir(directory).map_err(|error| in_file(directory, &error))? {
            let path = entry.map_err(|error| in_file(directory, &error))?.path();
            let is_part = path.extension().is_some_and(|extension| extension == PART);
            if !is_part && path.extension().is_none_or(|extension| extension != SHARD) {
                continue;
            }
            if is_part && is_leftover(&path) {
                // A file that cannot be removed still counts, below.
                let _ = fs::remove_file(&path);
            }
            if let Ok(metadata) = fs::metadata(&path) {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                entries.push(Entry { path, bytes: metadata.len(), used, is_part });
            }
        }
        Ok(entries)
    }

    fn path(&self, key: &CacheKey, extension: &str) -> PathBuf {
        self.settings.directory.join(format!("{}.{extension}", key.stem))
    }

    /// Locks the directory against changes by other processes and threads.
    fn lock(&self) -> io::Result<File> {
        let path = self.settings.directory.join(LOCK);
        let file = open_own(&path);
        let file = file.and_then(|file| lock_patiently(&file, &path, PATIENCE).map(|()| file));
        file.map_err(|error| in_file(&path, &error))
    }
}

/// Checks that nobody else can put files into a directory: kept shards are recognized only by name and
/// length.
///
/// # Errors
/// [`ErrorKind::PermissionDenied`] with the owner.
fn check_owner(directory: &Path) -> io::Result<()> {
    let metadata = fs::metadata(directory)?;
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    let is_own = owner == user || owner == 0;
    if is_own && metadata.mode() & 0o002 == 0 {
        return Ok(());
    }
    let whose =
        if is_own { "can be written by every user".to_owned() } else { format!("belongs to user {owner}") };
    let reason =
        format!("the directory {whose}, who could put other shards into it; choose a directory of your own");
    Err(io::Error::new(ErrorKind::PermissionDenied, reason))
}

/// Returns whether a part's writer makes no progress: it is stopped, or has written nothing for `patience`.
pub(super) fn is_stuck(part: &Path, patience: Duration) -> bool {
    let Ok(file) = File::open(part) else { return false };
    let holder = Holder::of(&file);
    let written = file.metadata().and_then(|metadata| metadata.modified()).ok();
    // If the clock was set back, the last write appears to be in the future and would never be long ago.
    let idle =
        written.map(|time| time.elapsed().unwrap_or_else(|ahead| ahead.duration())).unwrap_or_default();
    let is_stuck = idle >= patience || holder.as_ref().is_some_and(Holder::is_stopped);
    if is_stuck {
        let by = holder.map_or_else(|| "another process".to_owned(), |holder| holder.describe());
        tracing::warn!("`{}` is being written by {by}; its shard is read from the store", part.display());
    }
    is_stuck
}

/// Returns whether a part has no writer.
fn is_leftover(path: &Path) -> bool {
    let Ok(file) = File::options().write(true).open(path) else { return false };
    !matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

fn in_file(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), CacheFault(format!("`{}`: {error}", path.display())))
}

/// Local disk fault, not a store fault.
#[derive(Debug, thiserror::Error)]
#[error("shard cache: {0}")]
pub(super) struct CacheFault(String);

impl CacheFault {
    /// Returns whether an error is a cache error.
    pub(super) fn is_in(error: &io::Error) -> bool {
        error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<Self>)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(bytes_max: u64) -> (tempfile::TempDir, Directory) {
        let place = tempfile::tempdir().unwrap();
        let settings = ShardCache { directory: place.path().join("cache"), bytes_max };
        let directory = Directory::open(settings, ReadMode::Auto).unwrap();
        (place, directory)
    }

    fn key(name: &str, bytes: u64) -> CacheKey {
        CacheKey { stem: format!("{name}-{bytes}"), bytes }
    }

    fn begun(directory: &Directory, key: &CacheKey) -> PartialShard {
        match directory.reserve(key, Room::Any).unwrap() {
            Reserved::PartialShard(part) => part,
            _ => panic!("it is new and there is room"),
        }
    }

    fn put(directory: &Directory, name: &str, bytes: u64) -> LocalShard {
        let key = key(name, bytes);
        let part = begun(directory, &key);
        part.writer().write_at(&vec![name.as_bytes()[0]; bytes as usize], 0).unwrap();
        directory.keep(part).unwrap()
    }

    fn used_at(directory: &Directory, name: &str, bytes: u64, seconds: u64) {
        let file = File::options().append(true).open(directory.path(&key(name, bytes), SHARD)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    }

    fn has(directory: &Directory, name: &str, bytes: u64) -> bool {
        directory.open_kept(&key(name, bytes)).unwrap().is_some()
    }

    #[test]
    fn the_longest_unused_shard_goes_first_and_stays_whole_where_it_is_open() {
        let (_place, directory) = directory(100);
        let held = put(&directory, "a", 40);
        put(&directory, "b", 40);
        used_at(&directory, "b", 40, 1);
        put(&directory, "c", 50);
        assert!(has(&directory, "a", 40) && !has(&directory, "b", 40) && has(&directory, "c", 50));
        used_at(&directory, "a", 40, 1);
        put(&directory, "d", 50);
        assert!(!has(&directory, "a", 40) && has(&directory, "c", 50) && has(&directory, "d", 50));
        assert!(held.read(0, 40).unwrap().iter().all(|&byte| byte == b'a'));
    }

    #[test]
    fn a_lower_limit_holds_from_the_start() {
        let (_place, directory) = directory(100);
        put(&directory, "a", 40);
        put(&directory, "b", 40);
        used_at(&directory, "a", 40, 1);
        let settings = ShardCache { bytes_max: 50, ..directory.settings.clone() };
        let lower = Directory::open(settings, ReadMode::Auto).unwrap();
        assert!(!has(&lower, "a", 40) && has(&lower, "b", 40));
    }

    #[test]
    fn a_shard_under_way_counts_and_is_written_once() {
        let (_place, directory) = directory(100);
        let part = begun(&directory, &key("a", 70));
        assert!(matches!(directory.reserve(&key("a", 70), Room::Any), Ok(Reserved::ByOther(_))));
        assert!(matches!(directory.reserve(&key("b", 40), Room::Any), Ok(Reserved::NoRoom)));
        drop(part);
        assert!(matches!(directory.reserve(&key("b", 40), Room::Any), Ok(Reserved::PartialShard(_))));
        assert!(matches!(directory.reserve(&key("c", 101), Room::Any), Ok(Reserved::NoRoom)));
    }

    #[test]
    fn what_a_killed_writer_left_is_taken_over() {
        let (_place, directory) = directory(100);
        fs::write(directory.path(&key("a", 70), PART), [0; 70]).unwrap();
        fs::write(directory.path(&key("b", 30), PART), [0; 30]).unwrap();
        let part = begun(&directory, &key("a", 70));
        assert!(!directory.path(&key("b", 30), PART).exists());
        drop(part);
        assert!(!directory.path(&key("a", 70), PART).exists());
    }

    #[test]
    fn a_writer_without_progress_is_stuck_whatever_the_clock_does() {
        let (_place, directory) = directory(100);
        let part = begun(&directory, &key("a", 70));
        let patience = Duration::from_mins(1);
        assert!(!is_stuck(&part.path, patience));
        for time in [SystemTime::now() - 2 * patience, SystemTime::now() + 60 * patience] {
            part.file.set_modified(time).unwrap();
            assert!(is_stuck(&part.path, patience));
        }
        part.writer().write_at(&[0], 0).unwrap();
        assert!(!is_stuck(&part.path, patience), "it goes on");
    }

    #[test]
    fn a_file_of_another_length_is_not_served() {
        let (_place, directory) = directory(100);
        fs::write(directory.path(&key("a", 70), SHARD), [0; 69]).unwrap();
        assert!(!has(&directory, "a", 70));
    }

    #[test]
    fn room_can_be_had_without_removing_what_is_in_use() {
        let (_place, directory) = directory(100);
        put(&directory, "a", 70);
        assert!(matches!(directory.reserve(&key("b", 40), Room::Unused), Ok(Reserved::NoRoom)));
        used_at(&directory, "a", 70, 1);
        assert!(matches!(directory.reserve(&key("b", 40), Room::Unused), Ok(Reserved::PartialShard(_))));
        assert!(!has(&directory, "a", 70));
    }
}
