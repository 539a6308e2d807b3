//! Builds the index rows for shards from the tar headers, on a few threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::UNIX_EPOCH;

use super::builder::{Builder, BuiltShard, push_table};
use super::encode::SpilledShard;
use super::location::{IndexOptions, index_error};
use super::remote::push_remote;
use super::schema::IndexedShard;
use super::spill::Spill;
use crate::error::{Error, Result};
use crate::shard::{Compression, OpenTable, Shard, sniff_compression};
use crate::store::{Identity, Opened};

/// Minimum number of remote shards that are read in parallel.
const REMOTE_THREADS: usize = 16;
/// Number of bytes that determine the shard format.
const SNIFFED_BYTES: usize = 8;

/// Reads a shard's headers; also decodes every field if `options` require it.
pub(super) fn build_shard(shard: &Shard, identity: &Identity, options: &IndexOptions) -> Result<BuiltShard> {
    let IndexOptions { is_verified, video_sampling, .. } = *options;
    if let Some(object) = shard.remote() {
        let indexed = indexed(shard, identity, Compression::None);
        let mut builder =
            Builder::new(indexed, is_verified, video_sampling).counting(options.token_counts.required());
        push_remote(&mut builder, shard, object, identity)?;
        return Ok(builder.finish());
    }
    let Opened::Local(archive) = shard.open()? else {
        let reason = format!("`{}` is a stream and cannot be indexed; write it to a file", shard.url);
        return Err(Error::Config { setting: "dataset", reason });
    };
    let first = archive.first(SNIFFED_BYTES).map_err(|source| shard.read_error(source))?;
    let compression = sniff_compression(&shard.url, &first);
    let indexed = indexed(shard, identity, *compression.as_ref().unwrap_or(&Compression::None));
    let mut builder =
        Builder::new(indexed, is_verified, video_sampling).counting(options.token_counts.required());
    match compression {
        Ok(Compression::None) => return builder.build_plain(shard, &archive),
        Ok(Compression::Table) => {
            push_table(&mut builder, shard, OpenTable::local(shard, archive))
                .map_err(|source| shard.read_error(source))?;
        }
        Ok(compression) => {
            let body = archive.body();
            let failure = body.failure();
            futures::executor::block_on(builder.push_unpacked(shard, compression, body));
            if let Some(source) = failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return Err(shard.read_error(source));
            }
        }
        Err(unsupported) => builder.skip_shard(shard, unsupported.to_string()),
    }
    Ok(builder.finish())
}

/// Returns the shard properties that are known before reading it.
pub(super) fn indexed(shard: &Shard, identity: &Identity, compression: Compression) -> IndexedShard {
    IndexedShard {
        name: shard.indexed_name(),
        bytes: identity.bytes,
        modified_ns: identity.modified_ns,
        etag: identity.etag.clone(),
        compression,
        unpacked_bytes: identity.bytes,
        samples: 0,
        payload_bytes: 0,
        digest: 0,
        blocks: Vec::new(),
    }
}

/// Returns the length and modification time of a shard file.
///
/// # Errors
/// [`Error::Storage`] with the operating system error, [`Error::Config`] if the shard is a stream.
pub(crate) fn identity_of_file(shard: &Shard) -> Result<Identity> {
    let path = shard.path().ok_or_else(|| Error::Config {
        setting: "dataset",
        reason: format!("`{}` is a stream and cannot be indexed; write it to a file", shard.url),
    })?;
    let metadata = std::fs::metadata(path).map_err(|source| shard.read_error(source))?;
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let modified_ns = modified.map_or(0, |since| since.as_nanos() as u64);
    Ok(Identity { bytes: metadata.len(), modified_ns, etag: None })
}

/// Returns the number of threads that read shards; threads for remote shards mostly wait.
fn threads(shards: &[Shard], options: &IndexOptions) -> usize {
    let is_remote = shards.iter().any(|shard| shard.remote().is_some());
    let threads = if is_remote { options.threads.max(REMOTE_THREADS) } else { options.threads };
    threads.clamp(1, shards.len())
}

/// Reads all shards on a few threads, and moves the rows to `spill`.
pub(super) fn build_shards(
    shards: &[Shard],
    stats: &[Identity],
    options: &IndexOptions,
    spill: &mut Spill,
) -> Result<Vec<SpilledShard>> {
    options.progress.begin("shards", shards.len() as u64);
    let mut built: Vec<Option<SpilledShard>> = shards.iter().map(|_| None).collect();
    let build = |shard: usize| {
        let built = build_shard(&shards[shard], &stats[shard], options)?;
        built.encode().map_err(|error| index_error(None, &error))
    };
    let result = collect(shards.len(), threads(shards, options), build, |shard, encoded| {
        options.progress.advance(1);
        built[shard] = Some(encoded?.spill(spill).map_err(|error| index_error(None, &error))?);
        Ok(())
    });
    options.progress.end();
    result?;
    built.into_iter().collect::<Option<Vec<_>>>().ok_or(Error::StageEnded { stage: "index" })
}

/// Passes every item's result to `take` when it is ready, sequentially. At most one result per thread
/// exists at a time, so memory does not grow with the number of items. The calling thread also works; threads
/// that cannot be started are skipped.
///
/// # Errors
/// The first error from `work` or `take`; the remaining threads then stop after the current item.
pub(super) fn collect<T: Send>(
    items: usize,
    threads: usize,
    work: impl Fn(usize) -> Result<T> + Sync,
    take: impl FnMut(usize, Result<T>) -> Result<()> + Send,
) -> Result<()> {
    let (next, is_stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    // A thread delivers its result itself: a separate thread would have to be woken for each result.
    let taking = Mutex::new((take, Ok(())));
    let run = || {
        while !is_stopped.load(Ordering::Relaxed) {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            let result = work(item);
            let mut turn = taking.lock().unwrap_or_else(PoisonError::into_inner);
            let (take, ended) = &mut *turn;
            if ended.is_ok() {
                *ended = take(item, result);
                is_stopped.fetch_or(ended.is_err(), Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            if thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    taking.into_inner().unwrap_or_else(PoisonError::into_inner).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// Result that counts existing instances.
    struct Counted<'a>(&'a AtomicUsize);

    impl<'a> Counted<'a> {
        fn new(existing: &'a AtomicUsize) -> Self {
            existing.fetch_add(1, Ordering::SeqCst);
            Self(existing)
        }
    }

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn few_results_exist_at_a_time_however_many_items_there_are() {
        for threads in [1, 2, 5] {
            let existing = AtomicUsize::new(0);
            let mut taken = vec![false; 500];
            let take = |item: usize, result: Result<Counted<'_>>| {
                // Gives the threads every chance to run ahead.
                std::thread::yield_now();
                assert!(existing.load(Ordering::SeqCst) <= 2 * threads + 1);
                assert!(!std::mem::replace(&mut taken[item], true));
                result.map(drop)
            };
            collect(500, threads, |_| Ok(Counted::new(&existing)), take).unwrap();
            assert!(taken.iter().all(|&is_taken| is_taken));
            assert_eq!(existing.load(Ordering::SeqCst), 0);
        }
    }

    #[test]
    fn an_error_ends_all_threads() {
        let failed = || Error::StageEnded { stage: "index" };
        for threads in [1, 4] {
            let started = AtomicUsize::new(0);
            let work = |item| {
                started.fetch_add(1, Ordering::SeqCst);
                if item == 10 { Err(failed()) } else { Ok(()) }
            };
            let error = collect(1_000_000, threads, work, |_, result| result).unwrap_err();
            assert_eq!(error.to_string(), failed().to_string());
            assert!(started.load(Ordering::SeqCst) < 1_000_000);
            let refused = collect(1_000_000, threads, |_| Ok(()), |_, _| Err(failed()));
            assert!(refused.is_err());
        }
    }
}
