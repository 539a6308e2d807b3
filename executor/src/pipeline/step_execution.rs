//! Executes an action list over the stages on a rank, and checks stage outputs: rows, gradients and losses
//! with the size and type that the next part requires.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_balancer::schedule::{Action, Part};
use dflop_comm::StepContext;
use dflop_device::{Device, Dtype, Lane, Tensor};
use dflop_models::{BlockOutput, GatherTimes, Parameters, Stage};

use super::gradient_reduction::{GradientGroups, GradientReduction};
use super::timeline::{Awaited, Clock, CommunicationKind, CommunicationLane, CommunicationPlace};
use super::topology::{Flow, missing};
use super::transfer_buffers::{Passes, StepView, TransferBuffers};
use crate::error::{Error, Result};

/// Execution of a step on a rank.
pub(super) struct StepExecution<'a, D: Device> {
    device: D,
    view: StepView<'a, D>,
    stages: &'a mut BTreeMap<u16, Box<dyn Stage<D>>>,
    transfers: TransferBuffers<D>,
    reduction: GradientReduction<'a, D>,
    /// Microbatch in the last backward pass of every stage.
    last_backward: BTreeMap<u16, u32>,
    losses: Vec<(u32, Tensor<D>)>,
}

/// Rank results after the action list, which the device may not have computed yet.
pub(super) struct StepResult<D: Device> {
    /// Losses of the microbatches whose loss this rank computes.
    pub(super) losses: Vec<(u32, Tensor<D>)>,
    pub(super) clock: Clock<D>,
}

impl<'a, D: Device> StepExecution<'a, D> {
    /// Prepares the execution of a step.
    ///
    /// - `is_divided`: whether each replica gets only part of the gradients
    pub(super) fn new(
        device: D,
        view: StepView<'a, D>,
        (groups, is_divided): (&'a GradientGroups<D>, bool),
        stages: &'a mut BTreeMap<u16, Box<dyn Stage<D>>>,
    ) -> Result<Self> {
        let reduction = GradientReduction::new(view.job, groups, view.rank_step.plan.step(), is_divided);
        let transfers = TransferBuffers::new(device.clone(), &view)?;
        let (last_backward, losses) = (BTreeMap::new(), Vec::new());
        Ok(Self { device, view, stages, transfers, reduction, last_backward, losses })
    }

    /// Executes the list; `at` follows the current action, for errors.
    pub(super) fn execute(mut self, list: &[Action], at: &mut StepContext) -> Result<StepResult<D>> {
        for action in list {
            // A stage's last backward pass completes its gradients, so their sums start there.
            if let Action::Backward(part) | Action::BackwardWeight(part) = action {
                self.last_backward.insert(part.stage, part.microbatch);
            }
        }
        let mut clock = Clock::start(&self.device, list.len())?;
        for (index, &action) in list.iter().enumerate() {
            // Posted early, messages arrive while earlier actions compute.
            self.transfers.post_receives(&self.view, list, index)?;
            if !self.view.passes.has(action) {
                continue;
            }
            *at = self.view.at(action);
            self.view.comm.host().note(*at);
            let start_ns = clock.now_ns();
            let busy = self.execute_action(action)?;
            clock.add(action, start_ns, busy);
        }
        *at = StepContext::step(self.view.rank_step.plan.step(), "finish the step");
        self.transfers.finish()?;
        clock.awaited = self.transfers.take_awaited();
        clock.awaited.extend(gathers(self.stages));
        self.reduction.finish(&self.device, self.stages, &mut clock.awaited)?;
        Ok(StepResult { losses: self.losses, clock })
    }

    /// Runs an action, and returns the events between which the device computes it.
    fn execute_action(&mut self, action: Action) -> Result<[D::Event; 2]> {
        let device = self.device.clone();
        let mark = || device.mark(Lane::Compute);
        match action {
            Action::Forward(part) => self.forward(part),
            Action::Backward(part) | Action::BackwardInput(part) => {
                self.backward(part, matches!(action, Action::BackwardInput(_)))
            }
            Action::BackwardWeight(part) => self.backward_weight(part),
            Action::ReduceGrads(number) => {
                let start = mark()?;
                let stage = self.stages.get_mut(&number).ok_or_else(|| missing(number))?;
                self.reduction.complete(number, &mut **stage)?;
                Ok([start, mark()?])
            }
            Action::Recv(_) | Action::Send(_) | Action::RecvGrad(_) | Action::SendGrad(_) => {
                let Some(transfer) = self.view.transfer(action) else {
                    return Err(Error::InvalidSetting {
                        setting: "schedule",
                        reason: format!("has no edge for {action}"),
                    });
                };
                let start = mark()?;
                self.transfers.transfer(&self.view, transfer)?;
                Ok([start, mark()?])
            }
        }
    }

    fn forward(&mut self, part: Part) -> Result<[D::Event; 2]> {
        if !self.view.is_active(part) {
            return self.nothing();
        }
        let input = self.transfers.take_input(&self.view, Flow::Activations, part)?;
        let context = Arc::clone(self.view.rank_step.context(self.view.module(part), part.microbatch)?);
        let stage = self.stages.get_mut(&part.stage).ok_or_else(|| missing(part.stage))?;
        let start = self.device.mark(Lane::Compute)?;
        let microbatch = part.microbatch as usize;
        let output = match self.view.passes {
            Passes::All => stage.forward(microbatch, context, input)?,
            Passes::Forward => stage.forward_only(microbatch, context, input)?,
        };
        let end = self.device.mark(Lane::Compute)?;
        check_forward(&self.view, (stage.name(), &self.device), part, &output)?;
        match output {
            BlockOutput::Rows(rows) => {
                self.transfers.put_output(&self.view, Flow::Activations, part, Some(rows))?;
            }
            BlockOutput::Loss(loss) => self.losses.push((part.microbatch, loss)),
        }
        Ok([start, end])
    }

    /// Runs a backward pass, or the part that computes the input gradient (`is_split`).
    fn backward(&mut self, part: Part, is_split: bool) -> Result<[D::Event; 2]> {
        let stage = self.stages.get_mut(&part.stage).ok_or_else(|| missing(part.stage))?;
        if !self.view.is_active(part) || !stage.has_backward() {
            return self.nothing();
        }
        let gradient = self.transfers.take_input(&self.view, Flow::Gradients, part)?;
        let is_last = self.last_backward.get(&part.stage) == Some(&part.microbatch);
        let is_reduced = is_last && self.reduction.has_replicas(part.stage);
        let (reduction, device) = (&mut self.reduction, &self.device);
        let mut done = |parameters: &mut Parameters<D>, first: usize| {
            if is_reduced { reduction.advance(part.stage, device, parameters, first) } else { Ok(()) }
        };
        let start = device.mark(Lane::Compute)?;
        let microbatch = part.microbatch as usize;
        let input = if is_split {
            stage.backward_input(microbatch, gradient)?
        } else {
            stage.backward_with(microbatch, gradient, &mut done)?
        };
        let end = device.mark(Lane::Compute)?;
        check_rows(&self.view, (stage.name(), device), Flow::Gradients, part, input.as_ref())?;
        self.transfers.put_output(&self.view, Flow::Gradients, part, input)?;
        Ok([start, end])
    }

    /// Runs the backward part that computes weight gradients.
    fn backward_weight(&mut self, part: Part) -> Result<[D::Event; 2]> {
        let stage = self.stages.get_mut(&part.stage).ok_or_else(|| missing(part.stage))?;
        if !self.view.is_active(part) || !stage.has_backward() {
            return self.nothing();
        }
        let start = self.device.mark(Lane::Compute)?;
        stage.backward_weight(part.microbatch as usize)?;
        let end = self.device.mark(Lane::Compute)?;
        let is_last = self.last_backward.get(&part.stage) == Some(&part.microbatch);
        if is_last && self.reduction.has_replicas(part.stage) {
            self.reduction.advance(part.stage, &self.device, stage.parameters_mut(), 0)?;
        }
        Ok([start, end])
    }

    fn nothing(&self) -> Result<[D::Event; 2]> {
        let now = self.device.mark(Lane::Compute)?;
        Ok([now.clone(), now])
    }
}

/// Takes the weight gathers that the passes in a step have waited for.
fn gathers<D: Device>(stages: &mut BTreeMap<u16, Box<dyn Stage<D>>>) -> impl Iterator<Item = Awaited<D>> {
    stages.iter_mut().flat_map(|(&stage, parameters)| {
        let buckets = parameters.parameters_mut().buckets_mut().iter_mut();
        buckets.filter_map(move |bucket| {
            let (lane, kind) = (CommunicationLane::Replicas { stage }, CommunicationKind::AllGather);
            let bytes = bucket.value_bytes();
            let place = CommunicationPlace { lane, kind, stage, microbatch: None, bytes };
            bucket.take_gather_times().map(|GatherTimes { span, wait }| Awaited { place, span, wait })
        })
    })
}

/// Checks a forward output: a loss on the last stage, rows on all other stages.
///
/// - `stage`: stage name for errors
///
/// # Errors
/// [`dflop_models::Error::Output`] that names stage and microbatch.
pub(super) fn check_forward<D: Device>(
    view: &StepView<'_, D>,
    (stage, device): (&str, &D),
    part: Part,
    output: &BlockOutput<D>,
) -> Result<()> {
    let is_last = usize::from(part.stage) + 1 == view.job.stages.len();
    match output {
        BlockOutput::Rows(_) if is_last => {
            refuse(stage, part, "forward gives rows, expected a loss".to_owned())
        }
        BlockOutput::Rows(rows) => check_rows(view, (stage, device), Flow::Activations, part, Some(rows)),
        BlockOutput::Loss(_) if !is_last => {
            refuse(stage, part, "forward gives a loss, expected rows".to_owned())
        }
        BlockOutput::Loss(loss) if loss.len() != 1 || loss.dtype() != Dtype::F64 => {
            let found = describe(loss);
            refuse(stage, part, format!("forward gives {found} as loss, expected 1 element of F64"))
        }
        BlockOutput::Loss(_) => Ok(()),
    }
}

/// Checks rows that leave a part, if other parts receive any.
///
/// # Errors
/// [`dflop_models::Error::Output`] that names stage and microbatch.
pub(super) fn check_rows<D: Device>(
    view: &StepView<'_, D>,
    (stage, device): (&str, &D),
    flow: Flow,
    part: Part,
    rows: Option<&Tensor<D>>,
) -> Result<()> {
    let mut taken = None;
    for edge in view.edges(flow, part, true) {
        if view.rows(flow, edge)? > 0 {
            taken = Some(edge);
            break;
        }
    }
    let Some(edge) = taken else { return Ok(()) };
    let count = match flow {
        _ if !view.is_routed(edge) => view.rows(flow, edge)?,
        // The rows of all routes are in one tensor.
        Flow::Activations => view.route(edge).0.source_tokens(part.microbatch),
        Flow::Gradients => view.rank_step.plan.media_tokens(part.microbatch),
    };
    let (width, dtype) = (view.width(edge), device.storage());
    if rows.is_some_and(|rows| rows.len() == count * width && rows.dtype() == dtype) {
        return Ok(());
    }
    let pass = match flow {
        Flow::Activations => "forward gives",
        Flow::Gradients => "backward gives, as gradient of the input,",
    };
    let found = rows.map_or_else(|| "nothing".to_owned(), describe);
    refuse(stage, part, format!("{pass} {found}, expected {count} rows of {width} elements of {dtype:?}"))
}

fn describe<D: Device>(tensor: &Tensor<D>) -> String {
    format!("{} elements of {:?}", tensor.len(), tensor.dtype())
}

fn refuse(stage: &str, part: Part, problem: String) -> Result<()> {
    let (stage, microbatch) = (stage.to_owned(), part.microbatch as usize);
    Err(dflop_models::Error::Output { stage, microbatch, problem }.into())
}
