//! Builds the index rows for shards from the tar headers, on a few threads.

use std::sync::PoisonError;
use std::time::UNIX_EPOCH;

use sha2::Digest;

use super::builder::{Builder, BuiltShard};
use super::collect::collect;
use super::encode::SpilledShard;
use super::location::index_error;
use super::places::IndexOptions;
use super::remote::push_remote;
use super::schema::IndexedShard;
use super::spill::Spill;
use crate::error::{Error, Result};
use crate::shard::{Compression, Shard, sniff_compression};
use crate::store::{Identity, Opened};

/// Minimum number of remote shards that are read in parallel.
const REMOTE_THREADS: usize = 16;
/// Number of bytes that determine the shard compression.
const SNIFFED_BYTES: usize = 6;

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
        name: shard.base_name().to_owned(),
        bytes: identity.bytes,
        modified_ns: identity.modified_ns,
        etag: identity.etag.clone(),
        compression,
        unpacked_bytes: identity.bytes,
        samples: 0,
        payload_bytes: 0,
        digest: 0,
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
