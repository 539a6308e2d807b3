//! Turns source entries into samples, writes them, and accounts for the rest.
//!
//! Creates unique keys that readers return unchanged.

use super::options::{LabelSource, PackOptions};
use super::record::{ImportReport, Record, SHOWN_MAX, SkippedSource, outside, read_medium, resolve_medium};
use super::row::{Cell, ColumnMap, Columns, Content, RowRules, holds_embedded, row_id, row_sample};
use bytes::Bytes;
use dflop_loader::error::{Error, OutputError, Result, excerpt};
use dflop_loader::flow::Progress;
use dflop_loader::shard::is_metadata;
use dflop_loader::write::{
    ShardCompression, ShardPart, ShardWriter, ShardWriterBuilder, WrittenShards, ZSTD_LEVEL,
};
use dflop_samples::media::repair_json;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

/// Maximum number of path characters in the account; a longer path is content in place of a path.
const PATH_SHOWN_MAX: usize = 255;

/// Contiguous source share, created by [`list_parts`](crate::list_parts). Small and serializable to JSON, for
/// a single task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourcePart {
    /// Part number and total number of parts.
    pub part: ShardPart,
    /// Number of the first entry in the source, from 0.
    pub first_entry: u64,
    /// Number of entries, whether they become samples or are skipped.
    pub entries: u64,
    /// Keys for entries whose requested key belongs to an earlier entry, by entry number.
    pub renamed: BTreeMap<u64, String>,
    /// Listing digest; a part is only packed from the listed source.
    pub source_digest: u64,
}

/// File that becomes a field.
#[derive(Debug)]
pub(super) struct SourceFile {
    /// Lower-case extension of the field.
    pub(super) extension: String,
    /// Path of the file.
    pub(super) path: PathBuf,
}

/// Extension and payload of each sample field.
type Fields = Vec<(String, Bytes)>;

/// Source of entry keys.
#[derive(Debug)]
enum KeySource {
    /// Keys are assigned in entry order.
    Assigned(Keys),
    /// Keys were assigned by a listing: the requested ones, except for these, by entry number.
    Listed(BTreeMap<u64, String>),
}

/// Packs the entries of a source, or of a source part.
#[derive(Debug)]
pub(super) struct Packer<'a> {
    /// Shard writer; `None` if entries are only listed.
    writer: Option<ShardWriter>,
    keys: KeySource,
    /// While listing: assigned keys that differ from the requested ones.
    renamed: BTreeMap<u64, String>,
    /// Entries to pack; entries outside the range are ignored.
    range: Range<u64>,
    /// Whether this packer accounts for files that are not entries, which only a single part may do.
    is_first: bool,
    root: PathBuf,
    pub(super) is_outside_allowed: bool,
    pub(super) labels: LabelSource,
    skipped: Vec<SkippedSource>,
    entries: u64,
    map: &'a ColumnMap,
    taken: ImportReport,
    progress: &'a Arc<dyn Progress>,
}

impl<'a> Packer<'a> {
    /// Opens the directory for the shards.
    pub(super) fn new(out: &Path, options: &'a PackOptions) -> Result<Self> {
        let writer = writer(out, options).build()?;
        Ok(Self { writer: Some(writer), ..Self::listing(options) })
    }

    /// Opens the shard directory for a part.
    pub(super) fn for_part(out: &Path, part: &SourcePart, options: &'a PackOptions) -> Result<Self> {
        Ok(Self {
            writer: Some(writer(out, options).part(part.part).build()?),
            keys: KeySource::Listed(part.renamed.clone()),
            range: part.first_entry..part.first_entry.saturating_add(part.entries),
            is_first: part.part.part == 0,
            ..Self::listing(options)
        })
    }

    /// Creates a packer that lists entries and keys without reading media or writing.
    pub(super) fn listing(options: &'a PackOptions) -> Self {
        Self {
            writer: None,
            keys: KeySource::Assigned(Keys::default()),
            renamed: BTreeMap::new(),
            range: 0..u64::MAX,
            is_first: true,
            root: options.root.clone().unwrap_or_default(),
            is_outside_allowed: options.is_outside_allowed,
            labels: options.labels,
            skipped: Vec::new(),
            entries: 0,
            map: &options.map,
            taken: ImportReport::default(),
            progress: &options.progress,
        }
    }

    /// Starts a source; relative paths start from the source directory unless a root is set.
    pub(super) fn enter(&mut self, source: &Path, options: &PackOptions) {
        if options.root.is_none() {
            let directory = if source.is_dir() { Some(source) } else { source.parent() };
            directory.unwrap_or(Path::new("")).clone_into(&mut self.root);
        }
    }

    /// Returns the column mapping.
    pub(super) fn column_map(&self) -> &'a ColumnMap {
        self.map
    }

    /// Returns whether entries are only listed, so that only keys matter.
    pub(super) fn is_listing(&self) -> bool {
        self.writer.is_none()
    }

    /// Passes over as many of the next `entries` as precede the entries to pack; returns the number.
    pub(super) fn pass(&mut self, entries: u64) -> u64 {
        let passed = entries.min(self.range.start.saturating_sub(self.entries));
        self.entries += passed;
        passed
    }

    /// Records the class names for the labels, unless they are known.
    pub(super) fn set_classes(&mut self, classes: &[String]) {
        if self.taken.classes.is_empty() {
            self.taken.classes = classes.to_vec();
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
        // Every part sees the entire source, so only the first part may record files that are not entries.
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

    /// Records a manifest entry that is not a sample.
    pub(super) fn skip_entry(&mut self, origin: String, reason: String) {
        if self.count_entry().is_some() {
            self.skip(origin, reason);
        }
    }

    /// Packs a manifest entry, whose bytes become the field `json`, unless it holds media itself.
    ///
    /// - `origin`: location of the entry, for the account
    /// - `id`: entry name in the manifest, if the entry does not contain it
    pub(super) fn add_entry(&mut self, origin: &str, id: Option<&str>, entry: &[u8]) -> Result<()> {
        let Some(number) = self.count_entry() else { return Ok(()) };
        if let Some(columns) = json_columns(entry)
            && (!self.map.is_empty() || holds_embedded(&columns))
        {
            let id = id.map(str::to_owned).or_else(|| row_id(&columns, self.map));
            let key = self.key(id.as_deref(), number);
            return self.write_row(&key, origin, columns, &RowRules::new(self.map), None);
        }
        let record = match Record::parse(entry) {
            Ok(record) => record,
            Err(reason) => {
                self.skip(origin.to_owned(), reason);
                return Ok(());
            }
        };
        // Assigned before files are read, so that an unreadable file does not change other keys.
        let key = self.key(id.or(record.id.as_deref()), number);
        let media = record.media.into_iter().map(|(extension, path)| (extension, Content::File(path)));
        let text = |text: String| Content::Bytes(text.into_bytes().into());
        let transcript = record.transcript.map(|words| ("txt".to_owned(), text(words)));
        let label = record.label.map(|label| ("cls".to_owned(), text(label.to_string())));
        let json = ("json".to_owned(), Content::Bytes(entry.to_vec().into()));
        self.write_contents(&key, origin, media.chain(transcript).chain(label).chain([json]))
    }

    /// Packs a table row.
    ///
    /// - `file`: file name, for the document and the account
    /// - `row`: row number in the file, from 0
    /// - `read`: reads the columns, of which a listing needs only the key columns
    pub(super) fn add_row(
        &mut self,
        file: &str,
        row: u64,
        read: impl FnOnce() -> std::result::Result<Columns, String>,
        rules: &RowRules,
    ) -> Result<()> {
        let Some(number) = self.count_entry() else { return Ok(()) };
        let origin = format!("{file}:{row}");
        match read() {
            Ok(columns) => {
                // Assigned before anything can fail, because a listing does not see all columns.
                let key = self.key(row_id(&columns, self.map).as_deref(), number);
                self.write_row(&key, &origin, columns, rules, Some((file, row)))
            }
            Err(reason) => {
                self.key(None, number);
                self.skip(origin, reason);
                Ok(())
            }
        }
    }

    /// Writes a row, or accounts for it.
    fn write_row(
        &mut self,
        key: &str,
        origin: &str,
        columns: Columns,
        rules: &RowRules,
        source: Option<(&str, u64)>,
    ) -> Result<()> {
        if self.writer.is_none() {
            return Ok(());
        }
        let sample = match row_sample(columns, rules, source) {
            Ok(sample) => sample,
            Err(reason) => {
                self.skip(origin.to_owned(), reason);
                return Ok(());
            }
        };
        let json = ("json".to_owned(), Content::Bytes(sample.json.into()));
        self.write_contents(key, origin, sample.fields.into_iter().chain([json]))?;
        for (column, field) in &sample.uses {
            self.taken.note_column(column, field);
        }
        Ok(())
    }

    /// Reads the files among the sample contents, and writes the sample; writes nothing if a file cannot be
    /// read.
    fn write_contents(
        &mut self,
        key: &str,
        origin: &str,
        contents: impl Iterator<Item = (String, Content)>,
    ) -> Result<()> {
        if self.writer.is_none() {
            return Ok(());
        }
        let mut fields = Fields::new();
        for (extension, content) in contents {
            match content {
                Content::Bytes(payload) => fields.push((extension, payload)),
                Content::File(named) => {
                    let path = resolve_medium(&self.root, &named);
                    let outside = if self.is_outside_allowed { None } else { outside(&self.root, &path) };
                    match outside.map_or_else(|| read_medium(&path), |reason| Ok(Err(reason)))? {
                        Ok(payload) => fields.push((extension, payload.into())),
                        Err(reason) => {
                            self.skip(path.display().to_string(), format!("{reason}; named by {origin}"));
                            return Ok(());
                        }
                    }
                }
            }
        }
        if let Some(reason) = self.write(key, &fields)? {
            self.skip(origin.to_owned(), reason);
        }
        Ok(())
    }

    /// Packs files that form one sample with a key like `name`; packs none of them if a file cannot be
    /// read.
    ///
    /// - `label`: sample class, which becomes the field `cls`
    pub(super) fn add_files(&mut self, name: &str, files: &[SourceFile], label: Option<usize>) -> Result<()> {
        let Some(number) = self.count_entry() else { return Ok(()) };
        let key = self.key(Some(name), number);
        if self.writer.is_none() {
            return Ok(());
        }
        let mut fields = Fields::with_capacity(files.len());
        for file in files {
            match read_medium(&file.path)? {
                Ok(payload) => fields.push((file.extension.clone(), payload.into())),
                Err(reason) => {
                    self.skip_files(files, &file.path, &reason);
                    return Ok(());
                }
            }
        }
        fields.extend(label.map(|label| ("cls".to_owned(), label.to_string().into_bytes().into())));
        if let Some(reason) = self.write(&key, &fields)? {
            self.skip_files(files, &files[0].path, &reason);
        }
        Ok(())
    }

    /// Completes the shards; returns the written shards, the skipped sources, and the packing summary.
    pub(super) fn finish(self) -> Result<(WrittenShards, Vec<SkippedSource>, ImportReport)> {
        let written = self.writer.map_or_else(|| Ok(WrittenShards::default()), ShardWriter::finish)?;
        Ok((written, self.skipped, self.taken))
    }

    /// Returns the number of entries, the keys that differ from the requested keys, and files that are not
    /// entries.
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

    /// Returns the key for an entry; it does not depend on whether files can be read.
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

    /// Records every file in a sample that cannot be packed because of `faulty`.
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

    /// Writes a sample; returns the reason if only this sample cannot be written.
    fn write(&mut self, key: &str, fields: &Fields) -> Result<Option<String>> {
        let Some(writer) = &mut self.writer else { return Ok(None) };
        let borrowed: Vec<(&str, &[u8])> = fields.iter().map(|(ext, payload)| (&**ext, &**payload)).collect();
        match writer.write(key, &borrowed) {
            Ok(()) => {
                for (extension, _) in fields {
                    self.taken.count_field(extension);
                }
                Ok(None)
            }
            // The sample is at fault and the writer is still usable, so packing continues.
            Err(Error::Output(OutputError::Write { reason, .. })) => Ok(Some(reason)),
            Err(error) => Err(error),
        }
    }
}

/// Returns the columns of an entry that is a JSON object, also if Python wrote it.
fn json_columns(entry: &[u8]) -> Option<Columns> {
    let text = std::str::from_utf8(entry).ok()?;
    let parsed = serde_json::from_str(text).or_else(|_| serde_json::from_str(&repair_json(text)));
    match parsed.ok()? {
        Cell::Object(columns) => Some(columns),
        _ => None,
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

/// Maximum length of a key created from a name, which leaves room for an extension in an entry name.
const KEY_BYTES_MAX: usize = 2048;

/// Assigns unique keys.
///
/// Keys are remembered as 128-bit digests, a quarter of the memory. Should two digests ever be equal, a key
/// has an unnecessary suffix.
#[derive(Debug, Default)]
pub(super) struct Keys {
    assigned: HashSet<u128>,
    /// Next suffix to try for keys that were requested again.
    next_suffixes: HashMap<u128, u64>,
}

impl Keys {
    /// Returns the key closest to `name`, or to `number` in nine digits without a usable name.
    pub(super) fn assign(&mut self, name: Option<&str>, number: u64) -> String {
        let wanted = requested_key(name, number);
        let digest = xxh3_128(wanted.as_bytes());
        if self.assigned.insert(digest) {
            return wanted;
        }
        let next = self.next_suffixes.get(&digest).copied().unwrap_or(1);
        // The suffixed key may itself be the name of a different entry.
        for suffix in next.. {
            let key = format!("{wanted}_{suffix}");
            if self.assigned.insert(xxh3_128(key.as_bytes())) {
                self.next_suffixes.insert(digest, suffix + 1);
                return key;
            }
        }
        unreachable!("there are more suffixes than keys")
    }
}

/// Returns the key that an entry requests.
pub(super) fn requested_key(name: Option<&str>, number: u64) -> String {
    name.and_then(safe_key).unwrap_or_else(|| format!("{number:09}"))
}

/// Sanitizes a name: dots in the base name and control characters become `_`; parts that are empty, `.` or
/// `..` are removed; a name that would be read as metadata has the prefix `x`. `None` if nothing, or too
/// much, is left.
pub(super) fn safe_key(name: &str) -> Option<String> {
    let is_odd = |part: &&str| matches!(*part, "" | "." | "..");
    let parts: Vec<&str> = name.trim().split('/').filter(|part| !is_odd(part)).collect();
    let (base, directories) = parts.split_last()?;
    let base = base.replace('.', "_");
    let joined: Vec<&str> = directories.iter().copied().chain([base.as_str()]).collect();
    let key = joined.join("/").replace(char::is_control, "_");
    // With an extension, because the metadata rule concerns complete entry names.
    let key = if is_metadata(&format!("{key}.x")) { format!("x{key}") } else { key };
    (key.len() <= KEY_BYTES_MAX).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_safe_keys() {
        let table = [
            ("000000525439", Some("000000525439")),
            ("a/b.c/d.e.f", Some("a/b.c/d_e_f")),
            ("/etc/../x.y/", Some("etc/x_y")),
            ("__meta__/a", Some("x__meta__/a")),
            ("__a__", Some("__a__")),
            ("a\nb\0", Some("a_b_")),
            ("日本.語", Some("日本_語")),
            ("..", None),
            (" ", None),
        ];
        for (name, key) in table {
            assert_eq!(safe_key(name).as_deref(), key, "{name}");
        }
        assert_eq!(safe_key(&"k".repeat(3000)), None);
    }

    #[test]
    fn no_key_is_given_twice() {
        let mut keys = Keys::default();
        let names = ["a", "a", "a_1", "a", "a.1", "b", "a"];
        let assigned = names.map(|name| keys.assign(Some(name), 0));
        assert_eq!(assigned, ["a", "a_1", "a_1_1", "a_2", "a_1_2", "b", "a_3"]);
        assert_eq!([keys.assign(None, 7), keys.assign(Some(".."), 7)], ["000000007", "000000007_1"]);
    }
}
