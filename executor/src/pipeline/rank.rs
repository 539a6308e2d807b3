//! One rank of a job.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_balancer::schedule::Action;

use super::edge::View;
use super::groups::Groups;
use super::job::Job;
use super::ranks::Place;
use super::run::{Ran, Run};
use super::timeline::Timed;
use super::topology::Topology;
use super::work::StepWork;
use crate::comm::{Comm, StepContext};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stage::Stage;

/// Gradients of a collective: 4 MiB.
const BUCKET_ELEMENTS: usize = 1 << 20;

/// What a step gave.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Mean loss over the target tokens of the step; the same bits on all ranks.
    pub loss: f64,
    /// When each action of this rank ran, in order.
    pub timeline: Vec<Timed>,
}

/// One rank of a job: its stages, its communicators.
pub struct Pipeline<D: Device> {
    comm: Box<dyn Comm>,
    job: Arc<Job>,
    place: Place,
    groups: Groups,
    stages: BTreeMap<u16, Stage<D>>,
    is_plan_checked: bool,
    bucket_elements: usize,
    /// Of the last number of rounds.
    schedule: Option<(usize, Topology, Vec<Action>)>,
}

impl<D: Device> Pipeline<D> {
    /// Joins the ranks of a job; all of them call it together.
    ///
    /// - `stages`: those of [`Job::ranges`] for this rank, in order
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the world or the stages are not those of the job, which ends the job on all ranks;
    /// [`Error::Comm`] if another rank failed.
    pub fn new(comm: Box<dyn Comm>, job: Arc<Job>, stages: Vec<Stage<D>>) -> Result<Self> {
        let checked = check(comm.as_ref(), &job, &stages);
        let place =
            checked.map_err(|error| end(comm.as_ref(), StepContext::step(0, "join the job"), error))?;
        let groups = Groups::split(&job, &place, comm.as_ref())?;
        let stages = place.stages.iter().copied().zip(stages).collect();
        Ok(Self {
            comm,
            job,
            place,
            groups,
            stages,
            is_plan_checked: false,
            bucket_elements: BUCKET_ELEMENTS,
            schedule: None,
        })
    }

    /// Sets whether ranks compare digests of their plans before every step. Default: no.
    #[must_use]
    pub fn check_plans(mut self, is_checked: bool) -> Self {
        self.is_plan_checked = is_checked;
        self
    }

    /// Sets how many gradients are added up over replicas in one collective; a larger tensor has one of its own.
    /// Default: 2^20, 4 MiB. The same on all ranks.
    #[must_use]
    pub fn bucket_elements(mut self, elements: usize) -> Self {
        self.bucket_elements = elements;
        self
    }

    /// Runs forward and backward of one global batch and adds up gradients over replicas.
    ///
    /// Gradients of a step before are discarded. Those of this step, of the mean loss over its target tokens, are left in the
    /// stages' parameters, the same on all replicas.
    ///
    /// # Errors
    /// [`Error::Plan`] if contexts do not fit the plan; those of stages, as [`Error::Loss`]; [`Error::Comm`]. Whatever fails
    /// here ends the job on all ranks; others get [`Error::Comm`] that says what it was.
    pub fn step(&mut self, step: &StepWork<D>) -> Result<StepOutcome> {
        let mut at = StepContext::step(step.plan.step(), "begin the step");
        let done = self.run(step, &mut at);
        done.map_err(|error| end(self.comm.as_ref(), at, error))
    }

    fn run(&mut self, work: &StepWork<D>, at: &mut StepContext) -> Result<StepOutcome> {
        let plan = &work.plan;
        if self.is_plan_checked {
            self.comm.check_digest(plan.step(), plan.digest(&self.job))?;
        }
        work.check(&self.job, &self.place)?;
        for stage in self.stages.values_mut() {
            stage.start_step(plan.step());
            stage.forget();
            let device = stage.device().clone();
            stage.parameters_mut().zero_gradients(&device)?;
        }
        let (_, topology, list) = match self.schedule.take() {
            Some(made) if made.0 == plan.rounds() => self.schedule.insert(made),
            _ => {
                let topology = Topology::new(&self.job, plan.rounds())?;
                let list = topology.list(self.place.pipeline_rank)?;
                self.schedule.insert((plan.rounds(), topology, list))
            }
        };
        let view = View { job: &self.job, topology, place: &self.place, comm: self.comm.as_ref(), work };
        let Ran { losses, timeline } =
            Run::new(view, &self.groups, self.bucket_elements, &mut self.stages).list(list, at)?;
        let loss = self.mean_loss(work, losses, *at)?;
        Ok(StepOutcome { loss, timeline })
    }

    /// The loss of the whole step. Every microbatch is brought by one rank, so the sum has the same bits for any layout.
    fn mean_loss(&self, work: &StepWork<D>, mut losses: Vec<f64>, at: StepContext) -> Result<f64> {
        if self.place.tp_rank > 0 {
            losses.fill(0.0);
        }
        self.comm.all_reduce(at.action("add up losses"), losses.as_mut_slice().into())?;
        Ok(losses.iter().sum::<f64>() * work.plan.loss_scale())
    }

    /// Walks over the stages of this rank, in order.
    pub fn stages_mut(&mut self) -> impl Iterator<Item = &mut Stage<D>> {
        self.stages.values_mut()
    }

    /// Walks over the stages of this rank with their numbers in the job, in order.
    pub fn stages(&self) -> impl Iterator<Item = (u16, &Stage<D>)> {
        self.stages.iter().map(|(&number, stage)| (number, stage))
    }

    /// Returns the communicator of all ranks.
    #[must_use]
    pub fn comm(&self) -> &dyn Comm {
        self.comm.as_ref()
    }

    /// Returns what this rank holds.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Returns the job.
    #[must_use]
    pub fn job(&self) -> &Arc<Job> {
        &self.job
    }
}

/// Ends the job on all ranks, unless it is over.
fn end(comm: &dyn Comm, at: StepContext, error: Error) -> Error {
    let is_over = matches!(&error, Error::Comm(error) if error.failure().is_some());
    if !is_over {
        // The caller gets the reason itself; the failure is for the other ranks.
        drop(comm.abort(at, &error.to_string()));
    }
    error
}

fn check<D: Device>(comm: &dyn Comm, job: &Job, stages: &[Stage<D>]) -> Result<Place> {
    if comm.size() != job.world_size() {
        let problem = format!("is {}, found {} ranks", job.world_size(), comm.size());
        return Err(Error::InvalidSetting { setting: "world size", reason: problem });
    }
    let place = job.place(comm.rank())?;
    let refuse = |problem| Err(Error::InvalidSetting { setting: "stages", reason: problem });
    if stages.len() != place.stages.len() {
        return refuse(format!("of rank {} are {:?}, found {}", comm.rank(), place.stages, stages.len()));
    }
    for (&number, stage) in place.stages.iter().zip(stages) {
        if job.stages[usize::from(number)].has_backward != stage.has_backward() {
            return refuse(format!(
                "of rank {}: {} is trained otherwise than stage {number}",
                comm.rank(),
                stage.name()
            ));
        }
    }
    Ok(place)
}
