//! Rank launches in consecutive steps, as `StepExecution` creates them, followed by an update.

use std::collections::BTreeMap;

use dflop_balancer::schedule::{Action, Part, Pass, PassKind};
use dflop_device::MessageLane;

use super::super::rank_step::tokens;
use super::super::step_order::OwnMessage;
use super::super::topology::Topology;
use super::super::{Job, PipelineStepPlan};
use super::{Group, Lane, Launch, Op};
use crate::pipeline::step_order::{LaneOrder, action_lists};
use crate::pipeline::topology::{Flow, RankRole, StageEdge, part_role};
use crate::pipeline::transfer_buffers::SharedLanes;

const POSTED_AHEAD: usize = 16;

/// Launch rule variant.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) posting: Posting,
    pub(super) messages: Messages,
    /// Whether the host waits for messages before it continues, as without a device.
    pub(super) is_host_waiting: bool,
}

/// Order in which receives are posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Posting {
    Sender,
    Receiver,
    /// Of all messages of the step.
    Step,
}

/// Message lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Messages {
    /// From rank to rank, with a single flow.
    Flow,
    /// From rank to rank, with both flows.
    Direction,
    /// Between two ranks, in both directions.
    Peer,
    /// This number of lanes for all messages.
    Shared(u64),
}

impl Messages {
    /// Returns the shared lane number for a message lane.
    const fn shared_lane(self, lane: MessageLane) -> Option<u64> {
        match self {
            Self::Shared(lanes) => Some((lane.from + lane.to) as u64 % lanes),
            _ => None,
        }
    }
}

/// Launching rank.
pub(super) struct Launcher<'a> {
    job: &'a Job,
    topology: &'a Topology,
    plan: &'a PipelineStepPlan,
    rank: usize,
    roles: Vec<RankRole>,
    list: Vec<Action>,
    lane_order: LaneOrder,
    rules: Rules,
    launches: Vec<Launch>,
    step: usize,
    /// Last launch on the compute lane.
    computed: Option<usize>,
    /// Last host wait.
    host: Option<usize>,
}

/// Step state.
#[derive(Default)]
struct StepState {
    start: Option<usize>,
    posted: BTreeMap<(Flow, StageEdge), usize>,
    posted_of: BTreeMap<(usize, Flow), usize>,
    posted_until: usize,
    shared: SharedLanes,
    sends: Vec<usize>,
    sums: Vec<usize>,
    ties: Vec<usize>,
    /// Buckets in every stage that are being summed.
    buckets: BTreeMap<u16, usize>,
}

/// Lists the launches on every rank in two steps with the same plan.
pub(super) fn launches(job: &Job, plan: &PipelineStepPlan, rules: Rules) -> Vec<Vec<Launch>> {
    let topology = Topology::new(job, plan.rounds()).unwrap();
    let ranks: Vec<usize> = (0..job.world_size()).collect();
    let lists = action_lists(job, &topology, &ranks).unwrap();
    let of_rank = |(rank, list): (usize, Vec<Action>)| {
        let roles = job.roles(rank).unwrap();
        let lane_order = LaneOrder::new(job, &topology, (rank, &roles), &list).unwrap();
        let lane_order = match rules.posting {
            Posting::Step => lane_order.with_step_order(job, &topology, rank).unwrap(),
            _ => lane_order,
        };
        let (launches, computed, host) = (Vec::new(), None, None);
        let topology = &topology;
        let mut launcher = Launcher {
            job,
            topology,
            plan,
            rank,
            roles,
            list,
            lane_order,
            rules,
            launches,
            step: 0,
            computed,
            host,
        };
        launcher.step();
        launcher.step();
        launcher.launches
    };
    ranks.into_iter().zip(lists).map(of_rank).collect()
}

impl Launcher<'_> {
    fn launch(&mut self, lane: Lane, group: Option<Group>, op: Op, after: &[usize]) -> usize {
        let after = after.iter().copied().chain(self.host).collect();
        self.launches.push(Launch { lane, group, step: self.step, op, after });
        self.launches.len() - 1
    }

    fn compute(&mut self, group: Option<Group>, op: Op, after: &[usize]) -> usize {
        let launch = self.launch(Lane::Compute, group, op, after);
        self.computed = Some(launch);
        launch
    }

    /// Orders the compute lane, and the host if it waits, after launches.
    fn wait(&mut self, launches: &[usize]) {
        let wait = self.compute(None, Op::Wait, launches);
        if self.rules.is_host_waiting {
            self.host = Some(self.launch(Lane::Host, None, Op::Wait, &[wait]));
        }
    }

    fn start(&mut self, group: Group, op: Op) -> usize {
        self.launch(Lane::Of(group), Some(group), op, &Vec::from_iter(self.computed))
    }

    fn message(&mut self, [from, to]: [usize; 2], flow: Flow, edge: StageEdge, after: &[usize]) -> usize {
        let (mut group, peer) = (Group::Messages(from, to, Some(flow)), from + to - self.rank);
        let lane = match self.rules.messages {
            Messages::Flow => Lane::Of(group),
            Messages::Direction => {
                group = Group::Messages(from, to, None);
                Lane::Of(group)
            }
            Messages::Peer => Lane::Peer(peer),
            Messages::Shared(_) => {
                // a communicator of all ranks matches both flows of two ranks by their order
                group = Group::Messages(from, to, None);
                let lane = MessageLane::of(from, to, edge.tag(flow));
                Lane::Shared(self.rules.messages.shared_lane(lane).unwrap_or(0))
            }
        };
        self.launch(lane, Some(group), Op::Message(flow, edge), after)
    }

    fn step(&mut self) {
        let has_rows = |message: &&OwnMessage| self.rows(message.flow, message.edge) > 0;
        let own = self.lane_order.own().iter().filter(has_rows).copied();
        let shared = SharedLanes::new(own, |lane| self.rules.messages.shared_lane(lane));
        let mut state = StepState { start: self.computed, shared, ..StepState::default() };
        let list = self.list.clone();
        for (index, &action) in list.iter().enumerate() {
            self.post_receives(&mut state, &list, index);
            match action {
                Action::Recv(_) | Action::RecvGrad(_) => {
                    let (_, flow, edge) = self.received(action).unwrap();
                    if self.rows(flow, edge) > 0 {
                        let posted = state.posted.remove(&(flow, edge)).expect("a receive was posted");
                        self.wait(&[posted]);
                    }
                }
                // Messages leave with their pass.
                Action::Send(_) | Action::SendGrad(_) => {}
                Action::ReduceGrads(stage) => self.complete(&mut state, stage),
                _ => self.pass(&mut state, action.pass().unwrap(), &list[index + 1..]),
            }
        }
        assert!(state.posted.is_empty(), "every posted message is taken");
        self.finish(&state);
        self.step += 1;
    }

    /// Returns sender, flow and edge for an action that receives.
    fn received(&self, action: Action) -> Option<(usize, Flow, StageEdge)> {
        let (flow, message) = match action {
            Action::Recv(message) => (Flow::Activations, message),
            Action::RecvGrad(message) => (Flow::Gradients, message),
            _ => return None,
        };
        let (own, peer) = (message.part(), usize::from(message.peer));
        let edges = StageEdge::for_part(self.topology, flow, own, false);
        let edge = edges.into_iter().find(|edge| self.topology.rank(edge.other(own)) == peer).unwrap();
        Some((self.job.source(peer, self.rank, part_role(&self.roles, own).unwrap()), flow, edge))
    }

    fn post_receives(&mut self, state: &mut StepState, list: &[Action], next: usize) {
        if self.rules.posting == Posting::Step {
            for message in
                state.shared.take_receives(next, next + POSTED_AHEAD).expect("sends are queued in order")
            {
                self.post(state, message.lane.from, message.flow, message.edge);
            }
            return;
        }
        let until = (next + POSTED_AHEAD).min(list.len());
        for &action in &list[state.posted_until..until] {
            let Some((from, flow, needed)) = self.received(action) else { continue };
            let edges = match self.rules.posting {
                Posting::Receiver => vec![needed],
                Posting::Sender | Posting::Step => {
                    let posted = state.posted_of.entry((from, flow)).or_default();
                    let lane = &self.lane_order.lane_messages(from, flow)[*posted..];
                    let ahead = lane.iter().position(|&edge| edge == needed).map_or(0, |ahead| ahead + 1);
                    *posted += ahead;
                    lane[..ahead].to_vec()
                }
            };
            for edge in edges {
                if self.rows(flow, edge) > 0 {
                    self.post(state, from, flow, edge);
                }
            }
        }
        state.posted_until = until;
    }

    /// Posts a receive, after the receive buffer allocation.
    fn post(&mut self, state: &mut StepState, from: usize, flow: Flow, edge: StageEdge) {
        let after: Vec<usize> = state.start.into_iter().chain(self.computed).collect();
        let posted = self.message([from, self.rank], flow, edge, &after);
        state.posted.insert((flow, edge), posted);
    }

    fn pass(&mut self, state: &mut StepState, pass: Pass, rest: &[Action]) {
        let (stage, role) = (&self.job.stages[usize::from(pass.part.stage)], self.role(pass.part));
        let is_active = tokens(self.plan, self.job, stage.range.module, pass.part.microbatch) > 0;
        if !is_active || (pass.kind.is_backward() && !stage.has_backward) {
            return;
        }
        let computed = self.compute(None, Op::Pass(pass), &[]);
        let pipeline_rank = role.pipeline_rank;
        let has_sums = pass.kind != PassKind::BackwardWeight;
        if self.job.world_ranks(pipeline_rank).len() > 1 && has_sums {
            self.compute(Some(Group::TensorParallel(pipeline_rank)), Op::Sum(pass), &[]);
        }
        // A stage's last backward pass starts to sum its gradients.
        let is_last = |kind: PassKind| kind == PassKind::Backward || kind == PassKind::BackwardWeight;
        let same = |action: &Action| action.pass().is_some_and(|next| next.part.stage == pass.part.stage);
        if is_last(pass.kind) && !rest.iter().any(same) {
            self.bucket(state, pass.part.stage);
        }
        let flow = match pass.kind {
            PassKind::Forward => Flow::Activations,
            PassKind::Backward | PassKind::BackwardInput => Flow::Gradients,
            PassKind::BackwardWeight => return,
        };
        let after = self.computed.unwrap_or(computed);
        for edge in StageEdge::for_part(self.topology, flow, pass.part, true) {
            if self.rows(flow, edge) == 0 {
                continue;
            }
            let peer = self.topology.rank(edge.other(pass.part));
            for to in self.job.targets(self.rank, &self.role(pass.part), peer) {
                if to != self.rank {
                    if self.rules.posting == Posting::Step {
                        let lane = MessageLane::of(self.rank, to, edge.tag(flow));
                        state.shared.take_send(lane, edge).expect("messages leave in order");
                    }
                    state.sends.push(self.message([self.rank, to], flow, edge, &[after]));
                }
            }
        }
    }

    fn role(&self, part: Part) -> RankRole {
        part_role(&self.roles, part).unwrap().clone()
    }

    /// Returns the planned number of rows in a message.
    fn rows(&self, flow: Flow, edge: StageEdge) -> usize {
        let [from, to] =
            [edge.upstream, edge.downstream].map(|part| &self.job.stages[usize::from(part.stage)]);
        if flow == Flow::Gradients && !from.has_backward {
            0
        } else if from.module == to.module {
            tokens(self.plan, self.job, from.range.module, edge.upstream.microbatch)
        } else {
            let route = self.plan.module_route(from.module);
            route.tokens_between(edge.upstream.microbatch, edge.downstream.microbatch)
        }
    }

    /// Returns the replicas of a stage, if there are several.
    fn replicas(&self, stage: u16) -> Option<Group> {
        let module = &self.job.modules()[self.job.stages[usize::from(stage)].module];
        let role = self.role(Part { microbatch: 0, stage });
        (module.dp_size > 1).then_some(Group::Replicas(stage, role.tp_rank))
    }

    fn bucket(&mut self, state: &mut StepState, stage: u16) {
        if let Some(group) = self.replicas(stage) {
            let bucket = *state.buckets.entry(stage).and_modify(|begun| *begun += 1).or_insert(0);
            state.sums.push(self.start(group, Op::Bucket(stage, bucket)));
        }
    }

    /// Starts the stage sums that the last backward pass has not started.
    fn complete(&mut self, state: &mut StepState, stage: u16) {
        while self.replicas(stage).is_some() && state.buckets.get(&stage) != Some(&1) {
            self.bucket(state, stage);
        }
        let is_end = self.job.llm_ends().is_some_and(|ends| ends.contains(&stage));
        let role = self.role(Part { microbatch: 0, stage });
        if is_end && !self.job.tied.is_empty() && self.job.llm().stages.len() > self.job.schedule.chunks() {
            state.ties.push(self.start(Group::Tie(role.replica, role.tp_rank), Op::Tied));
        }
    }

    /// Ends a step, and updates the weights.
    fn finish(&mut self, state: &StepState) {
        self.wait(&state.sends);
        self.wait(&state.ties);
        let stages: Vec<u16> = self.roles.iter().flat_map(|role| role.stages.clone()).collect();
        let ends = self.job.llm_ends().filter(|_| !self.job.tied.is_empty()).unwrap_or_default();
        let mut sums = state.sums.clone();
        for &stage in stages.iter().filter(|stage| ends.contains(stage)) {
            sums.extend(self.replicas(stage).map(|group| self.start(group, Op::Tied)));
        }
        self.wait(&sums);
        let norm = self.start(Group::World, Op::Norm);
        self.wait(&[norm]);
        self.compute(None, Op::Update, &[]);
        for stage in stages {
            if let Some(group) = self.replicas(stage) {
                let gathered = self.start(group, Op::Gather(stage));
                self.wait(&[gathered]);
            }
        }
    }
}
