//! Builds a dataset index in parts: tasks on any machines read shards, and the parts are merged.
//!
//! A *part* holds the headers of a few shards as portable bytes: for each shard a URL and a small index file
//! with only that shard. Merging reads no shard: it checks that every shard is covered once, in the present
//! version, and writes the same file as [`super::cache`].
//!
//! ```text
//! magic, version, shards; for each shard: length, URL, length, index file; XXH3 of all that
//! ```

use std::collections::HashMap;

use bytes::{Buf, BufMut, Bytes};
use dflop_samples::media::VideoSampling;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_64;

use super::build::build_shard;
use super::builder::{hash_sample, shard_digest};
use super::cache::{has_present_codecs, is_version, stats, write_and_open};
use super::encode::{EncodedRows, EncodedShard, IndexFile, ShardSummary, SpilledShard};
use super::file::{DecodedIndex, decode_index};
use super::location::{IndexOptions, check_options, directories, fault_in, index_error};
use super::rows::ShardRows;
use super::schema::IndexedShard;
use super::spill::Spill;
use super::{Index, no_samples};
use crate::error::{DataError, Error, Result, ShardFault};
use crate::shard::Shard;
use crate::store::Identity;

const MAGIC: &[u8; 16] = b"dflop index part";
/// Layout version of a part; the index files inside have a separate version.
const VERSION: u32 = 1;
const CHECKSUM_BYTES: usize = 8;

/// Shard in a part, with rows in memory or in a [`Spill`].
struct PartShard<Built> {
    url: String,
    built: Built,
    sampling: Option<VideoSampling>,
}

/// Reads the headers of some shards in a dataset.
pub(super) fn build_part(shards: &[Shard], options: &IndexOptions) -> Result<Vec<u8>> {
    check_options(shards, options)?;
    options.progress.begin("shards", shards.len() as u64);
    let mut part = PartBuilder::new(shards.len(), options.video_sampling);
    for (shard, identity) in shards.iter().zip(stats(shards)?) {
        let built = build_shard(shard, &identity, options)?.encode();
        let mut spill = Spill::in_memory();
        let built =
            built.and_then(|built| built.spill(&mut spill)).map_err(|error| index_error(None, &error))?;
        part.push(&shard.url, built, &spill)?;
        options.progress.advance(1);
    }
    options.progress.end();
    Ok(part.finish())
}

/// Part under construction, shard by shard.
pub(super) struct PartBuilder {
    part: Vec<u8>,
    sampling: VideoSampling,
}

impl PartBuilder {
    /// Starts a part with this number of shards.
    pub(super) fn new(shards: usize, sampling: VideoSampling) -> Self {
        let mut part = Vec::new();
        part.put_slice(MAGIC);
        part.put_u32_le(VERSION);
        part.put_u32_le(shards as u32);
        Self { part, sampling }
    }

    /// Adds a shard whose rows are in `spill`.
    ///
    /// # Errors
    /// [`Error::Storage`] if the shard cannot be encoded or the rows cannot be read.
    pub(super) fn push(&mut self, url: &str, built: SpilledShard, spill: &Spill) -> Result<()> {
        let index = IndexFile::new(vec![built], None, self.sampling);
        let index = index.map_err(|error| index_error(None, &error))?;
        let encoded = index.write(spill, Vec::new()).map_err(|fault| fault_in("in memory", fault))?;
        for bytes in [url.as_bytes(), &encoded] {
            self.part.put_u64_le(bytes.len() as u64);
            self.part.put_slice(bytes);
        }
        Ok(())
    }

    /// Returns the encoded part.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.part.put_u64_le(xxh3_64(&self.part));
        self.part
    }
}

/// Merges parts and writes the index to the usual location.
pub(super) fn merge_parts(
    shards: Vec<Shard>,
    parts: impl Iterator<Item = Bytes>,
    options: &IndexOptions,
) -> Result<Index> {
    check_options(&shards, options)?;
    let stats = stats(&shards)?;
    let mut places = ShardNumbers::new(&shards);
    let mut spill = Spill::new(directories(&shards, options));
    let mut slots: Vec<Option<PartShard<SpilledShard>>> = shards.iter().map(|_| None).collect();
    for (number, part) in parts.enumerate() {
        let covered =
            read_part(&part).map_err(|reason| Error::Data(DataError::IndexPart { part: number, reason }))?;
        for covered in covered {
            let place = places.take(&covered)?;
            let PartShard { url, built, sampling } = covered;
            let built = built.spill(&mut spill).map_err(|error| index_error(None, &error))?;
            slots[place] = Some(PartShard { url, built, sampling });
        }
    }
    let mut built = Vec::with_capacity(shards.len());
    for ((shard, identity), slot) in shards.iter().zip(&stats).zip(slots) {
        built.push(checked(shard, identity, slot, options)?);
    }
    check_counters(&shards, &built)?;
    if built.iter().all(|built| built.summary.shard.samples == 0) {
        let skipped: Vec<_> = built.into_iter().flat_map(|built| built.summary.skipped).collect();
        return Err(no_samples(&shards, &skipped));
    }
    write_and_open(shards, &stats, built, spill, options)
}

/// Assignment of part shards to dataset shards.
struct ShardNumbers {
    /// Unassigned indices in reverse order, by URL.
    by_url: HashMap<String, Vec<usize>>,
    /// Index by base name; `None` if several shards have that name.
    by_name: HashMap<String, Option<usize>>,
    is_taken: Vec<bool>,
}

impl ShardNumbers {
    fn new(shards: &[Shard]) -> Self {
        let (mut by_url, mut by_name) = (HashMap::<String, Vec<usize>>::new(), HashMap::new());
        for (place, shard) in shards.iter().enumerate().rev() {
            by_url.entry(shard.url.to_string()).or_default().push(place);
            let name = shard.indexed_name();
            by_name.entry(name).and_modify(|only| *only = None).or_insert(Some(place));
        }
        Self { by_url, by_name, is_taken: vec![false; shards.len()] }
    }

    /// Returns the index of a shard: by URL, else by base name, because the directory may have a different
    /// path on each machine.
    fn take(&mut self, covered: &PartShard<EncodedShard>) -> Result<usize> {
        let fault = |fault| Error::Data(DataError::IndexShard { shard: covered.url.clone(), fault });
        let place = if let Some(places) = self.by_url.get_mut(&covered.url) {
            places.pop().ok_or(fault(ShardFault::Repeated))?
        } else {
            let only = self.by_name.get(&covered.built.summary.shard.name).copied().flatten();
            only.ok_or(fault(ShardFault::Unknown))?
        };
        if std::mem::replace(&mut self.is_taken[place], true) {
            return Err(fault(ShardFault::Repeated));
        }
        Ok(place)
    }
}

/// Returns a shard after checking the version and the options that the rows were built with.
fn checked(
    shard: &Shard,
    identity: &Identity,
    slot: Option<PartShard<SpilledShard>>,
    options: &IndexOptions,
) -> Result<SpilledShard> {
    let fault = |fault| Error::Data(DataError::IndexShard { shard: shard.url.to_string(), fault });
    let PartShard { url, mut built, sampling } = slot.ok_or(fault(ShardFault::Missing))?;
    let summary = &mut built.summary;
    if !is_version(&summary.shard, identity) {
        return Err(fault(ShardFault::Changed));
    }
    let is_sampled = cfg!(feature = "video") && summary.has_videos();
    if is_sampled && sampling != Some(options.video_sampling) {
        return Err(fault(ShardFault::OtherSampling));
    }
    if let Some(counter) = options.token_counts.required()
        && !summary.counters.contains(&counter.digest())
    {
        return Err(fault(ShardFault::NotCounted));
    }
    if *url != *shard.url {
        let renamed = |text: &mut String| *text = text.replace(&url, &shard.url);
        summary.warnings.iter_mut().for_each(renamed);
        for skipped in &mut summary.skipped {
            skipped.shard = shard.url.to_string();
            renamed(&mut skipped.reason);
        }
    }
    Ok(built)
}

/// Checks that all shards have the same counters. A column is only kept if all shards have it, so it could be
/// lost silently.
fn check_counters(shards: &[Shard], built: &[SpilledShard]) -> Result<()> {
    let digests = |built: &SpilledShard| {
        let mut digests = built.summary.counters.clone();
        digests.sort_unstable();
        digests
    };
    let first = digests(&built[0]);
    match built.iter().position(|built| digests(built) != first) {
        Some(other) => {
            let shard = shards[other].url.to_string();
            Err(Error::Data(DataError::IndexShard { shard, fault: ShardFault::OtherCounters }))
        }
        None => Ok(()),
    }
}

/// Decodes a part.
///
/// # Errors
/// The reason why the part is invalid.
fn read_part(part: &Bytes) -> Result<Vec<PartShard<EncodedShard>>, String> {
    let short = || "it is truncated".to_owned();
    let end =
        part.len().checked_sub(CHECKSUM_BYTES).filter(|&end| end >= MAGIC.len() + 8).ok_or_else(short)?;
    if !part.starts_with(MAGIC) {
        return Err("expected a part of an index".into());
    }
    let (mut content, mut checksum) = (part.slice(MAGIC.len()..end), part.slice(end..));
    let version = content.get_u32_le();
    if version != VERSION {
        return Err(format!("it has version {version}, expected {VERSION}; make it again with this release"));
    }
    if checksum.get_u64_le() != xxh3_64(&part[..end]) {
        return Err("it is damaged or truncated: the checksum differs".into());
    }
    let mut shards = Vec::new();
    for _ in 0..content.get_u32_le() {
        let url = take_bytes(&mut content).ok_or_else(short)?;
        let url =
            String::from_utf8(url.to_vec()).map_err(|_| "it is damaged: a URL is not UTF-8".to_owned())?;
        let file = take_bytes(&mut content).ok_or_else(short)?;
        let decoded = decode_index(&file).map_err(|error| format!("shard `{url}`: {error}"))?;
        if !has_present_codecs(&decoded) {
            let known = "register the same codecs in every process that indexes or merges";
            return Err(format!("shard `{url}`: its shapes are those of other codecs; {known}"));
        }
        shards
            .push(part_shard(url, file, decoded).ok_or("it contains several shards where one is expected")?);
    }
    if content.has_remaining() {
        return Err("it is damaged: bytes follow its last shard".into());
    }
    Ok(shards)
}

fn take_bytes(content: &mut Bytes) -> Option<Bytes> {
    let length = content.try_get_u64_le().ok()?;
    let length = usize::try_from(length).ok().filter(|&length| length <= content.remaining())?;
    Some(content.split_to(length))
}

/// Returns the shard in an index file that has exactly one.
fn part_shard(url: String, file: Bytes, decoded: DecodedIndex) -> Option<PartShard<EncodedShard>> {
    let DecodedIndex { mut metadata, rows } = decoded;
    let ([rows], [_]) = (&rows[..], &metadata.shards[..]) else { return None };
    let shard = metadata.shards.remove(0);
    let summary = ShardSummary {
        digest: digest_of_rows(&shard, rows),
        shard,
        skipped: metadata.skipped.into_iter().map(|(_, skipped)| skipped).collect(),
        warnings: metadata.warnings,
        unused: metadata.unused,
        extension_names: rows.extensions().map(Into::into).collect(),
        counters: rows.counters().map(str::to_owned).collect(),
    };
    Some(PartShard {
        url,
        built: EncodedShard { summary, rows: EncodedRows::File(file) },
        sampling: metadata.video_sampling,
    })
}

/// Computes the shard digest from rows that were written and read back.
fn digest_of_rows(shard: &IndexedShard, rows: &ShardRows) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for sample in (0..rows.len()).map(|row| rows.row(0, row)) {
        let fields: Vec<_> = sample.fields().collect();
        let fields = fields.iter().map(|field| (field.extension, field.offset, field.bytes));
        hash_sample(&mut hasher, sample.key(), sample.offset(), fields);
    }
    shard_digest(hasher, shard)
}
