//! Writes samples to shards.
//!
//! A *shard* is a tar file named `shard-000000.tar`, or `shard-000000.tar.zst` with Zstandard. A sample lies
//! in one shard whole; a shard that has no room for the next sample ends, and the next one begins. Equal
//! samples in equal order give equal bytes: no time, no owner, nothing of the machine goes in. A shard gets
//! its name when it is complete and on disk, so whatever has a name is whole. What [`crate::read`] gives back
//! is what was written; a sample for which that would not hold is refused. Sources come from [`crate::pack`].

mod check;
mod shard_file;

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

use check::check_sample;
use shard_file::{END_BYTES, ShardFile, sample_tar_bytes};

/// Default limit of one shard: 256 MiB before compression.
pub const SHARD_BYTES: u64 = 256 << 20;

/// Default effort of Zstandard, its own default too.
pub const ZSTD_LEVEL: i32 = 3;

/// How shards are compressed as they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardCompression {
    /// Not at all: shards can be read by range and are memory-mapped.
    None,
    /// Zstandard with a checksum, which can only be read from the start.
    Zstd {
        /// Effort, in the range that the zstd library has: -131072 to 22; see [`ZSTD_LEVEL`].
        level: i32,
    },
}

/// What a [`ShardWriter`] has written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrittenShards {
    /// Paths of the shards, in order.
    pub shards: Vec<PathBuf>,
    /// Samples in all shards.
    pub samples: u64,
    /// Payload bytes of all fields, before compression, without tar headers.
    pub bytes: u64,
}

/// Settings of a [`ShardWriter`].
#[derive(Debug, Clone)]
#[must_use]
pub struct ShardWriterBuilder {
    folder: PathBuf,
    shard_bytes: u64,
    compression: ShardCompression,
}

impl ShardWriterBuilder {
    /// Sets the limit of one shard in bytes before compression, tar headers included. A sample that is longer
    /// gets a shard of its own. Default: [`SHARD_BYTES`].
    pub fn shard_bytes(mut self, bytes: u64) -> Self {
        self.shard_bytes = bytes;
        self
    }

    /// Sets the compression. Default: none.
    pub fn compression(mut self, compression: ShardCompression) -> Self {
        self.compression = compression;
        self
    }

    /// Makes the folder, where it is missing, and a writer into it.
    ///
    /// # Errors
    /// [`Error::Config`] if a setting makes no sense; [`Error::ShardExists`] if the folder holds shards or the
    /// rest of one; [`Error::File`] if the folder cannot be made or read.
    pub fn build(self) -> Result<ShardWriter> {
        self.check()?;
        let unusable = |source| Error::File { path: self.folder.display().to_string(), source };
        fs::create_dir_all(&self.folder).map_err(unusable)?;
        if let Some(path) = find_shard(&self.folder).map_err(unusable)? {
            return Err(Error::ShardExists { path: path.display().to_string() });
        }
        let written = WrittenShards::default();
        Ok(ShardWriter { settings: self, open: None, last_key: None, is_failed: false, written })
    }

    fn check(&self) -> Result<()> {
        if self.shard_bytes == 0 {
            return Err(Error::Config {
                setting: "shard_bytes",
                reason: "0 bytes hold no sample".to_owned(),
            });
        }
        let levels = zstd::compression_level_range();
        match self.compression {
            ShardCompression::Zstd { level } if !levels.contains(&level) => {
                let reason = format!("level {level} is not in {} to {}", levels.start(), levels.end());
                Err(Error::Config { setting: "compression", reason })
            }
            _ => Ok(()),
        }
    }
}

/// Returns the first of the files that a writer would add to, or that a killed one left.
fn find_shard(folder: &Path) -> std::io::Result<Option<PathBuf>> {
    let mut found: Option<PathBuf> = None;
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let is_shard = name.trim_start_matches('.').starts_with("shard-") && name.contains(".tar");
        let path = folder.join(&*name);
        if is_shard && found.as_ref().is_none_or(|first| path < *first) {
            found = Some(path);
        }
    }
    Ok(found)
}

/// Writes samples to numbered shards in one folder; see [the module](self).
///
/// Dropping it without [`finish`](Self::finish) removes the shard under construction and leaves those before.
#[derive(Debug)]
pub struct ShardWriter {
    settings: ShardWriterBuilder,
    open: Option<ShardFile>,
    last_key: Option<String>,
    is_failed: bool,
    written: WrittenShards,
}

impl ShardWriter {
    /// Starts the settings of a writer into `folder`.
    pub fn builder(folder: impl Into<PathBuf>) -> ShardWriterBuilder {
        let (shard_bytes, compression) = (SHARD_BYTES, ShardCompression::None);
        ShardWriterBuilder { folder: folder.into(), shard_bytes, compression }
    }

    /// Appends one sample: a key such as `train/000017`, and `(extension, payload)` of its fields in order.
    ///
    /// # Errors
    /// [`Error::Write`] if the sample would not be read back as it is; nothing of it is written and the writer
    /// goes on. That is so for a key that is empty, is the key of the sample before, has a dot in its base name,
    /// has empty, `.` or `..` parts, or reads as metadata (`__meta__/a`); for an extension with a slash or in
    /// upper case; for two fields of one extension, and for none.
    /// [`Error::File`] or [`Error::ShardExists`] if the shard cannot be written; it is removed and the writer is
    /// done for: all further calls fail.
    pub fn write(&mut self, key: &str, fields: &[(&str, &[u8])]) -> Result<()> {
        check_sample(key, fields, self.last_key.as_deref())?;
        self.check_whole()?;
        let appended = self.append(key, fields);
        self.note(appended)
    }

    /// Completes the last shard and tells what was written.
    ///
    /// # Errors
    /// [`Error::File`] or [`Error::ShardExists`] if it cannot be completed, or if an earlier call failed.
    pub fn finish(mut self) -> Result<WrittenShards> {
        self.check_whole()?;
        self.close_shard()?;
        Ok(self.written)
    }

    fn append(&mut self, key: &str, fields: &[(&str, &[u8])]) -> Result<()> {
        let tar_bytes = sample_tar_bytes(key, fields);
        let has_room =
            |shard: &ShardFile| shard.tar_bytes() + tar_bytes + END_BYTES <= self.settings.shard_bytes;
        if self.open.as_ref().is_some_and(|shard| !has_room(shard)) {
            self.close_shard()?;
        }
        let shard = match &mut self.open {
            Some(shard) => shard,
            None => self.open.insert(ShardFile::create(
                &self.settings.folder,
                self.written.shards.len(),
                self.settings.compression,
            )?),
        };
        shard.append(key, fields)?;
        self.last_key = Some(key.to_owned());
        self.written.samples += 1;
        self.written.bytes += fields.iter().map(|(_, payload)| payload.len() as u64).sum::<u64>();
        Ok(())
    }

    fn close_shard(&mut self) -> Result<()> {
        if let Some(shard) = self.open.take() {
            self.written.shards.push(shard.commit()?);
        }
        Ok(())
    }

    /// A shard that failed lacks samples that were counted, so nothing may follow.
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
        Err(Error::File { path: self.settings.folder.display().to_string(), source })
    }
}

#[cfg(test)]
mod tests;
