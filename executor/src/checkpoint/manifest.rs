//! Lists checkpoint file sizes and digests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dflop_loader::store::file;
use serde_json::{Value, json};

use super::digest::{FileDigest, write_file};
use super::files::failed;
use super::{FORMAT, MANIFEST_FILE};
use crate::error::{Error, Result};
use dflop_models::weights::Checkpoint;

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
