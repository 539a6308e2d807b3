//! Builds a shard in a temporary file that is renamed when it is complete.
//!
//! Names the shards from parallel writers, so that they do not collide and sort by part.

use super::destination::{Destination, is_partial, remove_abandoned, shard_names};
use super::{ShardCompression, entry_name};
use crate::error::{Error, OutputError, Result, StorageError};
use crate::shard::tar::Entry;
use crate::shard::{PARTIAL, Shard};
use crate::store::Stores;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

/// Archive end marker size in bytes.
pub(super) const END_BYTES: u64 = 2 * BLOCK_BYTES;

const BLOCK_BYTES: u64 = 512;

/// Maximum number of name bytes in a header; a longer name is preceded by a GNU extension header.
const SHORT_NAME_BYTES: usize = 100;

/// Bytes buffered in memory for the file system.
const BUFFERED_BYTES: usize = 1 << 20;

/// Returns the entry locations for a sample that starts at `offset`, after headers and padding.
pub(super) fn sample_entries(key: &str, fields: &[(&str, &[u8])], offset: u64) -> Vec<Entry> {
    let padded = |bytes: usize| (bytes as u64).next_multiple_of(BLOCK_BYTES);
    let mut header_offset = offset;
    let entry = |(extension, payload): &(&str, &[u8])| {
        let name = entry_name(key, extension);
        let is_long = name.len() > SHORT_NAME_BYTES;
        let extension_bytes = if is_long { BLOCK_BYTES + padded(name.len() + 1) } else { 0 };
        let payload_offset = header_offset + extension_bytes + BLOCK_BYTES;
        let entry = Entry { name, header_offset, payload_offset, bytes: payload.len() as u64, sparse: None };
        header_offset = payload_offset + padded(payload.len());
        entry
    };
    fields.iter().map(entry).collect()
}

/// Returns the number of bytes in the sample entries, with headers and padding.
pub(super) fn entries_bytes(entries: &[Entry]) -> u64 {
    let begin = entries.first().map_or(0, |entry| entry.header_offset);
    entries.last().and_then(Entry::end_offset).map_or(0, |end| end - begin)
}

/// Shard under construction. Dropping it removes the temporary file.
pub(super) struct ShardFile {
    archive: ::tar::Builder<Sink>,
    place: PartialFile,
    tar_bytes: u64,
}

impl fmt::Debug for ShardFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardFile")
            .field("place", &self.place)
            .field("tar_bytes", &self.tar_bytes)
            .finish_non_exhaustive()
    }
}

impl ShardFile {
    /// Starts the shard with this name in a local directory.
    pub(super) fn create(directory: &Path, name: &str, compression: ShardCompression) -> Result<Self> {
        let (file, place) = PartialFile::create(directory, name)?;
        let sink = Sink::new(file, compression).map_err(|source| place.error(source))?;
        Ok(Self { archive: ::tar::Builder::new(sink), place, tar_bytes: 0 })
    }

    /// Returns the bytes so far, before compression, without the end marker.
    pub(super) fn tar_bytes(&self) -> u64 {
        self.tar_bytes
    }

    /// Returns the final shard name.
    pub(super) fn name(&self) -> &str {
        &self.place.name
    }

    /// Appends a sample that [`super::check_sample`] accepted; `entries` are the field locations.
    pub(super) fn append(&mut self, entries: &[Entry], fields: &[(&str, &[u8])]) -> Result<()> {
        for (entry, (_, payload)) in entries.iter().zip(fields) {
            let mut header = ::tar::Header::new_gnu();
            header.set_entry_type(::tar::EntryType::Regular);
            header.set_size(payload.len() as u64);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            let appended = self.archive.append_data(&mut header, &entry.name, *payload);
            appended.map_err(|source| self.place.error(source))?;
        }
        self.tar_bytes += entries_bytes(entries);
        Ok(())
    }

    /// Completes the shard, syncs it to disk and publishes it; returns the location.
    ///
    /// - `is_replaced`: whether an object with the same name is overwritten
    pub(super) fn commit(self, destination: &Destination, is_replaced: bool) -> Result<PathBuf> {
        let Self { archive, place, .. } = self;
        let finished = archive.into_inner().and_then(Sink::finish).and_then(|file| {
            file.sync_all()?;
            Ok(file)
        });
        // The open file stays locked until it has the final name.
        let _file = finished.map_err(|source| place.error(source))?;
        destination.put(&place.partial, &place.name, is_replaced)
    }
}

/// Returns a shard name, from the part and the shard number within it.
pub(super) fn shard_name(part: Option<ShardPart>, number: usize, compression: ShardCompression) -> String {
    let extension = match compression {
        ShardCompression::None => "tar",
        ShardCompression::Zstd { .. } => "tar.zst",
    };
    let prefix = part.map_or_else(|| "shard-".to_owned(), ShardPart::prefix);
    format!("{prefix}{number:06}.{extension}")
}

/// Final shard name, and the hidden temporary file in the same directory.
#[derive(Debug)]
struct PartialFile {
    directory: PathBuf,
    name: String,
    partial: PathBuf,
}

impl PartialFile {
    /// Creates the temporary file, never reusing a file that a second writer may be using. The file stays
    /// locked while it is open, which distinguishes an active writer from a killed writer.
    fn create(directory: &Path, name: &str) -> Result<(File, Self)> {
        let partial = directory.join(format!(".{name}.{PARTIAL}"));
        let path = partial.display().to_string();
        match File::create_new(&partial) {
            Ok(file) => {
                // File systems without locks fail here; on such file systems no writer removes files of a
                // different writer either.
                let _ = file.try_lock();
                Ok((file, Self { directory: directory.to_owned(), name: name.to_owned(), partial }))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::Output(OutputError::ShardExists { path }))
            }
            Err(source) => Err(Error::Storage(StorageError::File { path, source })),
        }
    }

    fn error(&self, source: io::Error) -> Error {
        Error::Storage(StorageError::File {
            path: self.directory.join(&self.name).display().to_string(),
            source,
        })
    }
}

impl Drop for PartialFile {
    /// Removes the temporary file; a published shard no longer has one.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.partial);
    }
}

/// Destination for archive bytes.
enum Sink {
    Plain(BufWriter<File>),
    Zstd(zstd::Encoder<'static, BufWriter<File>>),
}

impl Sink {
    fn new(file: File, compression: ShardCompression) -> io::Result<Self> {
        let writer = BufWriter::with_capacity(BUFFERED_BYTES, file);
        match compression {
            ShardCompression::None => Ok(Self::Plain(writer)),
            ShardCompression::Zstd { level } => {
                let mut encoder = zstd::Encoder::new(writer, level)?;
                encoder.include_checksum(true)?;
                Ok(Self::Zstd(encoder))
            }
        }
    }

    fn finish(self) -> io::Result<File> {
        let writer = match self {
            Self::Plain(writer) => writer,
            Self::Zstd(encoder) => encoder.finish()?,
        };
        writer.into_inner().map_err(io::IntoInnerError::into_error)
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(writer) => writer.write(bytes),
            Self::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(writer) => writer.flush(),
            Self::Zstd(encoder) => encoder.flush(),
        }
    }
}

/// Maximum number of parts in a dataset: part numbers have five digits.
const PARTS_MAX: u32 = 100_000;

/// Part number of a writer and total number of parts. The shards are named `shard-00003-of-00010-000000.tar`,
/// so that a directory lists all shards in part order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ShardPart {
    /// Part index, from 0.
    pub part: u32,
    /// Number of parts.
    pub parts: u32,
}

impl ShardPart {
    /// Checks that the part exists.
    ///
    /// # Errors
    /// [`Error::Config`] if `part` is not below `parts`, or if there are more than 100,000 parts.
    pub fn check(self) -> Result<()> {
        let Self { part, parts } = self;
        if part < parts && parts <= PARTS_MAX {
            return Ok(());
        }
        let reason = format!(
            "expected a part below the number of parts and at most {PARTS_MAX} parts, got part {part} of {parts}"
        );
        Err(Error::Config { setting: "part", reason })
    }

    /// Returns the shard name prefix for the part.
    pub(super) fn prefix(self) -> String {
        let Self { part, parts } = self;
        format!("shard-{part:05}-of-{parts:05}-")
    }

    /// Returns whether a shard with this name may be in the same directory as the shards of this part.
    fn has_sibling(self, name: &str) -> bool {
        let number = name.strip_prefix("shard-").and_then(|rest| rest.split_once("-of-"));
        number.is_some_and(|(number, rest)| {
            let part = number.parse().ok().filter(|&part| part < self.parts);
            part.is_some_and(|part| name.starts_with(&Self { part, ..self }.prefix()) && !rest.is_empty())
        })
    }

    /// Removes the files from an earlier run of this part. Finished shards on a store are kept and later
    /// overwritten.
    ///
    /// # Errors
    /// [`Error::Output`] if a second writer for this part is active, or if the directory contains shards
    /// without a part or with a different number of parts; [`Error::Storage`] if the directory cannot be
    /// listed or a file cannot be removed.
    pub(super) fn clear(self, destination: &Destination) -> Result<()> {
        for name in shard_names(destination)? {
            let shard = destination.shard(&name)?;
            let in_the_way = || Error::Output(OutputError::ShardExists { path: shard.url.to_string() });
            let visible = name.trim_start_matches('.');
            if !visible.starts_with(&self.prefix()) {
                if self.has_sibling(visible) {
                    continue;
                }
                return Err(in_the_way());
            }
            match shard.path() {
                Some(path) if is_partial(path) => remove_abandoned(path).map_err(|_| in_the_way())?,
                Some(path) => fs::remove_file(path).map_err(|source| Error::file(path, source))?,
                None => {}
            }
        }
        Ok(())
    }
}

/// Directory that all parts are written to.
#[derive(Debug)]
pub struct PartDirectory(Destination);

impl PartDirectory {
    /// Opens the directory.
    ///
    /// # Errors
    /// [`Error::Storage`] if it is missing and cannot be created.
    pub fn open(directory: &Path, stores: &Stores) -> Result<Self> {
        Destination::open(directory, stores).map(Self)
    }

    /// Lists the shards by name, including shards under construction.
    ///
    /// # Errors
    /// [`Error::Storage`] if the directory cannot be listed.
    pub fn shards(&self) -> Result<BTreeMap<String, Shard>> {
        shard_names(&self.0)?.into_iter().map(|name| Ok((name.clone(), self.0.shard(&name)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_part_and_other_numbers_of_parts_are_told() {
        let part = |part| ShardPart { part, parts: 12 };
        assert_eq!(part(3).prefix(), "shard-00003-of-00012-");
        assert!(part(2).prefix() < part(10).prefix());
        assert!(part(3).has_sibling("shard-00011-of-00012-000000.tar"));
        for name in ["shard-000017.tar", "shard-00012-of-00012-000000.tar", "shard-00001-of-00010-000000.tar"]
        {
            assert!(!part(3).has_sibling(name), "{name}");
        }
        assert!(part(12).check().is_err() && part(11).check().is_ok());
    }
}
