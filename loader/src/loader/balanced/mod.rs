//! Delivers a DP rank's share of every global batch, planned ahead.
//!
//! `planner (k steps ahead) → ranged reads of my samples, my fields → decode pool → step`. The planner runs
//! on a thread of its own, off the critical path, and plans the same on every rank. What a rank reads is
//! bounded in bytes; a step that is larger than the bound is loaded alone.

mod builder;
mod packing;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_stream::try_stream;
use dflop_costmodel::{SampleCost, SampleShape};
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc;

pub use self::builder::BalancedLoaderBuilder;
use crate::fetch::{Demand, StepReader, StepReaderSettings};
use crate::index::SampleRow;

use super::watchdog::Watchdog;
use crate::decode::{Collator, DecodePool, PendingSample, TransformStage, Transforms};
use crate::error::{Error, Result, Skipped};
use crate::flow::{
    ByteBudget, ByteLease, LoaderStage, Metrics, MetricsSnapshot, SkipLog, metered, run_ahead,
};
use crate::order::LoaderState;
use crate::plan::{StepPlan, StepPlanner};
use crate::prepare::{ModelInputs, PrepareLog, PrepareReport, PreparedSample, Preparer};
use crate::sample::Sample;

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
    /// The samples as tensors, where the loader has a preparer and there is a sample, or a length to pad to.
    pub inputs: Option<ModelInputs>,
    /// LLM positions of `samples`: counted where the loader has a preparer, else as planned.
    pub tokens: u64,
    /// Tokens of `samples` that the loss is computed on: counted where the loader has a preparer, else as
    /// planned.
    pub target_tokens: u64,
    /// Tokens of padding up to the fixed length of the planner, which are not among `tokens`; 0 without one.
    pub padding_tokens: u64,
    /// LLM positions of `samples` as planned, from estimates of the text.
    pub planned_tokens: u64,
    /// Tokens of `samples` that the loss is computed on, as planned.
    pub planned_target_tokens: u64,
    /// Predicted forward and backward time of each whole module, in the model's order; padding to a fixed
    /// length is in that of the LLM.
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
    /// no number there, and stays none times 0: a loss that has to be computed on such a microbatch is
    /// summed, with `loss_scale_sum`.
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
    settings: BalancedLoaderBuilder,
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

    /// Streams steps, to the end of the run or of the number that was set, if there is one.
    ///
    /// Lazy: nothing is planned or read until the first poll. A sample that cannot be decoded is left out of
    /// its microbatch and listed by [`BalancedLoader::skipped`]; no other rank has to know. A plan that
    /// cannot be made, an unreadable shard, more bad samples than the budget allows, or a microbatch of more
    /// counted tokens than the planner's fixed length ([`Error::MicrobatchTooLong`], instead of its step), is
    /// the last item. Dropping the stream ends all its tasks.
    ///
    /// # Panics
    /// If it is polled outside a Tokio runtime, or in one without a timer.
    #[must_use]
    pub fn stream(&self) -> StepStream {
        let settings = self.settings.clone();
        let (pool, skips, at_step) = (self.pool.clone(), self.skips.clone(), self.next_step.clone());
        let transforms = self.transforms.clone();
        let packing = packing::Packing::new(&settings, self.prepared.clone());
        let steps = try_stream! {
            let metrics = pool.metrics().clone();
            metrics.begin_stream();
            let shards = settings.planner.datasets().iter().flat_map(|set| set.index().shards().to_vec()).collect();
            let watchdog = Watchdog::new(settings.stalls.clone(), metrics.clone(), shards);
            let collator = Collator::new(settings.decode, pool, skips.clone())
                .augment(settings.augment)
                .transforms(transforms)
                .video_sampling(settings.video_sampling)
                .preparer(settings.preparer.clone());
            let planner = settings.planner.clone();
            // One step waits decoded while the next is read; more steps only wait as plans.
            let mut begun = run_ahead(begin_steps(settings, collator.clone()), 1);
            loop {
                let next = next_step(&mut begun, &collator, &packing, &planner);
                let next = watchdog.watch(metered(metrics.stage(LoaderStage::Collate), next)).await?;
                let Some(step) = next? else { break };
                skips.check(false)?;
                at_step.store(step.step + 1, Ordering::Relaxed);
                let yielded = Instant::now();
                yield step;
                metrics.stage(LoaderStage::Deliver).busy(yielded.elapsed());
            }
        };
        steps.boxed()
    }

    /// Saves where the run stands: at the step behind the last one that a stream of this loader gave out,
    /// whatever was read ahead. The state is the same on every rank at the same step.
    ///
    /// # Errors
    /// [`Error::RunEnded`] or [`Error::Config`] if the loader began at a step that the run does not have.
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

/// Limits what is read to what transforms and the preparer need.
#[derive(Debug)]
struct InputDemand {
    preparer: Option<Arc<Preparer>>,
    transforms: Transforms,
}

impl Demand for InputDemand {
    fn needs_pixels(&self, extension: &str) -> bool {
        let is_size_enough = self.preparer.as_ref().is_some_and(|preparer| !preparer.reads_pixels());
        !is_size_enough || self.transforms.takes(extension)
    }

    fn tensor_bytes(&self, row: &SampleRow<'_>) -> u64 {
        let Some(preparer) = &self.preparer else { return 0 };
        let mut shape = SampleShape::default();
        row.read_shape(&mut shape);
        preparer.tensor_bytes(&shape)
    }
}

/// A step whose samples are being decoded.
struct PendingStep {
    plan: Arc<StepPlan>,
    microbatches: Vec<Vec<(u32, PendingSample)>>,
    _lease: ByteLease,
}

/// Plans on its own thread, `ahead` steps before they are read.
fn plan_ahead(
    planner: StepPlanner,
    steps: std::ops::Range<u64>,
    ahead: usize,
    metrics: Arc<Metrics>,
) -> mpsc::Receiver<Result<StepPlan>> {
    let (sender, receiver) = mpsc::channel(ahead);
    tokio::task::spawn_blocking(move || {
        let meter = metrics.stage(LoaderStage::Plan);
        for step in steps {
            // A panic must not look like the end of the run.
            let plan = catch_unwind(AssertUnwindSafe(|| meter.timed(|| planner.plan(step))));
            let plan = plan.unwrap_or(Err(Error::StageEnded { stage: "plan" }));
            let (planned, is_last) = (Instant::now(), plan.is_err());
            meter.fail(is_last.into());
            meter.depth.add(1);
            if sender.blocking_send(plan).is_err() || is_last {
                return;
            }
            meter.count(1, 0);
            meter.waited_for_room(planned.elapsed());
        }
    });
    receiver
}

fn begin_steps(
    settings: BalancedLoaderBuilder,
    collator: Collator,
) -> impl futures::Stream<Item = Result<PendingStep>> + Send {
    try_stream! {
        let metrics = collator.metrics().clone();
        let budget = ByteBudget::new(settings.buffered_bytes_max, metrics.decoded.clone());
        let until = settings.steps.map_or(u64::MAX, |steps| settings.from_step.saturating_add(steps));
        let until = until.min(settings.planner.steps().len().unwrap_or(u64::MAX));
        let steps = settings.from_step..until;
        let mut plans = plan_ahead(settings.planner.clone(), steps, settings.steps_ahead, metrics.clone());
        let demand = InputDemand { preparer: settings.preparer, transforms: settings.transforms };
        let read_settings = StepReaderSettings {
            planner: settings.planner,
            share: settings.share,
            fields: settings.fields,
            demand: Arc::new(demand),
            unpacked_bytes_max: settings.unpacked_bytes_max,
        };
        let mut reader = Some(StepReader::new(read_settings, collator.skips(), metrics.clone()));
        while let Some(plan) = plans.recv().await {
            metrics.stage(LoaderStage::Plan).depth.remove(1);
            let plan = Arc::new(plan?);
            let mut at_work = reader.take().ok_or(Error::StageEnded { stage: "read" })?;
            let mut reads = at_work.plan(&plan)?;
            let lease = budget.lease(reads.resident_bytes).await?;
            metered(metrics.stage(LoaderStage::Read), at_work.fetch(&mut reads)).await?;
            let its_metrics = metrics.clone();
            let reading = tokio::task::spawn_blocking(move || {
                (its_metrics.stage(LoaderStage::Read).timed(|| at_work.read(reads)), at_work)
            });
            let (microbatches, done) = reading.await.map_err(|_| Error::StageEnded { stage: "read" })?;
            reader = Some(done);
            let mut pending = Vec::new();
            for microbatch in microbatches? {
                let mut samples = Vec::with_capacity(microbatch.len());
                for (place, raw) in microbatch {
                    samples.push((place, collator.start_sample(raw).await?));
                }
                collator.transform(samples.iter_mut().map(|(_, sample)| sample));
                pending.push(samples);
            }
            metrics.stage(LoaderStage::Collate).depth.add(1);
            yield PendingStep { plan, microbatches: pending, _lease: lease };
        }
    }
}

/// Waits for the next step that was begun, and for its decoders.
async fn next_step(
    begun: &mut mpsc::Receiver<Result<PendingStep>>,
    collator: &Collator,
    packing: &packing::Packing,
    planner: &StepPlanner,
) -> Result<Option<Step>> {
    let Some(pending) = begun.recv().await.transpose()? else { return Ok(None) };
    let mut step = finish_step(collator, pending, planner, packing.dp_rank()).await?;
    packing.pack(collator, &mut step).await?;
    let samples = || step.microbatches.iter().flat_map(|microbatch| &microbatch.samples);
    let (delivered, bytes) = (samples().count() as u64, samples().map(|sample| sample.bytes).sum());
    let metrics = collator.metrics();
    metrics.stage(LoaderStage::Collate).depth.remove(1);
    metrics.stage(LoaderStage::Collate).count(1, bytes);
    metrics.stage(LoaderStage::Deliver).count(delivered, bytes);
    Ok(Some(step))
}

async fn finish_step(
    collator: &Collator,
    pending: PendingStep,
    planner: &StepPlanner,
    dp_rank: usize,
) -> Result<Step> {
    let PendingStep { plan, microbatches, _lease } = pending;
    let mut finished = Vec::with_capacity(microbatches.len());
    let loss_scale_sum =
        if plan.target_tokens == 0 { 0.0 } else { planner.dp_size() as f64 / plan.target_tokens as f64 };
    for microbatch in microbatches {
        let (mut samples, mut places, mut prepared) = (Vec::new(), Vec::new(), Vec::new());
        for (place, sample) in microbatch {
            if let Some(finished) = collator.finish_sample(sample).await? {
                samples.push(finished.sample);
                prepared.extend(finished.prepared);
                places.push(place);
            }
        }
        collator.skips().delivered(samples.len() as u64);
        let costs = places.iter().map(|&place| plan.costs[place as usize]).collect();
        let is_lockstep = planner.is_lockstep();
        let microbatch = microbatch_of(samples, costs, loss_scale_sum);
        let mut microbatch = Microbatch { places, prepared, is_lockstep, ..microbatch };
        pad(&mut microbatch, finished.len(), &plan, dp_rank, planner);
        finished.push(microbatch);
    }
    Ok(Step { step: plan.step, microbatches: finished, target_tokens: plan.target_tokens, plan })
}

/// Adds the padding up to the length that the step was planned for.
fn pad(microbatch: &mut Microbatch, number: usize, plan: &StepPlan, dp_rank: usize, planner: &StepPlanner) {
    let Some(to) = planner.pad_to() else { return };
    let (samples, tokens) = (microbatch.samples.len(), microbatch.tokens);
    microbatch.padding_tokens = to.padding_tokens(samples, tokens);
    microbatch.module_ns.resize(planner.model().modules().len(), 0);
    if let Some(llm_ns) = microbatch.module_ns.last_mut() {
        // Only where samples were skipped, or another share is read, the cost model has to be asked again.
        let planned = plan.planned_padding_ns(dp_rank, number, &microbatch.places);
        let padding_ns = planned.unwrap_or_else(|| planner.padding_ns(plan.step, samples, tokens));
        *llm_ns = llm_ns.saturating_add(padding_ns);
    }
}

fn microbatch_of(samples: Vec<Sample>, costs: Vec<SampleCost>, loss_scale_sum: f64) -> Microbatch {
    let target_tokens = costs.iter().map(|cost| u64::from(cost.target_tokens)).sum();
    let modules = costs.first().map_or(0, |cost| cost.module_ns.as_slice().len());
    let module_ns = |module: usize| costs.iter().map(|cost| cost.module_ns.as_slice()[module]).sum();
    let tokens = costs.iter().map(|cost| u64::from(cost.tokens)).sum();
    Microbatch {
        places: Vec::new(),
        prepared: Vec::new(),
        inputs: None,
        tokens,
        target_tokens,
        padding_tokens: 0,
        planned_tokens: tokens,
        planned_target_tokens: target_tokens,
        module_ns: (0..modules).map(module_ns).collect(),
        is_lockstep: false,
        loss_scale: target_tokens as f64 * loss_scale_sum,
        loss_scale_sum,
        samples,
        costs,
    }
}
