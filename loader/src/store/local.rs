//! Local files, memory-mapped: payloads are slices of the page cache.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::path::Path;

use bytes::Bytes;
use memmap2::Mmap;

/// Maps a file for reading; an empty file gives empty bytes.
///
/// The mapping lives as long as any slice of it. Shards are written once: a file that is shortened while
/// it is mapped ends the process with a bus error when its lost pages are read, so writers replace files
/// by rename, as [`crate::index`] and `dflop pack` do.
///
/// # Errors
/// What the operating system says; a directory is refused.
#[expect(unsafe_code, reason = "a memory map is the only way to hand out payloads without copying them")]
pub(crate) fn map_file(path: &Path) -> Result<Bytes> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(Error::new(ErrorKind::IsADirectory, "is a directory"));
    }
    if metadata.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private; that nobody shortens the file is stated above.
    let map = unsafe { Mmap::map(&file)? };
    Ok(Bytes::from_owner(map))
}
