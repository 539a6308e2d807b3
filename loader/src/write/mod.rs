//! Writes samples to shards.
//!
//! Checks that a sample will be read back from a shard exactly as it was written.
//!
//! A *shard* is a tar file named `shard-000000.tar`, or `shard-000000.tar.zst` with Zstandard. A sample is
//! never split over shards; a shard without room for the next sample is completed, and a new shard is
//! started. Equal samples in equal order yield equal bytes: no time, owner or machine property is stored. A
//! shard is named when it is complete and on disk, so every named shard is complete. [`crate::shard`] returns
//! exactly the written samples; a sample for which that would not hold is rejected. The crate
//! `dflop-import` writes those of other formats.
//!
//! The index rows are collected during writing and written at the end, so that the dataset opens without
//! being read again. A killed writer leaves complete shards, which are indexed on first use, and a partial
//! shard under a hidden name, which a writer that [appends](ShardWriterBuilder::append) removes.
//!
//! Shards are written to a local directory or to a directory in an [object store](crate::store), such as
//! `s3://bucket/prefix/`. Object store shards are built in a temporary directory (`TMPDIR`), which needs room
//! for one shard, and uploaded when they are complete: an object appears complete or not at all. The
//! check whether a name is taken precedes the upload, so two writers must not share a directory in a store.
//! The index for object store shards is written to the user's cache directory, where it is looked up.

mod destination;
mod shard_file;
#[cfg(test)]
mod tests;

use super::error::{Error, OutputError, Result, StorageError};
use super::index::WrittenIndex;
use super::shard::tar::Entry;
use super::shard::{Compression, is_metadata, split_key};
use super::store::Stores;
use destination::{Destination, Existing, find_shard};
use shard_file::{END_BYTES, ShardFile, entries_bytes, sample_entries, shard_name};
use std::path::PathBuf;

pub use shard_file::{PartDirectory, ShardPart};

/// Default shard size limit: 256 MiB before compression.
pub const SHARD_BYTES: u64 = 256 << 20;

/// Default Zstandard level, the same as the default in the zstd library.
pub const ZSTD_LEVEL: i32 = 3;

/// Shard compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardCompression {
    /// Uncompressed: shards can be read by range and are memory-mapped.
    None,
    /// Zstandard with a checksum, which can only be read from the start.
    Zstd {
        /// Compression level in the zstd library range, -131072 to 22; see [`ZSTD_LEVEL`].
        level: i32,
    },
}

impl From<ShardCompression> for Compression {
    fn from(compression: ShardCompression) -> Self {
        match compression {
            ShardCompression::None => Self::None,
            ShardCompression::Zstd { .. } => Self::Zstd,
        }
    }
}

/// Summary of the shards that a [`ShardWriter`] wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrittenShards {
    /// Shard paths, in order; URLs for shards in a store.
    pub shards: Vec<PathBuf>,
    /// Samples in all shards.
    pub samples: u64,
    /// Payload bytes in all fields, before compression, without tar headers.
    pub bytes: u64,
    /// Index file; `None` without shards, if disabled, or if these are the shards of a part.
    pub index: Option<PathBuf>,
    /// Index rows for the shards of a part, for [`Index::merge_parts`](crate::index::Index::merge_parts),
    /// unless disabled.
    pub index_part: Option<Vec<u8>>,
}

/// Builder for a [`ShardWriter`].
#[derive(Debug, Clone)]
#[must_use]
pub struct ShardWriterBuilder {
    directory: PathBuf,
    stores: Stores,
    shard_bytes: u64,
    shard_samples: u64,
    compression: ShardCompression,
    is_indexed: bool,
    is_appended: bool,
    part: Option<ShardPart>,
}

impl ShardWriterBuilder {
    /// Sets the maximum number of bytes per shard before compression, including tar headers. A longer sample
    /// is written to a separate shard. Default: [`SHARD_BYTES`].
    pub fn shard_bytes(mut self, bytes: u64) -> Self {
        self.shard_bytes = bytes;
        self
    }

    /// Sets the maximum number of samples per shard. Default: unlimited.
    pub fn shard_samples(mut self, samples: u64) -> Self {
        self.shard_samples = samples;
        self
    }

    /// Sets whether the directory index is written at the end, which probes every field during writing. The
    /// rows of finished shards wait in a temporary file. Default: true.
    pub fn index(mut self, is_indexed: bool) -> Self {
        self.is_indexed = is_indexed;
        self
    }

    /// Sets whether shards are added to the existing shards in the directory, with consecutive numbers.
    /// Remains of a killed writer are then removed. The index covers all shards, so existing shards are read
    /// for it. Default: false.
    pub fn append(mut self, is_appended: bool) -> Self {
        self.is_appended = is_appended;
        self
    }

    /// Writes a part of the shards in the directory, while concurrent writers may write different parts;
    /// shards are named as described at [`ShardPart`]. Only files from an earlier writer of the same part are
    /// removed, or overwritten on a store. No index is written; the rows are in
    /// [`WrittenShards::index_part`]. Default: this writer writes all shards.
    pub fn part(mut self, part: ShardPart) -> Self {
        self.part = Some(part);
        self
    }

    /// Sets the compression. Default: none.
    pub fn compression(mut self, compression: ShardCompression) -> Self {
        self.compression = compression;
        self
    }

    /// Sets the stores, for shards that are written to a store. Default: the default settings.
    pub fn stores(mut self, stores: &Stores) -> Self {
        self.stores = stores.clone();
        self
    }

    /// Opens the directory, creating it if missing, and returns a writer for it. A directory in a store is
    /// listed, which HTTP servers do not support.
    ///
    /// # Errors
    /// [`Error::Config`] if a setting is invalid; [`Error::Output`] if the directory contains shards or
    /// partial shards, or, when appending, if a second writer is active there; [`Error::Storage`] if the
    /// directory cannot be created or read; [`Error::Selection`] if a URL is malformed or the store cannot be
    /// configured; [`Error::Storage`] if a directory in a store cannot be listed or, when appending, a shard
    /// cannot be read for the index.
    pub fn build(self) -> Result<ShardWriter> {
        self.check()?;
        let destination = Destination::open(&self.directory, &self.stores)?;
        let mut index = self.is_indexed.then(WrittenIndex::default);
        let mut next_number = 0;
        if let Some(part) = self.part {
            part.clear(&destination)?;
        } else if self.is_appended {
            let existing = Existing::scan(&destination)?;
            next_number = existing.next_number;
            if let Some(index) = &mut index {
                existing.shards.into_iter().try_for_each(|shard| index.add_existing(shard))?;
            }
        } else if let Some(shard) = find_shard(&destination)? {
            return Err(Error::Output(OutputError::ShardExists { path: shard.url.to_string() }));
        }
        let (written, last_key) = (WrittenShards::default(), None);
        Ok(ShardWriter {
            settings: self,
            destination,
            next_number,
            open: None,
            index,
            last_key,
            is_failed: false,
            written,
        })
    }

    fn check(&self) -> Result<()> {
        if let Some(part) = self.part {
            part.check()?;
            if self.is_appended {
                let reason = "a part cannot be appended to; write the whole part again".to_owned();
                return Err(Error::Config { setting: "append", reason });
            }
        }
        for (setting, limit) in [("shard_bytes", self.shard_bytes), ("shard_samples", self.shard_samples)] {
            if limit == 0 {
                return Err(Error::Config { setting, reason: "must be at least 1".to_owned() });
            }
        }
        let levels = zstd::compression_level_range();
        match self.compression {
            ShardCompression::Zstd { level } if !levels.contains(&level) => {
                let reason = format!("expected {} to {}, got {level}", levels.start(), levels.end());
                Err(Error::Config { setting: "compression", reason })
            }
            _ => Ok(()),
        }
    }
}

/// Writes samples to numbered shards in one directory; see [the module](self).
///
/// Dropping it without [`finish`](Self::finish) removes the shard under construction and keeps the finished
/// shards.
#[derive(Debug)]
pub struct ShardWriter {
    settings: ShardWriterBuilder,
    destination: Destination,
    next_number: usize,
    open: Option<OpenShard>,
    index: Option<WrittenIndex>,
    last_key: Option<String>,
    is_failed: bool,
    written: WrittenShards,
}

#[derive(Debug)]
struct OpenShard {
    file: ShardFile,
    samples: u64,
}

impl ShardWriter {
    /// Starts the settings for a writer into `directory`, a path or a directory URL in a store.
    pub fn builder(directory: impl Into<PathBuf>) -> ShardWriterBuilder {
        ShardWriterBuilder {
            directory: directory.into(),
            stores: Stores::default(),
            shard_bytes: SHARD_BYTES,
            shard_samples: u64::MAX,
            compression: ShardCompression::None,
            is_indexed: true,
            is_appended: false,
            part: None,
        }
    }

    /// Appends a sample: a key such as `train/000017`, and `(extension, payload)` of its fields in order.
    ///
    /// # Errors
    /// [`Error::Output`] if the sample would not be read back unchanged; nothing is written and the writer
    /// remains usable. This concerns a key that is empty, equals the previous key, has a dot in the base
    /// name, has empty, `.` or `..` parts, or looks like metadata (`__meta__/a`); an extension with a slash
    /// or in upper case; two fields with the same extension; and a sample without fields. [`Error::Storage`]
    /// or [`Error::Output`] if the shard cannot be written; it is removed and all further calls fail.
    pub fn write(&mut self, key: &str, fields: &[(&str, &[u8])]) -> Result<()> {
        // Before anything is written: a rejected sample must leave the shard as it was.
        check_sample(key, fields, self.last_key.as_deref())?;
        self.check_whole()?;
        let appended = self.append(key, fields);
        self.note(appended)
    }

    /// Completes the last shard, writes the index, and returns a summary.
    ///
    /// # Errors
    /// [`Error::Storage`] or [`Error::Output`] if the shard cannot be completed, or if an earlier call
    /// failed; [`Error::Storage`] with the index path if it cannot be written: all shards are complete then.
    pub fn finish(mut self) -> Result<WrittenShards> {
        self.check_whole()?;
        self.close_shard()?;
        match (self.index.take(), self.settings.part) {
            (Some(index), Some(_)) => self.written.index_part = Some(index.finish_part()?),
            (Some(index), None) => self.written.index = index.finish()?,
            (None, _) => {}
        }
        Ok(self.written)
    }

    fn append(&mut self, key: &str, fields: &[(&str, &[u8])]) -> Result<()> {
        if !self.has_room(entries_bytes(&sample_entries(key, fields, 0))) {
            self.close_shard()?;
        }
        let shard = if let Some(shard) = &mut self.open {
            shard
        } else {
            let ShardWriterBuilder { part, compression, .. } = self.settings;
            let name = shard_name(part, self.next_number, compression);
            Self::open_shard(&self.destination, compression, &name, &mut self.open, &mut self.index)?
        };
        let entries = sample_entries(key, fields, shard.file.tar_bytes());
        shard.file.append(&entries, fields)?;
        shard.samples += 1;
        if let Some(index) = &mut self.index {
            entries.iter().zip(fields).for_each(|(entry, (_, payload))| index.push(entry, payload));
        }
        self.last_key = Some(key.to_owned());
        self.written.samples += 1;
        self.written.bytes += entries.iter().map(|entry: &Entry| entry.bytes).sum::<u64>();
        Ok(())
    }

    /// Returns whether the shard under construction, if any, has room for a further sample of this length.
    fn has_room(&self, sample_bytes: u64) -> bool {
        self.open.as_ref().is_none_or(|shard| {
            shard.samples < self.settings.shard_samples
                && shard.file.tar_bytes() + sample_bytes + END_BYTES <= self.settings.shard_bytes
        })
    }

    fn open_shard<'a>(
        destination: &Destination,
        compression: ShardCompression,
        name: &str,
        open: &'a mut Option<OpenShard>,
        index: &mut Option<WrittenIndex>,
    ) -> Result<&'a mut OpenShard> {
        let file = ShardFile::create(destination.staging(), name, compression)?;
        if let Some(index) = index {
            index.begin_shard(destination.shard(file.name())?, compression.into());
        }
        Ok(open.insert(OpenShard { file, samples: 0 }))
    }

    fn close_shard(&mut self) -> Result<()> {
        let Some(shard) = self.open.take() else { return Ok(()) };
        self.written.shards.push(shard.file.commit(&self.destination, self.settings.part.is_some())?);
        self.next_number += 1;
        self.index.as_mut().map_or(Ok(()), WrittenIndex::end_shard)
    }

    /// Remembers a failure: the failed shard lacks samples that were counted, so nothing may follow.
    fn note(&mut self, outcome: Result<()>) -> Result<()> {
        if outcome.is_err() {
            self.is_failed = true;
            self.open = None;
        }
        outcome
    }

    fn check_whole(&self) -> Result<()> {
        if !self.is_failed {
            return Ok(());
        }
        let source = std::io::Error::other("an earlier shard could not be written");
        Err(Error::Storage(StorageError::File {
            path: self.settings.directory.display().to_string(),
            source,
        }))
    }
}

/// Longest entry name, equal to the longest path in Linux.
const NAME_BYTES_MAX: usize = 4096;

/// Returns the entry name for a field.
fn entry_name(key: &str, extension: &str) -> String {
    format!("{key}.{extension}")
}

/// Checks a sample that follows the sample with the key `last`, before anything is written.
fn check_sample(key: &str, fields: &[(&str, &[u8])], last: Option<&str>) -> Result<()> {
    let refuse = |reason: String| Err(Error::Output(OutputError::Write { key: key.to_owned(), reason }));
    if let Some(reason) = key_fault(key) {
        return refuse(reason.to_owned());
    }
    if last == Some(key) {
        return refuse("the previous sample has the same key, and both would be read as one".to_owned());
    }
    if fields.is_empty() {
        return refuse("a sample must have at least one field".to_owned());
    }
    for (at, (extension, _)) in fields.iter().enumerate() {
        if fields[..at].iter().any(|(earlier, _)| earlier == extension) {
            return refuse(format!("two fields have the extension `{extension}`"));
        }
        if let Some(reason) = name_fault(key, extension) {
            return refuse(format!("field `{extension}` {reason}"));
        }
    }
    Ok(())
}

/// Returns why a key would change: tar writers and extractors normalize paths, so only normalized keys are
/// stable.
fn key_fault(key: &str) -> Option<&'static str> {
    let base = key.rsplit('/').next().unwrap_or_default();
    if base.is_empty() {
        return Some("the key must have a base name");
    }
    if base.contains('.') {
        return Some("the base name of the key has a dot, and would be read as key and extension");
    }
    if key.contains('\0') {
        return Some("the key must not contain NUL");
    }
    if key.starts_with('/') {
        return Some("the key must not be an absolute path");
    }
    let is_odd = |part: &str| matches!(part, "" | "." | "..");
    key.split('/').any(is_odd).then_some("the key must not have empty, `.` or `..` parts")
}

/// Returns why shard readers would not return `key` and `extension` unchanged.
fn name_fault(key: &str, extension: &str) -> Option<String> {
    let name = entry_name(key, extension);
    if name.len() > NAME_BYTES_MAX {
        return Some(format!("has an entry name of {} bytes, expected at most {NAME_BYTES_MAX}", name.len()));
    }
    if is_metadata(&name) {
        return Some("would be skipped as metadata: its path starts and ends with `__`".to_owned());
    }
    if extension.contains('\0') {
        return Some("must not contain NUL in its extension".to_owned());
    }
    match split_key(&name) {
        Some((read_key, read_extension)) if read_key == key && read_extension == extension => None,
        Some((read_key, read_extension)) => {
            Some(format!("would be read as key `{read_key}`, extension `{read_extension}`"))
        }
        None => Some("would not be read at all".to_owned()),
    }
}
