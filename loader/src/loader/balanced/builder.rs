//! Configures a [`BalancedLoader`].

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use dflop_samples::inputs::SampleProcessor;
use dflop_samples::media::VideoSampling;
use dflop_samples::media::augment::Augment;

use super::BalancedLoader;
use crate::dataset::Dataset;
use crate::decode::{
    Decode, DecodePool, SIDE_WITHOUT_PIXELS, TransformStage, Transforms, WORKERS_MAX, check_augment,
};
use crate::error::{Error, Result, check_at_most};
use crate::fetch::{DpShare, Share};
use crate::flow::{ErrorBudget, SkipListener, SkipLog};
use crate::loader::field_check::check_indexed;
use crate::loader::watchdog::{StallListener, StallSettings};
use crate::order::LoaderState;
use crate::plan::StepPlanner;
use crate::shard::FieldSelection;

/// Most steps that may wait as plans.
const STEPS_AHEAD_MAX: u64 = 1 << 16;

/// Settings of a [`BalancedLoader`].
#[derive(Debug, Clone)]
pub struct BalancedLoaderBuilder {
    pub(super) planner: StepPlanner,
    pub(super) dp_rank: usize,
    pub(super) share: Arc<dyn Share>,
    pub(super) from_step: u64,
    pub(super) state: Option<LoaderState>,
    pub(super) steps: Option<u64>,
    pub(super) fields: FieldSelection,
    pub(super) field_names: Option<Vec<String>>,
    pub(super) decode: Decode,
    pub(super) augment: Option<Augment>,
    pub(super) transforms: Transforms,
    pub(super) workers: usize,
    pub(super) steps_ahead: usize,
    pub(super) buffered_bytes_max: u64,
    pub(super) unpacked_bytes_max: u64,
    pub(super) microbatch_bytes_max: Option<u64>,
    pub(super) error_budget: ErrorBudget,
    pub(super) skip_listener: Option<Arc<dyn SkipListener>>,
    pub(super) stalls: StallSettings,
    pub(super) preparer: Option<Arc<dyn SampleProcessor>>,
    pub(super) is_packed: bool,
    /// Sampling that the indexes were made with: plans count these frames.
    pub(super) video_sampling: Option<VideoSampling>,
}

impl BalancedLoaderBuilder {
    pub(super) fn new(planner: StepPlanner, dp_rank: usize) -> Self {
        Self {
            from_step: planner.first_step(),
            state: None,
            planner,
            dp_rank,
            share: Arc::new(DpShare(dp_rank)),
            steps: None,
            fields: FieldSelection::ALL,
            field_names: None,
            decode: Decode::Media,
            augment: None,
            transforms: Transforms::new(),
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            steps_ahead: 2,
            buffered_bytes_max: 256 << 20,
            unpacked_bytes_max: 1 << 30,
            microbatch_bytes_max: None,
            error_budget: ErrorBudget::default(),
            skip_listener: None,
            stalls: StallSettings::default(),
            preparer: None,
            is_packed: true,
            video_sampling: None,
        }
    }

    /// Sets the first step. Costs nothing, wherever it is. Default: that of the planner, which is 0 unless it
    /// was restored.
    #[must_use]
    pub fn from_step(mut self, step: u64) -> Self {
        self.from_step = step;
        self
    }

    /// Goes on with the step that a state of the planner's run stands at; replaces [`Self::from_step`]. A
    /// state of changed data, or of another global batch, is restored by the planner.
    #[must_use]
    pub fn restore(mut self, state: LoaderState) -> Self {
        self.state = Some(state);
        self
    }

    /// Ends the stream after this many steps. Default: with the run, if that ends.
    #[must_use]
    pub fn steps(mut self, steps: u64) -> Self {
        self.steps = Some(steps);
        self
    }

    /// Reads only the fields that these names stand for, see [`FieldSelection`]: `jpg` also stands for
    /// `0.jpg`, `images` for all images. Default: all fields.
    #[must_use]
    pub fn fields(mut self, names: Vec<String>) -> Self {
        self.field_names = Some(names);
        self
    }

    /// Changes images at random, the same for a sample and epoch wherever it is decoded. They keep their
    /// width and height, so that planned costs hold. Default: no change.
    #[must_use]
    pub fn augment(mut self, augment: Augment) -> Self {
        self.augment = Some(augment);
        self
    }

    /// Passes fields through user code, behind decoding and before the preparer. A field that no decoder
    /// claims, and that a transform makes an image, is planned at no cost: indexes do not know it. Default:
    /// none.
    #[must_use]
    pub fn transforms(mut self, transforms: Transforms) -> Self {
        self.transforms = transforms;
        self
    }

    /// Sets what is done with the bytes of a sample: [`Decode::Media`], the default, or [`Decode::Raw`].
    #[must_use]
    pub fn decode(mut self, decode: Decode) -> Self {
        self.decode = decode;
        self
    }

    /// Sets how many threads decode. Default: one per core.
    #[must_use]
    pub fn workers(mut self, threads: usize) -> Self {
        self.workers = threads;
        self
    }

    /// Sets how many steps are planned, read and decoded before they are asked for, as far as
    /// [`Self::buffered_bytes_max`] allows. Default: 2.
    #[must_use]
    pub fn steps_ahead(mut self, steps: usize) -> Self {
        self.steps_ahead = steps;
        self
    }

    /// Sets how many bytes of samples, decoded and prepared, may wait to be delivered, by the shapes in the
    /// index; a larger microbatch is loaded alone. Default: 256 MiB.
    #[must_use]
    pub fn buffered_bytes_max(mut self, bytes: u64) -> Self {
        self.buffered_bytes_max = bytes;
        self
    }

    /// Refuses a microbatch that takes more bytes, decoded and prepared. Default: the memory that is
    /// available when its step is read.
    #[must_use]
    pub fn microbatch_bytes_max(mut self, bytes: u64) -> Self {
        self.microbatch_bytes_max = Some(bytes);
        self
    }

    /// Sets how many bytes of unpacked compressed shards are kept; the last one always is. Default: 1 GiB.
    #[must_use]
    pub fn unpacked_bytes_max(mut self, bytes: u64) -> Self {
        self.unpacked_bytes_max = bytes;
        self
    }

    /// Sets how many bad samples are tolerated. Default: 5 % of an epoch.
    #[must_use]
    pub fn error_budget(mut self, budget: ErrorBudget) -> Self {
        self.error_budget = budget;
        self
    }

    /// Tells a listener of every skipped sample, also of those that [`BalancedLoader::skipped`] does not
    /// list.
    #[must_use]
    pub fn skip_listener(mut self, listener: Arc<dyn SkipListener>) -> Self {
        self.skip_listener = Some(listener);
        self
    }

    /// Logs a stall after this many seconds without progress while the consumer waits, and again after each
    /// further interval. `INFINITY` disables it. Default: 60.
    #[must_use]
    pub fn stall_seconds_max(mut self, seconds: f64) -> Self {
        self.stalls.warn_seconds = seconds;
        self
    }

    /// Fails the stream with [`Error::Stalled`] after this many seconds without progress. Default: disabled.
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

    /// Sets what turns decoded samples into model inputs, of which every microbatch then has tensors. Where
    /// microbatches are planned under a token cap, no sample may be longer. Default: none.
    #[must_use]
    pub fn preparer(mut self, preparer: Arc<dyn SampleProcessor>) -> Self {
        self.preparer = Some(preparer);
        self
    }

    /// Leaves prepared samples as they are, for callers that pack them themselves
    /// ([`Microbatch::prepared`](super::Microbatch::prepared), [`SampleProcessor::pack`]): microbatches have
    /// no tensors.
    #[must_use]
    pub fn unpacked(mut self) -> Self {
        self.is_packed = false;
        self
    }

    /// Delivers other samples of a step than the rank's microbatches. Loss scales stay those of a DP rank.
    #[must_use]
    pub fn share(mut self, share: Arc<dyn Share>) -> Self {
        self.share = share;
        self
    }

    /// Checks the settings and starts the decode threads.
    ///
    /// # Errors
    /// [`Error::Config`] if the rank is not below the DP size, if workers or steps ahead are zero, if no
    /// field is named or undecoded images are to be changed, if pixels are asked for, which have no
    /// microbatch form yet, or a preparer for undecoded samples, or with another layout than the planner pads
    /// for; [`Error::ErrorBudget`] if the index alone exceeds it; [`Error::State`]
    /// if a state is of another run.
    pub fn build(mut self) -> Result<BalancedLoader> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let dp_size = self.planner.dp_size();
        if self.dp_rank >= dp_size {
            return invalid("dp_rank", format!("{} is not below the DP size of {dp_size}", self.dp_rank));
        }
        if self.workers == 0 || self.steps_ahead == 0 {
            return invalid("workers and steps_ahead", "must be at least 1".into());
        }
        check_at_most("workers", self.workers as u64, WORKERS_MAX)?;
        check_at_most("steps_ahead", self.steps_ahead as u64, STEPS_AHEAD_MAX)?;
        if matches!(self.decode, Decode::Pixels { .. }) {
            return invalid("decode", "a balanced loader delivers `Raw` or `Media`".into());
        }
        check_augment(self.decode, self.augment.as_ref())?;
        self.transforms.check(self.decode)?;
        if let Some(names) = &self.field_names {
            self.fields = FieldSelection::new(names)?;
        }
        check_indexed(self.planner.datasets(), &self.fields, &self.transforms)?;
        self.stalls.check()?;
        if self.preparer.is_some() && self.decode != Decode::Media {
            return invalid("preparer", "it needs decoded samples".into());
        }
        if let (Some(preparer), Some(tokens_max)) = (&mut self.preparer, self.planner.caps().tokens_max) {
            *preparer = preparer.limited(Some(tokens_max), None);
        }
        if let Some(preparer) = &mut self.preparer {
            pad_as_planned(preparer, &self.planner)?;
        }
        let pool = DecodePool::new(self.workers, SIDE_WITHOUT_PIXELS)?;
        let transforms = TransformStage::new(&self.transforms, pool.metrics().clone())?;
        if let Some(state) = self.state.take() {
            self.from_step = self.planner.step_of(&state)?;
        }
        self.video_sampling = common_video_sampling(self.planner.datasets())?;
        let datasets = self.planner.datasets().iter();
        let bad: Vec<_> = datasets.flat_map(Dataset::skipped).cloned().collect();
        let epoch = self.planner.steps().epoch_samples() + bad.len() as u64;
        let skips = SkipLog::new(self.error_budget, Some(epoch)).listener(self.skip_listener.clone());
        for skipped in bad {
            skips.push(skipped);
        }
        skips.check(false)?;
        let next_step = Arc::new(AtomicU64::new(self.from_step));
        let (pool, skips) = (Arc::new(pool), Arc::new(skips));
        Ok(BalancedLoader { settings: self, pool, transforms, skips, next_step, prepared: Arc::default() })
    }
}

/// Lets a preparer pad to the length that was planned for.
fn pad_as_planned(preparer: &mut Arc<dyn SampleProcessor>, planner: &StepPlanner) -> Result<()> {
    let Some(to) = planner.pad_to() else { return Ok(()) };
    if to.layout.is_packed() != preparer.layout().is_packed() {
        let reason =
            format!("planned for {:?}, but the layout of the preparer is {:?}", to.layout, preparer.layout());
        return Err(Error::Config { setting: "pad_to_tokens", reason });
    }
    if preparer.has_buckets() {
        let reason = "microbatches of a fixed length have no buckets and no multiples: drop one of the two";
        return Err(Error::Config { setting: "pad_to_tokens", reason: reason.into() });
    }
    *preparer = preparer.limited(Some(to.room()), Some(to.tokens as usize));
    Ok(())
}

/// The sampling of videos by which all indexes were made.
fn common_video_sampling(datasets: &[Dataset]) -> Result<Option<VideoSampling>> {
    let mut samplings = datasets.iter().filter_map(|set| set.index().video_sampling());
    let first = samplings.next();
    if samplings.any(|other| Some(other) != first) {
        let reason = "the indexes of the datasets were made for different frames of videos".into();
        return Err(Error::Config { setting: "video_sampling", reason });
    }
    Ok(first)
}
