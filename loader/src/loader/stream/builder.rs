//! Configures a [`Loader`].

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::{Arc, Mutex};

use dflop_samples::media::augment::Augment;
use dflop_samples::media::{PixelFormat, PixelStatistics, VideoSampling};

use super::Loader;
use super::dealt::Deal;
use super::stream_state::{StreamKind, StreamState, Tracker};
use crate::dataset::Dataset;
use crate::decode::{
    Decode, DecodePool, KernelSettings, SIDE_WITHOUT_PIXELS, TransformStage, Transforms, WORKERS_MAX,
    check_augment,
};
use crate::error::{Error, Result, check_at_most};
use crate::flow::{ErrorBudget, SkipListener, SkipLog};
use crate::loader::field_check::check_indexed;
use crate::loader::watchdog::{StallListener, StallSettings};
use crate::order::ShuffleBuffer;
use crate::shard::{FIELD_BYTES_MAX, FieldSelection, KnownShards, Position, Shard, ShardOrder, ShardPasses};

/// Largest batch, in samples.
const BATCH_SIZE_MAX: u64 = 1 << 20;

/// Largest epoch to begin with; far from where its arithmetic would overflow.
const FIRST_EPOCH_MAX: u64 = 1 << 40;

/// Settings of a [`Loader`].
#[derive(Debug, Clone)]
pub struct LoaderBuilder {
    pub(super) shards: Vec<Shard>,
    pub(super) decode: Decode,
    pub(super) scaled_decode: bool,
    pub(super) statistics: PixelStatistics,
    pub(super) pixel_format: PixelFormat,
    pub(super) augment: Option<Augment>,
    pub(super) transforms: Transforms,
    pub(super) fields: FieldSelection,
    pub(super) video_sampling: Option<VideoSampling>,
    pub(super) batch_size: usize,
    pub(super) workers: usize,
    pub(super) epochs: u64,
    pub(super) samples_max: Option<u64>,
    pub(super) error_budget: ErrorBudget,
    pub(super) skip_listener: Option<Arc<dyn SkipListener>>,
    pub(super) field_bytes_max: u64,
    pub(super) buffered_bytes_max: u64,
    pub(super) decoded_bytes_max: u64,
    pub(super) input: Input,
    pub(super) deal: Option<Deal>,
    pub(super) drops_last: bool,
    pub(super) stalls: StallSettings,
}

impl LoaderBuilder {
    pub(super) fn new(shards: Vec<Shard>) -> Self {
        Self {
            shards,
            decode: Decode::Media,
            scaled_decode: false,
            statistics: PixelStatistics::default(),
            pixel_format: PixelFormat::default(),
            augment: None,
            transforms: Transforms::new(),
            fields: FieldSelection::ALL,
            video_sampling: None,
            batch_size: 32,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            epochs: 1,
            samples_max: None,
            error_budget: ErrorBudget::default(),
            skip_listener: None,
            field_bytes_max: FIELD_BYTES_MAX,
            buffered_bytes_max: 64 << 20,
            decoded_bytes_max: 64 << 20,
            input: Input::default(),
            deal: None,
            drops_last: false,
            stalls: StallSettings::default(),
        }
    }

    /// Sets what is done with the bytes of a sample. Default: [`Decode::Media`].
    #[must_use]
    pub fn decode(mut self, decode: Decode) -> Self {
        self.decode = decode;
        self
    }

    /// Sets whether [`Decode::Pixels`] may decode a JPEG to a half, a quarter or an eighth of its size where
    /// what becomes the square is still at least as long as its side then. Faster, and slightly different
    /// pixels; needs the feature `turbojpeg`. Default: no.
    #[must_use]
    pub fn scaled_decode(mut self, is_scaled: bool) -> Self {
        self.scaled_decode = is_scaled;
        self
    }

    /// Sets the mean and the standard deviation that [`Decode::Pixels`] normalizes by. Default: those of
    /// `ImageNet`.
    #[must_use]
    pub fn pixel_statistics(mut self, statistics: PixelStatistics) -> Self {
        self.statistics = statistics;
        self
    }

    /// Sets type and order of the values that [`Decode::Pixels`] makes; bytes are not normalized. Default:
    /// single precision, channels first.
    #[must_use]
    pub fn pixel_format(mut self, format: PixelFormat) -> Self {
        self.pixel_format = format;
        self
    }

    /// Changes images at random, the same for a sample and epoch wherever it is decoded. With
    /// [`Decode::Pixels`] the random crop takes the place of the center crop; with [`Decode::Media`] an image
    /// keeps its width and height. Default: no change.
    #[must_use]
    pub fn augment(mut self, augment: Augment) -> Self {
        self.augment = Some(augment);
        self
    }

    /// Passes fields, or whole samples, through user code after decoding; with [`Decode::Pixels`] all but the
    /// images. Default: none.
    #[must_use]
    pub fn transforms(mut self, transforms: Transforms) -> Self {
        self.transforms = transforms;
        self
    }

    /// Sets which frames of a video [`Decode::Media`] delivers; needs the feature `video`. Default: two a
    /// second, 64 at most.
    #[must_use]
    pub fn video_sampling(mut self, sampling: VideoSampling) -> Self {
        self.video_sampling = Some(sampling);
        self
    }

    /// Reads these fields only; others are passed over, in streams too. Default: all, and with
    /// [`Decode::Pixels`] the images.
    #[must_use]
    pub fn fields(mut self, fields: FieldSelection) -> Self {
        self.fields = fields;
        self
    }

    /// Sets how many samples a batch has. Default: 32.
    #[must_use]
    pub fn batch_size(mut self, samples: usize) -> Self {
        self.batch_size = samples;
        self
    }

    /// Sets how many threads decode. Default: one per core.
    #[must_use]
    pub fn workers(mut self, threads: usize) -> Self {
        self.workers = threads;
        self
    }

    /// Sets how many times the shards are read, from [`Self::first_epoch`] on. Default: once.
    #[must_use]
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.epochs = epochs;
        self
    }

    /// Ends the stream after this many good or bad samples; of [`Self::samples_of_rank`], after this many
    /// good ones, counted from the first epoch. Default: never.
    #[must_use]
    pub fn samples_max(mut self, samples: u64) -> Self {
        self.samples_max = Some(samples);
        self
    }

    /// Sets how many bad samples are tolerated. Default: 5 %, counted after the first 1,000.
    #[must_use]
    pub fn error_budget(mut self, budget: ErrorBudget) -> Self {
        self.error_budget = budget;
        self
    }

    /// Tells a listener of every skipped sample, also of those that [`Loader::skipped`] does not list.
    #[must_use]
    pub fn skip_listener(mut self, listener: Arc<dyn SkipListener>) -> Self {
        self.skip_listener = Some(listener);
        self
    }

    /// Sets the largest field in bytes; a sample with a larger one is bad. Default: 1 GiB.
    #[must_use]
    pub fn field_bytes_max(mut self, bytes: u64) -> Self {
        self.field_bytes_max = bytes;
        self
    }

    /// Sets how many payload bytes may wait for their decoder; a larger sample is alone. Of remote
    /// shards as many bytes again may be requested ahead. Default: 64 MiB.
    ///
    /// That is exact for [`Decode::Media`]: never more than this or one sample. What is collected first,
    /// batches as stored and batches of pixel tensors, is read ahead within one half and held within the
    /// other, or as one batch where a batch is larger. A shuffle buffer has a bound of its own and halves the
    /// bytes likewise.
    #[must_use]
    pub fn buffered_bytes_max(mut self, bytes: u64) -> Self {
        self.buffered_bytes_max = bytes;
        self
    }

    /// Sets how many bytes of decoded media may be under way, whole batches at a time; a larger batch is
    /// alone. Of pixel tensors, which are used again, at least three are under way. Default: 64 MiB.
    #[must_use]
    pub fn decoded_bytes_max(mut self, bytes: u64) -> Self {
        self.decoded_bytes_max = bytes;
        self
    }

    /// Checks the settings and starts the decode threads.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no shard, if there are fewer than ranks, if a count is zero or absurdly
    /// large, or if images are to be scaled or changed that are not decoded, or pass user code on their way
    /// into a tensor; [`Error::State`] if a state to go on from is of another stream.
    pub fn build(self) -> Result<Loader> {
        let zero = |setting| Err(Error::Config { setting, reason: "must be at least 1".into() });
        if self.shards.is_empty() {
            return Err(Error::Config { setting: "shards", reason: "no shard is named".into() });
        }
        if NonZeroUsize::new(self.batch_size).is_none() {
            return zero("batch_size");
        }
        if NonZeroUsize::new(self.workers).is_none() {
            return zero("workers");
        }
        check_at_most("batch_size", self.batch_size as u64, BATCH_SIZE_MAX)?;
        check_at_most("workers", self.workers as u64, WORKERS_MAX)?;
        if NonZeroU64::new(self.epochs).is_none() {
            return zero("epochs");
        }
        if self.samples_max == Some(0) {
            return zero("samples_max");
        }
        if let Some(deal) = &self.deal {
            self.check_deal(deal)?;
        }
        self.input.check(&self.kind())?;
        self.stalls.check()?;
        check_augment(self.decode, self.augment.as_ref())?;
        self.transforms.check(self.decode)?;
        check_video(self.video_sampling)?;
        let pool = DecodePool::new(self.workers, self.kernel()?)?;
        let transforms = TransformStage::new(&self.transforms, pool.metrics().clone())?;
        let kernel_cpu_ns = pool.cpu_ns();
        let (known, mut skips) = (
            self.input.known(),
            SkipLog::new(self.error_budget, self.samples_known()).listener(self.skip_listener.clone()),
        );
        if let Some(state) = &self.input.restored {
            skips = skips.after(state.delivered(), state.skipped(), state.first_skipped().cloned());
        }
        let tracker = Arc::new(Mutex::new(self.input.tracker()?));
        Ok(Loader {
            settings: self,
            pool: Arc::new(pool),
            skips: Arc::new(skips),
            kernel_cpu_ns,
            transforms,
            known,
            tracker,
        })
    }

    fn kernel(&self) -> Result<KernelSettings> {
        let Decode::Pixels { side } = self.decode else {
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
        Ok(KernelSettings::new(side, self.scaled_decode)?.statistics(self.statistics))
    }

    /// The fields that the shards are read for.
    pub(super) fn read_fields(&self) -> FieldSelection {
        let has_choice = !self.fields.is_all() || !matches!(self.decode, Decode::Pixels { .. });
        if has_choice {
            return self.fields.clone();
        }
        // User code gets its fields beside the images.
        self.transforms.selections().fold(FieldSelection::images(), FieldSelection::and)
    }

    /// Returns the properties that another loader must share to resume from its state.
    pub(super) fn kind(&self) -> StreamKind<'_> {
        let has_videos = cfg!(feature = "video") && self.decode == Decode::Media;
        StreamKind {
            shards: &self.shards,
            order: self.input.order,
            deal: self.deal.as_ref(),
            drops_last: self.drops_last,
            shuffle: self.input.shuffle,
            video_sampling: has_videos.then(|| self.video_sampling.unwrap_or_default()),
        }
    }

    /// Shuffles samples in a bounded buffer, which drains at the end of every epoch. Default: not at all.
    #[must_use]
    pub fn shuffle(mut self, buffer: ShuffleBuffer) -> Self {
        self.input.shuffle = Some(buffer);
        self
    }

    /// Shuffles the order of shards anew in every epoch, drawn from (seed, epoch). Default: the order given.
    #[must_use]
    pub fn shuffle_shards(mut self, seed: u64) -> Self {
        self.input.order.seed = Some(seed);
        self
    }

    /// Reads every `world`-th shard of an epoch's order, from shard `rank` on, as webdataset splits shards by
    /// node: ranks read apart without an index. Default: all shards.
    ///
    /// Shards hold different numbers of samples, so ranks deliver different numbers of batches; where steps
    /// must agree, use [`Self::samples_of_rank`]. With [`Self::shuffle_shards`], and the
    /// same seed on all ranks, a rank gets other shards in every epoch.
    #[must_use]
    pub fn shards_of_rank(mut self, rank: usize, world: usize) -> Self {
        (self.input.order.rank, self.input.order.world) = (rank, world);
        self
    }

    /// Reads a rank's share of the samples of an indexed dataset, which replaces the shards of the builder:
    /// every rank delivers the same number of full batches, and a last one of the same length, whatever
    /// shards hold and whichever samples are bad. Default: whole shards.
    ///
    /// The samples of an epoch form a sequence, shard by shard. A rank reads one contiguous range of it, and
    /// goes on with the samples that follow, cyclically, for as many as it lacks: at most one because ranges
    /// differ in length, and one for every sample that cannot be decoded.
    #[must_use]
    pub fn samples_of_rank(mut self, dataset: Dataset, rank: usize, world: usize) -> Self {
        self.shards = dataset.index().shards().to_vec();
        self.deal = Some(Deal { dataset, rank, world });
        self
    }

    /// Sets whether a last batch with fewer samples than the batch size is dropped, at the end of all epochs.
    /// With [`Self::samples_of_rank`], no sample is then repeated but in place of a bad one. Default: no.
    #[must_use]
    pub fn drop_last(mut self, drops_last: bool) -> Self {
        self.drops_last = drops_last;
        self
    }

    /// Returns the samples that a rank delivers in all epochs.
    fn dealt_samples(&self, deal: &Deal) -> u64 {
        let samples = deal.epoch_samples(self.drops_last).saturating_mul(self.epochs);
        let samples = samples.min(self.samples_max.unwrap_or(u64::MAX));
        if self.drops_last { samples - samples % self.batch_size as u64 } else { samples }
    }

    /// Returns the samples that a rank has still to deliver.
    pub(super) fn left_samples(&self, deal: &Deal) -> u64 {
        let delivered = self.input.restored.as_ref().map_or(0, |state| state.delivered());
        self.dealt_samples(deal).saturating_sub(delivered)
    }

    fn samples_known(&self) -> Option<u64> {
        self.deal.as_ref().map(|deal| self.dealt_samples(deal))
    }

    /// Returns the number of batches in all epochs; `None` if whole shards are read, without an index.
    pub(super) fn batches(&self) -> Option<u64> {
        Some(self.samples_known()?.div_ceil(self.batch_size as u64))
    }

    /// Returns the number of batches in all epochs of whole shards with this many samples.
    pub(super) fn batches_of(&self, shard_samples: u64) -> u64 {
        let samples = shard_samples.saturating_mul(self.epochs).min(self.samples_max.unwrap_or(u64::MAX));
        let batch_size = self.batch_size as u64;
        if self.drops_last { samples / batch_size } else { samples.div_ceil(batch_size) }
    }

    fn check_deal(&self, deal: &Deal) -> Result<()> {
        deal.check()?;
        check_indexed(std::slice::from_ref(&deal.dataset), &self.fields, &self.transforms)?;
        if self.dealt_samples(deal) > 0 {
            return Ok(());
        }
        let (samples, batch, world) = (deal.dataset.len(), self.batch_size, deal.world);
        let reason = format!("{samples} samples make no full batch of {batch} on each of {world} ranks");
        Err(Error::Config { setting: "drop_last", reason })
    }

    /// Returns the bytes that wait behind the reader.
    pub(super) fn reader_bytes(&self) -> u64 {
        let is_leased_through = self.decode == Decode::Media && self.input.shuffle.is_none();
        if is_leased_through { self.buffered_bytes_max } else { self.buffered_bytes_max / 2 }
    }

    /// Sets the epoch to begin with, from which [`Self::epochs`] counts: epoch 2 of a loader that begins
    /// there has the order, shuffle and random changes of the third epoch of one that begins at 0. For
    /// trainers that make a loader for every pass. Default: 0.
    #[must_use]
    pub fn first_epoch(mut self, epoch: u64) -> Self {
        self.input.first_epoch = epoch;
        self
    }

    /// Goes on where another loader was when it gave this state: the batches that follow are those that the
    /// other would have delivered, epochs counted from its first, which replaces [`Self::first_epoch`].
    /// Shards, rank, shuffle buffer, shard shuffle and frames of videos must be the same;
    /// [`Self::samples_max`] counts from here. Default: from the first sample.
    #[must_use]
    pub fn restore(mut self, state: StreamState) -> Self {
        self.input.restored = Some(Arc::new(state));
        self
    }

    /// Says where standard input, or the pipe that was being read, begins after [`Self::restore`]. Default:
    /// at its beginning.
    #[must_use]
    pub fn restored_input(mut self, begins: RestoredInput) -> Self {
        self.input.begins = begins;
        self
    }

    /// Reports a loader that gets nothing done for so long while its consumer waits, again each time it has
    /// passed; infinity is never. Default: 60 seconds.
    #[must_use]
    pub fn stall_seconds_max(mut self, seconds: f64) -> Self {
        self.stalls.warn_seconds = seconds;
        self
    }

    /// Fails the stream with [`crate::error::Error::Stalled`] after this many seconds without progress.
    /// Default: disabled.
    #[must_use]
    pub fn stall_seconds_error(mut self, seconds: f64) -> Self {
        self.stalls.error_seconds = seconds;
        self
    }

    /// Sets the listener for stalls. Default: [`crate::loader::LogStalls`].
    #[must_use]
    pub fn stall_listener(mut self, listener: Arc<dyn StallListener>) -> Self {
        self.stalls.listener = listener;
        self
    }

    /// Batches between the dispatcher and the consumer.
    pub(super) fn batches_ahead(&self) -> usize {
        let Decode::Pixels { side } = self.decode else { return 2 };
        let row_bytes = 3 * u64::from(side.get()).pow(2) * size_of::<f32>() as u64;
        let batch_bytes = row_bytes.saturating_mul(self.batch_size as u64);
        // One is filled and one is consumed beside those that wait.
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

/// Start of standard input, or of a pipe, when a stream resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoredInput {
    /// At its beginning, as it was; what was consumed is read again and passed over.
    #[default]
    Start,
    /// After the consumed part, as a new archive.
    Rest,
}

/// Order and origin of the input.
#[derive(Debug, Clone, Default)]
pub(super) struct Input {
    pub(super) order: ShardOrder,
    pub(super) shuffle: Option<ShuffleBuffer>,
    pub(super) restored: Option<Arc<StreamState>>,
    /// First epoch of the builder; a restored state has its own.
    first_epoch: u64,
    begins: RestoredInput,
}

impl Input {
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

    /// Epoch that a stream begins in, and samples of it that left the shuffle buffer before.
    pub(super) fn shuffled(&self) -> (u64, u64) {
        self.restored.as_ref().map_or((self.first_epoch, 0), |state| (state.epoch(), state.drawn()))
    }

    pub(super) fn known(&self) -> KnownShards {
        self.restored.as_ref().map_or_else(KnownShards::default, |state| state.known())
    }
}
