//! Packs a directory: files with the same path without extension form a sample, `kite.0.jpg` with `kite.txt`.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};

use super::options::LabelSource;
use super::packer::{Packer, SourceFile};
use super::record::{outside, split_extension};
use super::tables::is_split;
use dflop_loader::error::{Error, OutputError, Result};
use dflop_loader::store::file;

/// Maximum number of digits in a medium number within a sample.
const NUMBER_DIGITS_MAX: usize = 3;

/// Names of documents about a dataset.
const ABOUT_NAMES: [&str; 9] = [
    "readme",
    "license",
    "licence",
    "notice",
    "changelog",
    "contributing",
    "citation",
    "authors",
    "code_of_conduct",
];
/// Extensions of such documents; a group with only the first two extensions is a document under any name.
const ABOUT_EXTENSIONS: &[&str] = &["md", "rst", "txt", "html", "pdf", "cff", "bib"];

/// Packs the files below `root`, ordered by path.
///
/// Holds all file paths in memory, and the bytes of one sample at a time.
pub(super) fn pack_directory(root: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let mut listing = Listing::of(root, packer.is_outside_allowed)?;
    let classes =
        if packer.labels == LabelSource::Directory { listing.take_classes(root)? } else { Vec::new() };
    packer.set_classes(&classes);
    for (path, reason) in listing.skipped {
        packer.skip_in_source(path.display().to_string(), reason);
    }
    packer.begin(listing.groups.len() as u64);
    for (name, files) in listing.groups {
        for files in split_repeats(files) {
            if packer.is_done() {
                return Ok(());
            }
            let class = name.split('/').next();
            let label = class.and_then(|class| classes.iter().position(|known| known == class));
            packer.add_files(&name, &files, label)?;
        }
    }
    Ok(())
}

/// Passes the names of all packed files to `hash`, in order.
///
/// # Errors
/// See [`Listing::of`].
pub(super) fn hash_names(root: &Path, is_outside_allowed: bool, mut hash: impl FnMut(&[u8])) -> Result<()> {
    let listing = Listing::of(root, is_outside_allowed)?;
    for (name, files) in listing.groups {
        hash(name.as_bytes());
        for file in files {
            hash(b"\0");
            hash(file.extension.as_bytes());
        }
        hash(b"\0\0");
    }
    Ok(())
}

/// Files below a directory, grouped by sample.
#[derive(Debug, Default)]
struct Listing {
    /// Path below the root without extension → files.
    groups: BTreeMap<String, Vec<SourceFile>>,
    skipped: Vec<(PathBuf, String)>,
    /// Canonical paths of directories that were read: links may lead to a directory twice, or form circles.
    read: HashSet<PathBuf>,
    is_outside_allowed: bool,
}

impl Listing {
    /// Reads the files below `root` and groups them.
    ///
    /// # Errors
    /// [`Error::Storage`] if the machine has no descriptor or memory for a directory: it is not at fault.
    fn of(root: &Path, is_outside_allowed: bool) -> Result<Self> {
        let mut listing = Self::read(root, is_outside_allowed)?;
        listing.join_numbered();
        listing.leave_out_documents();
        Ok(listing)
    }

    fn read(root: &Path, is_outside_allowed: bool) -> Result<Self> {
        let mut listing = Self { is_outside_allowed, ..Self::default() };
        let mut directories = vec![root.to_owned()];
        while let Some(directory) = directories.pop() {
            match listing.read_directory(root, &directory) {
                // The stack is popped from the end, so reversing visits directories in order.
                Ok(inner) => directories.extend(inner.into_iter().rev()),
                Err(error) if file::is_shortage(&error) => return Err(Error::file(&directory, error)),
                Err(error) => listing.skip(directory, &error.to_string()),
            }
        }
        Ok(listing)
    }

    /// Reads a directory and returns the subdirectories.
    fn read_directory(&mut self, root: &Path, directory: &Path) -> io::Result<Vec<PathBuf>> {
        if !self.read.insert(fs::canonicalize(directory)?) {
            self.skip(directory.to_owned(), "a link to a directory that was already packed");
            return Ok(Vec::new());
        }
        let mut entries = fs::read_dir(directory)?.collect::<io::Result<Vec<DirEntry>>>()?;
        // The file system order is arbitrary, but equal sources must produce equal shards.
        entries.sort_by_key(DirEntry::file_name);
        let mut directories = Vec::new();
        for entry in entries {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            match fs::metadata(&path) {
                _ if name.starts_with('.') => self.skip(path, "hidden"),
                _ if let Some(reason) = self.outside(root, &entry) => self.skip(path, &reason),
                Err(error) => self.skip(path, &error.to_string()),
                Ok(metadata) if metadata.is_dir() => directories.push(path),
                Ok(metadata) if metadata.is_file() => self.add_file(root, path),
                Ok(_) => self.skip(path, "not a regular file"),
            }
        }
        Ok(directories)
    }

    /// Returns the reason for not packing a link that leads out of the root.
    fn outside(&self, root: &Path, entry: &DirEntry) -> Option<String> {
        let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
        if is_link && !self.is_outside_allowed { outside(root, &entry.path()) } else { None }
    }

    fn add_file(&mut self, root: &Path, path: PathBuf) {
        let below = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        match split_extension(&below) {
            Some((stem, extension)) => {
                self.groups.entry(stem.to_owned()).or_default().push(SourceFile { extension, path });
            }
            None => self.skip(path, "a file needs an extension"),
        }
    }

    /// Adds `kite.0.jpg` to the sample `kite` as the field `0.jpg`, if different files prove that this sample
    /// exists.
    ///
    /// The number may also be part of a name: without a `photo.txt`, `photo.2024.jpg` remains a separate
    /// sample.
    fn join_numbered(&mut self) {
        let mut numbered: Vec<(String, String)> = self
            .groups
            .keys()
            .filter_map(|name| Some((name, name.rsplit_once('.')?)))
            .filter(|(_, (of, number))| is_medium_number(number) && self.groups.contains_key(*of))
            .map(|(name, (of, _))| (name.clone(), of.to_owned()))
            .collect();
        numbered.sort_by_key(|(name, of)| (of.clone(), name[of.len() + 1..].parse::<u32>().ok()));
        for (name, of) in numbered {
            let number = name[of.len() + 1..].to_owned();
            let files = self.groups.remove(&name).unwrap_or_default();
            let renamed = files.into_iter().map(|file| SourceFile {
                extension: format!("{number}.{}", file.extension),
                path: file.path,
            });
            self.groups.entry(of).or_default().extend(renamed);
        }
    }

    /// Leaves out documents about the dataset, and other Markdown or reStructuredText files without a medium
    /// or text of the same name.
    fn leave_out_documents(&mut self) {
        let is_document = |(name, files): (&String, &mut Vec<SourceFile>)| {
            let base = name.rsplit('/').next().unwrap_or_default().to_lowercase();
            let is_about = ABOUT_NAMES.contains(&&*base);
            let extensions = if is_about { ABOUT_EXTENSIONS } else { &ABOUT_EXTENSIONS[..2] };
            files.iter().all(|file| extensions.contains(&&*file.extension))
        };
        for (_, files) in self.groups.extract_if(.., |name, files| is_document((name, files))) {
            let reason = "a document, without a medium or a text of its own name next to it".to_owned();
            self.skipped.extend(files.into_iter().map(|file| (file.path, reason.clone())));
        }
    }

    /// Returns the directory names that divide the files into classes, in order; leaves out files outside of
    /// any directory, and files that have a label.
    ///
    /// # Errors
    /// [`Error::Output`] if the directories are splits rather than classes, or if there is none.
    fn take_classes(&mut self, root: &Path) -> Result<Vec<String>> {
        let class_of = |name: &str| name.split_once('/').map(|(class, _)| class.to_owned());
        let classes: BTreeSet<String> = self.groups.keys().filter_map(|name| class_of(name)).collect();
        let fail = |reason: String| {
            Err(Error::Output(OutputError::Pack { path: root.display().to_string(), reason }))
        };
        if classes.is_empty() {
            return fail("no directory in it names a class".to_owned());
        }
        if let Some(split) = classes.first().filter(|_| classes.iter().all(|class| is_split(class))) {
            return fail(format!("its directories are splits; pack one of them, such as `{split}`"));
        }
        let has_label = |files: &[SourceFile]| files.iter().any(|file| file.extension == "cls");
        let odd = |name: &str, files: &[SourceFile]| class_of(name).is_none() || has_label(files);
        for (name, files) in self.groups.extract_if(.., |name, files| odd(name, files)) {
            let is_classless = class_of(&name).is_none();
            let reason =
                if is_classless { "in no directory that names its class" } else { "has a label already" };
            self.skipped.extend(files.into_iter().map(|file| (file.path, reason.to_owned())));
        }
        Ok(classes.into_iter().collect())
    }

    fn skip(&mut self, path: PathBuf, reason: &str) {
        self.skipped.push((path, reason.to_owned()));
    }
}

/// Returns whether part of a name can be a medium number.
fn is_medium_number(number: &str) -> bool {
    (1..=NUMBER_DIGITS_MAX).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Splits a group where extensions repeat, ignoring case: the second file starts a new sample.
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
