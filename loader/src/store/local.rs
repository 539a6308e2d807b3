//! Maps local files into memory: payloads are slices of the page cache.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

use bytes::Bytes;
use memmap2::Mmap;

/// Maps a file for reading; an empty file gives empty bytes.
///
/// The mapping lives as long as any slice of it. Shards are written once: if a file is truncated while it is
/// mapped, reading its lost pages ends the process with a bus error, so writers replace files by rename, as
/// [`crate::index`] and `dflop pack` do.
///
/// # Errors
/// The error of the operating system; a directory is rejected.
#[expect(unsafe_code, reason = "a memory map is the only way to hand out payloads without copying them")]
pub(crate) fn map_file(path: &Path) -> Result<Bytes> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(Error::new(ErrorKind::IsADirectory, "expected a file, found a directory"));
    }
    if metadata.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private; nobody truncates the file, as documented above.
    let map = unsafe { Mmap::map(&file)? };
    Ok(Bytes::from_owner(map))
}

/// Reads a whole file of at most `bytes_max`; `None` if there is none.
///
/// # Errors
/// [`crate::Error::File`] if it cannot be read, [`crate::Error::Index`] if it is longer.
pub(crate) fn read_file(path: &Path, bytes_max: u64) -> crate::Result<Option<Vec<u8>>> {
    let error = |source| crate::Error::File { path: path.display().to_string(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(missing) if missing.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(error(source)),
    };
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(error)?;
    if bytes.len() as u64 > bytes_max {
        let reason = format!("it is longer than {bytes_max} bytes");
        return Err(crate::Error::Index { path: path.display().to_string(), reason });
    }
    Ok(Some(bytes))
}
