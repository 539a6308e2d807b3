//! Finds a dataset index, checks that it is up to date, and replaces it otherwise.
//!
//! `places.rs` names the file and its directories; `location.rs` writes it.

use std::fs::File;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use dflop_samples::media::VideoSampling;
use dflop_samples::media::codec::registered;

use super::build::{build_shards, identity_of_file};
use super::encode::{IndexFile, SpilledShard};
use super::file::{DecodedIndex, decode_index};
use super::location::{
    IN_MEMORY, IndexOptions, beside, check_options, directories, fault_in, file_name, index_error,
    lock_first_writable, read_trusted, refusal, write_to_first,
};
use super::remote::identities;
use super::rows::ShardRows;
use super::schema::IndexedShard;
use super::spill::Spill;
use super::{Index, no_samples};
use crate::error::{Error, Result, Skipped, StorageError};
use crate::shard::tar::entries::RangedEntries;
use crate::shard::{Compression, LocalArchive, Shard, split_key};
use crate::store::{Identity, Opened, comparable_tag};

pub(super) fn open_or_build(shards: Vec<Shard>, options: &IndexOptions) -> Result<Index> {
    check_options(&shards, options)?;
    let stats = stats(&shards)?;
    let refused = refused_index(&shards, &stats, options);
    let mut index = open_or_build_trusted(shards, &stats, options)?;
    index.warnings.extend(refused);
    Ok(index)
}

/// Returns why the index next to the shards is not used, if the owner is the reason.
fn refused_index(shards: &[Shard], stats: &[Identity], options: &IndexOptions) -> Option<String> {
    let directory = beside(shards).filter(|_| options.directory.is_none())?;
    let file = directory.join(file_name(shards, stats));
    let refused = refusal(&directory, shards).or_else(|| refusal(&file, shards))?;
    tracing::warn!("{refused}");
    Some(refused)
}

fn open_or_build_trusted(shards: Vec<Shard>, stats: &[Identity], options: &IndexOptions) -> Result<Index> {
    let name = file_name(&shards, stats);
    let is_rebuilt = options.is_rebuilt || options.is_verified;
    let candidates = directories(&shards, options);
    if !is_rebuilt {
        for directory in &candidates {
            if let Some(decoded) = open_fitting(&directory.join(&name), &shards, stats, options)
                && has_counts(&decoded, options)
            {
                return assemble(shards, decoded, Some(directory.join(&name)), options);
            }
        }
        log_rebuild(&candidates, &name, &shards, options);
    }
    let lock = locked(&candidates, &name, options)?;
    let first = lock.as_ref().ok().map(|(directory, _)| directory.join(&name));
    // Another process may have built the index while this process waited for the lock.
    if let Some(path) = first.as_ref().filter(|_| !is_rebuilt)
        && let Some(decoded) = open_fitting(path, &shards, stats, options)
        && has_counts(&decoded, options)
    {
        return assemble(shards, decoded, Some(path.clone()), options);
    }
    let mut spill = Spill::new(candidates);
    let built = build_shards(&shards, stats, options, &mut spill)?;
    write_locked(shards, stats, built, spill, options)
}

/// Writes the index for built shards, under the lock, and opens it.
pub(super) fn write_and_open(
    shards: Vec<Shard>,
    stats: &[Identity],
    built: Vec<SpilledShard>,
    spill: Spill,
    options: &IndexOptions,
) -> Result<Index> {
    let _lock = locked(&directories(&shards, options), &file_name(&shards, stats), options)?;
    write_locked(shards, stats, built, spill, options)
}

/// Acquires the lock in the first writable directory. Without a writable directory, the index may stay in
/// memory unless a directory was set.
fn locked(
    candidates: &[PathBuf],
    name: &str,
    options: &IndexOptions,
) -> Result<std::io::Result<(PathBuf, File)>> {
    let lock = lock_first_writable(candidates, name);
    match (&options.directory, lock) {
        (Some(directory), Err(source)) => Err(Error::file(directory, source)),
        (_, lock) => Ok(lock),
    }
}

fn write_locked(
    shards: Vec<Shard>,
    stats: &[Identity],
    built: Vec<SpilledShard>,
    mut spill: Spill,
    options: &IndexOptions,
) -> Result<Index> {
    let (name, candidates) = (file_name(&shards, stats), directories(&shards, options));
    let before = |directory: &PathBuf| open_fitting(&directory.join(&name), &shards, stats, options);
    let before = candidates.iter().find_map(before);
    let index = IndexFile::new(built, before, options.video_sampling)
        .map_err(|error| index_error(Some(&candidates[0].join(&name)), &error))?;
    let path = match (write_to_first(&candidates, &name, &index, &mut spill), &options.directory) {
        (Ok(path), _) => path,
        (Err(Error::Storage(StorageError::File { .. })), None) => {
            let encoded = index.write(&spill, Vec::new()).map_err(|fault| fault_in(IN_MEMORY, fault))?;
            return decode_in_memory(shards, &encoded.into(), options);
        }
        (Err(error), _) => return Err(error),
    };
    drop((index, spill));
    let read = read_trusted(&path, &shards, options).map_err(|source| Error::file(&path, source))?;
    let decoded = decode_index(&read).map_err(|error| index_error(Some(&path), &error))?;
    assemble(shards, decoded, Some(path), options)
}

/// Writes the index for built shards to the location where [`open_or_build`] looks for it.
pub(super) fn store(shards: &[Shard], built: Vec<SpilledShard>, mut spill: Spill) -> Result<PathBuf> {
    let stats = stats(shards)?;
    let name = file_name(shards, &stats);
    let candidates = directories(shards, &IndexOptions::default());
    let (directory, _lock) = lock_first_writable(&candidates, &name).map_err(|source| {
        Error::Storage(StorageError::File { path: candidates[0].display().to_string(), source })
    })?;
    let index = IndexFile::new(built, None, VideoSampling::default())
        .map_err(|error| index_error(Some(&directory.join(&name)), &error))?;
    write_to_first(&candidates, &name, &index, &mut spill)
}

/// Returns the length and version of every shard.
pub(super) fn stats(shards: &[Shard]) -> Result<Vec<Identity>> {
    let remote = identities(shards)?;
    let known = shards.iter().zip(remote);
    known.map(|(shard, identity)| identity.map_or_else(|| identity_of_file(shard), Ok)).collect()
}

fn decode_in_memory(shards: Vec<Shard>, encoded: &Bytes, options: &IndexOptions) -> Result<Index> {
    let decoded = decode_index(encoded).map_err(|error| index_error(None, &error))?;
    assemble(shards, decoded, None, options)
}

fn assemble(
    shards: Vec<Shard>,
    decoded: DecodedIndex,
    path: Option<PathBuf>,
    options: &IndexOptions,
) -> Result<Index> {
    let DecodedIndex { metadata, mut rows } = decoded;
    let wanted = options.token_counts.wanted();
    // Counts for only some shards would mix exact and estimated lengths, so they are used for all or none.
    let text_counts = wanted.filter(|digest| rows.iter().all(|rows| rows.has_counts(digest)));
    for rows in &mut rows {
        rows.select_counts(text_counts.as_deref());
    }
    let has_videos = rows.iter().any(ShardRows::has_videos);
    let video_sampling = metadata.video_sampling.filter(|_| has_videos);
    let mut end = 0;
    let starts = rows.iter().map(|rows| {
        end += rows.len() as u64;
        end
    });
    let starts: Vec<u64> = starts.collect();
    // The index may have been built under a different path; the account names the present path.
    let renamed = metadata.skipped.into_iter().map(|(shard, skipped)| Skipped {
        shard: shards.get(shard).map_or(skipped.shard, |shard| shard.url.to_string()),
        ..skipped
    });
    let skipped: Vec<Skipped> = renamed.collect();
    if end == 0 {
        return Err(no_samples(&shards, &skipped));
    }
    Ok(Index {
        shards,
        indexed: metadata.shards,
        rows,
        starts,
        fingerprint: metadata.fingerprint.into(),
        skipped,
        warnings: metadata.warnings,
        unused: metadata.unused,
        video_sampling,
        text_counts,
        path,
    })
}

/// Opens an index file if it is intact and the shards have not changed.
fn open_fitting(
    path: &Path,
    shards: &[Shard],
    stats: &[Identity],
    options: &IndexOptions,
) -> Option<DecodedIndex> {
    let decoded = decode_index(&read_trusted(path, shards, options).ok()?).ok()?;
    let indexed = &decoded.metadata.shards;
    let is_same = indexed.len() == stats.len()
        && indexed.iter().zip(stats).all(|(indexed, identity)| is_version(indexed, identity));
    let is_fitting = is_same
        && has_video_shapes(&decoded, options)
        && has_present_codecs(&decoded)
        && (0..shards.len()).all(|shard| has_last_sample(&shards[shard], &decoded, shard));
    is_fitting.then_some(decoded)
}

/// Returns whether a shard is the indexed version: by entity tag if present, else by modification time.
pub(crate) fn is_version(indexed: &IndexedShard, found: &Identity) -> bool {
    let is_same = match (&indexed.etag, &found.etag) {
        (Some(indexed), Some(found)) => comparable_tag(indexed) == comparable_tag(found),
        (None, None) => indexed.modified_ns == found.modified_ns,
        _ => false,
    };
    is_same && indexed.bytes == found.bytes
}

/// Returns whether the required token counts are present.
pub(super) fn has_counts(decoded: &DecodedIndex, options: &IndexOptions) -> bool {
    options.token_counts.required().is_none_or(|counter| {
        let digest = counter.digest();
        decoded.rows.iter().all(|rows| rows.has_counts(&digest))
    })
}

/// Returns whether videos, if any, were sampled as configured; a build without video accepts any sampling.
fn has_video_shapes(decoded: &DecodedIndex, options: &IndexOptions) -> bool {
    !cfg!(feature = "video")
        || decoded.metadata.video_sampling == Some(options.video_sampling)
        || !decoded.rows.iter().any(ShardRows::has_videos)
}

/// Returns whether the shapes come from the codecs registered in this process.
pub(super) fn has_present_codecs(decoded: &DecodedIndex) -> bool {
    // All shards share one dictionary of extensions.
    let extensions = decoded.rows.first().into_iter().flat_map(ShardRows::extensions);
    registered(extensions).into_iter().eq(decoded.metadata.codecs.iter().map(String::as_str))
}

/// Logs why an existing index file cannot be used.
fn log_rebuild(candidates: &[PathBuf], name: &str, shards: &[Shard], options: &IndexOptions) {
    let mut paths = candidates.iter().map(|directory| directory.join(name));
    let found = paths.find_map(|path| Some((read_trusted(&path, shards, options).ok()?, path)));
    let Some((file, path)) = found else { return };
    let index = path.display();
    if let Err(reason) = decode_index(&file) {
        tracing::warn!(%index, %reason, "the index cannot be read and is built again");
    } else {
        tracing::info!(%index, "the index has other shards, codecs, frames or counts and is built again");
    }
}

/// Returns whether the last indexed sample of a shard is at the indexed location. Names, sizes and times may
/// agree between two datasets, but sample locations hardly do. Compressed shards are not checked, nor are
/// remote shards, whose entity tags do not agree by chance.
fn has_last_sample(source: &Shard, decoded: &DecodedIndex, shard: usize) -> bool {
    let (indexed, rows) = (&decoded.metadata.shards[shard], &decoded.rows[shard]);
    if indexed.compression != Compression::None || rows.len() == 0 || source.remote().is_some() {
        return true;
    }
    let last = rows.row(shard, rows.len() - 1);
    let Ok(Opened::Local(archive)) = source.open() else { return false };
    let archive = LocalArchive::new(archive);
    let entry = RangedEntries::starting_at(archive, last.offset(), Box::new(|_| 0)).next();
    let name = entry.and_then(Result::ok).map(|(entry, _)| entry.name);
    name.as_deref().and_then(split_key).is_some_and(|(key, _)| key == last.key())
}

/// Search result, by what [`open_or_build`](super::Index::open_or_build) would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FoundIndex {
    /// The index fits the shards and is opened.
    Fresh(PathBuf),
    /// The index fits the shards, but lacks the required token counts: it is rebuilt.
    Uncounted(PathBuf),
    /// Shards with the same names have changed since the index was built: it is rebuilt.
    Stale(PathBuf),
    /// There is no index: it is built.
    Missing,
}

/// Returns a shard's length in bytes, as reported by the file system or the store.
///
/// # Errors
/// [`crate::Error::Storage`] if the shard cannot be found, [`crate::Error::Config`] if it is a stream.
pub fn shard_bytes(shard: &Shard) -> Result<u64> {
    Ok(stats(std::slice::from_ref(shard))?[0].bytes)
}

pub(super) fn find(shards: &[Shard], options: &IndexOptions) -> Result<FoundIndex> {
    check_options(shards, options)?;
    let stats = stats(shards)?;
    let (name, candidates) = (file_name(shards, &stats), directories(shards, options));
    for path in candidates.iter().map(|directory| directory.join(&name)) {
        if let Some(decoded) = open_fitting(&path, shards, &stats, options) {
            let is_counted = has_counts(&decoded, options);
            return Ok(if is_counted { FoundIndex::Fresh(path) } else { FoundIndex::Uncounted(path) });
        }
    }
    let earlier = candidates.iter().find_map(|directory| same_named_index(directory, shards, options));
    Ok(earlier.map_or(FoundIndex::Missing, FoundIndex::Stale))
}

/// Returns an index in a directory for shards with the same names; the shard sizes may differ, so the file
/// name may differ as well.
fn same_named_index(directory: &Path, shards: &[Shard], options: &IndexOptions) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "arrow"));
    paths.sort();
    let has_same_names = |path: &PathBuf| {
        let Ok(read) = read_trusted(path, shards, options) else { return false };
        let Ok(decoded) = decode_index(&read) else { return false };
        let indexed = decoded.metadata.shards.iter().map(|shard| shard.name.clone());
        indexed.eq(shards.iter().map(Shard::indexed_name))
    };
    paths.into_iter().find(has_same_names)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, SystemTime};

    use super::super::encode::SpilledRows;
    use super::*;
    use crate::index::Index;
    use crate::shard::expand_shards;
    use crate::write::ShardWriter;

    const HELD_BYTES_MAX: usize = 20_000;

    /// Writes 40 shards and returns a spill with all rows.
    fn spilled(directory: &Path) -> (Vec<Shard>, Vec<SpilledShard>, Spill) {
        let data = directory.join("shards");
        let mut writer = ShardWriter::builder(&data).shard_samples(50).index(false).build().unwrap();
        for sample in 0..2_000 {
            writer.write(&format!("{sample:09}"), &[("txt", b"a kite"), ("cls", b"7")]).unwrap();
        }
        writer.finish().unwrap();
        let shards = expand_shards(&[data.to_str().unwrap()]).unwrap();
        let options = IndexOptions { threads: 3, ..IndexOptions::default() };
        let mut spill = Spill::holding(vec![directory.to_owned()], HELD_BYTES_MAX);
        let built = build_shards(&shards, &stats(&shards).unwrap(), &options, &mut spill).unwrap();
        (shards, built, spill)
    }

    #[test]
    fn rows_leave_memory_while_shards_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let (shards, built, spill) = spilled(directory.path());
        let records = built.iter().filter_map(|built| match &built.rows {
            SpilledRows::Record(record) => Some((record.end - record.start) as usize),
            SpilledRows::Held(_) => None,
        });
        let records: Vec<usize> = records.collect();
        let longest = *records.iter().max().unwrap();
        assert!(records.iter().sum::<usize>() > 5 * HELD_BYTES_MAX && spill.has_files());
        assert!(spill.held_bytes() <= 2 * (HELD_BYTES_MAX + longest), "{}", spill.held_bytes());
        let held = built.iter().filter_map(|built| match &built.rows {
            SpilledRows::Record(_) => None,
            SpilledRows::Held(rows) => Some(rows.memory_bytes()),
        });
        let held: usize = held.sum();
        assert!(held > 0 && held <= HELD_BYTES_MAX, "{held}");
        let index = IndexFile::new(built, None, VideoSampling::default()).unwrap();
        let written = index.write(&spill, Vec::new()).unwrap();
        let expected = Index::open_or_build(shards, &IndexOptions::default()).unwrap();
        assert!(written == std::fs::read(expected.path().unwrap()).unwrap());
    }

    /// A disk that has room for the index, but not also for the rows.
    #[test]
    fn rows_make_room_for_an_index_that_has_none() {
        let directory = tempfile::tempdir().unwrap();
        let (_, built, mut spill) = spilled(directory.path());
        let index = IndexFile::new(built, None, VideoSampling::default()).unwrap();
        let expected = index.write(&spill, Vec::new()).unwrap();
        let blocked = directory.path().join("file");
        std::fs::write(&blocked, b"").unwrap();
        let error = write_to_first(&[blocked], "a.arrow", &index, &mut spill).unwrap_err();
        assert!(matches!(error, Error::Storage(StorageError::File { .. })), "{error}");
        assert!(!spill.has_files());
        let path = write_to_first(&[directory.path().to_owned()], "a.arrow", &index, &mut spill).unwrap();
        assert!(std::fs::read(path).unwrap() == expected);
    }

    #[test]
    fn small_shards_share_batches_and_keep_their_rows() {
        let directory = tempfile::tempdir().unwrap();
        let sizes = [3, 600, 0, 5, 512, 513, 0, 2];
        let shard = |number: usize| directory.path().join(format!("{number}-000000.tar"));
        for (number, &samples) in sizes.iter().enumerate() {
            let out = directory.path().join("written");
            let mut writer = ShardWriter::builder(&out).index(false).build().unwrap();
            for sample in 0..samples {
                let fields: [(&str, &[u8]); 2] = [("txt", b"a kite"), (["cls", "id"][number % 2], b"7")];
                writer.write(&format!("{number}-{sample}"), &fields).unwrap();
            }
            let written = writer.finish().unwrap();
            match written.shards.first() {
                Some(written) => std::fs::rename(written, shard(number)).unwrap(),
                None => std::fs::write(shard(number), [0; 1024]).unwrap(),
            }
            std::fs::remove_dir_all(&out).unwrap();
        }
        let pattern = directory.path().to_str().unwrap();
        let index =
            Index::open_or_build(expand_shards(&[pattern]).unwrap(), &IndexOptions::default()).unwrap();
        let file = File::open(index.path().unwrap()).unwrap();
        let batches = arrow_ipc::reader::FileReader::try_new(file, None).unwrap();
        let batches: Vec<_> = batches.map(|batch| batch.unwrap().num_rows()).collect();
        assert_eq!(batches, [3, 600, 517, 513, 2]);
        for (number, rows) in index.record_batches().enumerate() {
            assert_eq!(rows.num_rows(), sizes[number]);
            let range = index.shard_samples(number);
            assert_eq!((range.end - range.start) as usize, sizes[number]);
            for (sample, row) in range.enumerate() {
                let row = index.sample(row);
                let fields: Vec<_> = row.fields().map(|field| (field.extension, field.bytes)).collect();
                assert_eq!(row.key(), format!("{number}-{sample}"));
                assert_eq!(fields, [("txt", 6), (["cls", "id"][number % 2], 1)]);
            }
        }
    }

    fn write(directory: &Path, text: &str) -> Vec<Shard> {
        let _ = std::fs::remove_dir_all(directory.join("new"));
        let mut writer = ShardWriter::builder(directory.join("new")).build().unwrap();
        writer.write("kite", &[("txt", text.as_bytes())]).unwrap();
        writer.finish().unwrap();
        let to = directory.join("shard-000.tar");
        let from =
            std::fs::read_dir(directory.join("new")).unwrap().filter_map(|entry| Some(entry.ok()?.path()));
        let from = from.into_iter().find(|path| path.extension().is_some_and(|ext| ext == "tar")).unwrap();
        std::fs::rename(from, &to).unwrap();
        expand_shards(&[to.to_str().unwrap()]).unwrap()
    }

    #[test]
    fn an_index_is_missing_then_fresh_then_stale_and_nothing_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let options = IndexOptions { directory: Some(directory.path().join("index")), ..Default::default() };
        let shards = write(directory.path(), "a red kite");
        assert_eq!(find(&shards, &options).unwrap(), FoundIndex::Missing);
        assert!(!directory.path().join("index").exists());
        let built = Index::open_or_build(shards.clone(), &options).unwrap();
        let path = built.path().unwrap().to_owned();
        assert_eq!(find(&shards, &options).unwrap(), FoundIndex::Fresh(path.clone()));
        let later = SystemTime::now() + Duration::from_hours(1);
        File::options().write(true).open(shards[0].path().unwrap()).unwrap().set_modified(later).unwrap();
        assert_eq!(find(&shards, &options).unwrap(), FoundIndex::Stale(path.clone()), "another time");
        let longer = write(directory.path(), &"a red kite ".repeat(2000));
        assert_eq!(find(&longer, &options).unwrap(), FoundIndex::Stale(path), "another size");
        assert_eq!(
            shard_bytes(&longer[0]).unwrap(),
            std::fs::metadata(longer[0].path().unwrap()).unwrap().len()
        );
        std::fs::remove_file(longer[0].path().unwrap()).unwrap();
        assert!(shard_bytes(&longer[0]).is_err() && find(&longer, &options).is_err());
    }
}
