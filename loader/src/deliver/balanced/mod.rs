//! Delivers a DP rank's share of every global batch, planned ahead.
//!
//! Settings for a [`BalancedLoader`](super::BalancedLoader), with checks.
//!
//! `planner (k steps ahead) → ranged reads of my samples, my fields → decode pool → microbatches → step`. The
//! planner runs on a separate thread, off the critical path, and plans the same on every rank. Microbatches
//! are read and decoded in sequence; the bytes of queued microbatches are bounded, and a microbatch that is
//! larger than the bound is loaded alone.

mod builder;
mod finish;
mod kept_documents;
mod read_ahead;
mod slices;

use super::settings::{LoaderSettings, check_indexed, common_video_sampling};
use super::watchdog::Watchdog;
use crate::dataset::Dataset;
use crate::decode::{Collator, Decode, DecodePool, TransformStage};
use crate::error::{Error, Result, Skipped, check_at_most};
use crate::fetch::{DpShare, Share, distinct_shards};
use crate::flow::{LoaderStage, MetricsSnapshot, PrepareLog, PrepareReport, SkipLog, metered, run_ahead};
use crate::order::LoaderState;
use crate::plan::{StepPlan, StepPlanner};
use async_stream::try_stream;
use dflop_costmodel::SampleCost;
use dflop_samples::inputs::{ModelInputs, PreparedSample, SampleProcessor};
use dflop_samples::media::VideoSampling;
use dflop_samples::sample::Sample;
use finish::Finisher;
use futures::StreamExt;
use futures::stream::BoxStream;
use kept_documents::KeptDocuments;
use read_ahead::begin_events;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::watch;

pub use builder::BalancedLoaderBuilder;
pub use slices::{MicrobatchContext, SliceGroup, SliceMedium};

/// Maximum number of queued step events, regardless of size.
const EVENTS_AHEAD_MAX: usize = 1 << 12;

/// Step events in order; an error is the last item.
pub type EventStream = BoxStream<'static, Result<StepEvent>>;

/// Event of a step: the start, then each microbatch.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all events are microbatches")]
pub enum StepEvent {
    /// A step starts.
    Start {
        /// The plan for all ranks; equal digests mean equal plans.
        plan: Arc<StepPlan>,
        /// Number of microbatches that follow.
        microbatches: usize,
    },
    /// The next microbatch in the step.
    Microbatch(Microbatch),
}

/// Steps in order; an error is the last item.
pub type StepStream = BoxStream<'static, Result<Step>>;

/// A DP rank's share of a global batch.
#[derive(Debug)]
pub struct Step {
    /// Step number, from 0.
    pub step: u64,
    /// The microbatches, in the order in which the pipeline runs them.
    pub microbatches: Vec<Microbatch>,
    /// Number of target tokens in the global batch, over all ranks, as planned.
    pub target_tokens: u64,
    /// The plan for all ranks; equal digests mean equal plans.
    pub plan: Arc<StepPlan>,
}

/// Samples for a single forward and backward pass.
#[derive(Debug)]
pub struct Microbatch {
    /// The samples that could be decoded.
    pub samples: Vec<Sample>,
    /// Index in [`StepPlan::samples`] for each entry of `samples`.
    pub plan_indices: Vec<u32>,
    /// Predicted cost for each entry of `samples`.
    pub costs: Vec<SampleCost>,
    /// Model inputs for each entry of `samples`, where the loader has a preparer and [leaves them
    /// unpacked](BalancedLoaderBuilder::unpacked); else empty.
    pub prepared: Vec<PreparedSample>,
    /// The samples as tensors, where the loader has a preparer; a microbatch without samples is a padding
    /// row.
    pub inputs: Option<ModelInputs>,
    /// Samples that this rank shares with others, whose slices are in `inputs`; `None` if the plan has no
    /// groups of ranks. Token counts are then of the slices.
    pub context: Option<MicrobatchContext>,
    /// Number of LLM positions in `samples`: counted where the loader has a preparer, else as planned.
    pub tokens: u64,
    /// Number of target tokens in `samples`: counted where the loader has a preparer, else as planned.
    pub target_tokens: u64,
    /// Number of tokens in `inputs` that are not among `tokens`: padding and blank media; without `inputs`,
    /// padding up to the planner's fixed length.
    pub padding_tokens: u64,
    /// Number of LLM positions in `samples` as planned, from text estimates.
    pub planned_tokens: u64,
    /// Number of target tokens in `samples`, as planned.
    pub planned_target_tokens: u64,
    /// Predicted forward and backward time per entire module, in model order: sample time, padding to a fixed
    /// length in the LLM time, and microbatch overhead.
    pub module_ns: Vec<u64>,
    /// Whether the modules share a device and run in sequence; otherwise each has separate pipeline stages.
    pub is_lockstep: bool,
    /// Factor for the **mean** loss over this microbatch's target tokens:
    /// `target_tokens * dp_size / step.target_tokens`. Summed over microbatches and averaged over DP ranks it
    /// yields the gradient of the token-normalized loss over the global batch. With a preparer the numerator
    /// is counted and the denominator planned, the same on all ranks: the relative microbatch weights are
    /// exact, and the total gradient is scaled by the ratio between counted and planned tokens in the step.
    ///
    /// Zero for a microbatch without target tokens, such as padding. A mean over zero tokens is NaN, and zero
    /// times NaN is NaN: use the summed loss with `loss_scale_sum`, or divide it by the step's target tokens.
    pub loss_scale: f64,
    /// The same factor for a loss that is **summed** over target tokens: `dp_size / step.target_tokens`.
    pub loss_scale_sum: f64,
}

impl Microbatch {
    /// Returns the predicted forward and backward time, in seconds: the sum over all modules where they share
    /// a device, the slowest module where each has separate pipeline stages.
    #[must_use]
    pub fn cost_seconds(&self) -> f64 {
        let ns = if self.is_lockstep {
            self.module_ns.iter().sum()
        } else {
            self.module_ns.iter().max().copied().unwrap_or(0)
        };
        ns as f64 / 1e9
    }
}

/// Streams a DP rank's share of every global batch.
#[derive(Debug)]
pub struct BalancedLoader {
    settings: Arc<BalancedSettings>,
    pool: Arc<DecodePool>,
    transforms: Option<Arc<TransformStage>>,
    skips: Arc<SkipLog>,
    /// Step after the last delivered step.
    next_step: Arc<AtomicU64>,
    prepared: Arc<PrepareLog>,
}

impl BalancedLoader {
    /// Starts the loader settings for `dp_rank`.
    #[must_use]
    pub fn builder(planner: StepPlanner, dp_rank: usize) -> BalancedLoaderBuilder {
        BalancedLoaderBuilder::new(planner, dp_rank)
    }

    /// Streams complete steps until the run, or the configured number, ends.
    ///
    /// As [`Self::events`], but with an entire step in memory, and a failed step is never delivered in part.
    ///
    /// # Panics
    /// See [`Self::events`].
    #[must_use]
    pub fn stream(&self) -> StepStream {
        // Only a complete step counts as delivered.
        let (mut events, at_step) = (self.event_stream(Arc::default()), self.next_step.clone());
        let steps = try_stream! {
            while let Some(event) = events.next().await {
                let StepEvent::Start { plan, microbatches: expected } = event? else { continue };
                let mut microbatches = Vec::with_capacity(expected);
                while microbatches.len() < expected {
                    let Some(StepEvent::Microbatch(microbatch)) = events.next().await.transpose()? else {
                        Err(Error::StageEnded { stage: "collate" })?;
                        return;
                    };
                    microbatches.push(microbatch);
                }
                at_step.store(plan.step + 1, Ordering::Relaxed);
                yield Step { step: plan.step, microbatches, target_tokens: plan.target_tokens, plan };
            }
        };
        steps.boxed()
    }

    /// Streams steps microbatch by microbatch: the next microbatches are decoded during training.
    ///
    /// Lazy: nothing is planned or read until the first poll. A sample that cannot be decoded is left out of
    /// the microbatch and listed by [`BalancedLoader::skipped`]; no communication between ranks is needed. A
    /// failed plan, an unreadable shard, more bad samples than the budget allows, a microbatch that does not
    /// fit into memory ([`Error::Plan`]) or has more counted tokens than the planner's fixed length
    /// ([`Error::Plan`]), is the last item. Dropping the stream ends all tasks.
    ///
    /// # Panics
    /// If it is polled outside a Tokio runtime, or in a runtime without a timer.
    #[must_use]
    pub fn events(&self) -> EventStream {
        self.event_stream(self.next_step.clone())
    }

    /// Streams events; `at_step` is the step after the last started step.
    fn event_stream(&self, at_step: Arc<AtomicU64>) -> EventStream {
        let settings = self.settings.clone();
        let (pool, skips) = (self.pool.clone(), self.skips.clone());
        let (transforms, log) = (self.transforms.clone(), self.prepared.clone());
        let events = try_stream! {
            let metrics = pool.metrics().clone();
            metrics.begin_stream();
            metrics.name_sources(settings.planner.datasets().iter().map(Dataset::name));
            let shards = distinct_shards(settings.planner.datasets());
            let watchdog = Watchdog::new(settings.shared.stalls.clone(), metrics.clone(), shards);
            let collator = Collator::new(settings.shared.decode, pool, skips.clone())
                .augment(settings.shared.augment)
                .transforms(transforms)
                .strictness(settings.shared.strictness)
                .video_sampling(settings.video_sampling)
                .preparer(settings.preparer.clone());
            let mut finisher = Finisher::new(&settings, collator.clone(), log)?;
            let events_ahead = settings.steps_ahead.saturating_mul(settings.planner.microbatches() + 1);
            let (at_work, steps_started) = watch::channel(settings.from_step);
            let events = begin_events(settings, collator, steps_started);
            let mut pending = run_ahead(events, events_ahead.min(EVENTS_AHEAD_MAX));
            loop {
                let next = finisher.next(&mut pending);
                let next = watchdog.watch(metered(metrics.stage(LoaderStage::Collate), next)).await;
                let next = next.and_then(|next| skips.check(false).and(next));
                let Some(event) = next.inspect_err(|_| finisher.roll_back(&at_step))? else { break };
                if let StepEvent::Start { plan, .. } = &event {
                    at_step.store(plan.step + 1, Ordering::Relaxed);
                    at_work.send_replace(plan.step);
                }
                let yielded = Instant::now();
                yield event;
                metrics.stage(LoaderStage::Deliver).busy(yielded.elapsed());
            }
        };
        events.boxed()
    }

    /// Returns the state after the last step that a stream of this loader delivered or started. Steps read
    /// ahead are not included. The state is the same on every rank at the same step.
    ///
    /// # Errors
    /// [`Error::Selection`] or [`Error::Config`] if the loader began at a step that the run does not have.
    pub fn state(&self) -> Result<LoaderState> {
        self.settings.planner.state(self.next_step.load(Ordering::Relaxed))
    }

    /// Returns the metrics of every stage so far, over all streams from this loader.
    #[must_use]
    pub fn metrics(&self) -> MetricsSnapshot {
        self.pool.metrics().snapshot()
    }

    /// Returns the first 1,000 samples that were not delivered, each once, in the order found; samples that
    /// indexing found bad included.
    #[must_use]
    pub fn skipped(&self) -> Vec<Skipped> {
        self.skips.skipped()
    }

    /// Returns the account of samples that were not delivered: exact numbers, and the first samples by name.
    #[must_use]
    pub fn skip_log(&self) -> &SkipLog {
        &self.skips
    }

    /// Returns the sample preparation totals so far; all zero without a preparer.
    #[must_use]
    pub fn prepare_report(&self) -> PrepareReport {
        PrepareReport { dropped_samples: self.skips.dropped(), ..self.prepared.report() }
    }
}

/// Maximum number of planned steps kept ahead.
const STEPS_AHEAD_MAX: u64 = 1 << 16;
/// Decoded bytes that may wait, by default.
const BUFFERED_BYTES_MAX: u64 = 256 << 20;

/// Settings for a balanced loader; checked inside a [`BalancedLoader`](BalancedLoader).
#[derive(Debug, Clone)]
struct BalancedSettings {
    shared: LoaderSettings,
    planner: StepPlanner,
    dp_rank: usize,
    share: Arc<dyn Share>,
    from_step: u64,
    state: Option<LoaderState>,
    steps: Option<u64>,
    steps_ahead: usize,
    unpacked_bytes_max: u64,
    microbatch_bytes_max: Option<u64>,
    preparer: Option<Arc<dyn SampleProcessor>>,
    is_packed: bool,
    /// Video sampling in the indexes: plans count these frames.
    video_sampling: Option<VideoSampling>,
}

impl BalancedSettings {
    fn new(planner: StepPlanner, dp_rank: usize) -> Self {
        Self {
            shared: LoaderSettings::default(),
            from_step: planner.first_step(),
            state: None,
            planner,
            dp_rank,
            share: Arc::new(DpShare(dp_rank)),
            steps: None,
            steps_ahead: 2,
            unpacked_bytes_max: 1 << 30,
            microbatch_bytes_max: None,
            preparer: None,
            is_packed: true,
            video_sampling: None,
        }
    }

    /// Returns the decoded bytes that may wait.
    fn buffered_bytes_max(&self) -> u64 {
        self.shared.buffered_bytes_max.unwrap_or(BUFFERED_BYTES_MAX)
    }

    /// Checks all settings and fills in values from the planner.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Selection`]; [`Error::State`] if a state is from a different run.
    fn checked(mut self) -> Result<Self> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let dp_size = self.planner.dp_size();
        if self.dp_rank >= dp_size {
            return invalid("dp_rank", format!("{} is not below the DP size of {dp_size}", self.dp_rank));
        }
        if self.steps_ahead == 0 {
            return invalid("steps_ahead", "must be at least 1".into());
        }
        check_at_most("steps_ahead", self.steps_ahead as u64, STEPS_AHEAD_MAX)?;
        if matches!(self.shared.decode, Decode::Pixels { .. }) {
            return invalid("decode", "a balanced loader delivers `Raw` or `Media`".into());
        }
        self.shared = self.shared.seeded(self.planner.seed());
        self.shared.check()?;
        check_indexed(self.planner.datasets(), &self.shared.fields, &self.shared.transforms)?;
        if self.preparer.is_some() && self.shared.decode != Decode::Media {
            return invalid("preparer", "it needs decoded samples".into());
        }
        if let (Some(preparer), Some(tokens_max)) = (&mut self.preparer, self.planner.caps().tokens_max) {
            // A sample above the cap is split over up to as many ranks.
            let ranks = self.planner.context().map_or(1, |groups| groups.ranks[1] as u64);
            *preparer = preparer.limited(Some(tokens_max.saturating_mul(ranks)), None);
        }
        if let Some(preparer) = &mut self.preparer {
            pad_as_planned(preparer, &self.planner)?;
            if self.planner.rows().is_some() {
                *preparer = Arc::new(KeptDocuments::new(preparer.clone()));
            }
        }
        if self.planner.context().is_some() {
            self.check_slices()?;
        }
        if let Some(state) = self.state.take() {
            self.from_step = self.planner.saved_step(&state)?;
        }
        self.video_sampling = common_video_sampling(self.planner.datasets())?;
        Ok(self)
    }
}

impl BalancedSettings {
    /// Checks that microbatches can be cut into slices.
    fn check_slices(&self) -> Result<()> {
        let reason = match &self.preparer {
            None => "slices are cut from tensors: set a tokenizer and the built-in processor",
            Some(_) if !self.is_packed => "prepared samples that are left unpacked have no slices",
            Some(preparer) if !preparer.layout().is_packed() => "slices need the packed layout",
            Some(preparer) if preparer.has_buckets() => {
                "slices have no buckets and no multiples: drop one of the two"
            }
            Some(_) => return Ok(()),
        };
        Err(Error::Config { setting: "context", reason: reason.into() })
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
    // Rows hold pieces of documents, which may be longer.
    let tokens_max = planner.rows().is_none().then(|| to.capacity_tokens());
    *preparer = preparer.limited(tokens_max, Some(to.tokens as usize));
    Ok(())
}
