//! Describes activation and gradient transfers between stages: edge, message tag, peer, rows.

use dflop_balancer::schedule::{Action, Part};
use dflop_comm::StepContext;
use dflop_device::{Device, DeviceComm};
use dflop_models::ModuleKind;

use super::job::Job;
use super::rank_step::{RankStep, tokens};
use super::step_order::LaneOrder;
use super::step_plan::{RouteEnd, RoutePlan};
use super::topology::{Flow, RankRole, StageEdge, StageTransfer, Topology, part_role};
use crate::error::Result;

/// Everything a rank needs to know about other ranks while it runs a step.
pub(super) struct StepView<'a, D: Device> {
    pub(super) job: &'a Job,
    pub(super) topology: &'a Topology,
    /// Order of messages to this rank.
    pub(super) lane_order: &'a LaneOrder,
    /// World rank; rank roles follow.
    pub(super) rank: usize,
    pub(super) roles: &'a [RankRole],
    pub(super) comm: &'a dyn DeviceComm<D>,
    pub(super) rank_step: &'a RankStep<D>,
}

impl<D: Device> StepView<'_, D> {
    pub(super) fn module(&self, part: Part) -> ModuleKind {
        self.job.stages[usize::from(part.stage)].range.module
    }

    /// Returns whether there is anything to compute; all stages in a replica agree.
    pub(super) fn is_active(&self, part: Part) -> bool {
        let module = self.module(part);
        // A text can turn out empty although tokens were planned, so the plan is not sufficient.
        let has_rows =
            || self.rank_step.contexts.get(&(module, part.microbatch)).is_some_and(|own| own.layers.rows > 0);
        tokens(&self.rank_step.plan, self.job, module, part.microbatch) > 0 && has_rows()
    }

    /// Returns the role in which this rank runs a part.
    pub(super) fn role(&self, part: Part) -> Result<&RankRole> {
        part_role(self.roles, part)
    }

    /// Returns the edges over which a part sends rows (`is_out`) or receives them.
    pub(super) fn edges(&self, flow: Flow, part: Part, is_out: bool) -> Vec<StageEdge> {
        StageEdge::for_part(self.topology, flow, part, is_out)
    }

    /// Returns whether the edge leads from an encoder to the LLM.
    pub(super) fn is_routed(&self, edge: StageEdge) -> bool {
        self.module(edge.upstream) != self.module(edge.downstream)
    }

    /// Returns the number of columns per row.
    pub(super) fn width(&self, edge: StageEdge) -> usize {
        self.job.stages[usize::from(edge.upstream.stage)].output_width
    }

    /// Returns the route of an encoder edge, with source and destination microbatch.
    pub(super) fn route(&self, edge: StageEdge) -> (&RoutePlan, [u32; 2]) {
        let module = self.job.stages[usize::from(edge.upstream.stage)].module;
        (self.rank_step.plan.module_route(module), [edge.upstream.microbatch, edge.downstream.microbatch])
    }

    /// Returns the number of rows in a transfer; 0 for gradients if nothing is trained upstream.
    pub(super) fn rows(&self, flow: Flow, edge: StageEdge) -> Result<usize> {
        if flow == Flow::Gradients && !self.job.stages[usize::from(edge.upstream.stage)].has_backward {
            return Ok(0);
        }
        if self.is_routed(edge) {
            let (route, [source, destination]) = self.route(edge);
            return Ok(route.tokens_between(source, destination));
        }
        if !self.is_active(edge.upstream) {
            return Ok(0);
        }
        let context = self.rank_step.context(self.module(edge.upstream), edge.upstream.microbatch)?;
        Ok(context.layers.rows)
    }

    /// Returns the end of a route that a part is at.
    pub(super) fn end(&self, part: Part) -> RouteEnd {
        if self.module(part) == ModuleKind::Llm { RouteEnd::Destination } else { RouteEnd::Source }
    }

    /// Returns the transfer for an action; `None` if it sends and receives nothing.
    pub(super) fn transfer(&self, action: Action) -> Option<StageTransfer> {
        StageTransfer::of(self.topology, action)
    }

    /// Returns step, microbatch and name of an action, for errors.
    pub(super) fn at(&self, action: Action) -> StepContext {
        let step = self.rank_step.plan.step();
        let (name, part) = match action {
            Action::Recv(message) => ("recv", message.part()),
            Action::Send(message) => ("send", message.part()),
            Action::RecvGrad(message) => ("recv gradient", message.part()),
            Action::SendGrad(message) => ("send gradient", message.part()),
            Action::Forward(part) => ("forward", part),
            Action::Backward(part) | Action::BackwardInput(part) | Action::BackwardWeight(part) => {
                ("backward", part)
            }
            Action::ReduceGrads(stage) => return StepContext::step(step, &format!("reduce stage {stage}")),
        };
        StepContext::microbatch(step, part.microbatch, &format!("{name}, stage {}", part.stage))
    }

    /// Returns step, microbatch and name of a message. Both ends pass the same step and microbatch, which are
    /// checked.
    pub(super) fn at_edge(&self, transfer: StageTransfer) -> StepContext {
        let name = match (transfer.flow, transfer.is_send) {
            (Flow::Activations, true) => "send",
            (Flow::Activations, false) => "recv",
            (Flow::Gradients, true) => "send gradient",
            (Flow::Gradients, false) => "recv gradient",
        };
        let own = if (transfer.flow == Flow::Activations) == transfer.is_send {
            transfer.edge.upstream
        } else {
            transfer.edge.downstream
        };
        let name = format!("{name}, stage {}", own.stage);
        StepContext::microbatch(self.rank_step.plan.step(), transfer.edge.downstream.microbatch, &name)
    }
}
