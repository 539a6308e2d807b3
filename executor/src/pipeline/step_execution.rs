//! Executes an action list over the stages of a rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_balancer::schedule::{Action, Part};

use super::activation_transfer::{Flow, StepView};
use super::gradient_groups::GradientGroups;
use super::gradient_reduction::GradientReduction;
use super::timeline::{Clock, TimedAction, cpu_timed};
use super::transfer_buffers::TransferBuffers;
use crate::error::{Error, Result};
use dflop_comm::StepContext;
use dflop_device::Device;
use dflop_models::{BlockOutput, Parameters, Stage};

/// Execution of one step on one rank.
pub(super) struct StepExecution<'a, D: Device> {
    view: StepView<'a, D>,
    stages: &'a mut BTreeMap<u16, Stage<D>>,
    transfers: TransferBuffers<D>,
    reduction: GradientReduction<'a>,
    /// Microbatch of the last backward pass of every stage.
    last_backward: BTreeMap<u16, u32>,
    /// Losses of the microbatches whose loss this rank computes; 0 for all others.
    losses: Vec<f64>,
}

/// Results of a rank after its action list.
pub(super) struct StepResult {
    /// `[microbatches]`
    pub(super) losses: Vec<f64>,
    pub(super) timeline: Vec<TimedAction>,
}

impl<'a, D: Device> StepExecution<'a, D> {
    pub(super) fn new(
        view: StepView<'a, D>,
        groups: &'a GradientGroups,
        bucket_elements: usize,
        stages: &'a mut BTreeMap<u16, Stage<D>>,
    ) -> Self {
        let losses = vec![0.0; view.rank_step.plan.microbatches().len()];
        let reduction = GradientReduction::new(view.job, groups, bucket_elements, view.rank_step.plan.step());
        Self {
            view,
            stages,
            transfers: TransferBuffers::default(),
            reduction,
            last_backward: BTreeMap::new(),
            losses,
        }
    }

    /// Executes the list; `at` follows the current action, for errors.
    pub(super) fn execute(mut self, list: &[Action], at: &mut StepContext) -> Result<StepResult> {
        for action in list {
            // The last backward pass of a stage completes its gradients, so their sums start there.
            if let Action::Backward(part) = action {
                self.last_backward.insert(part.stage, part.microbatch);
            }
        }
        let mut clock = Clock::start(list.len());
        for (index, &action) in list.iter().enumerate() {
            // Posted early, messages arrive while earlier actions compute.
            self.transfers.post_receives(&self.view, list, index)?;
            *at = self.view.at(action);
            self.view.comm.note(*at);
            let start_ns = clock.now_ns();
            let cpu_ns = self.execute_action(action)?;
            clock.add(action, start_ns, cpu_ns);
        }
        *at = StepContext::step(self.view.rank_step.plan.step(), "finish the step");
        self.transfers.finish()?;
        self.reduction.finish(self.stages)?;
        Ok(StepResult { losses: self.losses, timeline: clock.into_timeline() })
    }

    /// Runs one action and returns its CPU time.
    fn execute_action(&mut self, action: Action) -> Result<u64> {
        match action {
            Action::Forward(part) => self.forward(part),
            Action::Backward(part) => self.backward(part),
            Action::BackwardInput(part) | Action::BackwardWeight(part) => Err(Error::InvalidSetting {
                setting: "schedule",
                reason: format!("splits the backward pass of {part}"),
            }),
            Action::ReduceGrads(number) => {
                let stage = self.stages.get_mut(&number).ok_or_else(|| missing(number))?;
                let (done, cpu_ns) = cpu_timed(|| self.reduction.complete(number, stage));
                done?;
                Ok(cpu_ns)
            }
            Action::Recv(_) | Action::Send(_) | Action::RecvGrad(_) | Action::SendGrad(_) => {
                let Some(transfer) = self.view.transfer(action) else {
                    return Err(Error::InvalidSetting {
                        setting: "schedule",
                        reason: format!("has no edge for {action}"),
                    });
                };
                let (done, cpu_ns) = cpu_timed(|| self.transfers.transfer(&self.view, transfer));
                done?;
                Ok(cpu_ns)
            }
        }
    }

    fn forward(&mut self, part: Part) -> Result<u64> {
        if !self.view.is_active(part) {
            return Ok(0);
        }
        let stage = self.stages.get_mut(&part.stage).ok_or_else(|| missing(part.stage))?;
        let device = stage.device().clone();
        let input = self.transfers.take_input(&self.view, &device, Flow::Activations, part)?;
        let context = Arc::clone(self.view.rank_step.context(self.view.module(part), part.microbatch)?);
        let microbatch = part.microbatch as usize;
        let (output, cpu_ns) = device.run(|| cpu_timed(|| stage.forward(microbatch, context, input)));
        match output? {
            BlockOutput::Rows(rows) => {
                self.transfers.put_output(&self.view, &device, Flow::Activations, part, Some(rows))?;
            }
            BlockOutput::Loss(loss) => self.losses[microbatch] = loss,
        }
        Ok(cpu_ns)
    }

    fn backward(&mut self, part: Part) -> Result<u64> {
        let stage = self.stages.get_mut(&part.stage).ok_or_else(|| missing(part.stage))?;
        if !self.view.is_active(part) || !stage.has_backward() {
            return Ok(0);
        }
        let device = stage.device().clone();
        let gradient = self.transfers.take_input(&self.view, &device, Flow::Gradients, part)?;
        let microbatch = part.microbatch as usize;
        let is_last = self.last_backward.get(&part.stage) == Some(&part.microbatch);
        let is_reduced = is_last && self.reduction.has_replicas(part.stage);
        let reduction = &mut self.reduction;
        let done = |parameters: &Parameters<D>, first: usize| {
            if is_reduced { reduction.advance(part.stage, &device, parameters, first) } else { Ok(()) }
        };
        let (input, cpu_ns) = device.run(|| cpu_timed(|| stage.backward_with(microbatch, gradient, done)));
        self.transfers.put_output(&self.view, &device, Flow::Gradients, part, input?)?;
        Ok(cpu_ns)
    }
}

fn missing(stage: u16) -> Error {
    Error::InvalidSetting { setting: "stages", reason: format!("this rank lacks stage {stage}") }
}
