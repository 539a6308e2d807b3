//! Updates all weights in a job: gradient norm over all ranks, clipping, learning rate, `AdamW`.
//!
//! The kernels that an update needs are loaded before messages are posted, see
//! [`Runtime::prepare`](dflop_device::Runtime::prepare).

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_comm::{Comm, StepContext};
use dflop_device::ops::adamw::{AdamW, AdamWState, UpdateRange};
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::{Device, DeviceComm, Dtype, Lane, LateRead, Staged};
use dflop_models::Stage;
use dflop_models::weights::ParameterSpec;

use super::adamw::{AdamWOptimizer, AdamWSettings, LearningRate, ParameterRate};
use super::bucket_state::{Ownership, Precision};
use super::step_metrics::{Counting, StepMetrics};
use crate::error::{Error, Result};
use crate::pipeline::{DeviceTimes, PendingStep, StepOutcome};

/// Settings for the job optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobOptimizerSettings {
    /// Learning rate by step.
    pub learning_rate: LearningRate,
    /// `AdamW` settings.
    pub adamw: AdamWSettings,
    /// Maximum gradient norm over all parameters; larger gradients are scaled down. `None` for no limit.
    pub gradient_norm_max: Option<f64>,
    /// Maximum number of consecutive steps that are skipped because a loss or a gradient is not finite; the
    /// next such step ends the job.
    pub skip_nonfinite: u64,
}

impl JobOptimizerSettings {
    /// Creates settings with a learning rate, [`AdamWSettings::default`], a maximum gradient norm of 1, and
    /// no skipped steps.
    #[must_use]
    pub fn new(learning_rate: LearningRate) -> Self {
        let adamw = AdamWSettings::default();
        Self { learning_rate, adamw, gradient_norm_max: Some(1.0), skip_nonfinite: 0 }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`].
    pub fn check(&self) -> Result<()> {
        self.learning_rate.check()?;
        self.adamw.check()?;
        match self.gradient_norm_max {
            Some(norm) if norm.is_nan() || norm <= 0.0 => {
                let reason = format!("{norm} is not above 0");
                Err(Error::InvalidSetting { setting: "gradient_norm_max", reason })
            }
            _ => Ok(()),
        }
    }
}

/// Update report.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateReport {
    /// Step number, from 0.
    pub step: u64,
    /// Gradient norm over all parameters, before clipping; the same bits on all ranks.
    pub gradient_norm: f64,
    /// Learning rate in the step.
    pub learning_rate: f64,
    /// Whether the gradients were scaled down.
    pub is_clipped: bool,
    /// Whether nothing was updated, because a loss or a gradient is not finite.
    pub is_skipped: bool,
}

/// Part of the job optimizer on one rank.
///
/// It has a separate communicator, so that it does not borrow the pipeline while it updates pipeline stages.
pub struct JobOptimizer<D: Device> {
    pub(crate) settings: JobOptimizerSettings,
    pub(crate) adamw: AdamWOptimizer<D>,
    pub(crate) ownership: Ownership,
    pub(crate) comm: Arc<dyn Comm>,
    /// Number of consecutive skipped steps up to now.
    skipped_in_a_row: u64,
    /// Tensor communicator, once it is set or the device is known.
    tensors: Option<Arc<dyn DeviceComm<D>>>,
    /// Compute lane event after the last update.
    ended: Option<D::Event>,
}

/// An update that the device may not have computed yet.
pub(crate) struct StartedUpdate<D: Device> {
    /// `f64`: losses, squared gradient sums, then the gradient norm and factor.
    figures: LateRead,
    /// Number of losses.
    losses: usize,
    learning_rate: f64,
    /// Points of the compute lane before and behind the update.
    span: [D::Event; 2],
    /// Point behind the update before it, if there was one.
    before: Option<D::Event>,
}

/// Returns the outcome for a step whose update is complete.
fn outcome<D: Device>(
    step: &PendingStep<D>,
    losses: &[f64],
    report: UpdateReport,
) -> Result<(StepOutcome, UpdateReport)> {
    let outcome = if report.is_skipped { step.outcome_from_losses(losses) } else { step.outcome(losses)? };
    Ok((outcome, report))
}

impl<D: Device> JobOptimizer<D> {
    /// Creates an optimizer with step count 0; all ranks in `comm` call it.
    ///
    /// - `stages`: stages on this rank, in the order of later calls to [`update`](Self::update)
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a setting is invalid, [`Error::Comm`].
    pub fn new<'a, S: Stage<D> + ?Sized + 'a>(
        settings: JobOptimizerSettings,
        comm: &dyn Comm,
        stages: impl IntoIterator<Item = &'a S>,
    ) -> Result<Self> {
        settings.check()?;
        let stages: Vec<&S> = stages.into_iter().collect();
        prepare(stages.iter().copied(), settings.adamw.precision)?;
        let adamw = AdamWOptimizer::new(settings.adamw)?;
        let own = comm.split(StepContext::step(0, "split for the optimizer"), Some(0), comm.rank() as u64)?;
        let Some(comm) = own else {
            let reason = "expected a communicator with this rank, found none after a split".to_owned();
            return Err(Error::InvalidSetting { setting: "comm", reason });
        };
        let ownership = Ownership::agree(&*comm, stages)?;
        let (comm, skipped_in_a_row) = (Arc::from(comm), 0);
        Ok(Self { settings, adamw, ownership, comm, skipped_in_a_row, tensors: None, ended: None })
    }

    /// Divides the optimizer state over the stage replicas, so that each replica has the state for a part of
    /// the parameters (ZeRO stage 1); must be called before the first update. The weights have the same bits
    /// as without.
    ///
    /// An update starts to gather the weights that other replicas have updated, and does not wait for them:
    /// passes in the next step do, block by block ([`dflop_models::Parameters::wait_values`]).
    ///
    /// - `replicas`: replicas of every stage
    ///   ([`PipelineRank::replicas`](crate::pipeline::PipelineRank::replicas))
    #[must_use]
    pub fn shard_states(mut self, replicas: Vec<Option<Arc<dyn DeviceComm<D>>>>) -> Self {
        self.adamw.shard(replicas);
        self
    }

    /// Updates some parameters with a learning rate and a weight decay of their own, by name in checkpoints.
    #[must_use]
    pub fn parameter_rates(mut self, rates: BTreeMap<String, ParameterRate>) -> Self {
        self.adamw.set_rates(rates);
        self
    }

    /// Exchanges losses and norms over this communicator for all ranks
    /// ([`PipelineRank::tensors`](crate::pipeline::PipelineRank::tensors)). Default: through the host.
    #[must_use]
    pub fn exchange_over(mut self, comm: Arc<dyn DeviceComm<D>>) -> Self {
        self.tensors = Some(comm);
        self
    }

    /// Updates all parameters with the step gradients and sets the gradients to zero; all ranks call it.
    ///
    /// - `stages`: stages on this rank; gradients must be summed over replicas, complete or divided
    ///   ([`PipelineRank::shard_gradients`](crate::pipeline::PipelineRank::shard_gradients)), and for a tied
    ///   parameter on two stages over both stages
    ///
    /// # Errors
    /// [`Error::Gradient`] if a gradient is not finite and the step is not skipped: no rank has updated
    /// anything, and the job has ended; [`Error::Comm`], [`Error::Device`].
    pub fn update<'a, S: Stage<D> + ?Sized + 'a>(
        &mut self,
        stages: impl IntoIterator<Item = &'a mut S>,
    ) -> Result<UpdateReport> {
        let mut stages: Vec<&mut S> = stages.into_iter().collect();
        let started = self.start(None, &mut stages)?;
        Ok(self.finish(started, None, &stages)?.1)
    }

    /// Updates all parameters like [`update`](Self::update), and reads the step losses: the device is waited
    /// for once.
    ///
    /// # Errors
    /// Errors from [`update`](Self::update); [`dflop_models::Error::Loss`] if a loss is not finite, in which
    /// case no rank has updated anything either.
    pub fn update_step<'a, S: Stage<D> + ?Sized + 'a>(
        &mut self,
        step: &PendingStep<D>,
        stages: impl IntoIterator<Item = &'a mut S>,
    ) -> Result<(StepOutcome, UpdateReport)> {
        let mut stages: Vec<&mut S> = stages.into_iter().collect();
        let started = self.start(Some(step), &mut stages)?;
        let (losses, report) = self.finish(started, Some(step), &stages)?;
        outcome(step, &losses, report)
    }

    /// Starts [`update_step`](Self::update_step) without waiting for the device;
    /// [`finish_step`](Self::finish_step) waits.
    ///
    /// # Errors
    /// [`Error::Comm`], [`Error::Device`].
    pub(crate) fn start_step<'a, S: Stage<D> + ?Sized + 'a>(
        &mut self,
        step: &PendingStep<D>,
        stages: impl IntoIterator<Item = &'a mut S>,
    ) -> Result<StartedUpdate<D>> {
        self.start(Some(step), &mut stages.into_iter().collect::<Vec<_>>())
    }

    /// Waits for an update, and reads the step losses.
    ///
    /// # Errors
    /// Errors from [`update_step`](Self::update_step).
    pub(crate) fn finish_step<'a, S: Stage<D> + ?Sized + 'a>(
        &mut self,
        started: StartedUpdate<D>,
        step: &PendingStep<D>,
        stages: impl IntoIterator<Item = &'a mut S>,
    ) -> Result<(StepOutcome, UpdateReport, DeviceTimes)> {
        let stages: Vec<&mut S> = stages.into_iter().collect();
        let (span, before) = (started.span.clone(), started.before.clone());
        let (losses, report) = self.finish(started, Some(step), &stages)?;
        let times = step.device_times(before.as_ref(), &span);
        let (outcome, report) = outcome(step, &losses, report)?;
        Ok((outcome, report, times))
    }

    fn start<S: Stage<D> + ?Sized>(
        &mut self,
        pending: Option<&PendingStep<D>>,
        stages: &mut [&mut S],
    ) -> Result<StartedUpdate<D>> {
        let Some(device) = stages.first().map(|stage| stage.device().clone()) else {
            let reason = "expected at least one, found none".to_owned();
            return Err(Error::InvalidSetting { setting: "stages", reason });
        };
        let (before, begin) = (self.ended.clone(), device.mark(Lane::Compute)?);
        for stage in stages.iter_mut() {
            stage.parameters_mut().fold_shared_gradients(&device)?;
        }
        let step = self.adamw.steps();
        let comm = Arc::clone(&self.comm);
        let tensors = self.tensors.get_or_insert_with(|| Arc::new(Staged::new(device.clone(), comm)));
        // After the fold: the norm must include both uses of a shared parameter.
        let (ownership, replicas) = (&self.ownership, self.adamw.replicas());
        let counting = Counting { ownership, comm: &**tensors, replicas };
        let StepMetrics { values, losses } =
            StepMetrics::exchange(&device, stages, &counting, step, pending)?;
        let squares = losses..values.len();
        let mut clip = device.zeros_as(Dtype::F64, 2)?;
        device.clip_factor(&values, squares, self.settings.gradient_norm_max, &mut clip)?;
        let learning_rate = self.settings.learning_rate.at(step);
        self.adamw.start(stages, learning_rate, &clip)?;
        for stage in stages.iter_mut() {
            stage.parameters_mut().zero_gradients(&device)?;
        }
        let mut figures = device.zeros_as(Dtype::F64, values.len() + 2)?;
        device.copy_ranges(&[CopyRange { from: 0, to: 0, len: values.len() }], &values, &mut figures)?;
        device.copy_ranges(&[CopyRange { from: 0, to: values.len(), len: 2 }], &clip, &mut figures)?;
        let end = device.mark(Lane::Compute)?;
        self.ended = Some(end.clone());
        // before later work is queued, which it does not wait for
        let figures = device.read_later(&figures)?;
        Ok(StartedUpdate { figures, losses, learning_rate, span: [begin, end], before })
    }

    fn finish<S: Stage<D> + ?Sized>(
        &mut self,
        started: StartedUpdate<D>,
        pending: Option<&PendingStep<D>>,
        stages: &[&mut S],
    ) -> Result<(Vec<f64>, UpdateReport)> {
        let StartedUpdate { figures, losses, learning_rate, .. } = started;
        let step = self.adamw.steps();
        // The only place where a training step waits for the device.
        let mut all = figures()?;
        let (factor, norm) = (all.pop().unwrap_or(f64::NAN), all.pop().unwrap_or(f64::NAN));
        // The figures are the same on all ranks, and so is the decision.
        let is_finite = all.iter().all(|figure| figure.is_finite());
        let is_skipped = !is_finite && self.skipped_in_a_row < self.settings.skip_nonfinite;
        let report =
            UpdateReport { step, gradient_norm: norm, learning_rate, is_clipped: factor < 1.0, is_skipped };
        let (losses, squares) = all.split_at(losses);
        if is_skipped {
            self.adamw.skip();
            self.skipped_in_a_row += 1;
            return Ok((losses.to_vec(), report));
        }
        if let Some(pending) = pending.filter(|_| losses.iter().any(|loss| !loss.is_finite())) {
            pending.outcome(losses)?;
        }
        if let Some(index) = squares.iter().position(|square| !square.is_finite()) {
            return Err(self.not_finite(stages, index, squares[index]));
        }
        self.adamw.confirm();
        self.skipped_in_a_row = 0;
        Ok((losses.to_vec(), report))
    }

    /// Returns the error for a gradient that is not finite: the owner ends the job with it, all other ranks
    /// get that failure.
    fn not_finite(&self, stages: &[&mut (impl Stage<D> + ?Sized)], index: usize, square: f64) -> Error {
        let at = StepContext::step(self.adamw.steps(), "norm of gradients");
        for stage in stages {
            let of_owner = |spec: &&ParameterSpec| self.ownership.own(spec) == Some(index);
            if let Some(spec) = stage.parameters().specs().iter().find(of_owner) {
                let (stage, tensor, norm) = (stage.name().to_owned(), spec.name.clone(), square.sqrt());
                let error = Error::Gradient { stage, tensor, norm };
                drop(self.comm.abort(at, &error.to_string()));
                return error;
            }
        }
        match self.comm.barrier(at) {
            Err(error) => error.into(),
            Ok(()) => Error::Gradient { stage: String::new(), tensor: String::new(), norm: square.sqrt() },
        }
    }

    /// Returns the number of steps taken, which equals the number of the next step.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.adamw.steps()
    }

    /// Measures the time before the next update from an event on, after device work that no step contains.
    pub(crate) fn continue_from(&mut self, event: D::Event) {
        self.ended = Some(event);
    }

    /// Returns the settings.
    #[must_use]
    pub const fn settings(&self) -> &JobOptimizerSettings {
        &self.settings
    }

    /// Returns the parameter ownership.
    #[must_use]
    pub const fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    /// Returns the `AdamW` optimizer for this rank's stages.
    #[must_use]
    pub const fn adamw(&self) -> &AdamWOptimizer<D> {
        &self.adamw
    }
}

/// Number of elements in the tensors that operations are tried on.
const ELEMENTS: usize = 8;

/// Runs the update operations on a few elements with the types that stages have.
pub(super) fn prepare<'a, D: Device, S: Stage<D> + ?Sized + 'a>(
    stages: impl IntoIterator<Item = &'a S>,
    precision: Precision,
) -> Result<()> {
    let mut types = Vec::new();
    let mut device = None;
    for stage in stages {
        device.get_or_insert_with(|| stage.device().clone());
        for bucket in stage.parameters().buckets() {
            let parts = bucket.values().parts().iter().zip(bucket.gradients.parts());
            types.extend(parts.map(|(values, gradients)| (values.dtype(), gradients.dtype())));
        }
    }
    let Some(device) = device else { return Ok(()) };
    types.dedup();
    device.prepare(|| types.iter().try_for_each(|&types| update(&device, types, precision)))
}

fn update<D: Device>(
    device: &D,
    (weights, gradients): (Dtype, Dtype),
    precision: Precision,
) -> Result<(), Error> {
    let zeros = |dtype| device.zeros_as(dtype, ELEMENTS);
    let (mut values, mut gradient, mut master) = (zeros(weights)?, zeros(gradients)?, zeros(Dtype::F32)?);
    let (mut mean, mut square, figures) = (zeros(Dtype::F32)?, zeros(Dtype::F32)?, zeros(Dtype::F64)?);
    let (mut squares, mut clip) = (zeros(Dtype::F64)?, device.zeros_as(Dtype::F64, 2)?);
    device.sums_of_squares(&[(&gradient, 0)], &mut squares)?;
    device.clip_factor(&figures, 0..ELEMENTS, None, &mut clip)?;
    let place = CopyRange { from: 0, to: 0, len: 1 };
    let mut copied = zeros(weights)?;
    device.copy_ranges(&[place], &values, &mut copied)?;
    device.copy_ranges(&[place], &mean, &mut master)?;
    device.copy_ranges(&[place], &figures, &mut squares)?;
    device.add(&copied, &mut master)?;
    device.add(&zeros(gradients)?, &mut gradient)?;
    let adamw = AdamW {
        learning_rate: 0.0,
        beta1: 0.9,
        beta2: 0.9,
        epsilon: 1.0,
        weight_decay: 0.0,
        step: 1,
        gradient_scale: 1.0,
    };
    let ranges = [UpdateRange { elements: 0..ELEMENTS, learning_rate: 0.0, weight_decay: 0.0 }];
    let master = (precision == Precision::Bf16).then_some(&mut master);
    let state = AdamWState { master, mean: &mut mean, square: &mut square };
    Ok(device.adamw(&adamw, &ranges, &clip, &mut values, &gradient, state)?)
}
