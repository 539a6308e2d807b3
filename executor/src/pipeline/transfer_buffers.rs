//! Buffers rows between stages: posted receives, arrived rows, rows passed on within a rank, sends.
//!
//! Describes activation and gradient transfers between stages: edge, message tag, peer, rows.

use super::job::Job;
use super::rank_step::{RankStep, tokens};
use super::step_order::{LaneOrder, OwnMessage};
use super::step_plan::{RouteEnd, RoutePlan};
use super::timeline::{Awaited, CommunicationKind, CommunicationLane, CommunicationPlace, wait};
use super::topology::{Flow, RankRole, StageEdge, StageTransfer, Topology, part_role};
use crate::error::{Error, Result};
use dflop_balancer::schedule::{Action, Part};
use dflop_comm::StepContext;
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::{Device, DeviceComm, Lane, MessageLane, RowShape, Tensor, Transfer};
use dflop_models::ModuleKind;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Number of following actions whose receives are posted in advance, so that messages arrive during
/// computation.
const POSTED_AHEAD: usize = 16;

type Key = (Flow, StageEdge);

/// All rows in a step that are outside a stage.
pub(super) struct TransferBuffers<D: Device> {
    device: D,
    /// Step start event, after which receives may begin.
    start: D::Event,
    posted: BTreeMap<Key, (CommunicationPlace, Transfer<D>)>,
    /// Number of actions with posted receives.
    posted_until: usize,
    /// Number of messages in every lane, in lane order, whose receives are posted.
    posted_of: BTreeMap<(usize, Flow), usize>,
    /// Messages on shared lanes.
    shared: SharedLanes,
    /// Rows from other ranks, and rows passed on within this rank.
    arrived: BTreeMap<Key, Tensor<D>>,
    /// Rows already sent at the end of a pass, before the matching send in the action list.
    sent: BTreeSet<Key>,
    sends: Vec<(CommunicationPlace, Transfer<D>)>,
    /// Messages that operations were ordered after.
    awaited: Vec<Awaited<D>>,
}

impl<D: Device> TransferBuffers<D> {
    pub(super) fn new(device: D, view: &StepView<'_, D>) -> Result<Self> {
        let mut own = Vec::new();
        for &message in view.lane_order.own() {
            // A message without rows is never sent, so it has no place in a lane.
            if view.comm.shared_lane(message.lane).is_some() && view.rows(message.flow, message.edge)? > 0 {
                own.push(message);
            }
        }
        Ok(Self {
            shared: SharedLanes::new(own, |lane| view.comm.shared_lane(lane)),
            start: device.mark(Lane::Compute)?,
            device,
            posted: BTreeMap::new(),
            posted_until: 0,
            posted_of: BTreeMap::new(),
            arrived: BTreeMap::new(),
            sent: BTreeSet::new(),
            sends: Vec::new(),
            awaited: Vec::new(),
        })
    }

    /// Posts the receives for the next actions, each after all earlier receives in the same lane.
    pub(super) fn post_receives(
        &mut self,
        view: &StepView<'_, D>,
        list: &[Action],
        next: usize,
    ) -> Result<()> {
        for message in self.shared.take_receives(next, next + POSTED_AHEAD)? {
            self.post(view, message.lane.from, message.flow, message.edge)?;
        }
        let until = (next + POSTED_AHEAD).min(list.len());
        for &action in &list[self.posted_until.min(until)..until] {
            if let Some(transfer) = view.transfer(action).filter(|transfer| !transfer.is_send) {
                self.post_lane(view, transfer)?;
            }
        }
        self.posted_until = self.posted_until.max(until);
        Ok(())
    }

    /// Posts the receives in the lane of a transfer, in send order, up to the transfer itself.
    fn post_lane(&mut self, view: &StepView<'_, D>, transfer: StageTransfer) -> Result<()> {
        let StageTransfer { flow, edge: needed, peer, .. } = transfer;
        let from = view.job.source(peer, view.rank, view.role(flow.receiver(needed))?);
        if self.shared.has(MessageLane::of(from, view.rank, needed.tag(flow))) {
            return Ok(());
        }
        let lane = view.lane_order.lane_messages(from, flow);
        let posted = self.posted_of.entry((from, flow)).or_default();
        // A message that is not ahead was posted for a later message in the lane.
        let ahead = lane[*posted..].iter().position(|&edge| edge == needed).map_or(0, |ahead| ahead + 1);
        let edges = &lane[*posted..*posted + ahead];
        *posted += ahead;
        edges.iter().try_for_each(|&edge| self.post(view, from, flow, edge))
    }

    /// Posts the receive for a message; does nothing for a message without rows, which is never sent.
    fn post(&mut self, view: &StepView<'_, D>, from: usize, flow: Flow, edge: StageEdge) -> Result<()> {
        let rows = view.rows(flow, edge)?;
        if rows == 0 {
            return Ok(());
        }
        let (part, shape) =
            (flow.receiver(edge), RowShape { dtype: self.device.storage(), rows, cols: view.width(edge) });
        let peer = view.topology.rank(edge.other(part));
        let at = view.at_edge(StageTransfer { flow, is_send: false, edge, peer });
        let receive = view.comm.recv(from, edge.tag(flow), at, shape, &self.start)?;
        let bytes = (shape.rows * shape.cols * shape.dtype.bytes()) as u64;
        let place = place(CommunicationLane::Receive { from }, flow, part, bytes);
        self.posted.insert((flow, edge), (place, receive));
        Ok(())
    }

    /// Orders the passes after the posted receive of a transfer; does nothing if there are no rows. Sent rows
    /// leave when the pass ends, regardless of the send's position in the list.
    pub(super) fn transfer(&mut self, view: &StepView<'_, D>, transfer: StageTransfer) -> Result<()> {
        let StageTransfer { flow, edge, .. } = transfer;
        if view.rows(flow, edge)? == 0 {
            return Ok(());
        }
        if transfer.is_send {
            let part = if flow == Flow::Activations { edge.upstream } else { edge.downstream };
            // A tensor-parallel rank sends nothing if other ranks send to all ranks of the peer.
            let targets = view.job.targets(view.rank, view.role(part)?, transfer.peer);
            let is_sent = self.sent.remove(&(flow, edge)) || targets.is_empty();
            return if is_sent { Ok(()) } else { Err(order(part, "has nothing to send")) };
        }
        let receive =
            self.posted.remove(&(flow, edge)).ok_or_else(|| order(edge.downstream, "awaits nothing"))?;
        if let Some(rows) = wait(&self.device, receive, &mut self.awaited)? {
            self.arrived.insert((flow, edge), rows);
        }
        Ok(())
    }

    /// Orders the next step after all sends, and checks that no rows are left.
    pub(super) fn finish(&mut self) -> Result<()> {
        // Sends are awaited here instead of where they start, so that stages compute meanwhile.
        for send in std::mem::take(&mut self.sends) {
            wait(&self.device, send, &mut self.awaited)?;
        }
        let left = self.sent.iter().chain(self.arrived.keys()).chain(self.posted.keys()).next();
        match left {
            Some((_, edge)) => Err(order(edge.downstream, "has rows left that no part took")),
            None => Ok(()),
        }
    }

    /// Takes the messages that operations were ordered after.
    pub(super) fn take_awaited(&mut self) -> Vec<Awaited<D>> {
        std::mem::take(&mut self.awaited)
    }

    /// Returns the input rows of a part: from the neighbor stage, or assembled from all routes. `None` if it
    /// has no input.
    pub(super) fn take_input(
        &mut self,
        view: &StepView<'_, D>,
        flow: Flow,
        part: Part,
    ) -> Result<Option<Tensor<D>>> {
        let edges = view.edges(flow, part, false);
        let Some(&first) = edges.first() else { return Ok(None) };
        if !view.is_routed(first) {
            return self.take(flow, first, part).map(Some);
        }
        let width = view.width(first);
        let rows = match flow {
            Flow::Activations => view.rank_step.plan.media_tokens(part.microbatch),
            Flow::Gradients => view.route(first).0.source_tokens(part.microbatch),
        };
        if rows == 0 {
            return Ok(None);
        }
        // Every row belongs to exactly one medium, so all elements are written.
        let mut whole = self.device.alloc(rows * width)?;
        for edge in edges {
            if view.rows(flow, edge)? > 0 {
                let message = self.take(flow, edge, part)?;
                let (route, pair) = view.route(edge);
                let from_message = |range: CopyRange| CopyRange { from: range.to, to: range.from, ..range };
                let ranges = route.elements(pair, view.end(part), width).into_iter().map(from_message);
                self.device.copy_ranges(&ranges.collect::<Vec<_>>(), &message, &mut whole)?;
            }
        }
        Ok(Some(whole))
    }

    fn take(&mut self, flow: Flow, edge: StageEdge, part: Part) -> Result<Tensor<D>> {
        self.arrived.remove(&(flow, edge)).ok_or_else(|| order(part, "lacks rows"))
    }

    /// Passes the output rows of a part on to the next parts: keeps them on this rank, or starts to send
    /// them.
    pub(super) fn put_output(
        &mut self,
        view: &StepView<'_, D>,
        flow: Flow,
        part: Part,
        rows: Option<Tensor<D>>,
    ) -> Result<()> {
        let mut carried = Vec::new();
        for edge in view.edges(flow, part, true) {
            if view.rows(flow, edge)? > 0 {
                carried.push(edge);
            }
        }
        let Some(&first) = carried.first() else { return Ok(()) };
        let rows = rows.ok_or_else(|| order(part, "gives no rows"))?;
        if view.is_routed(first) {
            for edge in carried {
                let (route, pair) = view.route(edge);
                let ranges = route.elements(pair, view.end(part), view.width(edge));
                let mut message = self.device.alloc(ranges.iter().map(|range| range.len).sum())?;
                self.device.copy_ranges(&ranges, &rows, &mut message)?;
                self.pass_on(view, flow, edge, part, message)?;
            }
            return Ok(());
        }
        self.pass_on(view, flow, first, part, rows)
    }

    /// Passes rows on to a part: keeps them if this rank runs it, and starts to send them to all other ranks
    /// that receive them from this rank.
    fn pass_on(
        &mut self,
        view: &StepView<'_, D>,
        flow: Flow,
        edge: StageEdge,
        part: Part,
        rows: Tensor<D>,
    ) -> Result<()> {
        let peer = view.topology.rank(edge.other(part));
        let transfer = StageTransfer { flow, is_send: true, edge, peer };
        let mut targets = view.job.targets(view.rank, view.role(part)?, transfer.peer);
        // This rank comes last: the last target gets the rows themselves, and all other targets get a copy.
        targets.sort_by_key(|&target| target == view.rank);
        let Some((&last, others)) = targets.split_last() else { return Ok(()) };
        let copies = others.iter().map(|&to| Ok((to, self.device.copy(&rows)?)));
        let copies = copies.collect::<Result<Vec<_>>>()?;
        let after = self.device.mark(Lane::Compute)?;
        let (width, at) = (view.width(edge), view.at_edge(transfer));
        for (to, rows) in copies.into_iter().chain([(last, rows)]) {
            if to == view.rank {
                self.arrived.insert((flow, edge), rows);
            } else {
                self.sent.insert((flow, edge));
                let lane = MessageLane::of(view.rank, to, edge.tag(flow));
                self.shared.take_send(lane, edge)?;
                let place = place(CommunicationLane::Send { to }, flow, part, rows.bytes());
                self.sends.push((place, view.comm.send(to, edge.tag(flow), at, rows, width, &after)?));
            }
        }
        Ok(())
    }
}

/// Describes a message for a part on this rank.
fn place(lane: CommunicationLane, flow: Flow, part: Part, bytes: u64) -> CommunicationPlace {
    let kind = match flow {
        Flow::Activations => CommunicationKind::Activations,
        Flow::Gradients => CommunicationKind::Gradients,
    };
    CommunicationPlace { lane, kind, stage: part.stage, microbatch: Some(part.microbatch), bytes }
}

fn order(part: Part, problem: &'static str) -> Error {
    let (stage, microbatch) = (part.stage.to_string(), part.microbatch as usize);
    dflop_models::Error::Order { stage, microbatch, problem }.into()
}

/// Messages in shared lanes for a step, by lane number.
#[derive(Default)]
pub(super) struct SharedLanes {
    lanes: BTreeMap<u64, VecDeque<OwnMessage>>,
    shared: BTreeMap<MessageLane, u64>,
}

impl SharedLanes {
    /// - `messages`: this rank's messages with rows, in step order
    /// - `lane`: returns the shared lane number, or `None` for a message lane with a dedicated lane
    pub(super) fn new(
        messages: impl IntoIterator<Item = OwnMessage>,
        lane: impl Fn(MessageLane) -> Option<u64>,
    ) -> Self {
        let mut own = Self::default();
        for message in messages {
            if let Some(number) = lane(message.lane) {
                own.shared.insert(message.lane, number);
                own.lanes.entry(number).or_default().push_back(message);
            }
        }
        own
    }

    /// Returns whether a message lane is shared.
    pub(super) fn has(&self, lane: MessageLane) -> bool {
        self.shared.contains_key(&lane)
    }

    /// Takes the receives to post before an action: all receives ordered before the action, and receives
    /// ordered before a later action, `until`, that no send on this rank precedes.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a send that comes before the action has not been queued.
    pub(super) fn take_receives(&mut self, action: usize, until: usize) -> Result<Vec<OwnMessage>> {
        let mut taken = Vec::new();
        for lane in self.lanes.values_mut() {
            while let Some(message) = lane.pop_front_if(|next| !next.is_send && next.before <= until) {
                taken.push(message);
            }
            if let Some(late) = lane.iter().find(|next| !next.is_send).filter(|next| next.before <= action) {
                return Err(refuse(late.lane, late.edge, "is behind a message that is sent later"));
            }
        }
        Ok(taken)
    }

    /// Takes a message that is sent now; does nothing for a dedicated lane.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a different message comes first.
    pub(super) fn take_send(&mut self, lane: MessageLane, edge: StageEdge) -> Result<()> {
        let Some(number) = self.shared.get(&lane) else { return Ok(()) };
        let is_it = |next: &mut OwnMessage| (next.lane, next.edge) == (lane, edge);
        let next = self.lanes.get_mut(number).and_then(|shared| shared.pop_front_if(is_it));
        next.map(drop).ok_or_else(|| refuse(lane, edge, "is sent before one that comes first"))
    }
}

fn refuse(MessageLane { from, to, .. }: MessageLane, edge: StageEdge, problem: &str) -> Error {
    let (stage, microbatch) = (edge.upstream.stage, edge.upstream.microbatch);
    let reason = format!(
        "the message of microbatch {microbatch} in stage {stage} from rank {from} to rank {to} {problem}"
    );
    Error::InvalidSetting { setting: "order of messages", reason }
}

/// Passes that a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Passes {
    /// Forward and backward, for training.
    All,
    /// Forward only, for an evaluation.
    Forward,
}

impl Passes {
    /// Returns whether a step runs an action.
    pub(super) const fn has(self, action: Action) -> bool {
        let is_forward = matches!(action, Action::Forward(_) | Action::Recv(_) | Action::Send(_));
        matches!(self, Self::All) || is_forward
    }
}

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
    pub(super) passes: Passes,
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

    /// Returns whether gradients go back over an edge.
    pub(super) fn has_gradients(&self, edge: StageEdge) -> bool {
        self.passes == Passes::All && self.job.stages[usize::from(edge.upstream.stage)].has_backward
    }

    /// Returns the number of rows in a transfer; 0 for gradients if nothing is trained upstream, or the step
    /// has no backward passes.
    pub(super) fn rows(&self, flow: Flow, edge: StageEdge) -> Result<usize> {
        if flow == Flow::Gradients && !self.has_gradients(edge) {
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

#[cfg(test)]
mod tests {
    use super::super::rank_step::RankStep;
    use super::super::topology::Topology;
    use super::super::{Job, MicrobatchPlan, ModuleParallelism, PipelineStepPlan};
    use super::*;
    use crate::pipeline::step_order::LaneOrder;
    use dflop_balancer::schedule::{Message, ScheduleKind};
    use dflop_comm::{Comm, PayloadShape, Settings, StepContext, threads};
    use dflop_device::{Cpu, Runtime, Staged};
    use dflop_models::{FrozenModules, ModelConfig, ModuleKind, TextBatch};
    use std::sync::Arc;

    fn job() -> Job {
        let document = serde_json::json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48});
        let model = ModelConfig::from_config(&document).unwrap();
        let layout = ModuleParallelism::even(ModuleKind::Llm, 2, 2);
        Job::new(model, FrozenModules::default(), vec![layout], ScheduleKind::OneForwardOneBackward).unwrap()
    }

    fn rank_step(job: &Job, device: &Cpu) -> RankStep<Cpu> {
        let microbatches = vec![MicrobatchPlan { tokens: 4, media: Vec::new() }];
        let batch = TextBatch {
            input_ids: &[5, 6, 7, 8],
            labels: &[5, 6, 7, 8],
            positions: &[0, 1, 2, 3],
            cu_seqlens: &[0, 4],
            media_places: &[],
            loss_scale: 1.0,
        };
        let context = Arc::new(job.model().llm.context(device, &batch).unwrap());
        let plan = Arc::new(PipelineStepPlan::new(job, 0, 3, microbatches).unwrap());
        RankStep { plan, contexts: BTreeMap::from([((ModuleKind::Llm, 0), context)]) }
    }

    #[test]
    fn rows_leave_with_the_end_of_their_pass_and_their_send_comes_once() {
        let (job, device) = (job(), Cpu::new(1).unwrap());
        let mut ranks = threads::world(2, Settings::default()).unwrap();
        let peer = ranks.pop().unwrap();
        let comm = Staged::new(device.clone(), Arc::new(ranks.pop().unwrap()));
        let (step, topology) = (rank_step(&job, &device), Topology::new(&job, 1).unwrap());
        let roles = job.roles(0).unwrap();
        let lane_order = LaneOrder::new(&job, &topology, (0, &roles), &[]).unwrap();
        let view = StepView {
            job: &job,
            topology: &topology,
            lane_order: &lane_order,
            rank: 0,
            roles: &roles,
            comm: &comm,
            rank_step: &step,
            passes: Passes::All,
        };
        let part = Part { microbatch: 0, stage: 0 };
        let mut transfers = TransferBuffers::new(device.clone(), &view).unwrap();
        let rows = device.upload(&[0.5; 4 * 16]).unwrap();
        transfers.put_output(&view, Flow::Activations, part, Some(rows)).unwrap();

        let send = view.transfer(Action::Send(Message { microbatch: 0, stage: 0, peer: 1 })).unwrap();
        let (tag, at) = (send.edge.tag(Flow::Activations), StepContext::microbatch(0, 0, "recv"));
        let arrived = peer.start_recv(0, tag, at, PayloadShape::f32(4, 16)).unwrap().wait().unwrap();
        assert_eq!(arrived.into_f32(), Some(vec![0.5; 4 * 16]));

        let left = transfers.finish().unwrap_err().to_string();
        assert!(left.contains("has rows left"), "the list lacks the send: {left}");
        transfers.transfer(&view, send).unwrap();
        transfers.finish().unwrap();
        let again = transfers.transfer(&view, send).unwrap_err().to_string();
        assert!(again.contains("has nothing to send"), "{again}");
    }
}
