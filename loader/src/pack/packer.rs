//! Turns what a source gives into samples, writes them, and keeps account of the rest.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::key::Keys;
use super::medium::{read_medium, resolve_medium};
use super::record::Record;
use super::{PackOptions, Packed, SkippedSource};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::write::{ShardCompression, ShardWriter, WrittenShards, ZSTD_LEVEL};

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

/// Takes the samples of one source.
#[derive(Debug)]
pub(super) struct Packer<'a> {
    writer: ShardWriter,
    keys: Keys,
    root: PathBuf,
    skipped: Vec<SkippedSource>,
    entries: u64,
    progress: &'a Arc<dyn Progress>,
}

impl<'a> Packer<'a> {
    /// Opens the folder for the shards.
    pub(super) fn new(source: &Path, out: &Path, options: &'a PackOptions) -> Result<Self> {
        let level = ZSTD_LEVEL;
        let compression =
            if options.is_zstd { ShardCompression::Zstd { level } } else { ShardCompression::None };
        let writer = ShardWriter::builder(out)
            .stores(&options.stores)
            .shard_bytes(options.shard_bytes)
            .shard_samples(options.shard_samples.unwrap_or(u64::MAX))
            .index(options.is_indexed)
            .compression(compression)
            .build()?;
        let folder = || source.parent().unwrap_or(Path::new("")).to_owned();
        let root = options.root.clone().unwrap_or_else(folder);
        let (keys, skipped, progress) = (Keys::default(), Vec::new(), &options.progress);
        Ok(Self { writer, keys, root, skipped, entries: 0, progress })
    }

    /// Says how many samples are to come; 0 if that is not known.
    pub(super) fn begin(&self, samples: u64) {
        self.progress.begin("samples", samples);
    }

    /// Accounts for something that is no sample.
    pub(super) fn skip(&mut self, path: String, reason: String) {
        self.skipped.push(SkippedSource { path, reason });
    }

    /// Accounts for an entry of a manifest that is no sample.
    pub(super) fn skip_entry(&mut self, origin: String, reason: String) {
        self.count_entry();
        self.skip(origin, reason);
    }

    /// Packs one entry of a manifest, whose bytes become the field `json`.
    ///
    /// - `origin`: where the entry is, for the account
    /// - `id`: what the manifest calls it, where that is not in the entry
    pub(super) fn add_entry(&mut self, origin: &str, id: Option<&str>, entry: &[u8]) -> Result<()> {
        let number = self.count_entry();
        let record = match Record::parse(entry) {
            Ok(record) => record,
            Err(reason) => {
                self.skip(origin.to_owned(), reason);
                return Ok(());
            }
        };
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
        if let Some(reason) = self.write(id.or(record.id.as_deref()), number, &fields)? {
            self.skip(origin.to_owned(), reason);
        }
        Ok(())
    }

    /// Packs files that make one sample with a key like `name`; if one is not to be had, none of them is.
    pub(super) fn add_files(&mut self, name: &str, files: &[SourceFile]) -> Result<()> {
        let number = self.count_entry();
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
        if let Some(reason) = self.write(Some(name), number, &fields)? {
            self.skip_files(files, &files[0].path, &reason);
        }
        Ok(())
    }

    /// Completes the shards.
    pub(super) fn finish(self) -> Result<Packed> {
        let written = self.writer.finish()?;
        let WrittenShards { shards, samples, bytes, index } = written;
        Ok(Packed { shards, samples, bytes, index, skipped: self.skipped })
    }

    fn count_entry(&mut self) -> u64 {
        self.progress.advance(1);
        self.entries += 1;
        self.entries - 1
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
    fn write(&mut self, name: Option<&str>, number: u64, fields: &Fields) -> Result<Option<String>> {
        let key = self.keys.give(name, number);
        let fields: Vec<(&str, &[u8])> = fields.iter().map(|(ext, payload)| (&**ext, &**payload)).collect();
        match self.writer.write(&key, &fields) {
            Ok(()) => Ok(None),
            Err(Error::Write { reason, .. }) => Ok(Some(reason)),
            Err(error) => Err(error),
        }
    }
}
