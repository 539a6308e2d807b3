//! Delivers a DP rank's share of every global batch, planned ahead.
//!
//! `planner (k steps ahead) → ranged reads of my samples, my fields → decode pool → microbatches → step`. The
//! planner runs on a thread of its own, off the critical path, and plans the same on every rank. Microbatches
//! are read and decoded one after the other; those that wait are bounded in bytes, and one that is larger
//! than the bound is loaded alone.

mod builder;
mod finish;
mod packing;
mod read_ahead;
mod settings;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_stream::try_stream;
use dflop_costmodel::SampleCost;
use dflop_samples::inputs::{ModelInputs, PreparedSample};
use dflop_samples::sample::Sample;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::watch;

pub use self::builder::BalancedLoaderBuilder;
use self::finish::Finisher;
use self::read_ahead::begin_parts;
use self::settings::BalancedSettings;
use super::watchdog::Watchdog;
use crate::dataset::Dataset;
use crate::decode::{Collator, DecodePool, TransformStage};
use crate::error::{Error, Result, Skipped};
use crate::flow::{LoaderStage, MetricsSnapshot, SkipLog, metered, run_ahead};
use crate::flow::{PrepareLog, PrepareReport};
use crate::order::LoaderState;
use crate::plan::{StepPlan, StepPlanner};

/// Most parts of steps that wait, whatever their bytes.
const PARTS_AHEAD_MAX: usize = 1 << 12;

/// Parts of steps in order; an error is the last item.
pub type PartStream = BoxStream<'static, Result<StepPart>>;

/// Part of a step: its start, then each of its microbatches.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all parts are microbatches")]
pub enum StepPart {
    /// A step starts.
    Start {
        /// The plan of all ranks; equal digests mean equal plans.
        plan: Arc<StepPlan>,
        /// Number of microbatches that follow.
        microbatches: usize,
    },
    /// The next microbatch of the step.
    Microbatch(Microbatch),
}

/// Steps in order; an error is the last item.
pub type StepStream = BoxStream<'static, Result<Step>>;

/// One DP rank's share of a global batch.
#[derive(Debug)]
pub struct Step {
    /// Number of the step, from 0.
    pub step: u64,
    /// The microbatches, in the order in which the pipeline runs them.
    pub microbatches: Vec<Microbatch>,
    /// Tokens of the whole global batch, over all ranks, that the loss is computed on, as planned.
    pub target_tokens: u64,
    /// The plan of all ranks; equal digests mean equal plans.
    pub plan: Arc<StepPlan>,
}

/// Samples of one forward and backward pass.
#[derive(Debug)]
pub struct Microbatch {
    /// The samples that could be decoded.
    pub samples: Vec<Sample>,
    /// Place of each of `samples` in [`StepPlan::samples`].
    pub places: Vec<u32>,
    /// Predicted cost of each of `samples`.
    pub costs: Vec<SampleCost>,
    /// Model inputs of each of `samples`, where the loader has a preparer and
    /// [leaves them unpacked](BalancedLoaderBuilder::unpacked); else empty.
    pub prepared: Vec<PreparedSample>,
    /// The samples as tensors, where the loader has a preparer; a microbatch without samples is a row of
    /// padding.
    pub inputs: Option<ModelInputs>,
    /// LLM positions of `samples`: counted where the loader has a preparer, else as planned.
    pub tokens: u64,
    /// Tokens of `samples` that the loss is computed on: counted where the loader has a preparer, else as
    /// planned.
    pub target_tokens: u64,
    /// Tokens of `inputs` that are not among `tokens`: padding and blank media; without `inputs` those up to
    /// the fixed length of the planner.
    pub padding_tokens: u64,
    /// LLM positions of `samples` as planned, from estimates of the text.
    pub planned_tokens: u64,
    /// Tokens of `samples` that the loss is computed on, as planned.
    pub planned_target_tokens: u64,
    /// Predicted forward and backward time of each whole module, in the model's order: what the samples add,
    /// padding to a fixed length in that of the LLM, and what every microbatch takes besides.
    pub module_ns: Vec<u64>,
    /// Whether the modules share a device and run one after the other; otherwise each has pipeline stages of
    /// its own.
    pub is_lockstep: bool,
    /// Factor for the **mean** loss over this microbatch's target tokens:
    /// `target_tokens * dp_size / step.target_tokens`. Summed over microbatches and averaged over DP ranks it
    /// gives the gradient of the token-normalized loss of the global batch. With a preparer the numerator is
    /// counted and the denominator planned, the same on all ranks: microbatches weigh exactly what they have
    /// to, and the gradient as a whole is off by the one factor between counted and planned tokens of the
    /// step.
    ///
    /// It is 0 where nothing is learned, as in a microbatch of padding alone. The mean loss over no token is
    /// no number there, and stays none times 0: sum the loss instead, with `loss_scale_sum`, or divide it by
    /// the target tokens of the step.
    pub loss_scale: f64,
    /// The same factor for a loss that is **summed** over target tokens: `dp_size / step.target_tokens`.
    pub loss_scale_sum: f64,
}

impl Microbatch {
    /// Returns the predicted forward and backward time, in seconds: of all modules together where they share
    /// a device, of the slowest module where each has pipeline stages of its own.
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

/// Streams one DP rank's share of every global batch.
#[derive(Debug)]
pub struct BalancedLoader {
    settings: Arc<BalancedSettings>,
    pool: Arc<DecodePool>,
    transforms: Option<Arc<TransformStage>>,
    skips: Arc<SkipLog>,
    /// Step after the last one that a stream delivered.
    next_step: Arc<AtomicU64>,
    prepared: Arc<PrepareLog>,
}

impl BalancedLoader {
    /// Starts the settings of the loader of `dp_rank`.
    #[must_use]
    pub fn builder(planner: StepPlanner, dp_rank: usize) -> BalancedLoaderBuilder {
        BalancedLoaderBuilder::new(planner, dp_rank)
    }

    /// Streams whole steps, to the end of the run or of the number that was set, if there is one.
    ///
    /// As [`Self::parts`], but a step is in memory as a whole, and one that fails is not delivered in part.
    ///
    /// # Panics
    /// See [`Self::parts`].
    #[must_use]
    pub fn stream(&self) -> StepStream {
        // Only a whole step counts as delivered.
        let (mut parts, at_step) = (self.parts_of(Arc::default()), self.next_step.clone());
        let steps = try_stream! {
            while let Some(part) = parts.next().await {
                let StepPart::Start { plan, microbatches: expected } = part? else { continue };
                let mut microbatches = Vec::with_capacity(expected);
                while microbatches.len() < expected {
                    let Some(StepPart::Microbatch(microbatch)) = parts.next().await.transpose()? else {
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

    /// Streams steps microbatch by microbatch: while one is trained on, the next ones are decoded.
    ///
    /// Lazy: nothing is planned or read until the first poll. A sample that cannot be decoded is left out of
    /// its microbatch and listed by [`BalancedLoader::skipped`]; no other rank has to know. A plan that
    /// cannot be made, an unreadable shard, more bad samples than the budget allows, a microbatch that does
    /// not fit into memory ([`Error::Plan`]) or has more counted tokens than the planner's
    /// fixed length ([`Error::Plan`]), is the last item. Dropping the stream ends all its tasks.
    ///
    /// # Panics
    /// If it is polled outside a Tokio runtime, or in one without a timer.
    #[must_use]
    pub fn parts(&self) -> PartStream {
        self.parts_of(self.next_step.clone())
    }

    /// Streams parts; `at_step` is the step after the one that was started last.
    fn parts_of(&self, at_step: Arc<AtomicU64>) -> PartStream {
        let settings = self.settings.clone();
        let (pool, skips) = (self.pool.clone(), self.skips.clone());
        let (transforms, log) = (self.transforms.clone(), self.prepared.clone());
        let parts = try_stream! {
            let metrics = pool.metrics().clone();
            metrics.begin_stream();
            metrics.name_sources(settings.planner.datasets().iter().map(Dataset::name));
            let shards = settings.planner.datasets().iter().flat_map(|set| set.index().shards().to_vec()).collect();
            let watchdog = Watchdog::new(settings.shared.stalls.clone(), metrics.clone(), shards);
            let collator = Collator::new(settings.shared.decode, pool, skips.clone())
                .augment(settings.shared.augment)
                .transforms(transforms)
                .strictness(settings.shared.strictness)
                .video_sampling(settings.video_sampling)
                .preparer(settings.preparer.clone());
            let mut finisher = Finisher::new(&settings, collator.clone(), log)?;
            let parts_ahead = settings.steps_ahead.saturating_mul(settings.planner.microbatches() + 1);
            let (at_work, steps_started) = watch::channel(settings.from_step);
            let begun = begin_parts(settings, collator, steps_started);
            let mut begun = run_ahead(begun, parts_ahead.min(PARTS_AHEAD_MAX));
            loop {
                let next = finisher.next(&mut begun);
                let next = watchdog.watch(metered(metrics.stage(LoaderStage::Collate), next)).await;
                let next = next.and_then(|next| skips.check(false).and(next));
                let Some(part) = next.inspect_err(|_| finisher.roll_back(&at_step))? else { break };
                if let StepPart::Start { plan, .. } = &part {
                    at_step.store(plan.step + 1, Ordering::Relaxed);
                    at_work.send_replace(plan.step);
                }
                let yielded = Instant::now();
                yield part;
                metrics.stage(LoaderStage::Deliver).busy(yielded.elapsed());
            }
        };
        parts.boxed()
    }

    /// Saves where the run stands: at the step behind the last one that a stream of this loader gave out or
    /// started, whatever was read ahead. The state is the same on every rank at the same step.
    ///
    /// # Errors
    /// [`Error::Selection`] or [`Error::Config`] if the loader began at a step that the run does not have.
    pub fn state(&self) -> Result<LoaderState> {
        self.settings.planner.state(self.next_step.load(Ordering::Relaxed))
    }

    /// Returns what every stage did so far, over all streams of this loader.
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

    /// Returns the account of samples that were not delivered: exact numbers, and the first ones by name.
    #[must_use]
    pub fn skip_log(&self) -> &SkipLog {
        &self.skips
    }

    /// Returns what preparing samples for a model did so far; all zero without a preparer.
    #[must_use]
    pub fn prepare_report(&self) -> PrepareReport {
        PrepareReport { dropped_samples: self.skips.dropped(), ..self.prepared.report() }
    }
}
