//! Lists sizes and digests of the files of a checkpoint.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use super::directory::failed;
use super::{FORMAT, MANIFEST_FILE};
use crate::error::{Error, Result};

/// Number of bytes read at a time.
const READ_BYTES: usize = 1 << 20;

/// Size and digest of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileDigest {
    pub(super) bytes: u64,
    pub(super) xxh3: u64,
}

impl FileDigest {
    /// Computes them from a file.
    pub(super) fn of(path: &Path) -> Result<Self> {
        Self::read(path).map_err(failed("read", path))
    }

    fn read(path: &Path) -> io::Result<Self> {
        let (mut file, mut hash) = (File::open(path)?, Xxh3::new());
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

/// Files of a checkpoint by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) step: u64,
    pub(super) files: BTreeMap<String, FileDigest>,
}

impl Manifest {
    /// Writes the manifest into a directory and flushes it to disk.
    pub(super) fn write(&self, directory: &Path) -> Result<()> {
        let row = |(name, file): (&String, &FileDigest)| {
            (name.clone(), json!({"bytes": file.bytes, "xxh3": format!("{:016x}", file.xxh3)}))
        };
        let files: serde_json::Map<String, Value> = self.files.iter().map(row).collect();
        let document = json!({"format": FORMAT, "step": self.step, "files": files});
        write_file(&directory.join(MANIFEST_FILE), format!("{document:#}\n").as_bytes())
    }

    /// Reads the manifest of a directory.
    ///
    /// # Errors
    /// [`Error::Saved`] if it is missing or damaged.
    pub(super) fn read(directory: &Path) -> Result<Self> {
        let unusable = |problem: String| Error::Saved { path: directory.to_owned(), problem };
        let text = std::fs::read(directory.join(MANIFEST_FILE))
            .map_err(|error| unusable(format!("`{MANIFEST_FILE}` cannot be read: {error}")))?;
        let document: Value = serde_json::from_slice(&text)
            .map_err(|error| unusable(format!("`{MANIFEST_FILE}` is damaged: {error}")))?;
        Self::parse(&document).ok_or_else(|| unusable(format!("`{MANIFEST_FILE}` is damaged")))
    }

    fn parse(document: &Value) -> Option<Self> {
        if document.get("format")?.as_u64()? != FORMAT {
            return None;
        }
        let mut files = BTreeMap::new();
        for (name, file) in document.get("files")?.as_object()? {
            // A name with a path could refer to files outside the directory.
            let is_plain = Path::new(name).file_name() == Some(name.as_ref());
            let xxh3 = u64::from_str_radix(file.get("xxh3")?.as_str()?, 16).ok()?;
            let digest = FileDigest { bytes: file.get("bytes")?.as_u64()?, xxh3 };
            is_plain.then(|| files.insert(name.clone(), digest))?;
        }
        Some(Self { step: document.get("step")?.as_u64()?, files })
    }

    /// Compares the files of a directory with the manifest.
    ///
    /// # Errors
    /// [`Error::Saved`] that names the first file that is missing, has another size, or has other bytes.
    pub(super) fn verify(&self, directory: &Path) -> Result<()> {
        let unusable = |problem: String| Err(Error::Saved { path: directory.to_owned(), problem });
        for (name, expected) in &self.files {
            let path = directory.join(name);
            let bytes = match std::fs::metadata(&path) {
                Ok(metadata) => metadata.len(),
                Err(error) => return unusable(format!("`{name}` cannot be read: {error}")),
            };
            if bytes != expected.bytes {
                return unusable(format!("`{name}` has {bytes} bytes, not {}", expected.bytes));
            }
            if FileDigest::of(&path)? != *expected {
                return unusable(format!("`{name}` is damaged: its digest differs from the manifest"));
            }
        }
        Ok(())
    }

    /// Returns the paths of the files with this prefix and suffix, ascending.
    pub(super) fn paths(&self, directory: &Path, prefix: &str, suffix: &str) -> Vec<PathBuf> {
        let names = self.files.keys().filter(|name| name.starts_with(prefix) && name.ends_with(suffix));
        names.map(|name| directory.join(name)).collect()
    }
}

/// Writes a file and flushes it to disk.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(failed("write", path))
}
