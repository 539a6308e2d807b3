//! Turns the entries of a source into samples, writes them, and accounts for the rest.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::key::{Keys, wanted_key};
use super::medium::{read_medium, resolve_medium};
use super::parts::SourcePart;
use super::record::Record;
use super::{PackOptions, Packed, SkippedSource};
use crate::error::{Error, Result};
use crate::flow::Progress;
use crate::write::{ShardCompression, ShardWriter, ShardWriterBuilder, WrittenShards, ZSTD_LEVEL};

/// A file that is to be a field.
#[derive(Debug)]
pub(super) struct SourceFile {
    /// Lower-case extension of the field.
    pub(super) extension: String,
    /// Where its bytes are.
    pub(super) path: PathBuf,
}

/// Extension and payload of a sample's fields.
type Fields = Vec<(String, Vec<u8>)>;

/// Where the keys of entries come from.
#[derive(Debug)]
enum KeySource {
    /// They are handed out one after the other.
    Given(Keys),
    /// They were listed: those that entries ask for, but for these, by number.
    Listed(BTreeMap<u64, String>),
}

/// Takes the samples of one source, or of a part of it.
#[derive(Debug)]
pub(super) struct Packer<'a> {
    /// None where entries are only listed.
    writer: Option<ShardWriter>,
    keys: KeySource,
    /// Keys that are not those that entries ask for, where they are listed.
    renamed: BTreeMap<u64, String>,
    /// Entries that are packed; others are passed over.
    range: Range<u64>,
    /// Whether what is no entry is accounted for here.
    is_first: bool,
    root: PathBuf,
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
    pub(super) fn of_part(
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

    /// Lists entries and their keys, and reads and writes nothing.
    pub(super) fn listing(source: &Path, options: &'a PackOptions) -> Self {
        let directory = || source.parent().unwrap_or(Path::new("")).to_owned();
        Self {
            writer: None,
            keys: KeySource::Given(Keys::default()),
            renamed: BTreeMap::new(),
            range: 0..u64::MAX,
            is_first: true,
            root: options.root.clone().unwrap_or_else(directory),
            skipped: Vec::new(),
            entries: 0,
            progress: &options.progress,
        }
    }

    /// Whether all entries behind are passed over.
    pub(super) fn is_done(&self) -> bool {
        self.entries >= self.range.end
    }

    /// Says how many samples are to come; 0 if that is not known.
    pub(super) fn begin(&self, samples: u64) {
        self.progress.begin("samples", samples);
    }

    /// Accounts for something in the source that is no entry.
    pub(super) fn skip_in_source(&mut self, path: String, reason: String) {
        if self.is_first {
            self.skip(path, reason);
        }
    }

    /// Accounts for something that is no sample.
    fn skip(&mut self, path: String, reason: String) {
        self.skipped.push(SkippedSource { path, reason });
    }

    /// Accounts for an entry of a manifest that is no sample.
    pub(super) fn skip_entry(&mut self, origin: String, reason: String) {
        if self.count_entry().is_some() {
            self.skip(origin, reason);
        }
    }

    /// Packs one entry of a manifest, whose bytes become the field `json`.
    ///
    /// - `origin`: where the entry is, for the account
    /// - `id`: what the manifest calls it, where that is not in the entry
    pub(super) fn add_entry(&mut self, origin: &str, id: Option<&str>, entry: &[u8]) -> Result<()> {
        let Some(number) = self.count_entry() else { return Ok(()) };
        let record = match Record::parse(entry) {
            Ok(record) => record,
            Err(reason) => {
                self.skip(origin.to_owned(), reason);
                return Ok(());
            }
        };
        let key = self.key(id.or(record.id.as_deref()), number);
        if self.writer.is_none() {
            return Ok(());
        }
        let mut fields = Fields::with_capacity(record.media.len() + 2);
        for (extension, named) in record.media {
            let path = resolve_medium(&self.root, &named);
            match read_medium(&path) {
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

    /// Packs files that make one sample with a key like `name`; if one is not to be had, none of them is.
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

    /// Completes the shards; returns what was written and what was not.
    pub(super) fn finish_part(self) -> Result<(WrittenShards, Vec<SkippedSource>)> {
        let written = self.writer.map_or_else(|| Ok(WrittenShards::default()), ShardWriter::finish)?;
        Ok((written, self.skipped))
    }

    /// Returns the number of entries, the keys that are not those asked for, and what was not listed.
    pub(super) fn listed(self) -> (u64, BTreeMap<u64, String>, Vec<SkippedSource>) {
        (self.entries, self.renamed, self.skipped)
    }

    /// The number of the next entry, if it is to be packed.
    fn count_entry(&mut self) -> Option<u64> {
        let number = self.entries;
        self.entries += 1;
        self.range.contains(&number).then(|| {
            self.progress.advance(1);
            number
        })
    }

    /// The key of an entry; it is the same whether or not its files, or those of others, can be read.
    fn key(&mut self, name: Option<&str>, number: u64) -> String {
        match &mut self.keys {
            KeySource::Listed(renamed) => renamed.remove(&number).unwrap_or_else(|| wanted_key(name, number)),
            KeySource::Given(keys) => {
                let key = keys.give(name, number);
                if self.writer.is_none() && key != wanted_key(name, number) {
                    self.renamed.insert(number, key.clone());
                }
                key
            }
        }
    }

    /// Accounts for every file of a sample that `faulty` spoils.
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

    /// Returns the reason if the sample cannot be written and others can.
    fn write(&mut self, key: &str, fields: &Fields) -> Result<Option<String>> {
        let Some(writer) = &mut self.writer else { return Ok(None) };
        let fields: Vec<(&str, &[u8])> = fields.iter().map(|(ext, payload)| (&**ext, &**payload)).collect();
        match writer.write(key, &fields) {
            Ok(()) => Ok(None),
            Err(Error::Write { reason, .. }) => Ok(Some(reason)),
            Err(error) => Err(error),
        }
    }
}

/// The writer that options ask for.
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
