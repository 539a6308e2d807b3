//! Configures a [`Loader`].

use std::sync::{Arc, Mutex};

use dflop_costmodel::random::Seed;
use dflop_samples::media::augment::Augment;
use dflop_samples::media::{PixelFormat, PixelStatistics, Strictness, VideoSampling};

use super::Loader;
use super::dealt::Deal;
use super::input::RestoredInput;
use super::settings::StreamSettings;
use super::stream_state::StreamState;
use crate::dataset::Dataset;
use crate::decode::{Decode, DecodePool, TransformStage, Transforms};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::flow::{ErrorBudget, SkipListener, SkipLog};
use crate::loader::settings::{LoaderSettings, shared_settings};
use crate::loader::watchdog::StallListener;
use crate::order::ShuffleBuffer;
use crate::shard::{FieldSelection, Shard};

/// Configures a [`Loader`].
#[derive(Debug, Clone)]
pub struct LoaderBuilder {
    settings: StreamSettings,
}

impl LoaderBuilder {
    shared_settings!(settings.shared);

    pub(super) fn new(shards: Vec<Shard>) -> Self {
        Self { settings: StreamSettings::new(shards) }
    }

    /// Sets all settings that the loaders share.
    #[must_use]
    pub fn settings(mut self, settings: LoaderSettings) -> Self {
        self.settings.shared = settings;
        self
    }

    /// Sets whether [`Decode::Pixels`] may decode a JPEG at a half, a quarter or an eighth of the size where
    /// the region that becomes the square is still at least as long as the square side. Faster, and slightly
    /// different pixels; needs the feature `turbojpeg`. Default: no.
    #[must_use]
    pub fn scaled_decode(mut self, is_scaled: bool) -> Self {
        self.settings.scaled_decode = is_scaled;
        self
    }

    /// Sets the mean and the standard deviation for normalization by [`Decode::Pixels`]. Default: the
    /// `ImageNet` values.
    #[must_use]
    pub fn pixel_statistics(mut self, statistics: PixelStatistics) -> Self {
        self.settings.statistics = statistics;
        self
    }

    /// Sets value type and order in [`Decode::Pixels`] tensors; bytes are not normalized. Default: single
    /// precision, channels first.
    #[must_use]
    pub fn pixel_format(mut self, format: PixelFormat) -> Self {
        self.settings.pixel_format = format;
        self
    }

    /// Sets which video frames [`Decode::Media`] delivers; needs the feature `video`. Default: two per
    /// second, 64 at most.
    #[must_use]
    pub fn video_sampling(mut self, sampling: VideoSampling) -> Self {
        self.settings.video_sampling = Some(sampling);
        self
    }

    /// Sets how many samples a batch has. Default: 32.
    #[must_use]
    pub fn batch_size(mut self, samples: usize) -> Self {
        self.settings.batch_size = samples;
        self
    }

    /// Sets how many times the shards are read, from [`Self::first_epoch`] on. Default: once.
    #[must_use]
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.settings.epochs = epochs;
        self
    }

    /// Ends the stream after this many good or bad samples; with [`Self::samples_of_rank`], after this many
    /// good samples, counted from the first epoch. Default: never.
    #[must_use]
    pub fn samples_max(mut self, samples: u64) -> Self {
        self.settings.samples_max = Some(samples);
        self
    }

    /// Sets the maximum field size in bytes; a sample with a larger field is bad. Default: 1 GiB.
    #[must_use]
    pub fn field_bytes_max(mut self, bytes: u64) -> Self {
        self.settings.field_bytes_max = bytes;
        self
    }

    /// Sets the maximum number of decoded media bytes in progress, in complete batches; a larger batch is
    /// alone. At least three pixel tensors, which are reused, are in progress. Default: 64 MiB.
    #[must_use]
    pub fn decoded_bytes_max(mut self, bytes: u64) -> Self {
        self.settings.decoded_bytes_max = bytes;
        self
    }

    /// Checks the settings and starts the decode threads.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no shard, if there are fewer shards than ranks, if a count is zero or
    /// absurdly large, or if images are to be scaled or changed that are not decoded, or pass user code on
    /// the way into a tensor; [`Error::State`] if the restored state is from a different stream.
    pub fn build(self) -> Result<Loader> {
        let Self { mut settings } = self;
        settings.shared = settings.shared.seeded(0);
        settings.input.seed(Seed(settings.shared.seed.unwrap_or_default()));
        settings.check()?;
        let shared = &settings.shared;
        let pool = DecodePool::new(shared.workers, settings.kernel()?)?;
        let transforms = TransformStage::new(&shared.transforms, pool.metrics().clone())?;
        let skips = SkipLog::new(shared.error_budget, settings.samples_known());
        let mut skips = skips.listener(shared.skip_listener.clone());
        if let Some(state) = &settings.input.restored {
            skips = skips.after(state.delivered(), state.skipped(), state.first_skipped().cloned());
        }
        Ok(Loader {
            kernel_cpu_ns: pool.cpu_ns(),
            pool: Arc::new(pool),
            skips: Arc::new(skips),
            transforms,
            known: settings.input.known(),
            tracker: Arc::new(Mutex::new(settings.input.tracker()?)),
            settings: Arc::new(settings),
        })
    }

    /// Shuffles samples in a bounded buffer, which drains at the end of every epoch. Default: no shuffle.
    #[must_use]
    pub fn shuffle(mut self, buffer: ShuffleBuffer) -> Self {
        self.settings.input.shuffle = Some(buffer);
        self
    }

    /// Shuffles the shard order in every epoch, drawn from ([`seed`](Self::seed), epoch). Default: the given
    /// order.
    #[must_use]
    pub fn shuffle_shards(mut self) -> Self {
        self.settings.input.is_shuffled = true;
        self
    }

    /// Reads every `world`-th shard in an epoch's order, from shard `rank` on, as webdataset splits shards by
    /// node: ranks read different shards without an index. Default: all shards.
    ///
    /// Shards hold different numbers of samples, so ranks deliver different numbers of batches; where steps
    /// must agree, use [`Self::samples_of_rank`]. With [`Self::shuffle_shards`], and the same seed on all
    /// ranks, the shards of a rank differ from epoch to epoch.
    #[must_use]
    pub fn shards_of_rank(mut self, rank: usize, world: usize) -> Self {
        (self.settings.input.order.rank, self.settings.input.order.world) = (rank, world);
        self
    }

    /// Reads a rank's share of an indexed dataset, which replaces the builder's shards: every rank delivers
    /// the same number of full batches, and a last batch of the same length, whatever shards hold and
    /// whichever samples are bad. Default: whole shards.
    ///
    /// The samples of an epoch form a sequence, shard by shard. A rank reads a contiguous range, and
    /// continues with the samples that follow, cyclically, for as many as are missing: at most one because
    /// ranges differ in length, and one for every sample that cannot be decoded.
    #[must_use]
    pub fn samples_of_rank(mut self, dataset: Dataset, rank: usize, world: usize) -> Self {
        self.settings.shards = dataset.index().shards().to_vec();
        self.settings.deal = Some(Deal { dataset, rank, world });
        self
    }

    /// Sets whether a last batch with fewer samples than the batch size is dropped, at the end of all epochs.
    /// With [`Self::samples_of_rank`], a sample is then repeated only in place of a bad sample. Default: no.
    #[must_use]
    pub fn drop_last(mut self, drops_last: bool) -> Self {
        self.settings.drops_last = drops_last;
        self
    }

    /// Sets the first epoch, from which [`Self::epochs`] counts: a loader that begins at epoch 2 has the
    /// order, shuffle and random changes that a loader from epoch 0 has in the third epoch. For trainers that
    /// create a loader for every pass. Default: 0.
    #[must_use]
    pub fn first_epoch(mut self, epoch: u64) -> Self {
        self.settings.input.first_epoch = epoch;
        self
    }

    /// Continues from the state of a different loader: delivers the batches that the saved loader would have
    /// delivered, with epochs counted from the saved first epoch, which replaces [`Self::first_epoch`].
    /// Shards, rank, shuffle buffer, shard shuffle and video frames must be the same; [`Self::samples_max`]
    /// counts from here. Default: from the first sample.
    #[must_use]
    pub fn restore(mut self, state: StreamState) -> Self {
        self.settings.input.restored = Some(Arc::new(state));
        self
    }

    /// Sets the start of standard input, or of the pipe that was being read, after [`Self::restore`].
    /// Default: the beginning.
    #[must_use]
    pub fn restored_input(mut self, begins: RestoredInput) -> Self {
        self.settings.input.begins = begins;
        self
    }
}
