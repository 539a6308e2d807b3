//! Settings that both loaders share: how samples are read and decoded, which are bad, when a loader is stuck.
//!
//! Checks that named fields exist, so that a misspelled name does not go unnoticed.
//!
//! With an index the names are checked before anything is read. A stream without an index is checked after
//! the first epoch.

use super::watchdog::{StallListener, StallSettings};
use crate::dataset::Dataset;
use crate::decode::{Decode, Transforms, WORKERS_MAX, check_augment};
use crate::error::{Error, Result, SelectionError, check_at_most};
use crate::flow::{ErrorBudget, SkipListener, cores};
use crate::shard::{FieldSelection, Shard, ShardItem, is_rereadable, scan_shards};
use dflop_costmodel::random::Seed;
use dflop_samples::media::augment::Augment;
use dflop_samples::media::{Strictness, VideoSampling};
use futures::StreamExt;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Settings shared by [`Loader`](super::Loader) and [`BalancedLoader`](super::BalancedLoader).
///
/// The builders of both loaders have the same methods; use a value of this type to share settings between
/// loaders.
///
/// # Examples
/// ```
/// use dflop_loader::{Loader, LoaderSettings};
/// use dflop_loader::shard::expand_shards;
///
/// let settings = LoaderSettings::default().workers(8).seed(7);
/// let training = Loader::builder(expand_shards(&["-"])?).settings(settings.clone()).batch_size(64);
/// let validation = Loader::builder(expand_shards(&["-"])?).settings(settings.workers(2)).batch_size(8);
/// # Ok::<(), dflop_loader::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LoaderSettings {
    pub(super) decode: Decode,
    pub(super) fields: FieldSelection,
    pub(super) augment: Option<Augment>,
    pub(super) strictness: Strictness,
    pub(super) transforms: Transforms,
    pub(super) workers: usize,
    /// `None` for the loader default.
    pub(super) buffered_bytes_max: Option<u64>,
    pub(super) error_budget: ErrorBudget,
    pub(super) skip_listener: Option<Arc<dyn SkipListener>>,
    pub(super) stalls: StallSettings,
    /// `None` for the loader default.
    pub(super) seed: Option<u64>,
}

impl Default for LoaderSettings {
    fn default() -> Self {
        Self {
            decode: Decode::Media,
            fields: FieldSelection::ALL,
            augment: None,
            strictness: Strictness::default(),
            transforms: Transforms::new(),
            workers: cores(),
            buffered_bytes_max: None,
            error_budget: ErrorBudget::default(),
            skip_listener: None,
            stalls: StallSettings::default(),
            seed: None,
        }
    }
}

impl LoaderSettings {
    /// Checks the settings that do not depend on the loader.
    pub(super) fn check(&self) -> Result<()> {
        if self.workers == 0 {
            return Err(Error::Config { setting: "workers", reason: "must be at least 1".into() });
        }
        check_at_most("workers", self.workers as u64, WORKERS_MAX)?;
        check_augment(self.decode, self.augment.as_ref())?;
        self.transforms.check(self.decode)?;
        self.stalls.check()
    }

    /// Assigns a seed stream to every random choice without an explicit seed.
    pub(super) fn seeded(mut self, default: u64) -> Self {
        let seed = Seed(self.seed.unwrap_or(default));
        self.augment = self.augment.map(|augment| augment.or_seed(seed.stream("augment")));
        self.transforms = self.transforms.or_seed(seed.stream("transforms"));
        self.seed = Some(seed.0);
        self
    }
}

/// Defines the shared setting methods for a type that holds a [`LoaderSettings`] in a field.
macro_rules! shared_settings {
    ($($field:ident).*) => {
        /// Sets how sample bytes are decoded. Default: [`Decode::Media`].
        #[must_use]
        pub fn decode(mut self, decode: Decode) -> Self {
            self$(.$field)*.decode = decode;
            self
        }

        /// Reads only these fields, in streams too. Default: all, and with [`Decode::Pixels`] the images.
        #[must_use]
        pub fn fields(mut self, fields: FieldSelection) -> Self {
            self$(.$field)*.fields = fields;
            self
        }

        /// Augments images at random, the same for a sample and epoch wherever it is decoded. With
        /// [`Decode::Pixels`] the random crop replaces the center crop; with [`Decode::Media`] an image keeps
        /// the same width and height, so that planned costs hold. Default: no change.
        #[must_use]
        pub fn augment(mut self, augment: Augment) -> Self {
            self$(.$field)*.augment = Some(augment);
            self
        }

        /// Sets which media damage is an error. Default: [`Strictness::Standard`], as for Pillow.
        #[must_use]
        pub fn strictness(mut self, strictness: Strictness) -> Self {
            self$(.$field)*.strictness = strictness;
            self
        }

        /// Passes fields, or complete samples, through user code after decoding and before a processor; with
        /// [`Decode::Pixels`] all fields except the images. A field that no codec claims, and that a
        /// transform turns into an image, is planned at no cost: indexes do not know it. Default: none.
        #[must_use]
        pub fn transforms(mut self, transforms: Transforms) -> Self {
            self$(.$field)*.transforms = transforms;
            self
        }

        /// Sets the number of decode threads. Default: one per core.
        #[must_use]
        pub fn workers(mut self, threads: usize) -> Self {
            self$(.$field)*.workers = threads;
            self
        }

        /// Sets the maximum number of queued sample bytes. In a `Loader` these are payload bytes that wait
        /// for decoding; a larger sample is alone, and from remote shards as many bytes again may be
        /// requested ahead. In a `BalancedLoader` they are decoded and prepared samples that wait for
        /// delivery, sized by the index shapes; a larger microbatch is loaded alone. Default: 64 MiB and 256
        /// MiB.
        ///
        /// The limit is exact for a `Loader` with [`Decode::Media`]: at most this size or one sample.
        /// Batches of raw samples and of pixel tensors use one half of the budget for read-ahead and the
        /// other half for assembled batches, or one batch where a batch is larger. A shuffle buffer has
        /// a separate bound and halves the bytes likewise.
        #[must_use]
        pub fn buffered_bytes_max(mut self, bytes: u64) -> Self {
            self$(.$field)*.buffered_bytes_max = Some(bytes);
            self
        }

        /// Sets the tolerated number of bad samples. Default: 5 % per epoch; without an index 5 %, counted
        /// after the first 1,000.
        #[must_use]
        pub fn error_budget(mut self, budget: ErrorBudget) -> Self {
            self$(.$field)*.error_budget = budget;
            self
        }

        /// Notifies a listener of every skipped sample, also of samples that `skipped` does not list.
        #[must_use]
        pub fn skip_listener(mut self, listener: Arc<dyn SkipListener>) -> Self {
            self$(.$field)*.skip_listener = Some(listener);
            self
        }

        /// Logs a stall after this many seconds without progress while the consumer waits, and again after
        /// each further interval. `INFINITY` disables it. Default: 60.
        #[must_use]
        pub fn stall_seconds_max(mut self, seconds: f64) -> Self {
            self$(.$field)*.stalls.warn_seconds = seconds;
            self
        }

        /// Fails the stream with [`Error::Stalled`](crate::Error::Stalled) after this many seconds without
        /// progress. Default: disabled.
        #[must_use]
        pub fn stall_seconds_error(mut self, seconds: f64) -> Self {
            self$(.$field)*.stalls.error_seconds = seconds;
            self
        }

        /// Sets the listener for stalls. Default: [`LogStalls`](crate::deliver::LogStalls).
        #[must_use]
        pub fn stall_listener(mut self, listener: Arc<dyn StallListener>) -> Self {
            self$(.$field)*.stalls.listener = listener;
            self
        }

        /// Sets the seed for all random choices without an explicit seed: the shard order and the shuffle
        /// buffer in a `Loader`, augmentation, transforms; each draws from a separate
        /// [stream](dflop_costmodel::random::Seed::stream). Default: the planner seed, or 0.
        #[must_use]
        pub fn seed(mut self, seed: u64) -> Self {
            self$(.$field)*.seed = Some(seed);
            self
        }
    };
}

pub(super) use shared_settings;

impl LoaderSettings {
    shared_settings!();
}

/// Number of samples whose fields a message names.
const LISTED_SAMPLES: usize = 16;

/// Checks that the datasets have every selected field and the fields for every transform.
///
/// # Errors
/// [`Error::Selection`].
pub(super) fn check_indexed(
    datasets: &[Dataset],
    fields: &FieldSelection,
    transforms: &Transforms,
) -> Result<()> {
    let found: BTreeSet<&str> = datasets.iter().flat_map(|dataset| dataset.index().extensions()).collect();
    let samples = datasets.iter().map(Dataset::len).sum();
    let missing = |setting, names: &FieldSelection| {
        let unmatched = names.unmatched(&found.iter().copied())?;
        Some(no_field(setting, &unmatched, samples, &found))
    };
    let of_transforms = transforms.selections().find_map(|names| missing("transforms", names));
    missing("fields", fields).or(of_transforms).map_or(Ok(()), Err)
}

/// Returns the video sampling that all indexes share.
///
/// # Errors
/// [`Error::Config`] if indexes have different samplings.
pub(super) fn common_video_sampling(datasets: &[Dataset]) -> Result<Option<VideoSampling>> {
    let mut samplings = datasets.iter().filter_map(|set| set.index().video_sampling());
    let first = samplings.next();
    if samplings.any(|other| Some(other) != first) {
        let reason = "the indexes of the datasets were made for different frames of videos".into();
        return Err(Error::Config { setting: "video_sampling", reason });
    }
    Ok(first)
}

/// Returns the error for a stream in which no sample had any of the named fields; reads the first samples
/// again to list the available fields.
pub(super) async fn no_field_in_stream(
    setting: &'static str,
    names: &FieldSelection,
    samples: u64,
    shards: &[Shard],
) -> Error {
    let shards = shards.iter().filter(|shard| is_rereadable(shard)).take(1).cloned().collect();
    let first: Vec<_> = scan_shards(shards).take(LISTED_SAMPLES).collect().await;
    let good = first.iter().filter_map(|item| match item {
        Ok(ShardItem::Sample(sample)) => Some(sample),
        _ => None,
    });
    let found = good.flat_map(|sample| sample.fields.iter().map(|field| &*field.extension)).collect();
    no_field(setting, names, samples, &found)
}

fn no_field(setting: &'static str, names: &FieldSelection, samples: u64, found: &BTreeSet<&str>) -> Error {
    let found = found.iter().map(|&extension| extension.to_owned()).collect();
    Error::Selection(SelectionError::NoField { setting, fields: names.to_string(), samples, found })
}
