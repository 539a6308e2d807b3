//! The balanced loader: every DP rank's share of every global batch, planned ahead.
//!
//! `planner (k steps ahead) → ranged reads of my samples, my fields → decode pool → step`. The planner runs on
//! a thread of its own, off the critical path, and plans the same on every rank. What a rank reads is bounded
//! in bytes; a step that is larger than the bound is loaded alone.

mod builder;
mod reader;

use std::sync::Arc;

use async_stream::try_stream;
use dflop_costmodel::SampleCost;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc;

pub use builder::BalancedLoaderBuilder;
use reader::StepReader;

use crate::batch::Sample;
use crate::collate::{Collator, PendingSample};
use crate::error::{Error, Result};
use crate::plan::{StepPlan, StepPlanner};
use crate::pool::DecodePool;
use crate::prefetch::{ByteBudget, ByteLease, run_ahead};
use crate::skip::{SkipLog, Skipped};

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
        BalancedLoaderBuilder::new(planner, dp_rank)
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
            let collator = Collator::new(settings.decode, pool, skips.clone()).augment(settings.augment);
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

/// A step whose samples are being decoded.
struct PendingStep {
    plan: Arc<StepPlan>,
    microbatches: Vec<Vec<(PendingSample, SampleCost)>>,
    _lease: ByteLease,
}

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
        let mut reader = Some(StepReader::new(&settings, collator.skips()));
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
                    samples.push((collator.begin_sample(raw).await?, cost));
                }
                pending.push(samples);
            }
            yield PendingStep { plan, microbatches: pending, _lease: lease };
        }
    }
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
