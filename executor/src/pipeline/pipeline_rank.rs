//! Holds rank stages and communicators, runs steps, and hands out results that the device may not have
//! computed yet.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflop_balancer::schedule::Action;
use dflop_comm::{Comm, StepContext};
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::{Device, DeviceComm, Dtype, Lane, Staged, Tensor};
use dflop_models::Stage;

use super::Preparation;
use super::gradient_reduction::GradientGroups;
use super::job::Job;
use super::message_check::MessageCheck;
use super::rank_step::RankStep;
use super::step_execution::{StepExecution, StepResult};
use super::step_order::{LaneOrder, action_lists};
use super::timeline::{Clock, TimedAction, TimedCommunication};
use super::topology::{RankRole, Topology};
use super::transfer_buffers::{Passes, StepView};
use crate::error::{Error, Result};

/// Step result.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Mean loss over the target tokens in the step; the same bits on all ranks.
    pub loss: f64,
    /// Start and end of each action on this rank, in order.
    pub timeline: Vec<TimedAction>,
    /// Communication on this rank that passes waited for or ended before, by lane.
    pub communication: Vec<TimedCommunication>,
}

/// Rank in a job: stages and communicators.
pub struct PipelineRank<D: Device> {
    device: D,
    comm: Arc<dyn DeviceComm<D>>,
    job: Arc<Job>,
    roles: Vec<RankRole>,
    groups: GradientGroups<D>,
    stages: BTreeMap<u16, Box<dyn Stage<D>>>,
    preparation: Preparation,
    is_plan_checked: bool,
    /// Whether each replica gets only part of the gradients.
    is_divided: bool,
    /// Schedule for the last step, reused while the number of rounds stays the same.
    schedule: Option<RankSchedule>,
}

/// Work order on a rank in steps with a number of rounds.
struct RankSchedule {
    rounds: usize,
    topology: Topology,
    list: Vec<Action>,
    lane_order: LaneOrder,
    /// Messages between all ranks, if messages are matched by order.
    message_check: Option<MessageCheck>,
}

impl<D: Device> PipelineRank<D> {
    /// Joins the ranks in a job; all ranks call it together.
    ///
    /// Tensors move through the host; [`over`](Self::over) uses a different transport.
    ///
    /// - `stages`: one for each range in [`Job::ranges`] for all roles of this rank
    ///   ([`JobLayout::roles`](super::JobLayout::roles)), in order: built from the range
    ///   ([`build_stages`](crate::train)), or any other [`Stage`] that accepts the same rows and returns rows
    ///   of the same size, or a loss if it is the last stage
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the number of ranks or the stages do not match the job, which ends the
    /// job on all ranks; [`Error::Comm`] if another rank failed.
    pub fn new(comm: Box<dyn Comm>, job: Arc<Job>, stages: Vec<Box<dyn Stage<D>>>) -> Result<Self> {
        let roles = check(&*comm, &job, &stages)?;
        let device = stages[0].device().clone();
        Self::join(Arc::new(Staged::new(device, Arc::from(comm))), job, roles, stages)
    }

    /// Joins the ranks in a job like [`new`](Self::new), over a tensor communicator.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn over(comm: Arc<dyn DeviceComm<D>>, job: Arc<Job>, stages: Vec<Box<dyn Stage<D>>>) -> Result<Self> {
        let roles = check(comm.host(), &job, &stages)?;
        Self::join(comm, job, roles, stages)
    }

    fn join(
        comm: Arc<dyn DeviceComm<D>>,
        job: Arc<Job>,
        roles: Vec<RankRole>,
        stages: Vec<Box<dyn Stage<D>>>,
    ) -> Result<Self> {
        let device = stages[0].device().clone();
        let groups = GradientGroups::split(&job, &roles, &*comm)?;
        let stages = roles.iter().flat_map(|role| &role.stages).copied().zip(stages).collect();
        Ok(Self {
            device,
            comm,
            job,
            roles,
            groups,
            stages,
            preparation: Preparation::default(),
            is_plan_checked: false,
            is_divided: false,
            schedule: None,
        })
    }

    /// Sets whether ranks compare plan digests before every step. Default: no.
    #[must_use]
    pub fn check_plans(mut self, is_checked: bool) -> Self {
        self.is_plan_checked = is_checked;
        self
    }

    /// Divides the gradients over the stage replicas, so that each replica gets the sums that an optimizer
    /// with shared states needs: half the bytes of complete sums. Default: all replicas get complete
    /// gradients. The optimizer must share its states
    /// ([`JobOptimizer::shard_states`](crate::optimizer::JobOptimizer::shard_states)).
    ///
    /// The [`summed`](dflop_models::ParameterBucket::summed) elements of a bucket are complete after a step.
    /// Gradients have the same bits as without; the gradient norm may differ by `f32` rounding, because
    /// squares are added in a different order, and so may weights whose gradients are clipped.
    #[must_use]
    pub fn shard_gradients(mut self) -> Self {
        self.is_divided = true;
        self
    }

    /// Runs forward and backward for a global batch and sums gradients over replicas.
    ///
    /// Gradients from the previous step are discarded. The gradients of the mean loss over the target tokens
    /// in this step are left in the stage parameters: complete and the same on all replicas, or divided over
    /// them ([`shard_gradients`](Self::shard_gradients)).
    ///
    /// # Errors
    /// [`Error::Plan`] if contexts do not match the plan; stage errors; [`dflop_models::Error::Loss`] if a
    /// loss is not finite; [`Error::Comm`]. A failure on this rank ends the job on all ranks; the other ranks
    /// get an [`Error::Comm`] with the same text.
    pub fn step(&mut self, step: &RankStep<D>) -> Result<StepOutcome> {
        self.start(step)?.read()
    }

    /// Runs forward only for a global batch; weights do not change. All ranks call it, and not between
    /// [`start`](Self::start) and the update, because gradients are not kept.
    ///
    /// A rank runs the actions of a training step without backward passes, gradient messages and sums.
    ///
    /// - returns the sum of the losses over all target tokens in the step; the same bits on all ranks; not
    ///   finite if the loss of a microbatch is not
    ///
    /// # Errors
    /// Errors from [`step`](Self::step), except for losses that are not finite.
    pub fn evaluate(&mut self, step: &RankStep<D>) -> Result<f64> {
        let mut at = StepContext::step(step.plan.step(), "start the evaluation");
        let losses = self.run(step, Passes::Forward, &mut at).and_then(|pending| pending.read_losses());
        let losses = losses.map_err(|error| end(self.comm(), at, error))?;
        Ok(losses.iter().sum())
    }

    /// Starts [`step`](Self::step) without waiting for the device: an optimizer that consumes the result
    /// waits once for both ([`JobOptimizer::update_step`](crate::optimizer::JobOptimizer::update_step)).
    ///
    /// # Errors
    /// Same as [`step`](Self::step), except for losses, which are not known yet.
    pub fn start(&mut self, step: &RankStep<D>) -> Result<PendingStep<D>> {
        let mut at = StepContext::step(step.plan.step(), "start the step");
        let done = self.run(step, Passes::All, &mut at);
        done.map_err(|error| end(self.comm(), at, error))
    }

    fn run(
        &mut self,
        rank_step: &RankStep<D>,
        passes: Passes,
        at: &mut StepContext,
    ) -> Result<PendingStep<D>> {
        let plan = &rank_step.plan;
        if self.is_plan_checked {
            self.comm().check_digest(plan.step(), plan.digest(&self.job))?;
        }
        rank_step.check(&self.job, &self.roles)?;
        let (queued, begin) = (Instant::now(), self.device.mark(Lane::Compute)?);
        for stage in self.stages.values_mut() {
            stage.start_step(plan.step());
            // A failed step may have left activations.
            stage.forget();
            stage.parameters_mut().zero_gradients(&self.device)?;
        }
        let rank = self.comm.host().rank();
        let schedule = match self.schedule.take() {
            Some(made) if made.rounds == plan.rounds() => made,
            _ => {
                let bytes = self.comm.is_matched_by_order().then(|| self.device.storage().bytes());
                RankSchedule::new(&self.job, plan.rounds(), (rank, &self.roles), bytes)?
            }
        };
        let RankSchedule { topology, list, lane_order, message_check, .. } = self.schedule.insert(schedule);
        let view = StepView {
            job: &self.job,
            topology,
            lane_order,
            rank,
            roles: &self.roles,
            comm: &*self.comm,
            rank_step,
            passes,
        };
        if let Some(check) = message_check {
            check.run(&view)?;
        }
        self.preparation.run(&self.device, &view, list, &mut self.stages)?;
        let StepResult { losses, clock } =
            StepExecution::new(self.device.clone(), view, (&self.groups, self.is_divided), &mut self.stages)?
                .execute(list, at)?;
        let span = [begin, self.device.mark(Lane::Compute)?];
        // The last stage computes the losses.
        let stage = self.stages.values().last().map_or_else(String::new, |stage| stage.name().to_owned());
        Ok(PendingStep {
            device: self.device.clone(),
            comm: Arc::clone(&self.comm),
            stage,
            step: plan.step(),
            microbatches: plan.microbatches().len(),
            loss_scale: plan.loss_scale(),
            // All TP ranks in a stage compute the same loss; the first rank counts.
            is_counted: self.roles.last().is_some_and(|role| role.tp_rank == 0),
            losses,
            clock,
            queued,
            span,
        })
    }

    /// Iterates over the stages on this rank, in order.
    pub fn stages_mut(&mut self) -> impl Iterator<Item = &mut (dyn Stage<D> + 'static)> {
        self.stages.values_mut().map(|stage| &mut **stage)
    }

    /// Iterates over the stages on this rank with their numbers in the job, in order.
    pub fn stages(&self) -> impl Iterator<Item = (u16, &dyn Stage<D>)> {
        self.stages.iter().map(|(&number, stage)| (number, &**stage))
    }

    /// Returns the replicas of every stage on this rank, in order; `None` for a stage with a single replica.
    /// An optimizer divides the state over them
    /// ([`JobOptimizer::shard_states`](crate::optimizer::JobOptimizer::shard_states)).
    #[must_use]
    pub fn replicas(&self) -> Vec<Option<Arc<dyn DeviceComm<D>>>> {
        self.stages.keys().map(|&stage| self.groups.shared_replicas(stage)).collect()
    }

    /// Returns the shared tensor communicator for all ranks.
    #[must_use]
    pub fn tensors(&self) -> Arc<dyn DeviceComm<D>> {
        Arc::clone(&self.comm)
    }

    /// Returns the device that stages compute on.
    pub(crate) fn device(&self) -> &D {
        &self.device
    }

    /// Returns the communicator for all ranks.
    #[must_use]
    pub fn comm(&self) -> &dyn Comm {
        self.comm.host()
    }

    /// Returns the roles of this rank, one for each module of which the rank has stages.
    #[must_use]
    pub fn roles(&self) -> &[RankRole] {
        &self.roles
    }

    /// Returns the job.
    #[must_use]
    pub fn job(&self) -> &Arc<Job> {
        &self.job
    }
}

impl<D: Device> Drop for PipelineRank<D> {
    /// Waits for the weights that replicas gather: they need this rank until then.
    fn drop(&mut self) {
        for stage in self.stages.values() {
            // The job has ended if this fails, and nobody needs the weights.
            let _ = stage.parameters().wait_all_values();
        }
    }
}

impl RankSchedule {
    /// - `matched_bytes`: size of a row element in bytes, if messages are matched by order
    fn new(
        job: &Job,
        rounds: usize,
        (rank, roles): (usize, &[RankRole]),
        matched_bytes: Option<usize>,
    ) -> Result<Self> {
        let topology = Topology::new(job, rounds)?;
        let list = action_lists(job, &topology, &[rank])?.swap_remove(0);
        let mut lane_order = LaneOrder::new(job, &topology, (rank, roles), &list)?;
        if matched_bytes.is_some() {
            lane_order = lane_order.with_step_order(job, &topology, rank)?;
        }
        let message_check =
            matched_bytes.map(|bytes| MessageCheck::new(job, &topology, bytes)).transpose()?;
        Ok(Self { rounds, topology, list, lane_order, message_check })
    }
}

/// Ends the job on all ranks, unless it has ended already.
pub(super) fn end(comm: &dyn Comm, at: StepContext, error: Error) -> Error {
    let is_over = matches!(&error, Error::Comm(error) if error.failure().is_some());
    if !is_over {
        // The caller gets the error itself; the failure message is for the other ranks.
        drop(comm.abort(at, &error.to_string()));
    }
    error
}

/// Returns the roles of a rank, or ends the job if the stages do not match them.
fn check<D: Device>(comm: &dyn Comm, job: &Job, stages: &[Box<dyn Stage<D>>]) -> Result<Vec<RankRole>> {
    let checked = checked_roles(comm, job, stages);
    checked.map_err(|error| end(comm, StepContext::step(0, "join the job"), error))
}

fn checked_roles<D: Device>(
    comm: &dyn Comm,
    job: &Job,
    stages: &[Box<dyn Stage<D>>],
) -> Result<Vec<RankRole>> {
    if comm.size() != job.world_size() {
        let problem = format!("expected {} ranks, found {}", job.world_size(), comm.size());
        return Err(Error::InvalidSetting { setting: "world size", reason: problem });
    }
    let roles = job.roles(comm.rank())?;
    let numbers: Vec<u16> = roles.iter().flat_map(|role| &role.stages).copied().collect();
    let refuse = |problem| Err(Error::InvalidSetting { setting: "stages", reason: problem });
    if stages.is_empty() || stages.len() != numbers.len() {
        return refuse(format!(
            "expected {numbers:?} on rank {}, found {} stages",
            comm.rank(),
            stages.len()
        ));
    }
    for (&number, stage) in numbers.iter().zip(stages) {
        if job.stages[usize::from(number)].has_backward != stage.has_backward() {
            return refuse(format!(
                "on rank {}, {} and stage {number} differ in what is trained",
                comm.rank(),
                stage.name()
            ));
        }
        // The rank with the second copy waits for this copy's gradient.
        let is_end = job.llm_ends().is_some_and(|ends| ends.contains(&number));
        let has = |name: &String| {
            stage.parameters().specs().iter().any(|spec| spec.is_trained && spec.name == *name)
        };
        if let Some(tied) = job.tied.iter().find(|&name| is_end && !has(name)) {
            return refuse(format!(
                "on rank {}, {} lacks `{tied}`, or does not train it; stage {number} shares it with another one",
                comm.rank(),
                stage.name()
            ));
        }
    }
    Ok(roles)
}

/// Step whose losses are on the device.
pub struct PendingStep<D: Device> {
    pub(super) device: D,
    pub(super) comm: Arc<dyn DeviceComm<D>>,
    /// Name of the last stage on this rank, for errors.
    pub(super) stage: String,
    pub(super) step: u64,
    pub(super) microbatches: usize,
    pub(super) loss_scale: f64,
    /// Whether the losses on this rank count; false if another tensor-parallel rank has the same losses.
    pub(super) is_counted: bool,
    /// Losses of the microbatches whose loss this rank computes.
    pub(super) losses: Vec<(u32, Tensor<D>)>,
    pub(super) clock: Clock<D>,
    /// Time at which the first work in the step was queued.
    pub(super) queued: Instant,
    /// Compute lane events before the first work in the step and after the last pass and sum.
    pub(super) span: [D::Event; 2],
}

/// Step times on a device, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "units come last")]
pub(crate) struct DeviceTimes {
    /// Time from the last work in the previous step to the first work in this step; `None` for a first step.
    pub(crate) gap_ns: Option<u64>,
    /// Time from the first work in the step to the end of the passes and communication.
    pub(crate) passes_ns: u64,
    /// Time from there to the first work in the update.
    pub(crate) late_ns: u64,
    /// Time from the end of passes and communication to the end of the update.
    pub(crate) update_ns: u64,
}

impl DeviceTimes {
    /// Time from the first work in the step to the end of the update.
    pub(crate) const fn total(self) -> Duration {
        Duration::from_nanos(self.passes_ns + self.late_ns + self.update_ns)
    }
}

impl<D: Device> PendingStep<D> {
    /// Returns the number of microbatches in the step, each of which has a loss.
    #[must_use]
    pub const fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Writes the losses computed on this rank to the first elements in `figures`, `f64`, which are zero.
    /// Every microbatch comes from one rank, so the sum over ranks is exact.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn write_losses(&self, figures: &mut Tensor<D>) -> Result<()> {
        for (microbatch, loss) in self.losses.iter().filter(|_| self.is_counted) {
            let place = CopyRange { from: 0, to: *microbatch as usize, len: 1 };
            self.device.copy_ranges(&[place], loss, figures)?;
        }
        Ok(())
    }

    /// Returns the step outcome from the losses of all microbatches, after the device has completed all work.
    ///
    /// # Errors
    /// [`dflop_models::Error::Loss`] on the ranks that computed a loss that is not finite, which ends the
    /// job; [`crate::Error::Comm`] on all other ranks.
    pub fn outcome(&self, losses: &[f64]) -> Result<StepOutcome> {
        let at = StepContext::step(self.step, "add up losses");
        if let Some(microbatch) = losses.iter().position(|loss| !loss.is_finite()) {
            if self.losses.iter().any(|&(own, _)| own as usize == microbatch) {
                let (stage, loss) = (self.stage.clone(), losses[microbatch]);
                let error = dflop_models::Error::Loss { stage, microbatch, loss };
                return Err(end(self.comm.host(), at, error.into()));
            }
            // The rank that computed the loss ends the job.
            self.comm.host().barrier(at)?;
        }
        Ok(self.outcome_from_losses(losses))
    }

    /// Returns the time at which the first work in the step was queued.
    pub(crate) const fn queued(&self) -> Instant {
        self.queued
    }

    /// Returns the device times of the step, after the device has completed all work.
    ///
    /// - `before`: point after the previous step's update
    /// - `update`: points before and after this step's update
    pub(crate) fn device_times(&self, before: Option<&D::Event>, update: &[D::Event; 2]) -> DeviceTimes {
        let between =
            |from: Option<&D::Event>, to: &D::Event| u64::try_from(self.device.elapsed_ns(from?, to)?).ok();
        let ([begin, end], [updating, updated]) = (&self.span, update);
        DeviceTimes {
            gap_ns: between(before, begin),
            passes_ns: between(Some(begin), end).unwrap_or(0),
            late_ns: between(Some(end), updating).unwrap_or(0),
            update_ns: between(Some(updating), updated).unwrap_or(0),
        }
    }

    /// Returns the step outcome from any losses, which need not be finite.
    pub(crate) fn outcome_from_losses(&self, losses: &[f64]) -> StepOutcome {
        let loss = losses.iter().sum::<f64>() * self.loss_scale;
        let timeline = self.clock.timeline(&self.device);
        StepOutcome { loss, timeline, communication: self.clock.communication(&self.device) }
    }

    /// Waits until the device has done all work, regardless of success.
    pub(crate) fn wait(&self) {
        let _ = self.device.zeros_as(Dtype::F64, 1).and_then(|zero| self.device.read(&zero));
    }

    /// Adds up the losses on all ranks and waits for the device; all ranks call it.
    ///
    /// # Errors
    /// Same as [`outcome`](Self::outcome).
    pub fn read(self) -> Result<StepOutcome> {
        let losses = self.read_losses()?;
        self.outcome(&losses)
    }

    /// Adds up the losses on all ranks and waits for the device; all ranks call it.
    fn read_losses(&self) -> Result<Vec<f64>> {
        let at = StepContext::step(self.step, "add up losses");
        let mut figures = self.device.zeros_as(Dtype::F64, self.microbatches)?;
        self.write_losses(&mut figures)?;
        self.comm.all_reduce(at, &mut figures)?;
        Ok(self.device.read(&figures)?)
    }
}
