//! Packs a source in parts: each task, on any machine, packs a share, and the results are joined.
//!
//! [`list_parts`] reads only the source, not the media: it counts entries, splits them into contiguous shares
//! and assigns the keys, so that repeated keys are renamed as in a single run. [`pack_part`] packs a share
//! into separate shards. [`finish_parts`] checks that nothing is missing and writes the index.
//!
//! Samples, keys and sample order equal the results of [`pack`](crate::pack); only shard boundaries differ,
//! as a shard ends with each part.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::directory::hash_names;
use super::options::{PackOptions, SourceFormat};
use super::pack::{check_apart, no_samples, write_classes};
use super::packer::{Packer, SourcePart};
use super::record::{ImportReport, Packed, SkippedSource};
use super::source::Source;
use dflop_loader::error::{Error, OutputError, Result};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::Shard;
use dflop_loader::store::file;
use dflop_loader::write::{PartDirectory, ShardPart};

/// Result of [`pack_part`], for [`finish_parts`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedPart {
    /// Part number and total number of parts.
    pub part: ShardPart,
    /// Shard names in the directory, in order; empty if no entry was good.
    pub shards: Vec<String>,
    /// Samples in them.
    pub samples: u64,
    /// Payload bytes in all fields, before compression.
    pub bytes: u64,
    /// Files and entries that were not packed, in source order.
    pub skipped: Vec<SkippedSource>,
    /// Fields, columns and classes that were packed.
    pub taken: ImportReport,
    /// Index rows for the shards, unless disabled: a part as in [`Index::build_part`].
    pub index_part: Option<Vec<u8>>,
    /// Digest of the listing that contains the part.
    pub source_digest: u64,
}

/// Splits a source into `parts` contiguous entry shares whose sizes differ by at most one entry; reads
/// manifests and lists directories, but opens no media.
///
/// Holds all keys in memory meanwhile, as [`pack`](crate::pack) does.
///
/// # Errors
/// [`Error::Config`] if there are no parts or more than 100,000; else the errors of [`pack`](crate::pack)
/// that concern the source.
pub fn list_parts(source: &Path, parts: u32, options: &PackOptions) -> Result<Vec<SourcePart>> {
    ShardPart { part: 0, parts }.check()?;
    let opened = Source::open(source, options)?;
    let source_digest = digest(source, &opened, options.is_outside_allowed)?;
    let mut listing = Packer::listing(options);
    let outcome = opened.pack(source, options, &mut listing);
    options.progress.end();
    outcome?;
    let (entries, mut renamed, skipped) = listing.into_listing();
    if entries == 0 {
        let reason = no_samples(&skipped, opened.format);
        return Err(Error::Output(OutputError::Pack { path: source.display().to_string(), reason }));
    }
    // In 128 bits, because the product of entries and parts may exceed 64 bits.
    let bound = |part: u32| (u128::from(entries) * u128::from(part) / u128::from(parts)) as u64;
    let share = |part| {
        let (first_entry, end) = (bound(part), bound(part + 1));
        // The map is ordered by entry, so each share receives the keys below the share end.
        let later = renamed.split_off(&end);
        let renamed = std::mem::replace(&mut renamed, later);
        let (part, entries) = (ShardPart { part, parts }, end - first_entry);
        SourcePart { part, first_entry, entries, renamed, source_digest }
    };
    Ok((0..parts).map(share).collect())
}

/// Packs a source part into shards named `shard-00003-of-00010-000000.tar` in the directory `out`, which all
/// parts share.
///
/// A part that was killed can be run again: it removes, or overwrites on a store, only shards of the same
/// part. The index is not written; only index rows are created.
///
/// # Errors
/// See [`pack`](crate::pack), except that a part may have no good sample; [`Error::Output`] if the source
/// differs from the listed source or if `out` contains shards without a part or with a different number of
/// parts, or if a second process packs this part.
pub fn pack_part(source: &Path, out: &Path, part: &SourcePart, options: &PackOptions) -> Result<PackedPart> {
    part.part.check()?;
    let opened = Source::open(source, options)?;
    check_apart(source, out)?;
    let ShardPart { part: number, .. } = part.part;
    if digest(source, &opened, options.is_outside_allowed)? != part.source_digest {
        let reason =
            format!("`{}` has changed since its parts were listed; list them again", source.display());
        return Err(Error::Output(OutputError::PackPart { part: number, reason }));
    }
    let mut packer = Packer::for_part(out, part, options)?;
    let outcome = opened.pack(source, options, &mut packer);
    options.progress.end();
    outcome?;
    let (written, skipped, taken) = packer.finish()?;
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(PackedPart {
        part: part.part,
        shards: written.shards.iter().filter_map(name).collect(),
        samples: written.samples,
        bytes: written.bytes,
        skipped,
        taken,
        index_part: written.index_part,
        source_digest: part.source_digest,
    })
}

/// Checks that all parts were packed, in any order, and that the directory contains exactly the part shards;
/// then writes the index to the default location, unless disabled.
///
/// # Errors
/// [`Error::Output`] if a part is missing, present twice, from a different listing, without index rows, or
/// lacks a shard, if there are unexpected shards, or if no part has a sample; then the errors of
/// [`Index::merge_parts`].
pub fn finish_parts(out: &Path, parts: Vec<PackedPart>, options: &PackOptions) -> Result<Packed> {
    let mut parts = in_order(parts)?;
    let directory = PartDirectory::open(out, &options.stores)?;
    let mut found = directory.shards()?;
    let mut shards = Vec::new();
    for part in &parts {
        for name in &part.shards {
            let lost = || {
                Error::Output(OutputError::PackPart {
                    part: part.part.part,
                    reason: format!(
                        "its shard `{name}` is missing in `{}`; pack the part again",
                        out.display()
                    ),
                })
            };
            shards.push(found.remove(name).ok_or_else(lost)?);
        }
    }
    if let Some(other) = found.into_values().next() {
        return Err(Error::Output(OutputError::ShardExists { path: other.url.to_string() }));
    }
    if shards.is_empty() {
        let reason = "no samples in any part".to_owned();
        return Err(Error::Output(OutputError::Pack { path: out.display().to_string(), reason }));
    }
    let paths = shards.iter().map(shard_path).collect();
    let index = if options.is_indexed { merged(shards, &mut parts)? } else { None };
    let mut taken = ImportReport::default();
    for part in &mut parts {
        taken.add(std::mem::take(&mut part.taken));
    }
    write_classes(out, &taken.classes)?;
    Ok(Packed {
        shards: paths,
        taken,
        samples: parts.iter().map(|part| part.samples).sum(),
        bytes: parts.iter().map(|part| part.bytes).sum(),
        index,
        skipped: parts.into_iter().flat_map(|part| part.skipped).collect(),
    })
}

fn shard_path(shard: &Shard) -> PathBuf {
    shard.path().map_or_else(|| PathBuf::from(&*shard.url), Path::to_owned)
}

/// Writes the index for all shards; moves the rows out of the parts.
fn merged(shards: Vec<Shard>, parts: &mut [PackedPart]) -> Result<Option<PathBuf>> {
    if let Some(part) = parts.iter().find(|part| part.index_part.is_none()) {
        let reason = "it was packed without index rows; pack it with them, or finish without an index";
        return Err(Error::Output(OutputError::PackPart { part: part.part.part, reason: reason.into() }));
    }
    // In sequence, so that the rows of a part leave memory when they are merged.
    let index_parts = parts.iter_mut().filter_map(|part| part.index_part.take());
    let index = Index::merge_parts(shards, index_parts, &IndexOptions::default())?;
    Ok(index.path().map(Path::to_owned))
}

/// Sorts the parts; checks that each is present once and from the same listing.
fn in_order(mut parts: Vec<PackedPart>) -> Result<Vec<PackedPart>> {
    parts.sort_by_key(|part| part.part.part);
    let fault =
        |part, reason: &str| Err(Error::Output(OutputError::PackPart { part, reason: reason.to_owned() }));
    let Some(first) = parts.first() else { return fault(0, "it is missing; pack it and finish again") };
    let (count, digest) = (first.part.parts, first.source_digest);
    for (expected, part) in parts.iter().enumerate() {
        let number = part.part.part;
        if (part.part.parts, part.source_digest) != (count, digest) {
            return fault(
                number,
                "it belongs to another listing than the first part; list the source once for all parts",
            );
        }
        if u64::from(number) < expected as u64 {
            return fault(number, "it is present twice; pass each part once");
        }
        if u64::from(number) > expected as u64 {
            return fault(expected as u32, "it is missing; pack it and finish again");
        }
    }
    if (parts.len() as u64) < u64::from(count) {
        return fault(parts.len() as u32, "it is missing; pack it and finish again");
    }
    Ok(parts)
}

/// Returns the digest of manifest bytes, of all file names below a directory, or of table names and lengths.
fn digest(source: &Path, opened: &Source, is_outside_allowed: bool) -> Result<u64> {
    let mut hasher = Xxh3::new();
    match opened.format {
        // Only names: reading all files would take as long as packing them.
        SourceFormat::Files => {
            hash_names(source, is_outside_allowed, |name| hasher.update(name))?;
            Ok(hasher.digest())
        }
        SourceFormat::Table => {
            for table in &opened.tables {
                let metadata = fs::metadata(&table.path).map_err(|error| Error::file(&table.path, error))?;
                hasher.update(table.name.as_bytes());
                hasher.update(&metadata.len().to_le_bytes());
            }
            Ok(hasher.digest())
        }
        SourceFormat::Jsonl | SourceFormat::Json | SourceFormat::Csv => file_digest(source),
    }
}

/// Returns the digest of a file.
fn file_digest(path: &Path) -> Result<u64> {
    let unreadable = |error| Error::file(path, error);
    let mut hasher = Xxh3::new();
    let mut file = file::open(path).map_err(unreadable)?;
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer).map_err(unreadable)? {
            0 => return Ok(hasher.digest()),
            read => hasher.update(&buffer[..read]),
        }
    }
}
