//! Settings for a [`Loader`](super::Loader), and values derived from them.

use dflop_samples::media::{PixelFormat, PixelStatistics, VideoSampling};

use super::dealt::Deal;
use super::input::Input;
use super::stream_state::StreamKind;
use crate::decode::{Decode, KernelSettings, SIDE_WITHOUT_PIXELS};
use crate::error::{Error, Result, check_at_most};
use crate::loader::field_check::check_indexed;
use crate::loader::settings::LoaderSettings;
use crate::shard::{FIELD_BYTES_MAX, FieldSelection, Shard};

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
    pub(super) deal: Option<Deal>,
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
            deal: None,
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
        if let Some(deal) = &self.deal {
            self.check_deal(deal)?;
        }
        self.input.check(&self.kind())?;
        check_video(self.video_sampling)
    }

    fn check_deal(&self, deal: &Deal) -> Result<()> {
        deal.check()?;
        check_indexed(std::slice::from_ref(&deal.dataset), &self.shared.fields, &self.shared.transforms)?;
        if self.dealt_samples(deal) > 0 {
            return Ok(());
        }
        let (samples, batch, world) = (deal.dataset.len(), self.batch_size, deal.world);
        let reason = format!("{samples} samples make no full batch of {batch} on each of {world} ranks");
        Err(Error::Config { setting: "drop_last", reason })
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
            deal: self.deal.as_ref(),
            drops_last: self.drops_last,
            shuffle: self.input.shuffle,
            video_sampling: has_videos.then(|| self.video_sampling.unwrap_or_default()),
        }
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

    /// Returns the number of samples in all epochs; `None` if whole shards are read.
    pub(super) fn samples_known(&self) -> Option<u64> {
        self.deal.as_ref().map(|deal| self.dealt_samples(deal))
    }

    /// Returns the number of batches in all epochs; `None` if whole shards are read, without an index.
    pub(super) fn batches(&self) -> Option<u64> {
        Some(self.samples_known()?.div_ceil(self.batch_size as u64))
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
