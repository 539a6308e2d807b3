//! Reads local files: by `pread`, or in place through a memory map.
//!
//! Acquires file locks with a time limit: a lock holder may be stopped.
//!
//! Reading copies, and detects when a file is shortened or changed. A map copies nothing, but a file that is
//! shortened, or that its disk or server cannot deliver, ends the process with a bus error, and bytes that
//! were checked may change afterwards. So files are mapped where the caller requests it, or where nobody can
//! write them.

use bytes::Bytes;
use dflop_samples::file;
use memmap2::Mmap;
use rustix::buffer::spare_capacity;
use std::fs::{File, TryLockError};
use std::io::{Error, ErrorKind, Read, Result, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};
use tokio::io::{AsyncBufRead, AsyncRead, ReadBuf};

/// Number of bytes per [`FileBody`] read.
const CHUNK_BYTES: usize = 256 << 10;

/// Read mode for local and cached shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadMode {
    /// [`Self::Mmap`] on file systems that nobody can write, such as SquashFS images, else [`Self::Pread`].
    #[default]
    Auto,
    /// Through a memory map, without a copy. Shortening a shard while it is read ends the process.
    Mmap,
    /// By system calls that copy. Shortening or changing a shard while it is read causes an error.
    Pread,
}

/// Open local file.
#[derive(Debug, Clone)]
pub(crate) enum LocalShard {
    /// Mapped file content.
    Mapped(Bytes),
    /// File to read by range.
    File(Arc<LocalFile>),
}

impl LocalShard {
    /// Opens a file.
    ///
    /// # Errors
    /// The operating system error; anything but a regular file is rejected.
    pub(crate) fn open(path: &Path, mode: ReadMode) -> Result<Self> {
        Self::with_mode(LocalFile::open(path)?, mode)
    }

    fn with_mode(file: LocalFile, mode: ReadMode) -> Result<Self> {
        let is_mapped = match mode {
            ReadMode::Mmap => true,
            ReadMode::Pread => false,
            ReadMode::Auto => is_immutable(&file.file),
        };
        Ok(if is_mapped { Self::Mapped(map(&file.file, file.bytes)?) } else { Self::File(Arc::new(file)) })
    }

    /// Opens a file whose readers set the modification time to mark it as used.
    ///
    /// # Errors
    /// See [`Self::open`].
    pub(crate) fn open_marked(path: &Path, mode: ReadMode) -> Result<Self> {
        let unmarked = LocalFile { modified: None, ..LocalFile::open(path)? };
        Self::with_mode(unmarked, mode)
    }

    /// Returns the length at open time, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Mapped(bytes) => bytes.len() as u64,
            Self::File(file) => file.bytes,
        }
    }

    /// Reads `bytes` bytes at `offset`.
    ///
    /// # Errors
    /// [`ErrorKind::UnexpectedEof`] if the range ends outside the file, [`ErrorKind::InvalidData`] if the
    /// file was changed after it was opened, or the operating system error.
    pub(crate) fn read(&self, offset: u64, bytes: u64) -> Result<Bytes> {
        match self {
            Self::Mapped(all) => {
                let end = end_within(offset, bytes, all.len() as u64)?;
                Ok(all.slice(offset as usize..end as usize))
            }
            Self::File(file) => {
                let read = file.read(offset, bytes);
                // The change explains more than the failure that it caused.
                file.check_unchanged()?;
                read
            }
        }
    }

    /// Reads at most `bytes` from the start.
    ///
    /// # Errors
    /// See [`Self::read`].
    pub(crate) fn first(&self, bytes: usize) -> Result<Bytes> {
        self.read(0, self.bytes().min(bytes as u64))
    }

    /// Starts to read from start to end.
    pub(crate) fn body(&self) -> FileBody {
        FileBody { shard: self.clone(), offset: 0, chunk: Bytes::new(), failure: Failure::default() }
    }
}

/// File that is read by range, and compared with its state at open time.
#[derive(Debug)]
pub(crate) struct LocalFile {
    file: File,
    bytes: u64,
    /// Modification time; `None` if it carries no information.
    modified: Option<SystemTime>,
}

impl LocalFile {
    fn open(path: &Path) -> Result<Self> {
        let file = file::open(path)?;
        let metadata = file.metadata()?;
        Ok(Self { bytes: metadata.len(), modified: metadata.modified().ok(), file })
    }

    fn read(&self, offset: u64, bytes: u64) -> Result<Bytes> {
        end_within(offset, bytes, self.bytes)?;
        let mut buffer = Vec::with_capacity(bytes as usize);
        self.append(offset, bytes, &mut buffer)?;
        Ok(buffer.into())
    }

    /// Appends the bytes at `offset`, which are inside the file as it was at open time. After reading
    /// everything, callers use [`Self::check_unchanged`].
    ///
    /// # Errors
    /// The same errors as [`Self::check_unchanged`] if the file is shorter now, or the operating system
    /// error.
    pub(crate) fn append(&self, offset: u64, bytes: u64, buffer: &mut Vec<u8>) -> Result<()> {
        let end = buffer.len() + bytes as usize;
        buffer.reserve_exact(bytes as usize);
        let mut offset = offset;
        while buffer.len() < end {
            let read = rustix::io::pread(&self.file, spare_capacity(buffer), offset);
            match read.map_err(Error::from) {
                Ok(0) => {
                    self.check_unchanged()?;
                    return Err(ErrorKind::UnexpectedEof.into());
                }
                Ok(read) => offset += read as u64,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        // The capacity may be larger than requested.
        buffer.truncate(end);
        Ok(())
    }

    /// Returns the length at open time, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Checks that the file has not changed since it was opened.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if the length or the modification time differs.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let metadata = self.file.metadata()?;
        if metadata.len() != self.bytes {
            let (was, is) = (self.bytes, metadata.len());
            let reason = format!("it was changed while it was read: it had {was} bytes and has {is}");
            return Err(Error::new(ErrorKind::InvalidData, reason));
        }
        if self.modified.is_some() && metadata.modified().ok() != self.modified {
            return Err(Error::new(
                ErrorKind::InvalidData,
                "it was changed while it was read: it was written to",
            ));
        }
        Ok(())
    }
}

fn end_within(offset: u64, bytes: u64, length: u64) -> Result<u64> {
    offset.checked_add(bytes).filter(|&end| end <= length).ok_or_else(|| {
        let reason = format!("it ends at {length}, before offset {offset} + {bytes}");
        Error::new(ErrorKind::UnexpectedEof, reason)
    })
}

/// Error that ended a body early, if any.
pub(crate) type Failure = Arc<Mutex<Option<Error>>>;

/// Local file bytes in order. Reading blocks the thread.
#[derive(Debug)]
pub(crate) struct FileBody {
    shard: LocalShard,
    offset: u64,
    chunk: Bytes,
    failure: Failure,
}

impl FileBody {
    /// Returns the slot with the error after the body has ended early: decompressors only report that it
    /// ended.
    pub(crate) fn failure(&self) -> Failure {
        self.failure.clone()
    }

    fn fill(&mut self) -> Result<()> {
        let bytes = (self.shard.bytes() - self.offset).min(CHUNK_BYTES as u64);
        // Also at the end, where the empty read checks that the file is unchanged.
        self.chunk = self.shard.read(self.offset, bytes)?;
        self.offset += bytes;
        Ok(())
    }
}

impl AsyncBufRead for FileBody {
    fn poll_fill_buf(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<Result<&[u8]>> {
        let body = self.get_mut();
        if body.chunk.is_empty()
            && let Err(error) = body.fill()
        {
            // `io::Error` cannot be cloned: the reader gets a copy, the slot the original.
            let same = Error::new(error.kind(), error.to_string());
            *body.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            return Poll::Ready(Err(same));
        }
        Poll::Ready(Ok(&body.chunk))
    }

    fn consume(mut self: Pin<&mut Self>, bytes: usize) {
        let _consumed = self.chunk.split_to(bytes);
    }
}

impl AsyncRead for FileBody {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let chunk = std::task::ready!(self.as_mut().poll_fill_buf(context))?;
        let length = buffer.remaining().min(chunk.len());
        buffer.put_slice(&chunk[..length]);
        self.consume(length);
        Poll::Ready(Ok(()))
    }
}

/// File system types that are images, created at once and never written: SquashFS, EROFS, ISO 9660, CramFS,
/// RomFS. A read-only mount with a different type does not count: the files may be written elsewhere.
const IMMUTABLE: [u32; 5] = [0x7371_7368, 0xe0f5_e1e2, 0x9660, 0x28cd_3d45, 0x7275];

/// Returns whether a file is on a file system that nobody can write.
fn is_immutable(file: &File) -> bool {
    // The type is a 32-bit number in a field whose width and sign differ between platforms.
    rustix::fs::fstatfs(file).is_ok_and(|found| IMMUTABLE.contains(&(found.f_type as u32)))
}

/// Maps a file that this process wrote and that nobody else knows.
///
/// # Errors
/// The operating system error.
pub(crate) fn map_own(path: &Path) -> Result<Bytes> {
    let file = LocalFile::open(path)?;
    map(&file.file, file.bytes)
}

/// Maps an open file; the map lives as long as any slice into it.
#[expect(unsafe_code, reason = "a memory map is the only way to hand out payloads without copying them")]
fn map(file: &File, bytes: u64) -> Result<Bytes> {
    if bytes == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is shared with the file, so nothing here can rule out that a different process changes
    // the bytes under the slices, or shortens the file and thereby ends this process. Files are mapped only
    // if nobody can write them (an image, a private file without a name) or if the caller chose
    // `ReadMode::Mmap`, whose documentation states this. No code in this crate relies on mapped bytes staying
    // as they were checked: payloads are copied or parsed by bounds-checked code, and names and texts are
    // copied before they are treated as UTF-8.
    let map = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(map))
}

/// Maximum size of a file that is copied to memory, in bytes.
const COPIED_BYTES_MAX: u64 = 256 << 20;

/// Returns a file's bytes from a copy that no other process can change: in memory, or, for a long file, in a
/// file without a name, whose pages the system can drop.
///
/// # Errors
/// The operating system error.
pub(crate) fn read_private(mut file: File) -> Result<Bytes> {
    let bytes = file.metadata()?.len();
    if bytes > COPIED_BYTES_MAX
        && let Ok(mut copy) = tempfile::tempfile()
        && let Ok(copied) = std::io::copy(&mut file, &mut copy)
    {
        return map(&copy, copied);
    }
    // Also when the temporary directory has no room for the copy.
    file.rewind()?;
    read_all(&file)
}

fn read_all(mut file: &File) -> Result<Bytes> {
    let mut bytes = Vec::with_capacity(file.metadata()?.len() as usize);
    file.read_to_end(&mut bytes)?;
    Ok(bytes.into())
}

/// Reads a whole file with at most `bytes_max` bytes; `None` if there is no file.
///
/// # Errors
/// [`crate::Error::Storage`] if it cannot be read or if it is longer.
pub(crate) fn read_file(path: &Path, bytes_max: u64) -> crate::error::Result<Option<Vec<u8>>> {
    let error = |source| crate::error::Error::file(path, source);
    let file = match file::open(path) {
        Ok(file) => file,
        Err(missing) if missing.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(error(source)),
    };
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(error)?;
    if bytes.len() as u64 > bytes_max {
        let reason = format!("it is longer than {bytes_max} bytes");
        return Err(crate::error::Error::Storage(crate::error::StorageError::Index {
            path: path.display().to_string(),
            reason,
        }));
    }
    Ok(Some(bytes))
}

/// Interval between attempts.
const POLL: Duration = Duration::from_millis(20);

/// Time limits for a process that waits for a lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Time after which the holder is reported, once.
    pub(crate) until_report: Duration,
    /// Maximum wait for a stopped holder.
    pub(crate) for_stopped: Duration,
    /// Maximum wait for any holder.
    pub(crate) for_any: Duration,
}

/// Locks a file.
///
/// # Errors
/// [`ErrorKind::TimedOut`] with the path and the holder once the time limit is over; the operating system
/// error.
pub(crate) fn lock_patiently(file: &File, path: &Path, patience: Patience) -> Result<()> {
    let started = Instant::now();
    let mut is_reported = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {}
        }
        let waited = started.elapsed();
        if waited >= patience.until_report.min(patience.for_stopped) {
            let holder = Holder::of(file);
            let is_over = waited >= patience.for_any
                || (waited >= patience.for_stopped && holder.as_ref().is_some_and(Holder::is_stopped));
            if is_over {
                return Err(Error::new(ErrorKind::TimedOut, locked(path, holder.as_ref(), waited)));
            }
            if waited >= patience.until_report && !std::mem::replace(&mut is_reported, true) {
                tracing::warn!("waiting: {}", locked(path, holder.as_ref(), waited));
            }
            std::thread::sleep(POLL * 5);
        }
        std::thread::sleep(POLL);
    }
}

fn locked(path: &Path, holder: Option<&Holder>, waited: Duration) -> String {
    let by = holder.map_or_else(|| "another process".to_owned(), Holder::describe);
    format!("`{}` has been locked by {by} for more than {:.1} s", path.display(), waited.as_secs_f64())
}

/// Process that holds a file lock.
#[derive(Debug)]
pub(crate) struct Holder {
    process: u32,
}

impl Holder {
    /// Finds the holder in the kernel's lock list; `None` if the system has no such list, or hides the
    /// process.
    pub(crate) fn of(file: &File) -> Option<Self> {
        let metadata = file.metadata().ok()?;
        let (major, minor) = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
        let wanted = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
        // `1: FLOCK  ADVISORY  WRITE 4711 fd:01:1234 0 EOF`; lines with `->` wait for the lock.
        let locks = std::fs::read_to_string("/proc/locks").ok()?;
        let mut held = locks.lines().filter(|line| !line.contains("->"));
        let process = held.find_map(|line| {
            let mut words = line.split_whitespace().skip(4);
            let (process, file) = (words.next()?, words.next()?);
            (file == wanted).then(|| process.parse().ok())?
        });
        Some(Self { process: process? })
    }

    /// Returns whether the process is stopped by a signal or a debugger.
    pub(crate) fn is_stopped(&self) -> bool {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", self.process)).unwrap_or_default();
        // The name in parentheses may itself contain spaces and parentheses.
        let state = state.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        matches!(state, Some('T' | 't'))
    }

    /// Describes the process for a message.
    pub(crate) fn describe(&self) -> String {
        let stopped = if self.is_stopped() { ", which is stopped," } else { "" };
        format!("process {}{stopped}", self.process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use tokio::io::AsyncReadExt;

    fn file(bytes: usize) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8).collect();
        std::fs::write(file.path(), content).unwrap();
        file
    }

    #[test]
    fn both_modes_read_the_same() {
        let file = file(700_000);
        let whole = Bytes::from(std::fs::read(file.path()).unwrap());
        for mode in [ReadMode::Mmap, ReadMode::Pread] {
            let shard = LocalShard::open(file.path(), mode).unwrap();
            assert_eq!(matches!(shard, LocalShard::Mapped(_)), mode == ReadMode::Mmap);
            assert_eq!(shard.read(300_000, 400_000).unwrap(), whole.slice(300_000..));
            assert_eq!(shard.read(300_000, 400_001).unwrap_err().kind(), ErrorKind::UnexpectedEof);
            assert_eq!(shard.read(u64::MAX, 2).unwrap_err().kind(), ErrorKind::UnexpectedEof);
            let mut all = Vec::new();
            futures::executor::block_on(shard.body().read_to_end(&mut all)).unwrap();
            assert_eq!(all, whole);
        }
        assert_eq!(read_private(File::open(file.path()).unwrap()).unwrap(), whole);
    }

    #[test]
    fn a_file_that_changes_is_an_error_and_not_a_bus_error() {
        for change in [0, 1_000, 900_000] {
            let file = file(700_000);
            let shard = LocalShard::open(file.path(), ReadMode::Pread).unwrap();
            let mut body = shard.body();
            futures::executor::block_on(body.read_exact(&mut [0; 10])).unwrap();
            File::options().write(true).open(file.path()).unwrap().set_len(change).unwrap();
            let error = shard.read(500_000, 10).unwrap_err().to_string();
            assert!(error.contains(&format!("had 700000 bytes and has {change}")), "{error}");
            let read = futures::executor::block_on(body.read_to_end(&mut Vec::new()));
            assert!(read.unwrap_err().to_string().contains("changed while it was read"));
            assert!(body.failure().lock().unwrap().is_some());
        }
    }

    #[test]
    fn a_file_that_is_written_in_place_is_an_error() {
        let file = file(1_000);
        let shard = LocalShard::open(file.path(), ReadMode::Pread).unwrap();
        let written = File::options().write(true).open(file.path()).unwrap();
        written.write_at(b"other", 10).unwrap();
        written.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert!(shard.read(0, 5).unwrap_err().to_string().contains("it was written to"));
    }

    #[test]
    fn a_lock_that_stays_is_reported_with_its_holder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = File::open(file.path()).unwrap();
        held.lock().unwrap();
        let other = File::open(file.path()).unwrap();
        let [soon, late] = [100, 600_000].map(Duration::from_millis);
        let patience = Patience { until_report: soon, for_stopped: soon, for_any: soon * 3 };
        let error = lock_patiently(&other, file.path(), patience).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        if Path::new("/proc/locks").exists() {
            let holder = Holder::of(&other).expect("the kernel lists it");
            assert_eq!((holder.process, holder.is_stopped()), (std::process::id(), false));
            assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        }
        let patience = Patience { for_any: late, ..patience };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock_patiently(&other, file.path(), patience));
            std::thread::sleep(Duration::from_millis(300));
            drop(held);
            assert!(waiting.join().unwrap().is_ok());
        });
    }
}
