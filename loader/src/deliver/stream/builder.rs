//! Builds a stream from its settings and input.

use super::Loader;
use super::drawn::{Draw, DrawSettings};
use super::stream_state::{StreamKind, StreamState, Tracker};
use crate::decode::{Decode, DecodePool, KernelSettings, SIDE_WITHOUT_PIXELS, TransformStage, Transforms};
use crate::deliver::settings::{LoaderSettings, check_indexed, common_video_sampling, shared_settings};
use crate::deliver::watchdog::StallListener;
use crate::error::{Error, Result, check_at_most};
use crate::fetch::distinct_shards;
use crate::flow::{ErrorBudget, SkipListener, SkipLog};
use crate::order::{LoaderState, Mixture, Shuffle, ShuffleBuffer, Tail};
use crate::shard::{FIELD_BYTES_MAX, FieldSelection, KnownShards, Position, Shard, ShardOrder, ShardPasses};
use dflop_costmodel::random::Seed;
use dflop_samples::media::augment::Augment;
use dflop_samples::media::{PixelFormat, PixelStatistics, Strictness, VideoSampling};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

/// Configures a [`Loader`].
#[derive(Debug, Clone)]
pub struct LoaderBuilder {
    settings: StreamSettings,
    draws: DrawSettings,
}

impl LoaderBuilder {
    shared_settings!(settings.shared);

    pub(super) fn new(shards: Vec<Shard>) -> Self {
        Self { settings: StreamSettings::new(shards), draws: DrawSettings::default() }
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

    /// Sets how many times the shards, or the datasets without a limit from
    /// [`Dataset::repeat`](crate::dataset::Dataset::repeat), are read, from [`Self::first_epoch`] on;
    /// [`u64::MAX`] is without end. Default: once.
    #[must_use]
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.settings.epochs = epochs;
        self
    }

    /// Ends the stream after this many good or bad samples; with [`Self::samples_of_rank`], after this many
    /// good samples, counted from the first epoch in full batches. Default: never.
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
        let Self { mut settings, draws } = self;
        settings.shared = settings.shared.seeded(0);
        settings.input.seed(Seed(settings.shared.seed.unwrap_or_default()));
        settings.check()?;
        settings.draw = draws.build(&settings)?;
        if let Some(draw) = &settings.draw {
            check_indexed(draw.datasets(), &settings.shared.fields, &settings.shared.transforms)?;
            // Indexes know the shapes of these frames.
            let indexed = common_video_sampling(draw.datasets())?;
            settings.video_sampling = settings.video_sampling.or(indexed);
        }
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
            next_step: Arc::new(AtomicU64::new(settings.first_step())),
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

    /// Reads a rank's share of indexed data, which replaces the builder's shards: a dataset, a split or a
    /// mixture. Every rank delivers the same number of full batches, and a last batch of the same length,
    /// whatever shards hold and whichever samples are bad. Default: whole shards.
    ///
    /// Each step draws `batch_size * world` samples, in the order of
    /// [`StepPlanner`](crate::plan::StepPlanner), and ranks read consecutive parts. A sample that cannot be
    /// decoded is replaced by the sample half a dataset away, or the next good sample after it. Ranks that
    /// cannot divide the last step evenly repeat at most `world - 1` samples from that step.
    ///
    /// # Examples
    /// ```no_run
    /// # use dflop_loader::{Dataset, Loader, Mixture, Shuffle};
    /// # fn loader(photos: Dataset, clips: Dataset, rank: usize) -> dflop_loader::Result<Loader> {
    /// let mixture = Mixture::new().dataset(photos, 0.7).dataset(clips, 0.3);
    /// let builder = Loader::builder(Vec::new()).samples_of_rank(mixture, rank, 8);
    /// builder.order(Shuffle::Global).batch_size(32).build()
    /// # }
    /// ```
    #[must_use]
    pub fn samples_of_rank(mut self, data: impl Into<Mixture>, rank: usize, world: usize) -> Self {
        let data = data.into();
        self.settings.shards = distinct_shards(data.datasets());
        self.draws.share = Some((data, rank, world));
        self
    }

    /// Sets how the samples in an epoch are shuffled; needs [`Self::samples_of_rank`]. Default:
    /// [`Shuffle::None`], index order.
    #[must_use]
    pub fn order(mut self, shuffle: Shuffle) -> Self {
        self.draws.shuffle = Some(shuffle);
        self
    }

    /// Sets the treatment of samples that do not fill a step; needs [`Self::samples_of_rank`]. Default:
    /// [`Tail::Carry`], and [`Tail::Drop`] with [`Self::drop_last`].
    #[must_use]
    pub fn tail(mut self, tail: Tail) -> Self {
        self.draws.tail = Some(tail);
        self
    }

    /// Resumes from the state of a loader with [`Self::samples_of_rank`], on any number of ranks. Seed, order
    /// and tail must equal the state's; the saved first epoch replaces [`Self::first_epoch`]. A different
    /// batch size applies from the state's step on, under [`Tail::Carry`]. Default: from the first sample.
    #[must_use]
    pub fn restore_run(mut self, state: LoaderState) -> Self {
        self.draws.state = Some(state);
        self
    }

    /// Restores a run even if a dataset has changed: it resumes with the next epoch, the remaining datasets
    /// at the saved position. Default: a state for changed data is an error.
    #[must_use]
    pub fn accept_changed_data(mut self) -> Self {
        self.draws.accepts_changed_data = true;
        self
    }

    /// Sets whether a last batch with fewer samples than the batch size is dropped, at the end of all epochs;
    /// with [`Self::samples_of_rank`] at the end of every epoch, and a sample is then repeated only in place
    /// of a bad sample. Default: no.
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

/// Largest batch, in samples.
const BATCH_SIZE_MAX: u64 = 1 << 20;
/// Payload bytes that may wait, by default.
const BUFFERED_BYTES_MAX: u64 = 64 << 20;

/// Settings for a stream; checked inside a [`Loader`](super::Loader).
#[derive(Debug, Clone)]
pub(super) struct StreamSettings {
    pub(super) shared: LoaderSettings,
    pub(super) shards: Vec<Shard>,
    pub(super) scaled_decode: bool,
    pub(super) statistics: PixelStatistics,
    pub(super) pixel_format: PixelFormat,
    pub(super) video_sampling: Option<VideoSampling>,
    pub(super) batch_size: usize,
    pub(super) epochs: u64,
    pub(super) samples_max: Option<u64>,
    pub(super) field_bytes_max: u64,
    pub(super) decoded_bytes_max: u64,
    pub(super) input: Input,
    /// Share of drawn samples; `None` where whole shards are read.
    pub(super) draw: Option<Draw>,
    pub(super) drops_last: bool,
}

impl StreamSettings {
    pub(super) fn new(shards: Vec<Shard>) -> Self {
        Self {
            shared: LoaderSettings::default(),
            shards,
            scaled_decode: false,
            statistics: PixelStatistics::default(),
            pixel_format: PixelFormat::default(),
            video_sampling: None,
            batch_size: 32,
            epochs: 1,
            samples_max: None,
            field_bytes_max: FIELD_BYTES_MAX,
            decoded_bytes_max: 64 << 20,
            input: Input::default(),
            draw: None,
            drops_last: false,
        }
    }

    /// Checks all settings, after every random choice has a seed.
    ///
    /// # Errors
    /// [`Error::Config`]; [`Error::State`] if a state is from a different stream.
    pub(super) fn check(&self) -> Result<()> {
        if self.shards.is_empty() {
            return Err(Error::Config { setting: "shards", reason: "no shard is named".into() });
        }
        let samples_max = self.samples_max.unwrap_or(1);
        for (setting, count) in
            [("batch_size", self.batch_size as u64), ("epochs", self.epochs), ("samples_max", samples_max)]
        {
            if count == 0 {
                return Err(Error::Config { setting, reason: "must be at least 1".into() });
            }
        }
        check_at_most("batch_size", self.batch_size as u64, BATCH_SIZE_MAX)?;
        self.shared.check()?;
        self.input.check(&self.kind())?;
        check_video(self.video_sampling)
    }

    /// Returns the settings for the pixel decoders.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(super) fn kernel(&self) -> Result<KernelSettings> {
        let Decode::Pixels { side } = self.shared.decode else {
            if self.scaled_decode {
                let reason = "only images that are decoded to pixels of one size can be scaled".into();
                return Err(Error::Config { setting: "scaled_decode", reason });
            }
            return Ok(SIDE_WITHOUT_PIXELS.into());
        };
        let PixelStatistics { mean, deviation } = self.statistics;
        let is_finite = mean.into_iter().chain(deviation).all(f32::is_finite);
        if !is_finite || deviation.iter().any(|deviation| *deviation <= 0.0) {
            let reason = "the mean must be finite, and the standard deviation above 0".into();
            return Err(Error::Config { setting: "pixel_statistics", reason });
        }
        let kernel = KernelSettings::new(side, self.scaled_decode)?;
        Ok(kernel.statistics(self.statistics).strictness(self.shared.strictness))
    }

    /// Returns the fields that the shards are read for.
    pub(super) fn read_fields(&self) -> FieldSelection {
        let has_choice = !self.shared.fields.is_all() || !matches!(self.shared.decode, Decode::Pixels { .. });
        if has_choice {
            return self.shared.fields.clone();
        }
        // User code receives the selected fields in addition to the images.
        self.shared.transforms.selections().fold(FieldSelection::images(), FieldSelection::and)
    }

    /// Returns the properties that a loader must share to resume from the state.
    pub(super) fn kind(&self) -> StreamKind<'_> {
        let has_videos = cfg!(feature = "video") && self.shared.decode == Decode::Media;
        StreamKind {
            shards: &self.shards,
            order: self.input.order,
            drops_last: self.drops_last,
            shuffle: self.input.shuffle,
            video_sampling: has_videos.then(|| self.video_sampling.unwrap_or_default()),
        }
    }

    /// Returns the number of samples in all epochs; `None` if whole shards are read, or without end.
    pub(super) fn samples_known(&self) -> Option<u64> {
        self.draw.as_ref()?.samples
    }

    /// Returns the number of batches in all epochs; `None` if whole shards are read, or without end.
    pub(super) fn batches(&self) -> Option<u64> {
        self.draw.as_ref()?.end
    }

    /// Returns the step at which a stream of drawn samples starts.
    pub(super) fn first_step(&self) -> u64 {
        self.draw.as_ref().map_or(0, |draw| draw.run.first_step())
    }

    /// Returns the number of batches in all epochs over whole shards with this many samples.
    pub(super) fn stream_batches(&self, shard_samples: u64) -> u64 {
        let samples = shard_samples.saturating_mul(self.epochs).min(self.samples_max.unwrap_or(u64::MAX));
        let batch_size = self.batch_size as u64;
        if self.drops_last { samples / batch_size } else { samples.div_ceil(batch_size) }
    }

    /// Returns the payload bytes that may wait.
    pub(super) fn buffered_bytes_max(&self) -> u64 {
        self.shared.buffered_bytes_max.unwrap_or(BUFFERED_BYTES_MAX)
    }

    /// Returns the payload bytes that may wait between the reader and the batches.
    pub(super) fn reader_bytes(&self) -> u64 {
        let is_leased_through = self.shared.decode == Decode::Media && self.input.shuffle.is_none();
        if is_leased_through { self.buffered_bytes_max() } else { self.buffered_bytes_max() / 2 }
    }

    /// Returns the number of batches between the dispatcher and the consumer.
    pub(super) fn batches_ahead(&self) -> usize {
        let Decode::Pixels { side } = self.shared.decode else { return 2 };
        let row_bytes = 3 * u64::from(side.get()).pow(2) * size_of::<f32>() as u64;
        let batch_bytes = row_bytes.saturating_mul(self.batch_size as u64);
        // In addition to the queued batches, one is being filled and one is being consumed.
        (self.decoded_bytes_max / batch_bytes.max(1)).saturating_sub(2).clamp(1, 64) as usize
    }
}

fn check_video(sampling: Option<VideoSampling>) -> Result<()> {
    let Some(sampling) = sampling else { return Ok(()) };
    let reason = if cfg!(feature = "video") {
        sampling.fault()
    } else {
        Some("this build has no FFmpeg; build with the feature `video`")
    };
    match reason {
        Some(reason) => Err(Error::Config { setting: "video_sampling", reason: reason.into() }),
        None => Ok(()),
    }
}

/// Maximum first epoch; far from overflow.
const FIRST_EPOCH_MAX: u64 = 1 << 40;

/// Start of standard input, or of a pipe, when a stream resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoredInput {
    /// The beginning, unchanged; the consumed input is read again and passed over.
    #[default]
    Start,
    /// After the consumed part, as a new archive.
    Rest,
}

/// Order and origin of the input.
#[derive(Debug, Clone, Default)]
pub(super) struct Input {
    pub(super) order: ShardOrder,
    /// Whether the shard order is shuffled; [`Self::seed`] sets the seed.
    pub(super) is_shuffled: bool,
    pub(super) shuffle: Option<ShuffleBuffer>,
    pub(super) restored: Option<Arc<StreamState>>,
    /// First epoch in the builder; a restored state contains the first epoch.
    pub(super) first_epoch: u64,
    pub(super) begins: RestoredInput,
}

impl Input {
    /// Assigns a seed stream to each random choice without an explicit seed.
    pub(super) fn seed(&mut self, seed: Seed) {
        self.order.seed = self.is_shuffled.then(|| seed.stream("shards"));
        if let Some(buffer) = &mut self.shuffle {
            buffer.seed.get_or_insert(seed.stream("buffer"));
        }
    }

    pub(super) fn check(&self, kind: &StreamKind<'_>) -> Result<()> {
        self.order.check(kind.shards.len())?;
        check_at_most("first_epoch", self.first_epoch, FIRST_EPOCH_MAX)?;
        if let Some(buffer) = &self.shuffle {
            buffer.check()?;
        }
        match &self.restored {
            Some(state) => state.check(kind),
            None => Ok(()),
        }
    }

    pub(super) fn passes(&self, epochs: u64) -> ShardPasses {
        let start = Position { epoch: self.first_epoch, ..Position::default() };
        let end_epoch = self.first_epoch().saturating_add(epochs);
        match &self.restored {
            Some(state) => state.passes(end_epoch, self.begins == RestoredInput::Rest),
            None => ShardPasses { order: self.order, end_epoch, start, ..ShardPasses::default() },
        }
    }

    /// The epoch from which epochs are counted.
    fn first_epoch(&self) -> u64 {
        self.restored.as_ref().map_or(self.first_epoch, |state| state.first_epoch())
    }

    /// Returns the start of a stream.
    pub(super) fn tracker(&self) -> Result<Tracker> {
        match &self.restored {
            Some(state) => Tracker::restore(state),
            None => Ok(Tracker::begin(self.first_epoch)),
        }
    }

    /// Returns the first epoch of the stream, and the number of samples from that epoch that left the shuffle
    /// buffer before.
    pub(super) fn shuffled(&self) -> (u64, u64) {
        self.restored.as_ref().map_or((self.first_epoch, 0), |state| (state.epoch(), state.drawn()))
    }

    pub(super) fn known(&self) -> KnownShards {
        self.restored.as_ref().map_or_else(KnownShards::default, |state| state.known())
    }
}
