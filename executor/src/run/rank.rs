//! One rank of a run.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use dflop_costmodel::SampleShape;
use dflop_costmodel::correction::CorrectionOptions;
use serde_json::Value;

use super::correction::{Learner, StepTimes};
use super::forecast::Forecast;
use super::report::StepReport;
use super::told::Told;
use crate::comm::{Comm, StepContext};
use crate::device::Device;
use crate::error::Result;
use crate::feed::{FedStep, Feed};
use crate::pipeline::{Job, Pipeline, StepOutcome};
use crate::training::checkpoint::{Checkpoints, RunState};
use crate::training::{TraceWriter, TracedAction, Trainer, model_flops, utilization};

/// What a run does besides training.
pub struct RankOptions {
    /// How plans are corrected by what is measured; `None` for not at all.
    pub correction: Option<CorrectionOptions>,
    /// Rate of large matrix products of this rank, FLOP/s: the denominator of utilization.
    pub peak_flops_per_second: f64,
    /// Where the timeline of this rank goes.
    pub trace: Option<TraceWriter<Box<dyn Write + Send>>>,
    /// Seed, for saved states.
    pub seed: u64,
    /// How the model was cut, for saved states.
    pub layout: Value,
}

/// One rank of a run: its feed, its stages, its part of the optimizer.
pub struct Rank<D: Device> {
    pipeline: Pipeline<D>,
    feed: Feed<D>,
    trainer: Trainer<D>,
    options: RankOptions,
    learner: Option<Learner>,
    told: Told,
    /// Of all ranks together.
    peak_flops_per_second: f64,
    began: Instant,
    /// End of the step before.
    ended: Instant,
}

impl<D: Device> Rank<D> {
    /// Joins the parts of a rank; all ranks call it together.
    ///
    /// # Errors
    /// [`crate::Error::Model`] if a setting of the correction makes no sense; [`crate::Error::Comm`],
    /// [`crate::Error::Trace`].
    pub fn new(
        pipeline: Pipeline<D>,
        feed: Feed<D>,
        trainer: Trainer<D>,
        mut options: RankOptions,
    ) -> Result<Self> {
        let comm = pipeline.comm();
        let mut peak = [options.peak_flops_per_second];
        comm.all_reduce(StepContext::step(0, "add up peaks"), peak.as_mut_slice().into())?;
        let rank = comm.rank();
        if let Some(trace) = &mut options.trace {
            let place = pipeline.place();
            trace.rank(rank, &format!("rank {rank}: {:?} {}", place.module, place.replica))?;
        }
        let learner = options.correction.map(Learner::new).transpose()?;
        let (told, now) = (Told::new(rank, &feed), Instant::now());
        Ok(Self {
            told,
            pipeline,
            feed,
            trainer,
            options,
            learner,
            peak_flops_per_second: peak[0],
            began: now,
            ended: now,
        })
    }

    /// Takes one step; `None` at the end of the data. All ranks call it together.
    ///
    /// # Errors
    /// Whatever fails on one rank ends the job on all; others get [`crate::Error::Comm`] that says what it was.
    pub fn step(&mut self) -> Result<Option<StepReport>> {
        let done = self.try_step();
        done.inspect_err(|error| {
            let is_over = matches!(error, crate::Error::Comm(error) if error.failure().is_some());
            if !is_over {
                let at = StepContext::step(self.trainer.steps(), "train");
                // The caller gets the reason itself; the failure is for the other ranks.
                drop(self.pipeline.comm().abort(at, &error.to_string()));
            }
        })
    }

    fn try_step(&mut self) -> Result<Option<StepReport>> {
        self.pipeline.comm().note(StepContext::step(self.trainer.steps(), "read data"));
        let Some(fed) = self.feed.next(self.pipeline.comm())? else { return Ok(None) };
        self.told.step(self.pipeline.comm().rank(), &self.feed, &fed);
        let forecast = Forecast::new(self.pipeline.job(), self.pipeline.place().pipeline_rank, &fed.planned)?;
        let start = Instant::now();
        let outcome = self.pipeline.step(&fed.work)?;
        let update = self.trainer.update(self.pipeline.stages_mut(), 1.0)?;
        let timeline = (outcome.timeline.as_slice(), fed.waited.as_nanos() as u64);
        let (job, place) = (self.pipeline.job(), self.pipeline.place());
        let times =
            StepTimes::exchange(self.pipeline.comm(), job, place, fed.plan.step, &fed.planned, timeline)?;
        if let Some(learner) = &mut self.learner {
            learner.learn(job, self.feed.planner(), &fed.plan, &fed.planned, &times)?;
        }
        self.trace(&fed, &outcome, &forecast, start)?;
        let (before, ended) = (self.ended, Instant::now());
        self.ended = ended;
        let seconds = ended.duration_since(before).as_secs_f64();
        let ranks = self.pipeline.comm().size() as f64;
        let flops = self.flops(&fed)?;
        let pipeline_ns = outcome.timeline.iter().map(|timed| timed.end_ns).max().unwrap_or(0);
        Ok(Some(StepReport {
            step: fed.plan.step,
            loss: outcome.loss,
            gradient_norm: update.gradient_norm,
            learning_rate: update.learning_rate,
            samples: (fed.plan.samples.len() - fed.dropped.len()) as u64,
            dropped_samples: fed.dropped.len() as u64,
            tokens: fed.tokens,
            seconds,
            tokens_per_second: fed.tokens as f64 / seconds,
            mfu: utilization(flops, seconds, self.peak_flops_per_second)?,
            bubble_fraction: (1.0 - times.busy_ns as f64 / 1e9 / (ranks * seconds)).max(0.0),
            data_wait_seconds: times.waited_ns as f64 / 1e9 / ranks,
            predicted_seconds: forecast.makespan_ns as f64 / 1e9,
            pipeline_seconds: pipeline_ns as f64 / 1e9,
        }))
    }

    /// Model FLOPs of the samples that were learned from.
    fn flops(&self, fed: &FedStep<D>) -> Result<u128> {
        let planner = self.feed.planner();
        let is_kept = |place: usize| fed.dropped.iter().all(|dropped| dropped.place as usize != place);
        let shape = |place: usize| {
            let mut shape = SampleShape::default();
            planner.row(fed.plan.samples[place]).read_shape(&mut shape);
            shape
        };
        let shapes: Vec<SampleShape> =
            (0..fed.plan.samples.len()).filter(|&place| is_kept(place)).map(shape).collect();
        model_flops(planner.model(), &shapes)
    }

    fn trace(
        &mut self,
        fed: &FedStep<D>,
        outcome: &StepOutcome,
        forecast: &Forecast,
        start: Instant,
    ) -> Result<()> {
        let Some(trace) = &mut self.options.trace else { return Ok(()) };
        let actions: Vec<TracedAction> = outcome
            .timeline
            .iter()
            .map(|timed| TracedAction {
                action: timed.action,
                measured_ns: timed.start_ns..timed.end_ns,
                cpu_ns: timed.cpu_ns,
                predicted_ns: forecast.range(timed.action),
            })
            .collect();
        let start_ns = start.duration_since(self.began).as_nanos() as u64;
        trace.step(self.pipeline.comm().rank(), fed.plan.step, start_ns, &actions)
    }

    /// Saves weights, optimizer and where the loader stands; all ranks call it together.
    ///
    /// # Errors
    /// [`crate::Error::File`], [`crate::Error::NotSaved`], [`crate::Error::Comm`].
    pub fn save(&self, checkpoints: &Checkpoints) -> Result<std::path::PathBuf> {
        let loader = serde_json::to_value(self.feed.state()?).unwrap_or_default();
        let run = RunState { seed: self.options.seed, layout: self.options.layout.clone(), loader };
        let stages = self.pipeline.stages().map(|(_, stage)| stage);
        checkpoints.save(&self.trainer, stages, &run)
    }

    /// Ends the trace, if there is one.
    ///
    /// # Errors
    /// [`crate::Error::Trace`].
    pub fn finish(self) -> Result<()> {
        self.options.trace.map_or(Ok(()), |trace| trace.finish().map(drop))
    }

    /// Returns the steps taken, those before a restored state included.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.trainer.steps()
    }

    /// Returns the feed.
    #[must_use]
    pub fn feed(&self) -> &Feed<D> {
        &self.feed
    }

    /// Returns the job.
    #[must_use]
    pub fn job(&self) -> &Arc<Job> {
        self.pipeline.job()
    }

    /// Returns the communicator of all ranks.
    #[must_use]
    pub fn comm(&self) -> &dyn Comm {
        self.pipeline.comm()
    }

    /// Walks over the stages of this rank.
    pub fn stages(&self) -> impl Iterator<Item = &crate::stage::Stage<D>> {
        self.pipeline.stages().map(|(_, stage)| stage)
    }
}
