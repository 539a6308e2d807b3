//! Indexes a dataset: the byte location and the media shapes of every sample.
//!
//! The index is built once from headers, stored as one Arrow IPC file, and read on use. It lets every rank
//! plan whole global batches without reading payloads. `build` creates the rows, which wait in `spill` until
//! `encode` writes the file; `schema` defines it, `rows` reads it, `cache` finds, checks and replaces it.
//! Building needs memory for a few shards, regardless of the number of shards.

mod account;
#[cfg(feature = "arrow2")]
pub mod arrow2;
mod build;
mod builder;
mod cache;
mod columns;
mod encode;
mod file;
mod location;
mod merge;
mod remote;
mod rows;
mod schema;
mod spill;
mod text_counts;
mod writer;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use dflop_samples::media::VideoSampling;

pub use self::account::UnusedPart;
pub(crate) use self::build::identity_of_file;
pub(crate) use self::cache::is_version;
pub use self::cache::{FoundIndex, shard_bytes};
pub use self::rows::{FieldRow, SampleRow};
pub use self::schema::{IndexedBlock, IndexedShard};
pub use self::text_counts::TokenCounts;
pub(crate) use self::writer::WrittenIndex;
pub use arrow_array::RecordBatch;
pub use dflop_samples::inputs::TextCounter;
pub use location::IndexOptions;

use self::account::UnusedParts;
use self::rows::ShardRows;
use crate::error::{Error, Result, SelectionError, Skipped};
use crate::shard::{Compression, Shard, is_table_name};

/// Dataset index, open for reading.
#[derive(Debug)]
pub struct Index {
    shards: Vec<Shard>,
    indexed: Vec<IndexedShard>,
    rows: Vec<ShardRows>,
    starts: Vec<u64>,
    fingerprint: Arc<str>,
    skipped: Vec<Skipped>,
    warnings: Vec<String>,
    unused: UnusedParts,
    video_sampling: Option<VideoSampling>,
    text_counts: Option<String>,
    path: Option<PathBuf>,
}

impl Index {
    /// Opens the index for `shards`; builds it first if it is missing or a shard has changed.
    ///
    /// # Errors
    /// [`Error::Config`] if a shard is a stream, which cannot be indexed; [`Error::Storage`] if a shard
    /// cannot be read; [`Error::Selection`] if there is no good sample; [`Error::Storage`] if a configured
    /// index directory cannot be written.
    pub fn open_or_build(shards: Vec<Shard>, options: &IndexOptions) -> Result<Self> {
        cache::open_or_build(shards, options)
    }

    /// Looks for the index in the same locations as [`Self::open_or_build`]; builds and writes nothing.
    ///
    /// # Errors
    /// [`Error::Config`] without shards, or if a shard is a stream; [`Error::Storage`] if a shard cannot be
    /// found.
    pub fn find(shards: &[Shard], options: &IndexOptions) -> Result<FoundIndex> {
        cache::find(shards, options)
    }

    /// Reads some dataset shards for the index, on any machine that can read them. Returns bytes for
    /// [`Self::merge_parts`].
    ///
    /// `shards` may be a single one, and may have no good sample; bad ones are kept for the account. Only
    /// options that determine the rows apply: sampling of videos, token counts, verification. Shards are read
    /// one at a time.
    ///
    /// # Errors
    /// [`Error::Config`] without shards, or if a shard is a stream; [`Error::Storage`] if a shard cannot be
    /// read.
    pub fn build_part(shards: &[Shard], options: &IndexOptions) -> Result<Vec<u8>> {
        merge::build_part(shards, options)
    }

    /// Merges parts from [`Self::build_part`], in any order. Writes exactly the same file as
    /// [`Self::open_or_build`] for `shards`, at the same location and under the same lock; reads no shards,
    /// only shard lengths and versions.
    ///
    /// A part's shard is matched by URL, else by a unique base name, because tasks may see directories under
    /// different paths.
    ///
    /// # Errors
    /// [`Error::Data`] if a part is damaged, truncated or not a part, or if a shard is not covered exactly
    /// once, has changed since, or was read with different options; then the same errors as
    /// [`Self::open_or_build`].
    pub fn merge_parts(
        shards: Vec<Shard>,
        parts: impl IntoIterator<Item = impl Into<bytes::Bytes>>,
        options: &IndexOptions,
    ) -> Result<Self> {
        merge::merge_parts(shards, parts.into_iter().map(Into::into), options)
    }

    /// Returns the number of good samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns whether there is no good sample; never true for an opened index.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a digest over shard base names and sizes, keys, offsets and lengths, as 32 hex digits.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Returns the shards, in order.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the indexed properties for each shard, in order.
    #[must_use]
    pub fn indexed_shards(&self) -> &[IndexedShard] {
        &self.indexed
    }

    /// Returns the samples and shards skipped because of bad headers.
    #[must_use]
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// Returns the parts of good samples that no reader uses: document keys, turn flags, fields without a
    /// codec.
    #[must_use]
    pub fn unused(&self) -> &[UnusedPart] {
        self.unused.as_slice()
    }

    /// Names the most frequent [unused](Self::unused) parts in one line; `None` without unused parts.
    #[must_use]
    pub fn unused_summary(&self) -> Option<String> {
        account::summary(self.unused())
    }

    /// Returns data warnings for language model training, one line each: the number of samples without a
    /// training target, and unused parts that are not metadata.
    #[must_use]
    pub fn target_warnings(&self) -> Vec<String> {
        let (without, samples) = (self.samples_without_target(), self.len());
        let parts: Vec<UnusedPart> =
            self.unused().iter().filter(|part| !part.is_metadata()).cloned().collect();
        let targets =
            (without > 0).then(|| format!("{without} of {samples} samples have no training target"));
        let unused = account::summary(&parts).map(|parts| format!("not used: {parts}"));
        targets.into_iter().chain(unused).collect()
    }

    /// Returns whether the samples of a shard are fetched before they are read: from a store, or from table
    /// blocks.
    pub(crate) fn is_fetched(&self, shard: usize) -> bool {
        self.indexed[shard].compression == Compression::Table || self.shards[shard].remote().is_some()
    }

    /// Returns the number of samples with a medium for `encoder`.
    #[must_use]
    pub fn samples_with_media(&self, encoder: dflop_costmodel::Module) -> u64 {
        self.rows.iter().map(|rows| rows.samples_with_media(encoder)).sum()
    }

    /// Returns the number of samples without target tokens, by the selected token counts.
    #[must_use]
    pub fn samples_without_target(&self) -> u64 {
        self.rows.iter().map(ShardRows::without_target).sum()
    }

    /// Returns warnings about irregularities that lose no data, such as repeated keys.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the digest of the counter whose token counts are used; `None` for estimates.
    #[must_use]
    pub fn token_counts(&self) -> Option<&str> {
        self.text_counts.as_deref()
    }

    /// Returns whether any sample has a medium for `encoder`.
    #[must_use]
    pub fn has_media(&self, encoder: dflop_costmodel::Module) -> bool {
        self.rows.iter().any(|rows| rows.has_media(encoder))
    }

    /// Returns the sampling that determined the number of video frames; `None` without videos or without a
    /// video decoder.
    #[must_use]
    pub fn video_sampling(&self) -> Option<VideoSampling> {
        self.video_sampling
    }

    /// Returns the index file; `None` if no directory was writable and the index is only in memory.
    #[must_use]
    pub fn path(&self) -> Option<&std::path::Path> {
        self.path.as_deref()
    }

    /// Returns the extensions of all fields, in first-use order.
    pub fn extensions(&self) -> impl Iterator<Item = &str> {
        self.rows.first().into_iter().flat_map(ShardRows::extensions)
    }

    /// Returns the total payload size of all good samples, in bytes.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.indexed.iter().map(|shard| shard.payload_bytes).sum()
    }

    /// Returns a shard's range of sample indices.
    #[must_use]
    pub fn shard_samples(&self, shard: usize) -> Range<u64> {
        let start = if shard == 0 { 0 } else { self.starts[shard - 1] };
        start..self.starts[shard]
    }

    /// Returns a sample by index.
    ///
    /// # Panics
    /// If `sample` is not below [`Self::len`].
    #[must_use]
    pub fn sample(&self, sample: u64) -> SampleRow<'_> {
        assert!(sample < self.len(), "sample {sample} is outside an index of {}", self.len());
        let shard = self.starts.partition_point(|&end| end <= sample);
        self.rows[shard].row(shard, (sample - self.shard_samples(shard).start) as usize)
    }

    /// Returns the rows as Arrow record batches, one per shard, with the index file's columns: see the table
    /// in `index/schema.rs`. The arrays are views into the file.
    pub fn record_batches(&self) -> impl ExactSizeIterator<Item = &RecordBatch> {
        self.rows.iter().map(ShardRows::batch)
    }
}

fn no_samples(shards: &[Shard], skipped: &[Skipped]) -> Error {
    let is_table = shards.iter().all(|shard| is_table_name(&shard.url));
    let reason = match skipped.first() {
        Some(first) => {
            format!("{} bad entries, the first in `{}`: {}", skipped.len(), first.shard, first.reason)
        }
        None if is_table => "it has no rows".into(),
        None => "no entry name has the form KEY.EXTENSION".into(),
    };
    Error::Selection(SelectionError::NoSamples { dataset: crate::shard::display_shards(shards), reason })
}
