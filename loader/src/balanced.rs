//! The balanced loader: every DP rank's share of every global batch, planned ahead.
//!
//! `planner (k steps ahead) → ranged reads of my samples, my fields → decode pool → step`. The planner runs on
//! a thread of its own, off the critical path, and plans the same on every rank. What a rank reads is bounded
//! in bytes; a step that is larger than the bound is loaded alone.

use std::sync::Arc;

use async_stream::try_stream;
use dflop_costmodel::SampleCost;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc;

use crate::batch::Sample;
use crate::collate::{Collator, Decode, PendingSample};
use crate::error::{Error, Result};
use crate::index::{FieldRow, Index, SampleRow};
use crate::measure::FieldShape;
use crate::plan::{StepPlan, StepPlanner};
use crate::pool::{DecodePool, SIDE_WITHOUT_PIXELS};
use crate::prefetch::{ByteBudget, ByteLease, run_ahead};
use crate::sample::{RawField, RawSample};
use crate::skip::{ErrorBudget, SkipLog, Skipped};
use crate::store::ranges::ShardRanges;

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
    /// What each of `samples` costs.
    pub costs: Vec<SampleCost>,
    /// LLM positions of `samples`.
    pub tokens: u64,
    /// Tokens of `samples` that the loss is computed on.
    pub target_tokens: u64,
    /// Predicted forward and backward time of each whole module, in the model's order.
    pub module_ns: Vec<u64>,
    /// Factor for the **mean** loss over this microbatch's target tokens:
    /// `target_tokens * dp_size / step.target_tokens`. Summed over microbatches and averaged over DP ranks it
    /// gives the gradient of the token-normalised loss of the global batch.
    pub loss_scale: f64,
    /// The same factor for a loss that is **summed** over target tokens: `dp_size / step.target_tokens`.
    pub loss_scale_sum: f64,
}

impl Microbatch {
    /// Returns the predicted time of the slowest module, in seconds.
    #[must_use]
    pub fn cost_seconds(&self) -> f64 {
        self.module_ns.iter().max().copied().unwrap_or(0) as f64 / 1e9
    }
}

/// Settings of a [`BalancedLoader`].
#[derive(Debug, Clone)]
pub struct BalancedLoaderBuilder {
    planner: StepPlanner,
    dp_rank: usize,
    from_step: u64,
    steps: Option<u64>,
    fields: Option<Vec<String>>,
    decode: Decode,
    workers: usize,
    steps_ahead: usize,
    buffered_bytes_max: u64,
    unpacked_bytes_max: u64,
    error_budget: ErrorBudget,
}

/// Streams one DP rank's share of every global batch.
#[derive(Debug)]
pub struct BalancedLoader {
    settings: BalancedLoaderBuilder,
    pool: Arc<DecodePool>,
    skips: Arc<SkipLog>,
}

impl BalancedLoader {
    /// Starts the settings of the loader of `dp_rank`.
    #[must_use]
    pub fn builder(planner: StepPlanner, dp_rank: usize) -> BalancedLoaderBuilder {
        BalancedLoaderBuilder {
            planner,
            dp_rank,
            from_step: 0,
            steps: None,
            fields: None,
            decode: Decode::Media,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            steps_ahead: 2,
            buffered_bytes_max: 256 << 20,
            unpacked_bytes_max: 1 << 30,
            error_budget: ErrorBudget::default(),
        }
    }

    /// Streams steps, without end unless a number of steps was set.
    ///
    /// Lazy: nothing is planned or read until the first poll. A sample that cannot be decoded is left out of its
    /// microbatch and listed by [`BalancedLoader::skipped`]; no other rank has to know. A plan that cannot be
    /// made, an unreadable shard, or more bad samples than the budget allows, is the last item. Dropping the
    /// stream ends all its tasks.
    ///
    /// # Panics
    /// If it is polled outside a Tokio runtime.
    #[must_use]
    pub fn stream(&self) -> StepStream {
        let settings = self.settings.clone();
        let (pool, skips) = (self.pool.clone(), self.skips.clone());
        let steps = try_stream! {
            let collator = Collator::new(settings.decode, pool, skips.clone());
            let dp_size = settings.planner.dp_size();
            // One step waits decoded while the next is read; more steps only wait as plans.
            let mut begun = run_ahead(begin_steps(settings, collator.clone()), 1);
            while let Some(step) = begun.recv().await {
                let step = finish_step(&collator, step?, dp_size).await?;
                skips.check(false)?;
                yield step;
            }
        };
        steps.boxed()
    }

    /// Returns what was not delivered so far, in the order found; samples that indexing found bad included.
    #[must_use]
    pub fn skipped(&self) -> Vec<Skipped> {
        self.skips.skipped()
    }
}

impl BalancedLoaderBuilder {
    /// Sets the first step. Costs nothing, wherever it is. Default: 0.
    #[must_use]
    pub fn from_step(mut self, step: u64) -> Self {
        self.from_step = step;
        self
    }

    /// Ends the stream after this many steps. Default: never.
    #[must_use]
    pub fn steps(mut self, steps: u64) -> Self {
        self.steps = Some(steps);
        self
    }

    /// Reads only fields with these extensions; `jpg` also stands for `0.jpg`. Default: all fields.
    #[must_use]
    pub fn fields(mut self, extensions: Vec<String>) -> Self {
        self.fields = Some(extensions);
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

    /// Sets how many steps are planned before they are read. Default: 2.
    #[must_use]
    pub fn steps_ahead(mut self, steps: usize) -> Self {
        self.steps_ahead = steps;
        self
    }

    /// Sets how many bytes of samples, encoded or decoded, may be under way; a larger step is loaded alone.
    /// Default: 256 MiB.
    #[must_use]
    pub fn buffered_bytes_max(mut self, bytes: u64) -> Self {
        self.buffered_bytes_max = bytes;
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

    /// Checks the settings and starts the decode threads.
    ///
    /// # Errors
    /// [`Error::Config`] if the rank is not below the DP size, if workers or steps ahead are zero, or if pixels
    /// are asked for, which have no microbatch form yet; [`Error::ErrorBudget`] if the index alone exceeds it.
    pub fn build(self) -> Result<BalancedLoader> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let dp_size = self.planner.dp_size();
        if self.dp_rank >= dp_size {
            return invalid("dp_rank", format!("{} is not below the DP size of {dp_size}", self.dp_rank));
        }
        if self.workers == 0 || self.steps_ahead == 0 {
            return invalid("workers and steps_ahead", "must be at least 1".into());
        }
        if matches!(self.decode, Decode::Pixels { .. }) {
            return invalid("decode", "a balanced loader delivers `Raw` or `Media`".into());
        }
        let pool = DecodePool::new(self.workers, SIDE_WITHOUT_PIXELS)?;
        let bad = self.planner.index().skipped();
        let epoch = self.planner.steps().epoch_samples() + bad.len() as u64;
        let skips = SkipLog::new(self.error_budget, Some(epoch));
        for skipped in bad {
            skips.push(skipped.clone());
        }
        skips.check(false)?;
        Ok(BalancedLoader { settings: self, pool: Arc::new(pool), skips: Arc::new(skips) })
    }
}

/// A step whose samples are being decoded.
struct PendingStep {
    plan: Arc<StepPlan>,
    microbatches: Vec<Vec<(PendingSample, SampleCost)>>,
    _lease: ByteLease,
}

/// What was read for one microbatch: each sample with its cost.
type ReadMicrobatch = Vec<(RawSample, SampleCost)>;

/// Plans on a thread of its own, `ahead` steps before they are read.
fn plan_ahead(planner: StepPlanner, from: u64, until: u64, ahead: usize) -> mpsc::Receiver<Result<StepPlan>> {
    let (sender, receiver) = mpsc::channel(ahead);
    tokio::task::spawn_blocking(move || {
        for step in from..until {
            let plan = planner.plan(step);
            let is_last = plan.is_err();
            if sender.blocking_send(plan).is_err() || is_last {
                return;
            }
        }
    });
    receiver
}

fn begin_steps(
    settings: BalancedLoaderBuilder,
    collator: Collator,
) -> impl futures::Stream<Item = Result<PendingStep>> + Send {
    try_stream! {
        let budget = ByteBudget::new(settings.buffered_bytes_max);
        let until = settings.steps.map_or(u64::MAX, |steps| settings.from_step.saturating_add(steps));
        let mut plans = plan_ahead(settings.planner.clone(), settings.from_step, until, settings.steps_ahead);
        let mut reader = Some(StepReader {
            index: settings.planner.index().clone(),
            ranges: ShardRanges::new(settings.planner.index().clone(), settings.unpacked_bytes_max),
            dp_rank: settings.dp_rank,
            fields: settings.fields,
            skips: collator.skips(),
        });
        while let Some(plan) = plans.recv().await {
            let plan = Arc::new(plan?);
            let mut at_work = reader.take().ok_or(Error::StageEnded { stage: "read" })?;
            let lease = budget.lease(at_work.resident_bytes(&plan)).await?;
            let its_plan = plan.clone();
            let reading = tokio::task::spawn_blocking(move || (at_work.read(&its_plan), at_work));
            let (microbatches, done) = reading.await.map_err(|_| Error::StageEnded { stage: "read" })?;
            reader = Some(done);
            let mut pending = Vec::new();
            for microbatch in microbatches? {
                let mut samples = Vec::with_capacity(microbatch.len());
                for (raw, cost) in microbatch {
                    samples.push((collator.begin_sample(raw, None).await?, cost));
                }
                pending.push(samples);
            }
            yield PendingStep { plan, microbatches: pending, _lease: lease };
        }
    }
}

/// Reads this rank's samples of a step, and of them only the wanted fields.
struct StepReader {
    index: Arc<Index>,
    ranges: ShardRanges,
    dp_rank: usize,
    fields: Option<Vec<String>>,
    skips: Arc<SkipLog>,
}

impl StepReader {
    fn read(&mut self, plan: &StepPlan) -> Result<Vec<ReadMicrobatch>> {
        let index = self.index.clone();
        let mut microbatches = Vec::new();
        for places in &plan.ranks[self.dp_rank] {
            let mut samples = Vec::with_capacity(places.len());
            for &place in places {
                let row = index.sample(plan.samples[place as usize].sample);
                match plan.refused.iter().find(|(refused, _)| *refused == place as usize) {
                    Some((_, reason)) => self.skip(&row, reason),
                    None => samples.push((self.read_sample(&row)?, plan.costs[place as usize])),
                }
            }
            microbatches.push(samples);
        }
        Ok(microbatches)
    }

    fn read_sample(&mut self, row: &SampleRow<'_>) -> Result<RawSample> {
        let mut fields = Vec::new();
        for field in row.fields().filter(|field| is_wanted(self.fields.as_deref(), field)) {
            let payload = self.ranges.read(row.shard, field.offset, field.bytes)?;
            let (extension, offset, bytes) = (field.extension.into(), field.offset, field.bytes);
            fields.push(RawField { extension, offset, bytes, payload: Some(payload) });
        }
        let shard = self.index.shards()[row.shard].url.clone();
        Ok(RawSample { key: row.key().to_owned(), shard, offset: row.offset(), fields })
    }

    fn skip(&self, row: &SampleRow<'_>, reason: &str) {
        self.skips.push(Skipped {
            shard: self.index.shards()[row.shard].url.to_string(),
            offset: row.offset(),
            key: Some(row.key().to_owned()),
            field: None,
            reason: reason.to_owned(),
        });
    }

    /// What this rank's share of a step takes in memory, decoded, from the shapes in the index.
    fn resident_bytes(&self, plan: &StepPlan) -> u64 {
        let places = plan.ranks[self.dp_rank].iter().flatten();
        let rows = places.map(|&place| self.index.sample(plan.samples[place as usize].sample));
        let fields = rows.flat_map(|row| row.fields());
        fields
            .filter(|field| is_wanted(self.fields.as_deref(), field))
            .map(|field| decoded_bytes(&field))
            .sum()
    }
}

/// RGB bytes of a picture, f32 bytes of mono audio (stereo is rare in training data), else the stored bytes.
fn decoded_bytes(field: &FieldRow<'_>) -> u64 {
    match field.shape {
        FieldShape::Image(size) => 3 * u64::from(size.width) * u64::from(size.height),
        FieldShape::Audio(length) => length.frames * size_of::<f32>() as u64,
        FieldShape::Text(_) | FieldShape::Opaque => field.bytes,
    }
}

fn is_wanted(wanted: Option<&[String]>, field: &FieldRow<'_>) -> bool {
    let last = field.extension.rsplit('.').next().unwrap_or_default();
    wanted.is_none_or(|wanted| wanted.iter().any(|name| name == field.extension || name == last))
}

async fn finish_step(collator: &Collator, pending: PendingStep, dp_size: usize) -> Result<Step> {
    let PendingStep { plan, microbatches, _lease } = pending;
    let mut finished = Vec::with_capacity(microbatches.len());
    let loss_scale_sum =
        if plan.target_tokens == 0 { 0.0 } else { dp_size as f64 / plan.target_tokens as f64 };
    for microbatch in microbatches {
        let (mut samples, mut costs) = (Vec::new(), Vec::new());
        for (sample, cost) in microbatch {
            if let Some(sample) = collator.finish_sample(sample).await? {
                samples.push(sample);
                costs.push(cost);
            }
        }
        collator.skips().delivered(samples.len() as u64);
        finished.push(microbatch_of(samples, costs, loss_scale_sum));
    }
    Ok(Step { step: plan.step, microbatches: finished, target_tokens: plan.target_tokens, plan })
}

fn microbatch_of(samples: Vec<Sample>, costs: Vec<SampleCost>, loss_scale_sum: f64) -> Microbatch {
    let target_tokens = costs.iter().map(|cost| u64::from(cost.target_tokens)).sum();
    let modules = costs.first().map_or(0, |cost| cost.module_ns.as_slice().len());
    let module_ns = |module: usize| costs.iter().map(|cost| cost.module_ns.as_slice()[module]).sum();
    Microbatch {
        tokens: costs.iter().map(|cost| u64::from(cost.tokens)).sum(),
        target_tokens,
        module_ns: (0..modules).map(module_ns).collect(),
        loss_scale: target_tokens as f64 * loss_scale_sum,
        loss_scale_sum,
        samples,
        costs,
    }
}
