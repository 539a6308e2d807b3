//! Runs an action list over the stages of a rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_balancer::schedule::{Action, Part};

use super::edge::{Flow, View};
use super::exchange::Exchange;
use super::groups::Groups;
use super::reduce::Reduction;
use super::timeline::{Clock, Timed, cpu_timed};
use crate::comm::StepContext;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::BlockOutput;
use crate::model::parameters::Parameters;
use crate::stage::Stage;

/// One step of one rank.
pub(super) struct Run<'a, D: Device> {
    view: View<'a, D>,
    stages: &'a mut BTreeMap<u16, Stage<D>>,
    exchange: Exchange<D>,
    reduction: Reduction<'a>,
    /// The microbatch of every stage's last backward.
    last_backward: BTreeMap<u16, u32>,
    /// Sums of losses of the microbatches that this rank has the loss of; 0 elsewhere.
    losses: Vec<f64>,
}

/// What a rank has of a step once its list is done.
pub(super) struct Ran {
    /// `[microbatches]`
    pub(super) losses: Vec<f64>,
    pub(super) timeline: Vec<Timed>,
}

impl<'a, D: Device> Run<'a, D> {
    pub(super) fn new(
        view: View<'a, D>,
        groups: &'a Groups,
        bucket_elements: usize,
        stages: &'a mut BTreeMap<u16, Stage<D>>,
    ) -> Self {
        let losses = vec![0.0; view.work.plan.microbatches().len()];
        let reduction = Reduction::new(view.job, groups, bucket_elements, view.work.plan.step());
        Self {
            view,
            stages,
            exchange: Exchange::default(),
            reduction,
            last_backward: BTreeMap::new(),
            losses,
        }
    }

    /// Runs the list; `at` is where it stands, for errors.
    pub(super) fn list(mut self, list: &[Action], at: &mut StepContext) -> Result<Ran> {
        for action in list {
            if let Action::Backward(part) = action {
                self.last_backward.insert(part.stage, part.microbatch);
            }
        }
        let mut clock = Clock::start(list.len());
        for (index, &action) in list.iter().enumerate() {
            self.exchange.post(&self.view, list, index)?;
            *at = self.view.at(action);
            self.view.comm.note(*at);
            let start_ns = clock.now_ns();
            let cpu_ns = self.act(action)?;
            clock.add(action, start_ns, cpu_ns);
        }
        *at = StepContext::step(self.view.work.plan.step(), "finish the step");
        self.exchange.finish()?;
        self.reduction.finish(self.stages)?;
        Ok(Ran { losses: self.losses, timeline: clock.into_timeline() })
    }

    /// Runs one action and returns its CPU time.
    fn act(&mut self, action: Action) -> Result<u64> {
        match action {
            Action::Forward(part) => self.forward(part),
            Action::Backward(part) => self.backward(part),
            Action::BackwardInput(part) | Action::BackwardWeight(part) => Err(Error::InvalidSetting {
                setting: "schedule",
                reason: format!("splits the backward of {part}"),
            }),
            Action::ReduceGrads(number) => {
                let stage = self.stages.get_mut(&number).ok_or_else(|| missing(number))?;
                let (done, cpu_ns) = cpu_timed(|| self.reduction.complete(number, stage));
                done.map(|()| cpu_ns)
            }
            Action::Recv(_) | Action::Send(_) | Action::RecvGrad(_) | Action::SendGrad(_) => {
                let Some(transfer) = self.view.transfer(action) else {
                    return Err(Error::InvalidSetting {
                        setting: "schedule",
                        reason: format!("has no end for {action}"),
                    });
                };
                let (done, cpu_ns) = cpu_timed(|| self.exchange.run(&self.view, transfer));
                done.map(|()| cpu_ns)
            }
        }
    }

    fn forward(&mut self, part: Part) -> Result<u64> {
        if !self.view.is_active(part) {
            return Ok(0);
        }
        let stage = self.stages.get_mut(&part.stage).ok_or_else(|| missing(part.stage))?;
        let device = stage.device().clone();
        let input = self.exchange.take(&self.view, &device, Flow::Activations, part)?;
        let context = Arc::clone(self.view.work.context(self.view.module(part), part.microbatch)?);
        let microbatch = part.microbatch as usize;
        let (output, cpu_ns) = device.run(|| cpu_timed(|| stage.forward(microbatch, context, input)));
        match output? {
            BlockOutput::Rows(rows) => {
                self.exchange.give(&self.view, &device, Flow::Activations, part, Some(rows))?;
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
        let gradient = self.exchange.take(&self.view, &device, Flow::Gradients, part)?;
        let microbatch = part.microbatch as usize;
        let is_last = self.last_backward.get(&part.stage) == Some(&part.microbatch);
        let is_reduced = is_last && self.reduction.has_replicas(part.stage);
        let reduction = &mut self.reduction;
        let done = |parameters: &Parameters<D>, first: usize| {
            if is_reduced { reduction.advance(part.stage, &device, parameters, first) } else { Ok(()) }
        };
        let (input, cpu_ns) = device.run(|| cpu_timed(|| stage.backward_with(microbatch, gradient, done)));
        self.exchange.give(&self.view, &device, Flow::Gradients, part, input?)?;
        Ok(cpu_ns)
    }
}

fn missing(stage: u16) -> Error {
    Error::InvalidSetting { setting: "stages", reason: format!("of this rank lack stage {stage}") }
}
