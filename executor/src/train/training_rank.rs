//! Trains on a single rank: runs steps, reports them, saves checkpoints.

use std::error::Error as _;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use dflop_balancer::schedule::Action;
use dflop_comm::{Comm, StepContext};
use dflop_costmodel::SampleShape;
use dflop_device::{Device, Lane};
use dflop_loader::BalancedLoader;
use serde_json::Value;

use super::correction_record::CorrectionRecorder;
use super::evaluation::{Evaluation, EvaluationReport};
use super::pass_predictor::{Forecast, PassPredictor, planned_passes};
use super::start_times::{StartPart, StartReport, StartTimes};
use super::step_end::{SkipWarnings, StepEnd, StopReason};
use super::step_times::{
    CorrectionReport, CorrectionSettings, HostPart, HostTimes, MeasuredTimes, PlanCorrector, Queued,
    StepTimes,
};
use super::trace::{TraceWriter, TracedAction};
use super::{StepReport, model_flops, utilization};
use crate::checkpoint::{CheckpointDirectory, CheckpointSaver, RunState, SaveProgress};
use crate::error::{Error, Result};
use crate::inputs::{Ending, InputReader, InputsAhead, PredictedTimes, StepInputs, Taken};
use crate::optimizer::{JobOptimizer, UpdateReport};
use crate::pipeline::{Job, PassTimes, PendingStep, PipelineRank, StepOutcome, simulate};

/// Rank options in addition to pipeline, inputs and optimizer.
pub struct TrainingRankOptions {
    /// Settings for cost model corrections learned from measured times; `None` disables them.
    pub correction: Option<CorrectionSettings>,
    /// Predicts stage passes from a measured profile; `None` divides the planned module times by layers.
    pub pass_predictor: Option<PassPredictor>,
    /// FLOP/s for large matrix products on this rank, added to the MFU denominator.
    pub peak_flops_per_second: f64,
    /// Timeline writer for this rank, if any.
    pub trace: Option<TraceWriter<Box<dyn Write + Send>>>,
    /// Run seed, saved in checkpoints.
    pub seed: u64,
    /// Model layout, saved in checkpoints.
    pub layout: Value,
    /// Checkpoint directory, if any.
    pub checkpoints: Option<CheckpointDirectory>,
    /// Check for a stop request on this rank, which ends the run after the current step.
    pub stop: Option<StopCheck>,
    /// Step before which the run ends, if it is known: no inputs are read for it. The same on all ranks.
    pub until: Option<u64>,
}

/// Returns why the run should stop, if it should; called once per step.
pub type StopCheck = Box<dyn Fn() -> Option<StopReason> + Send>;

/// Training state on a rank: inputs, stages and optimizer shard.
pub struct TrainingRank<D: Device> {
    pipeline: PipelineRank<D>,
    inputs: InputsAhead<D>,
    optimizer: JobOptimizer<D>,
    options: TrainingRankOptions,
    corrector: Option<PlanCorrector>,
    saver: Option<CheckpointSaver>,
    /// Error from the last save, if it failed.
    unsaved: Option<Error>,
    stop_reason: Option<StopReason>,
    skip_warnings: SkipWarnings,
    evaluation: Option<Evaluation<D>>,
    /// Times of the start, until the first step has ended.
    start: Option<StartTimes>,
    is_pipeline: bool,
    /// Sum over all ranks, in FLOP/s.
    peak_flops_per_second: f64,
    began: Instant,
    /// End of the previous step, where the current step's time begins.
    ended: Instant,
    /// Time when the previous step's results were read.
    read: Instant,
    /// Recent host activity.
    host: HostTimes,
    /// Whether a separate processor computes while the host continues.
    is_device_apart: bool,
    /// Next step: passes queued, update not yet queued.
    ahead: Option<StartedStep<D>>,
    /// Reason why there is no next step.
    ending: Option<Ending<D>>,
}

/// Step whose passes are queued.
struct StartedStep<D: Device> {
    step: StepInputs<D>,
    pending: PendingStep<D>,
    /// Time when the step inputs were requested.
    asked: Instant,
}

impl<D: Device> TrainingRank<D> {
    /// Joins the rank's pipeline, inputs and optimizer. Collective: every rank must call it.
    ///
    /// # Errors
    /// [`crate::Error::Model`] if a correction setting is invalid; [`crate::Error::Comm`],
    /// [`crate::Error::Trace`].
    pub fn new(
        pipeline: PipelineRank<D>,
        inputs: InputReader<D>,
        optimizer: JobOptimizer<D>,
        mut options: TrainingRankOptions,
    ) -> Result<Self> {
        let comm = pipeline.comm();
        let steps = options.until.map_or(u64::MAX, |until| until.saturating_sub(optimizer.steps()));
        let inputs = InputsAhead::start(inputs, comm, steps)?;
        // Ranks may run on different machines, so the peak of the job is the sum of theirs.
        let mut peak = [options.peak_flops_per_second];
        comm.all_reduce(StepContext::step(0, "sum peaks"), peak.as_mut_slice().into())?;
        let rank = comm.rank();
        if let Some(trace) = &mut options.trace {
            let roles = pipeline.roles().iter();
            let roles: Vec<String> =
                roles.map(|role| format!("{:?} {}", role.module, role.replica)).collect();
            trace.rank(rank, &format!("rank {rank}: {}", roles.join(", ")))?;
        }
        let corrector = options.correction.take();
        let corrector =
            corrector.map(|settings| PlanCorrector::new(settings, optimizer.steps())).transpose()?;
        let (skip_warnings, now) = (SkipWarnings::new(rank, &inputs), Instant::now());
        let is_pipeline = pipeline.job().is_pipeline();
        let is_device_apart = pipeline.stages().any(|(_, stage)| stage.device().host_threads().is_none());
        Ok(Self {
            skip_warnings,
            evaluation: None,
            start: None,
            is_pipeline,
            pipeline,
            inputs,
            optimizer,
            saver: options.checkpoints.take().map(CheckpointSaver::new),
            unsaved: None,
            options,
            corrector,
            stop_reason: None,
            peak_flops_per_second: peak[0],
            began: now,
            ended: now,
            read: now,
            host: HostTimes::default(),
            is_device_apart,
            ahead: None,
            ending: None,
        })
    }

    /// Records the correction tables from this step on; a single rank in the job records them.
    pub fn record_corrections(&mut self, recorder: CorrectionRecorder) {
        if let Some(corrector) = &mut self.corrector {
            corrector.record(recorder);
        }
    }

    /// Evaluates after some steps from now on. All ranks evaluate, or none does.
    pub fn evaluate(&mut self, evaluation: Evaluation<D>) {
        self.evaluation = Some(evaluation);
    }

    /// Reports these times, which end with the first step, in the first report. All ranks report them, or
    /// none does.
    pub fn record_start(&mut self, mut start: StartTimes) {
        start.end_on(StartPart::Ranks, self.pipeline.device(), &*self.pipeline.tensors());
        self.start = Some(start);
    }

    /// Runs a step; returns `None` at the end of the data. Collective: every rank must call it.
    ///
    /// # Errors
    /// A failure on any rank ends the job on all ranks; the remaining ranks return [`crate::Error::Comm`]
    /// with the failure text. An unwritable checkpoint is not an error: the failure is logged, and the next
    /// save tries again.
    pub fn step(&mut self) -> Result<Option<StepReport>> {
        let done = self.try_step();
        done.inspect_err(|error| {
            let is_over = matches!(error, Error::Comm(error) if error.failure().is_some());
            if !is_over {
                let at = StepContext::step(self.optimizer.steps(), "train");
                // The caller gets the error itself; the failure message is for the other ranks.
                drop(self.pipeline.comm().abort(at, &error.to_string()));
            }
        })
    }

    fn try_step(&mut self) -> Result<Option<StepReport>> {
        let begin = Instant::now();
        self.host.add(HostPart::Report, self.read, begin);
        let Some(started) = self.take_started()? else { return Ok(None) };
        let StartedStep { step, pending, asked } = started;
        let queued = Queued { asked, passes: pending.queued(), update: Instant::now() };
        let update = self.optimizer.start_step(&pending, self.pipeline.stages_mut())?;
        // While the device computes.
        let (job, roles) = (self.pipeline.job(), self.pipeline.roles());
        let rounds = step.predicted.rounds();
        let forecast = Forecast::new(job, roles, rounds, &self.predicted_passes(&step)?)?;
        let flops = self.flops(&step)?;
        let evaluation = self.evaluation.as_ref();
        let is_due = evaluation.is_some_and(|own| own.is_due(step.plan.step + 1, self.options.until));
        if !is_due {
            self.start_ahead()?;
        }
        let waiting = Instant::now();
        let (outcome, update, device) =
            self.optimizer.finish_step(update, &pending, self.pipeline.stages_mut())?;
        self.read = Instant::now();
        self.host.add(HostPart::Result, waiting, self.read);
        let parts = StepTimes::new(&self.host, queued, device);
        // the next step looks no further back than to the end of this one
        self.host.forget_before(begin);
        let start = self.read.checked_sub(device.total()).unwrap_or(queued.passes).max(queued.passes);
        let report = self.end_step(&step, (&outcome, parts, &update), (&forecast, flops, start))?;
        let evaluation = if is_due { self.run_evaluation()? } else { None };
        Ok(Some(StepReport { evaluation, ..report }))
    }

    /// Evaluates, unless the run stops before its last step. No step contains the time.
    fn run_evaluation(&mut self) -> Result<Option<EvaluationReport>> {
        let is_stopped = self.stop_reason.is_some() && self.options.until != Some(self.optimizer.steps());
        let Some(evaluation) = self.evaluation.as_ref().filter(|_| !is_stopped) else { return Ok(None) };
        let report = evaluation.run(&mut self.pipeline)?;
        if !report.loss.is_finite() && self.pipeline.comm().rank() == 0 {
            let (step, loss, target_tokens) = (self.optimizer.steps() - 1, report.loss, report.target_tokens);
            tracing::warn!(step, loss, target_tokens, "an evaluation has no finite loss");
        }
        self.optimizer.continue_from(self.pipeline.device().mark(Lane::Compute)?);
        self.ended = Instant::now();
        self.read = self.ended;
        self.host.forget_before(self.ended);
        Ok(Some(report))
    }

    /// Returns the queued step, or queues the next step; `None` at the end of the run.
    fn take_started(&mut self) -> Result<Option<StartedStep<D>>> {
        if let Some(started) = self.ahead.take() {
            return Ok(Some(started));
        }
        let asked = Instant::now();
        let ending = match self.ending.take() {
            Some(ending) => ending,
            None => match self.take_inputs() {
                Taken::Step(step) => {
                    if let Some(start) = &mut self.start {
                        start.end(StartPart::Inputs);
                    }
                    return self.start(*step, asked).map(Some);
                }
                Taken::Other(ending) => ending,
            },
        };
        self.inputs.resolve(self.pipeline.comm(), ending)?;
        Ok(None)
    }

    fn take_inputs(&mut self) -> Taken<D> {
        self.pipeline.comm().note(StepContext::step(self.optimizer.steps(), "read data"));
        self.inputs.take()
    }

    /// Queues a step's passes.
    fn start(&mut self, mut step: StepInputs<D>, asked: Instant) -> Result<StartedStep<D>> {
        let ready = Instant::now();
        let has_samples = asked + step.wait;
        self.host.add(HostPart::Data, asked, has_samples);
        self.host.add(HostPart::Input, has_samples, ready.max(has_samples));
        self.skip_warnings.step(self.pipeline.comm().rank(), &self.inputs, &step);
        let pending = self.pipeline.start(&step.rank_step)?;
        self.host.add(HostPart::Plan, ready, pending.queued().max(ready));
        // stages have what they need
        step.rank_step.contexts.clear();
        Ok(StartedStep { step, pending, asked })
    }

    /// Queues the next step's passes, if there is a next step, after the current update: the device has work
    /// while the host reads and reports the current step's results. With computation on the host itself, this
    /// would only delay the results.
    fn start_ahead(&mut self) -> Result<()> {
        if !self.is_device_apart {
            return Ok(());
        }
        let asked = Instant::now();
        match self.take_inputs() {
            Taken::Step(step) => self.ahead = Some(self.start(*step, asked)?),
            // This step ends first.
            Taken::Other(ending) => self.ending = Some(ending),
        }
        Ok(())
    }

    /// Exchanges step times after the results were read, learns from them, and reports the step.
    fn end_step(
        &mut self,
        step: &StepInputs<D>,
        (outcome, parts, update): (&StepOutcome, StepTimes, &UpdateReport),
        (forecast, flops, start): (&Forecast, u128, Instant),
    ) -> Result<StepReport> {
        let rounds = step.predicted.rounds();
        let (job, roles) = (self.pipeline.job(), self.pipeline.roles());
        let comm = self.pipeline.comm();
        let stop = self.options.stop.as_ref().and_then(|stop| stop());
        let save = self.saver.as_mut().map_or(SaveProgress::default(), CheckpointSaver::progress);
        let end = StepEnd::new(stop, save);
        let measured = (outcome, parts);
        let times = MeasuredTimes::exchange(comm, job, roles, (step.plan.step, rounds), measured, end)?;
        self.stop_reason = times.end.stop();
        let (replayed_ns, _) = simulate(job, rounds, times.passes())?;
        let correction = match &mut self.corrector {
            Some(corrector) => {
                corrector.add_step(job, self.inputs.planner(), &step.plan, &step.predicted, &times)?
            }
            None => None,
        };
        self.trace(step, outcome, forecast, start)?;
        if let Some(saver) = &mut self.saver {
            let saved = saver.advance(self.pipeline.comm(), times.end.save);
            self.note_saved(saved.map(|saved| saved.is_some()))?;
        }
        if update.is_skipped && self.pipeline.comm().rank() == 0 {
            let (step, loss, norm) = (step.plan.step, outcome.loss, update.gradient_norm);
            let skipped = self.optimizer.adamw().skipped();
            tracing::warn!(
                step,
                loss,
                norm,
                skipped,
                "a step is skipped: a loss or a gradient is not finite"
            );
        }
        let figures = (flops, [forecast.makespan_ns, replayed_ns]);
        self.report(step, (outcome, update), &times, figures, correction)
    }

    /// Reports a step that has just ended.
    ///
    /// - `flops`: model FLOPs in the step
    /// - `simulated_ns`: makespans with predicted and with measured pass times, in nanoseconds
    fn report(
        &mut self,
        step: &StepInputs<D>,
        (outcome, update): (&StepOutcome, &UpdateReport),
        times: &MeasuredTimes,
        (flops, simulated_ns): (u128, [u64; 2]),
        correction: Option<CorrectionReport>,
    ) -> Result<StepReport> {
        // From end to end, so that waits for data and saved checkpoints count.
        let (before, ended) = (self.ended, Instant::now());
        self.ended = ended;
        let seconds = ended.duration_since(before).as_secs_f64();
        let ranks = self.pipeline.comm().size() as f64;
        let limit = step.plan.launch_limit(&self.inputs.planner().model().launch_limits());
        Ok(StepReport {
            step: step.plan.step,
            loss: outcome.loss,
            gradient_norm: update.gradient_norm,
            learning_rate: update.learning_rate,
            is_skipped: update.is_skipped,
            samples: (step.plan.samples.len() - step.skipped.len()) as u64,
            skipped_samples: step.skipped.len() as u64,
            tokens: step.tokens,
            seconds,
            tokens_per_second: step.tokens as f64 / seconds,
            mfu: utilization(flops, seconds, self.peak_flops_per_second)?,
            pass_seconds: times.parts.pass_ns as f64 / 1e9 / ranks,
            bubble_fraction: self
                .is_pipeline
                .then(|| (times.parts.between_ns as f64 / 1e9 / (ranks * seconds)).min(1.0)),
            idle: times.parts.idle(ranks),
            predicted_seconds: simulated_ns[0] as f64 / 1e9,
            launch_limit_tokens: limit.map(|limit| limit.tokens),
            replayed_seconds: simulated_ns[1] as f64 / 1e9,
            pipeline_seconds: times.pipeline_ns as f64 / 1e9,
            communication_seconds: times.communication_ns[0] as f64 / 1e9 / ranks,
            exposed_communication_seconds: times.communication_ns[1] as f64 / 1e9 / ranks,
            correction,
            evaluation: None,
            start: self.start_report(step.plan.step)?,
        })
    }

    /// Ends the times of the start, if this is the first step.
    fn start_report(&mut self, step: u64) -> Result<Option<StartReport>> {
        let Some(start) = self.start.take() else { return Ok(None) };
        start.finish(step, self.pipeline.device(), &*self.pipeline.tensors()).map(Some)
    }

    /// Predicts the step's passes from the profile, or else from planned module times.
    fn predicted_passes(&self, step: &StepInputs<D>) -> Result<PassTimes> {
        let (job, planner) = (self.pipeline.job(), self.inputs.planner());
        match &self.options.pass_predictor {
            Some(predictor) => predictor.passes(job, planner, &step.plan, &step.predicted),
            None => planned_passes(job, &step.predicted),
        }
    }

    /// Returns the model FLOPs for the trained samples.
    fn flops(&self, step: &StepInputs<D>) -> Result<u128> {
        let planner = self.inputs.planner();
        let is_kept = |index: usize| step.skipped.iter().all(|skipped| skipped.index as usize != index);
        let shape = |index: usize| {
            let mut shape = SampleShape::default();
            planner.row(step.plan.samples[index]).read_shape(&mut shape);
            shape
        };
        let shapes: Vec<SampleShape> =
            (0..step.plan.samples.len()).filter(|&index| is_kept(index)).map(shape).collect();
        model_flops(planner.model(), &shapes)
    }

    fn trace(
        &mut self,
        step: &StepInputs<D>,
        outcome: &StepOutcome,
        forecast: &Forecast,
        start: Instant,
    ) -> Result<()> {
        let Some(trace) = &mut self.options.trace else { return Ok(()) };
        let actions: Vec<TracedAction> = outcome
            .timeline
            .iter()
            .map(|timed| TracedAction {
                action: self.pipeline.job().with_world_peer(timed.action),
                measured_ns: timed.start_ns..timed.end_ns,
                busy_ns: timed.busy_ns,
                predicted_ns: forecast.range(timed.action),
                samples: pass_samples(self.pipeline.job(), &step.predicted, timed.action),
            })
            .collect();
        let start_ns = start.duration_since(self.began).as_nanos() as u64;
        let rank = self.pipeline.comm().rank();
        trace.step(rank, step.plan.step, start_ns, &actions)?;
        trace.communication(rank, step.plan.step, start_ns, &outcome.communication)
    }

    /// Starts to save weights, optimizer state and loader state. Collective: every rank must call it. Later
    /// steps run while files are written. Does nothing without a checkpoint directory.
    ///
    /// A save whose files cannot be written, such as on a full disk, is abandoned and logged; earlier
    /// checkpoints remain, and [`finish_save`](Self::finish_save) fails unless a later save succeeds.
    ///
    /// # Errors
    /// Errors from [`CheckpointSaver::start`], except for files that cannot be written.
    pub fn save(&mut self) -> Result<()> {
        let begin = Instant::now();
        let saved = self.try_save();
        self.host.add(HostPart::Checkpoint, begin, Instant::now());
        saved
    }

    fn try_save(&mut self) -> Result<()> {
        self.finish_pending()?;
        let Some(saver) = &mut self.saver else { return Ok(()) };
        let state = match &self.ahead {
            // of this step, which is not taken yet
            Some(started) => self.inputs.planner().state(started.step.plan.step)?,
            None => self.inputs.state()?,
        };
        let loader = serde_json::to_value(state).unwrap_or_default();
        let corrections =
            self.corrector.as_ref().map_or_else(Vec::new, |corrector| corrector.tables().to_vec());
        let run =
            RunState { seed: self.options.seed, layout: self.options.layout.clone(), loader, corrections };
        let stages = self.pipeline.stages().map(|(_, stage)| stage);
        let started = saver.start(&self.optimizer, stages, &run);
        self.note_saved(started.map(|()| false))
    }

    /// Waits for a save in progress.
    fn finish_pending(&mut self) -> Result<()> {
        let Some(saver) = &mut self.saver else { return Ok(()) };
        let saved = saver.finish(self.pipeline.comm());
        self.note_saved(saved.map(|saved| saved.is_some()))
    }

    /// Records whether a save is complete or failed because files cannot be written (all ranks agree on
    /// this); returns any other error.
    fn note_saved(&mut self, saved: Result<bool>) -> Result<()> {
        match saved {
            Ok(true) => self.unsaved = None,
            Ok(false) => {}
            Err(error @ (Error::File { .. } | Error::NotSaved { .. })) => {
                let rank = self.pipeline.comm().rank();
                if rank == 0 || !matches!(error, Error::NotSaved { .. }) {
                    let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
                    let (step, reason) = (self.optimizer.steps(), format!("{error}{cause}"));
                    tracing::warn!(
                        step,
                        rank,
                        reason,
                        "a checkpoint cannot be written; training goes on, and the next save tries again"
                    );
                }
                self.unsaved = Some(error);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Waits for a checkpoint write in progress. Collective: every rank must call it.
    ///
    /// - returns the checkpoint directory
    ///
    /// # Errors
    /// The last save's failure, also if that save was abandoned earlier; see [`CheckpointSaver::finish`].
    pub fn finish_save(&mut self) -> Result<Option<PathBuf>> {
        let Some(saver) = &mut self.saver else { return Ok(None) };
        let saved = saver.finish(self.pipeline.comm())?;
        match self.unsaved.take().filter(|_| saved.is_none()) {
            Some(failure) => Err(failure),
            None => Ok(saved),
        }
    }

    /// Ends input preparation for steps that will not run. Collective: every rank must call it before any
    /// rank leaves the job.
    ///
    /// # Panics
    /// If the preparation panicked.
    pub fn end_inputs(&mut self) {
        if let Some(ahead) = self.ahead.take() {
            // communicators end once nothing is under way
            ahead.pending.wait();
        }
        self.inputs.end();
    }

    /// Returns why the run should stop after the last step, if any rank requested a stop; the same on all
    /// ranks.
    #[must_use]
    pub const fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// Ends the trace, if enabled.
    ///
    /// # Errors
    /// [`crate::Error::Trace`].
    pub fn finish(self) -> Result<()> {
        self.options.trace.map_or(Ok(()), |trace| trace.finish().map(drop))
    }

    /// Returns the number of steps taken, including those before a restored checkpoint.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Iterates over this rank's loaders, for metrics and skip logs.
    pub fn loaders(&self) -> impl Iterator<Item = &BalancedLoader> {
        self.inputs.loaders()
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

    /// Iterates over this rank's stages.
    pub fn stages(&self) -> impl Iterator<Item = &dyn dflop_models::Stage<D>> {
        self.pipeline.stages().map(|(_, stage)| stage)
    }
}

/// Returns the step plan indices for the samples in a forward pass.
fn pass_samples(job: &Job, predicted: &PredictedTimes, action: Action) -> Vec<u32> {
    let Action::Forward(part) = action else { return Vec::new() };
    let module = job.stages()[usize::from(part.stage)].module();
    let microbatches = predicted.samples().get(module);
    microbatches.and_then(|all| all.get(part.microbatch as usize)).cloned().unwrap_or_default()
}
