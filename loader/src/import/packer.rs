//! Turns the entries of a source into samples, writes them, and accounts for the rest.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::key::{Keys, requested_key};
use super::medium::{outside, read_medium, resolve_medium};
use super::parts::SourcePart;
use super::record::{Record, SHOWN_MAX};
use super::{PackOptions, Packed, SkippedSource};
use crate::error::{Error, OutputError, Result, excerpt};
use crate::flow::Progress;
use crate::write::{ShardCompression, ShardWriter, ShardWriterBuilder, WrittenShards, ZSTD_LEVEL};

/// Most characters of a path in the account; a longer one is content in the place of a path.
const PATH_SHOWN_MAX: usize = 255;

/// File that becomes a field.
#[derive(Debug)]
pub(super) struct SourceFile {
    /// Lower-case extension of the field.
    pub(super) extension: String,
    /// Path of the file.
    pub(super) path: PathBuf,
}

/// Extension and payload of a sample's fields.
type Fields = Vec<(String, Vec<u8>)>;

/// Source of the keys of entries.
#[derive(Debug)]
enum KeySource {
    /// Keys are assigned one after another.
    Assigned(Keys),
    /// Keys were assigned by a listing: the requested ones, except for these, by entry number.
    Listed(BTreeMap<u64, String>),
}

/// Packs the entries of one source, or of a part of it.
#[derive(Debug)]
pub(super) struct Packer<'a> {
    /// Writer of the shards; `None` if entries are only listed.
    writer: Option<ShardWriter>,
    keys: KeySource,
    /// While listing: assigned keys that differ from the requested ones.
    renamed: BTreeMap<u64, String>,
    /// Entries to pack; others are ignored.
    range: Range<u64>,
    /// Whether this packer accounts for files that are not entries, which only one part may do.
    is_first: bool,
    root: PathBuf,
    pub(super) is_outside_allowed: bool,
    skipped: Vec<SkippedSource>,
    entries: u64,
    progress: &'a Arc<dyn Progress>,
}

impl<'a> Packer<'a> {
    /// Opens the directory for the shards.
    pub(super) fn new(source: &Path, out: &Path, options: &'a PackOptions) -> Result<Self> {
        let writer = writer(out, options).build()?;
        Ok(Self { writer: Some(writer), ..Self::listing(source, options) })
    }

    /// Opens the directory for the shards of a part.
    pub(super) fn for_part(
        source: &Path,
        out: &Path,
        part: &SourcePart,
        options: &'a PackOptions,
    ) -> Result<Self> {
        Ok(Self {
            writer: Some(writer(out, options).part(part.part).build()?),
            keys: KeySource::Listed(part.renamed.clone()),
            range: part.first_entry..part.first_entry.saturating_add(part.entries),
            is_first: part.part.part == 0,
            ..Self::listing(source, options)
        })
    }

    /// Makes a packer that lists entries and their keys without reading media or writing.
    pub(super) fn listing(source: &Path, options: &'a PackOptions) -> Self {
        let directory = || source.parent().unwrap_or(Path::new("")).to_owned();
        Self {
            writer: None,
            keys: KeySource::Assigned(Keys::default()),
            renamed: BTreeMap::new(),
            range: 0..u64::MAX,
            is_first: true,
            root: options.root.clone().unwrap_or_else(directory),
            is_outside_allowed: options.is_outside_allowed,
            skipped: Vec::new(),
            entries: 0,
            progress: &options.progress,
        }
    }

    /// Returns whether all further entries are ignored.
    pub(super) fn is_done(&self) -> bool {
        self.entries >= self.range.end
    }

    /// Reports the expected number of samples; 0 if unknown.
    pub(super) fn begin(&self, samples: u64) {
        self.progress.begin("samples", samples);
    }

    /// Records something in the source that is not an entry.
    pub(super) fn skip_in_source(&mut self, path: String, reason: String) {
        // Every part sees the whole source, so only the first may record what is not an entry.
        if self.is_first {
            self.skip(path, reason);
        }
    }

    /// Records something that is not a sample.
    fn skip(&mut self, path: String, reason: String) {
        // A manifest may hold content where a path is expected.
        let is_long = path.chars().nth(PATH_SHOWN_MAX).is_some();
        let path = if is_long { excerpt(&path, SHOWN_MAX).into_owned() } else { path };
        self.skipped.push(SkippedSource { path, reason });
    }

    /// Records an entry of a manifest that is not a sample.
    pub(super) fn skip_entry(&mut self, origin: String, reason: String) {
        if self.count_entry().is_some() {
            self.skip(origin, reason);
        }
    }

    /// Packs one entry of a manifest, whose bytes become the field `json`.
    ///
    /// - `origin`: location of the entry, for the account
    /// - `id`: name of the entry in the manifest, if the entry does not contain it
    pub(super) fn add_entry(&mut self, origin: &str, id: Option<&str>, entry: &[u8]) -> Result<()> {
        let Some(number) = self.count_entry() else { return Ok(()) };
        let record = match Record::parse(entry) {
            Ok(record) => record,
            Err(reason) => {
                self.skip(origin.to_owned(), reason);
                return Ok(());
            }
        };
        // Assigned before files are read, so that an unreadable file does not change other keys.
        let key = self.key(id.or(record.id.as_deref()), number);
        if self.writer.is_none() {
            return Ok(());
        }
        let mut fields = Fields::with_capacity(record.media.len() + 2);
        for (extension, named) in record.media {
            let path = resolve_medium(&self.root, &named);
            let outside = if self.is_outside_allowed { None } else { outside(&self.root, &path) };
            match outside.map_or_else(|| read_medium(&path), Err) {
                Ok(payload) => fields.push((extension, payload)),
                Err(reason) => {
                    self.skip(path.display().to_string(), format!("{reason}; named by {origin}"));
                    return Ok(());
                }
            }
        }
        fields.extend(record.transcript.map(|words| ("txt".to_owned(), words.into_bytes())));
        fields.push(("json".to_owned(), entry.to_vec()));
        if let Some(reason) = self.write(&key, &fields)? {
            self.skip(origin.to_owned(), reason);
        }
        Ok(())
    }

    /// Packs files that form one sample with a key like `name`; if one cannot be read, none is packed.
    pub(super) fn add_files(&mut self, name: &str, files: &[SourceFile]) -> Result<()> {
        let Some(number) = self.count_entry() else { return Ok(()) };
        let key = self.key(Some(name), number);
        if self.writer.is_none() {
            return Ok(());
        }
        let mut fields = Fields::with_capacity(files.len());
        for file in files {
            match read_medium(&file.path) {
                Ok(payload) => fields.push((file.extension.clone(), payload)),
                Err(reason) => {
                    self.skip_files(files, &file.path, &reason);
                    return Ok(());
                }
            }
        }
        if let Some(reason) = self.write(&key, &fields)? {
            self.skip_files(files, &files[0].path, &reason);
        }
        Ok(())
    }

    /// Completes the shards.
    pub(super) fn finish(self) -> Result<Packed> {
        let (WrittenShards { shards, samples, bytes, index, .. }, skipped) = self.finish_part()?;
        Ok(Packed { shards, samples, bytes, index, skipped })
    }

    /// Completes the shards; returns what was written and what was skipped.
    pub(super) fn finish_part(self) -> Result<(WrittenShards, Vec<SkippedSource>)> {
        let written = self.writer.map_or_else(|| Ok(WrittenShards::default()), ShardWriter::finish)?;
        Ok((written, self.skipped))
    }

    /// Returns the number of entries, the keys that differ from the requested ones, and what is not an entry.
    pub(super) fn into_listing(self) -> (u64, BTreeMap<u64, String>, Vec<SkippedSource>) {
        (self.entries, self.renamed, self.skipped)
    }

    /// Returns the number of the next entry, if it is to be packed.
    fn count_entry(&mut self) -> Option<u64> {
        let number = self.entries;
        self.entries += 1;
        self.range.contains(&number).then(|| {
            self.progress.advance(1);
            number
        })
    }

    /// Returns the key of an entry; it does not depend on whether files can be read.
    fn key(&mut self, name: Option<&str>, number: u64) -> String {
        match &mut self.keys {
            KeySource::Listed(renamed) => {
                renamed.remove(&number).unwrap_or_else(|| requested_key(name, number))
            }
            KeySource::Assigned(keys) => {
                let key = keys.assign(name, number);
                if self.writer.is_none() && key != requested_key(name, number) {
                    self.renamed.insert(number, key.clone());
                }
                key
            }
        }
    }

    /// Records every file of a sample that cannot be packed because of `faulty`.
    fn skip_files(&mut self, files: &[SourceFile], faulty: &Path, reason: &str) {
        for file in files {
            let path = file.path.display().to_string();
            if file.path == faulty {
                self.skip(path, reason.to_owned());
            } else {
                self.skip(path, format!("its sample is skipped because of `{}`", faulty.display()));
            }
        }
    }

    /// Writes a sample; returns the reason if it cannot be written but others can.
    fn write(&mut self, key: &str, fields: &Fields) -> Result<Option<String>> {
        let Some(writer) = &mut self.writer else { return Ok(None) };
        let fields: Vec<(&str, &[u8])> = fields.iter().map(|(ext, payload)| (&**ext, &**payload)).collect();
        match writer.write(key, &fields) {
            Ok(()) => Ok(None),
            // The sample is at fault and the writer is still usable, so packing continues.
            Err(Error::Output(OutputError::Write { reason, .. })) => Ok(Some(reason)),
            Err(error) => Err(error),
        }
    }
}

/// Returns the writer for these options.
fn writer(out: &Path, options: &PackOptions) -> ShardWriterBuilder {
    let level = ZSTD_LEVEL;
    let compression = if options.is_zstd { ShardCompression::Zstd { level } } else { ShardCompression::None };
    ShardWriter::builder(out)
        .stores(&options.stores)
        .shard_bytes(options.shard_bytes)
        .shard_samples(options.shard_samples.unwrap_or(u64::MAX))
        .index(options.is_indexed)
        .compression(compression)
}
