//! Builds the index of a dataset in parts: tasks on any machines read shards, and their parts are merged.
//!
//! A *part* holds the headers of a few shards as portable bytes: for each shard its URL and a small index
//! file of that shard alone. Merging reads no shard: it checks that every shard is covered once, in its
//! present version, and writes the file that [`super::cache`] would have written.
//!
//! ```text
//! magic, version, shards; for each shard: length, URL, length, index file; XXH3 of all that
//! ```

use std::collections::HashMap;

use bytes::{Buf, BufMut, Bytes};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_64;

use super::build::{BuiltShard, build_shard, digest_of, hash_sample};
use super::cache::{IndexOptions, check_options, is_version, stats, write_and_open};
use super::file::{DecodedIndex, decode_index, encode_index};
use super::foreign::{ForeignIndexes, claims, differences};
use super::rows::ShardRows;
use super::schema::IndexedShard;
use super::{Index, no_samples};
use crate::error::{Error, Result, ShardFault, Skipped};
use crate::media::VideoSampling;
use crate::shard::Shard;
use crate::store::Identity;

const MAGIC: &[u8; 16] = b"dflop index part";
/// Changes with the layout of a part; the index files inside have their own version.
const VERSION: u32 = 1;
const CHECKSUM_BYTES: usize = 8;

/// Shard in a part.
struct PartShard {
    url: String,
    built: BuiltShard,
    sampling: Option<VideoSampling>,
}

/// Reads the headers of some shards of a dataset.
pub(super) fn build_part(shards: &[Shard], options: &IndexOptions) -> Result<Vec<u8>> {
    check_options(shards, options)?;
    options.progress.begin("shards", shards.len() as u64);
    let mut built = Vec::with_capacity(shards.len());
    for (shard, identity) in shards.iter().zip(stats(shards)?) {
        built.push((shard.clone(), build_shard(shard, &identity, options)?));
        options.progress.advance(1);
    }
    options.progress.end();
    encode_part(built, options.video_sampling)
}

/// Encodes the rows of shards as a part.
///
/// # Errors
/// [`Error::Index`] if they cannot be encoded.
pub(super) fn encode_part(built: Vec<(Shard, BuiltShard)>, sampling: VideoSampling) -> Result<Vec<u8>> {
    let mut part = Vec::new();
    part.put_slice(MAGIC);
    part.put_u32_le(VERSION);
    part.put_u32_le(built.len() as u32);
    for (shard, built) in built {
        let encoded = encode_index(vec![built], sampling)
            .map_err(|error| Error::Index { path: "in memory".into(), reason: error.to_string() })?;
        for bytes in [shard.url.as_bytes(), &encoded] {
            part.put_u64_le(bytes.len() as u64);
            part.put_slice(bytes);
        }
    }
    part.put_u64_le(xxh3_64(&part));
    Ok(part)
}

/// Merges parts and writes the index to its usual location.
pub(super) fn merge_parts(
    shards: Vec<Shard>,
    parts: impl Iterator<Item = Bytes>,
    options: &IndexOptions,
) -> Result<Index> {
    check_options(&shards, options)?;
    let stats = stats(&shards)?;
    let mut places = ShardNumbers::new(&shards);
    let mut slots: Vec<Option<PartShard>> = shards.iter().map(|_| None).collect();
    for (number, part) in parts.enumerate() {
        let covered = read_part(&part).map_err(|reason| Error::IndexPart { part: number, reason })?;
        for covered in covered {
            let place = places.take(&covered)?;
            slots[place] = Some(covered);
        }
    }
    let mut built = Vec::with_capacity(shards.len());
    for ((shard, identity), slot) in shards.iter().zip(&stats).zip(slots) {
        built.push(checked(shard, identity, slot, options)?);
    }
    check_counters(&shards, &built)?;
    if options.foreign != ForeignIndexes::Ignore {
        for ((shard, built), claims) in shards.iter().zip(&mut built).zip(claims(&shards)) {
            let found = differences(shard, built, &claims);
            built.warnings.extend(found);
        }
    }
    if built.iter().all(|built| built.shard.samples == 0) {
        let skipped: Vec<_> = built.into_iter().flat_map(|built| built.skipped).collect();
        return Err(no_samples(&shards, &skipped));
    }
    write_and_open(shards, &stats, built, options)
}

/// Assignment of the shards of parts to the shards of the dataset.
struct ShardNumbers {
    /// Indices not yet assigned, the last one first.
    by_url: HashMap<String, Vec<usize>>,
    /// Index by base name, if only one shard has it.
    by_name: HashMap<String, Option<usize>>,
    is_taken: Vec<bool>,
}

impl ShardNumbers {
    fn new(shards: &[Shard]) -> Self {
        let (mut by_url, mut by_name) = (HashMap::<String, Vec<usize>>::new(), HashMap::new());
        for (place, shard) in shards.iter().enumerate().rev() {
            by_url.entry(shard.url.to_string()).or_default().push(place);
            let name = shard.base_name().to_owned();
            by_name.entry(name).and_modify(|only| *only = None).or_insert(Some(place));
        }
        Self { by_url, by_name, is_taken: vec![false; shards.len()] }
    }

    /// Returns the index of a shard: by URL, else by base name, as the directory may have another path
    /// elsewhere.
    fn take(&mut self, covered: &PartShard) -> Result<usize> {
        let fault = |fault| Error::IndexShard { shard: covered.url.clone(), fault };
        let place = if let Some(places) = self.by_url.get_mut(&covered.url) {
            places.pop().ok_or(fault(ShardFault::Repeated))?
        } else {
            let only = self.by_name.get(&covered.built.shard.name).copied().flatten();
            only.ok_or(fault(ShardFault::Unknown))?
        };
        if std::mem::replace(&mut self.is_taken[place], true) {
            return Err(fault(ShardFault::Repeated));
        }
        Ok(place)
    }
}

/// Returns a shard's rows after checking its version and the options they were made with.
fn checked(
    shard: &Shard,
    identity: &Identity,
    slot: Option<PartShard>,
    options: &IndexOptions,
) -> Result<BuiltShard> {
    let fault = |fault| Error::IndexShard { shard: shard.url.to_string(), fault };
    let PartShard { url, mut built, sampling } = slot.ok_or(fault(ShardFault::Missing))?;
    if !is_version(&built.shard, identity) {
        return Err(fault(ShardFault::Changed));
    }
    let is_sampled = cfg!(feature = "video") && built.columns.has_videos();
    if is_sampled && sampling != Some(options.video_sampling) {
        return Err(fault(ShardFault::OtherSampling));
    }
    if let Some(counter) = options.token_counts.required() {
        let digest = counter.digest();
        if built.columns.text_counts.iter().all(|counted| counted.digest != digest) {
            return Err(fault(ShardFault::NotCounted));
        }
    }
    if *url != *shard.url {
        let renamed = |text: &mut String| *text = text.replace(&url, &shard.url);
        built.warnings.iter_mut().for_each(renamed);
        for skipped in &mut built.skipped {
            skipped.shard = shard.url.to_string();
            renamed(&mut skipped.reason);
        }
    }
    Ok(built)
}

/// Checks that all shards have the same counters; a column is only kept if all have it, so one could be lost
/// silently.
fn check_counters(shards: &[Shard], built: &[BuiltShard]) -> Result<()> {
    let digests = |built: &BuiltShard| {
        let mut digests: Vec<_> =
            built.columns.text_counts.iter().map(|counted| counted.digest.clone()).collect();
        digests.sort_unstable();
        digests
    };
    let first = digests(&built[0]);
    match built.iter().position(|built| digests(built) != first) {
        Some(other) => {
            let shard = shards[other].url.to_string();
            Err(Error::IndexShard { shard, fault: ShardFault::OtherCounters })
        }
        None => Ok(()),
    }
}

/// Decodes a part.
///
/// # Errors
/// The reason why it is invalid.
fn read_part(part: &Bytes) -> Result<Vec<PartShard>, String> {
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
        let decoded = decode_index(&take_bytes(&mut content).ok_or_else(short)?);
        let decoded = decoded.map_err(|error| format!("shard `{url}`: {error}"))?;
        shards.push(part_shard(url, decoded).ok_or("it contains several shards where one is expected")?);
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

/// Returns the rows of an index of one shard.
fn part_shard(url: String, decoded: DecodedIndex) -> Option<PartShard> {
    let DecodedIndex { mut metadata, rows } = decoded;
    let ([rows], [_]) = (&rows[..], &metadata.shards[..]) else { return None };
    let shard = metadata.shards.remove(0);
    let skipped = metadata.skipped.into_iter().map(|(_, skipped)| skipped).collect();
    let built = BuiltShard::of_rows(shard, rows, skipped, metadata.warnings);
    Some(PartShard { url, built, sampling: metadata.video_sampling })
}

impl BuiltShard {
    /// Restores a built shard from rows that were written and read back.
    fn of_rows(shard: IndexedShard, rows: &ShardRows, skipped: Vec<Skipped>, warnings: Vec<String>) -> Self {
        let mut hasher = Sha256::new();
        for sample in (0..rows.len()).map(|row| rows.row(0, row)) {
            let fields: Vec<_> = sample.fields().collect();
            let fields = fields.iter().map(|field| (field.extension, field.offset, field.bytes));
            hash_sample(&mut hasher, sample.key(), sample.offset(), fields);
        }
        let digest = digest_of(hasher, &shard);
        Self { shard, columns: rows.columns(), digest, skipped, warnings }
    }
}
