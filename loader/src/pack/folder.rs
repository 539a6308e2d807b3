//! A folder: files that share their path without extension make a sample.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};

use super::medium::split_extension;
use super::packer::{Packer, SourceFile};
use crate::error::Result;

/// Packs the files below `root`, ordered by path.
///
/// The paths of all files are held in memory, the bytes of one sample at a time.
pub(super) fn pack_folder(root: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let listing = Listing::read(root);
    for (path, reason) in listing.skipped {
        packer.skip(path.display().to_string(), reason);
    }
    packer.begin(listing.groups.len() as u64);
    for (name, files) in listing.groups {
        for files in split_repeats(files) {
            packer.add_files(&name, &files)?;
        }
    }
    Ok(())
}

/// What lies below a folder.
#[derive(Debug, Default)]
struct Listing {
    /// Path below the root without extension → files.
    groups: BTreeMap<String, Vec<SourceFile>>,
    skipped: Vec<(PathBuf, String)>,
    /// Folders that were read, by their true path: links may lead to one twice, or round in circles.
    read: HashSet<PathBuf>,
}

impl Listing {
    fn read(root: &Path) -> Self {
        let mut listing = Self::default();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            match listing.read_folder(root, &folder) {
                Ok(inner) => folders.extend(inner.into_iter().rev()),
                Err(error) => listing.skip(folder, &error.to_string()),
            }
        }
        listing
    }

    /// Reads one folder and returns those in it.
    fn read_folder(&mut self, root: &Path, folder: &Path) -> io::Result<Vec<PathBuf>> {
        if !self.read.insert(fs::canonicalize(folder)?) {
            self.skip(folder.to_owned(), "a link to a folder that is packed already");
            return Ok(Vec::new());
        }
        let mut entries = fs::read_dir(folder)?.collect::<io::Result<Vec<DirEntry>>>()?;
        entries.sort_by_key(DirEntry::file_name);
        let mut folders = Vec::new();
        for entry in entries {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            match fs::metadata(&path) {
                _ if name.starts_with('.') => self.skip(path, "hidden"),
                Err(error) => self.skip(path, &error.to_string()),
                Ok(metadata) if metadata.is_dir() => folders.push(path),
                Ok(metadata) if metadata.is_file() => self.add_file(root, path),
                Ok(_) => self.skip(path, "not a regular file"),
            }
        }
        Ok(folders)
    }

    fn add_file(&mut self, root: &Path, path: PathBuf) {
        let below = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        match split_extension(&below) {
            Some((stem, extension)) => {
                self.groups.entry(stem.to_owned()).or_default().push(SourceFile { extension, path });
            }
            None => self.skip(path, "no extension to tell its kind"),
        }
    }

    fn skip(&mut self, path: PathBuf, reason: &str) {
        self.skipped.push((path, reason.to_owned()));
    }
}

/// Extensions that differ in case only are one; a file whose extension is taken goes to a sample of its own.
fn split_repeats(files: Vec<SourceFile>) -> Vec<Vec<SourceFile>> {
    let mut samples: Vec<Vec<SourceFile>> = Vec::with_capacity(1);
    for file in files {
        let is_free = |sample: &&mut Vec<SourceFile>| sample.iter().all(|f| f.extension != file.extension);
        match samples.iter_mut().find(is_free) {
            Some(sample) => sample.push(file),
            None => samples.push(vec![file]),
        }
    }
    samples
}
