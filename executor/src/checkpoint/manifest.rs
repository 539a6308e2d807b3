//! File sizes and digests in a checkpoint, and their comparison with the files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use dflop_loader::store::file;
use dflop_models::weights::Checkpoint;
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use super::{FORMAT, MANIFEST_FILE, failed};
use crate::error::{Error, Result};

/// Checkpoint files by name.
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
        write_file(&directory.join(MANIFEST_FILE), format!("{document:#}\n").as_bytes()).map(drop)
    }

    /// Reads the manifest in a directory.
    ///
    /// # Errors
    /// [`Error::Saved`] if the manifest is missing or damaged.
    pub(super) fn read(directory: &Path) -> Result<Self> {
        let unusable = |problem: String| Error::Saved { path: directory.to_owned(), problem };
        let text = file::read(&directory.join(MANIFEST_FILE))
            .map_err(|error| unusable(format!("`{MANIFEST_FILE}` cannot be read: {error}")))?;
        Self::from_text(directory, &text)
    }

    /// Parses the manifest text for a directory.
    ///
    /// # Errors
    /// [`Error::Saved`] if the manifest is damaged.
    pub(super) fn from_text(directory: &Path, text: &[u8]) -> Result<Self> {
        let unusable = |problem: String| Error::Saved { path: directory.to_owned(), problem };
        let document: Value = serde_json::from_slice(text)
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

    /// Checks that a directory has no file that would be loaded in addition to the files in the manifest,
    /// such as weights under the single-file checkpoint name, which other programs look for first.
    ///
    /// # Errors
    /// [`Error::Saved`] with the file name.
    pub(super) fn check_surplus(&self, directory: &Path) -> Result<()> {
        let is_loaded = |name: &str| name.ends_with(".safetensors") || name.ends_with(".index.json");
        let entries = std::fs::read_dir(directory).map_err(failed("read", directory))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut surplus: Vec<String> =
            names.filter(|name| is_loaded(name) && !self.files.contains_key(name)).collect();
        surplus.sort_unstable();
        match surplus.first() {
            Some(name) => {
                let problem = format!(
                    "`{name}` is not in its manifest, but would be loaded with it; remove the file, or save it \
                     elsewhere"
                );
                Err(Error::Saved { path: directory.to_owned(), problem })
            }
            None => Ok(()),
        }
    }

    /// Opens the weights listed in the manifest.
    ///
    /// # Errors
    /// [`Error::Saved`] for a surplus file; [`dflop_models::Error::Format`] for an invalid file.
    pub(super) fn weights(&self, directory: &Path) -> Result<Checkpoint> {
        self.check_surplus(directory)?;
        Ok(Checkpoint::open_files(self.paths(directory, "model", ".safetensors"))?)
    }

    /// Returns the paths of files with this prefix and suffix, ascending.
    pub(super) fn paths(&self, directory: &Path, prefix: &str, suffix: &str) -> Vec<PathBuf> {
        let names = self.files.keys().filter(|name| name.starts_with(prefix) && name.ends_with(suffix));
        names.map(|name| directory.join(name)).collect()
    }
}

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

impl Manifest {
    /// Compares the sizes of all files in a directory; reads none.
    ///
    /// # Errors
    /// [`Error::Saved`] that names the first file that is missing or has the wrong size.
    pub(super) fn verify_sizes(&self, directory: &Path) -> Result<()> {
        for (name, expected) in &self.files {
            let bytes = match std::fs::metadata(directory.join(name)) {
                Ok(metadata) if !metadata.is_file() => {
                    return unusable(directory, format!("`{name}` is not a regular file"));
                }
                Ok(metadata) => metadata.len(),
                Err(error) => return unusable(directory, format!("`{name}` cannot be read: {error}")),
            };
            if bytes != expected.bytes {
                return unusable(directory, format!("`{name}` has {bytes} bytes, not {}", expected.bytes));
            }
        }
        Ok(())
    }

    /// Compares the digests of the files in one rank's share.
    ///
    /// - returns the number of bytes read
    ///
    /// # Errors
    /// [`Error::Saved`] that names the first file in the share that cannot be read or has different bytes.
    pub(super) fn verify_share(&self, directory: &Path, rank: usize, ranks: usize) -> Result<u64> {
        let mut read = 0;
        for name in self.share(rank, ranks) {
            let digest = match FileDigest::of(&directory.join(name)) {
                Ok(digest) => digest,
                Err(error) => return unusable(directory, format!("`{name}` cannot be read: {error}")),
            };
            if digest != self.files[name] {
                let problem = format!("`{name}` is damaged: its digest differs from the manifest");
                return unusable(directory, problem);
            }
            read += digest.bytes;
        }
        Ok(read)
    }

    /// Returns the files in a rank's share: files are assigned by descending size to the rank with the fewest
    /// bytes.
    fn share(&self, rank: usize, ranks: usize) -> Vec<&str> {
        let mut files: Vec<(u64, &str)> =
            self.files.iter().map(|(name, file)| (file.bytes, name.as_str())).collect();
        files.sort_by(|a, b| b.cmp(a));
        let (mut loads, mut own) = (vec![0_u64; ranks], Vec::new());
        for (bytes, name) in files {
            // the lowest rank among equal loads
            let Some(least) = (0..ranks).min_by_key(|&rank| loads[rank]) else { break };
            loads[least] += bytes;
            if least == rank {
                own.push(name);
            }
        }
        own
    }
}

fn unusable<T>(directory: &Path, problem: String) -> Result<T> {
    Err(Error::Saved { path: directory.to_owned(), problem })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;

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

    /// Number of bytes per parameter in a bf16 state: weights, master weights and two moments.
    const STATE_BYTES: u64 = 14;

    /// Creates sparse files with the sizes of a model state saved by `ranks` ranks, and the manifest.
    fn made_up(directory: &Path, parameters: u64, ranks: u64) -> Manifest {
        let mut files = BTreeMap::new();
        let mut digests = BTreeMap::new();
        for piece in 1..=ranks {
            for (kind, bytes) in [("model", 2), ("optimizer", STATE_BYTES - 2)] {
                let name = format!("{kind}-{piece:05}-of-{ranks:05}.safetensors");
                let length = bytes * parameters / ranks;
                File::create(directory.join(&name)).unwrap().set_len(length).unwrap();
                // files with equal lengths have equal digests, as all bytes are zeros
                let digest =
                    digests.entry(length).or_insert_with(|| FileDigest::of(&directory.join(&name)).unwrap());
                files.insert(name, *digest);
            }
        }
        Manifest { step: 7, files }
    }

    /// Returns the number of bytes that each rank reads to verify a made-up state.
    fn bytes_by_rank(parameters: u64, writers: u64, ranks: usize) -> Vec<u64> {
        let directory = tempfile::tempdir().unwrap();
        let manifest = made_up(directory.path(), parameters, writers);
        manifest.verify_sizes(directory.path()).unwrap();
        (0..ranks).map(|rank| manifest.verify_share(directory.path(), rank, ranks).unwrap()).collect()
    }

    #[track_caller]
    fn assert_divided(bytes: &[u64], parameters: u64, writers: u64) {
        let total = STATE_BYTES * parameters;
        assert_eq!(bytes.iter().sum::<u64>(), total, "every byte is read by one rank");
        let largest = (STATE_BYTES - 2) * parameters / writers;
        let most = bytes.iter().max().unwrap();
        assert!(*most <= total / bytes.len() as u64 + largest, "{bytes:?}");
    }

    #[test]
    fn ranks_divide_the_bytes_of_a_state_evenly() {
        const PARAMETERS: u64 = 8 << 20;
        for (writers, ranks) in [(8, 8), (8, 4), (4, 3), (2, 8), (1, 1)] {
            let bytes = bytes_by_rank(PARAMETERS, writers, ranks);
            assert_divided(&bytes, PARAMETERS, writers);
            if writers as usize == ranks {
                assert!(bytes.iter().all(|own| *own == bytes[0]), "{bytes:?}");
            }
        }
    }

    /// Runs for a minute: `make test-heavy`.
    #[test]
    #[ignore = "reads 98 GB of zeros"]
    fn no_rank_of_eight_reads_more_than_an_eighth_of_a_state_of_7b_parameters() {
        const PARAMETERS: u64 = 7_000_000_000;
        let bytes = bytes_by_rank(PARAMETERS, 8, 8);
        assert_divided(&bytes, PARAMETERS, 8);
        assert!(bytes.iter().all(|own| *own == STATE_BYTES * PARAMETERS / 8), "{bytes:?}");
    }

    #[test]
    fn the_share_with_the_damage_names_it_and_others_do_not_see_it() {
        let directory = tempfile::tempdir().unwrap();
        let manifest = made_up(directory.path(), 1 << 16, 4);
        let damaged = "model-00003-of-00004.safetensors";
        let path = directory.path().join(damaged);
        let length = std::fs::metadata(&path).unwrap().len() as usize;
        std::fs::write(&path, vec![1; length]).unwrap();
        manifest.verify_sizes(directory.path()).unwrap();
        let found: Vec<_> = (0..3).map(|rank| manifest.verify_share(directory.path(), rank, 3)).collect();
        let errors: Vec<String> =
            found.iter().filter_map(|share| share.as_ref().err()).map(Error::to_string).collect();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(errors[0].contains(&format!("`{damaged}` is damaged")), "{errors:?}");
    }
}
