//! Computes file sizes and digests, from file contents or while files are written.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use xxhash_rust::xxh3::Xxh3;

use dflop_loader::store::file;

use super::files::failed;
use crate::error::Result;

/// Number of bytes read at a time.
const READ_BYTES: usize = 1 << 20;

/// File size and digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileDigest {
    pub(super) bytes: u64,
    pub(super) xxh3: u64,
}

impl FileDigest {
    /// Computes size and digest from a file.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let (mut file, mut hash) = (file::open(path)?, Xxh3::new());
        let (mut buffer, mut bytes) = (vec![0; READ_BYTES], 0);
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(Self { bytes, xxh3: hash.digest() }),
                read => {
                    hash.update(&buffer[..read]);
                    bytes += read as u64;
                }
            }
        }
    }
}

/// File that is hashed while it is written, in one pass.
pub(super) struct DigestWriter<'a> {
    file: File,
    hash: Xxh3,
    bytes: u64,
    is_cancelled: &'a AtomicBool,
}

impl<'a> DigestWriter<'a> {
    /// Creates a file that must not exist. Once `is_cancelled` is set, writing fails.
    pub(super) fn create(path: &Path, is_cancelled: &'a AtomicBool) -> io::Result<Self> {
        Ok(Self { file: File::create_new(path)?, hash: Xxh3::new(), bytes: 0, is_cancelled })
    }

    /// Flushes the file to disk.
    pub(super) fn finish(self) -> io::Result<FileDigest> {
        self.file.sync_all()?;
        Ok(FileDigest { bytes: self.bytes, xxh3: self.hash.digest() })
    }
}

impl Write for DigestWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::other("the run has ended"));
        }
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a file that must not exist and flushes it to disk.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<FileDigest> {
    let write = || {
        let never = AtomicBool::new(false);
        let mut file = DigestWriter::create(path, &never)?;
        file.write_all(bytes)?;
        file.finish()
    };
    write().map_err(failed("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_made_while_writing_is_that_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let never = AtomicBool::new(false);
        let mut file = DigestWriter::create(&path, &never).unwrap();
        for length in [0, 1, 7, 4096, 3 * READ_BYTES + 5] {
            file.write_all(&vec![length as u8; length]).unwrap();
        }
        let written = file.finish().unwrap();
        assert_eq!(written, FileDigest::of(&path).unwrap());
        assert_eq!(written.bytes, std::fs::metadata(&path).unwrap().len());
    }

    #[test]
    fn a_cancelled_file_is_not_written_on() {
        let directory = tempfile::tempdir().unwrap();
        let stop = AtomicBool::new(false);
        let mut file = DigestWriter::create(&directory.path().join("file"), &stop).unwrap();
        file.write_all(b"before").unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(file.write_all(b"after").unwrap_err().to_string().contains("the run has ended"));
    }
}
