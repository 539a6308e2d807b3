//! Lists everything that ranks do in a step, as data: actions, launch order, message rows.
//!
//! A [`PipelineRank`](super::PipelineRank) runs the same lists. Here a message names world ranks and the
//! parts at both ends, so that any framework can run the lists over any communicators.

use std::collections::BTreeMap;
use std::ops::Range;

use dflop_balancer::schedule::{Action, Message, Part};
use xxhash_rust::xxh3::Xxh3;

use super::layout::{JobLayout, refuse};
use super::rank_step::tokens;
use super::step_order::{OwnMessage, StepOrder, action_lists};
use super::step_plan::{PipelineStepPlan, RouteEnd, RoutedMedium};
use super::topology::{Flow, RankRole, StageEdge, StageTransfer, Topology, part_role};
use crate::error::{Error, Result};

/// Maximum number of parts in a schedule, over all stages and replicas.
const PARTS_MAX: usize = 1 << 22;

/// Remote message end: a world rank, and the part that sends or receives there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageEnd {
    /// World rank.
    pub rank: usize,
    /// Part.
    pub part: Part,
}

/// Action on a world rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankAction {
    /// Action, whose peer is a pipeline rank.
    pub action: Action,
    /// Remote message end; `None` for passes and sums.
    pub other_end: Option<MessageEnd>,
}

/// Message launch on a world rank.
///
/// A rank launches messages in list order, each directly before the action `before`. If the order is kept, a
/// receive may be launched earlier, and a send as soon as the pass that produces the rows has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankLaunch {
    /// Message index in the rank's actions.
    pub action: usize,
    /// Index of the first action after the message in step order; the number of actions at the end.
    pub before: usize,
}

/// Actions and launches of all world ranks in a step.
///
/// **No deadlock.** If every rank launches messages as [`StepSchedule::launches`] lists them, no launch waits
/// for itself, even if all messages on a rank share a queue and a send ends only with the matching receive.
/// Gradient sums ([`Action::ReduceGrads`]) have a queue for each replica group.
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::ScheduleKind;
/// use dflop_executor::models::ModuleKind;
/// use dflop_executor::pipeline::{JobLayout, ModuleParallelism, Placement, StepSchedule};
///
/// // Two encoder ranks feed three LLM pipelines.
/// let modules = vec![
///     ModuleParallelism::even(ModuleKind::Vision, 4, 1).dp_size(2),
///     ModuleParallelism::even(ModuleKind::Llm, 8, 1).dp_size(3),
/// ];
/// let schedule = ScheduleKind::OneForwardOneBackward;
/// let layout = JobLayout::new(Placement::Disaggregated, modules, schedule)?;
/// let step = StepSchedule::new(layout, 2)?;
/// let first: Vec<String> = step.actions(0)[..3].iter().map(|own| own.action.to_string()).collect();
/// assert_eq!(first, ["forward 0 in stage 0", "send 0 in stage 0 to 4", "send 0 in stage 0 to 3"]);
/// assert_eq!(step.launches(2)?[0].action, 0);
/// # Ok::<(), dflop_executor::Error>(())
/// ```
pub struct StepSchedule {
    layout: JobLayout,
    topology: Topology,
    microbatches: usize,
    lists: Vec<RankList>,
    order: StepOrder,
}

impl StepSchedule {
    /// Lists the actions and launches in a step.
    ///
    /// - `microbatches`: number per LLM DP rank
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if there is no microbatch, or the lists would be too long;
    /// [`Error::Balancer`] if the layout has no such schedule.
    pub fn new(layout: JobLayout, microbatches: usize) -> Result<Self> {
        let stage_replicas = layout.modules().iter().map(|module| module.stages.len() * module.dp_size);
        let parts = stage_replicas.sum::<usize>().saturating_mul(microbatches);
        if !(1..=PARTS_MAX).contains(&parts) {
            let problem = format!(
                "{microbatches} per LLM replica are {parts} over all stages, expected 1 to {PARTS_MAX}"
            );
            return refuse("microbatches", problem);
        }
        let topology = Topology::new(&layout, microbatches)?;
        let ranks: Vec<usize> = (0..layout.world_size()).collect();
        let order = StepOrder::new(&layout, &topology)?;
        let mut lists = Vec::with_capacity(ranks.len());
        for (rank, list) in action_lists(&layout, &topology, &ranks)?.into_iter().enumerate() {
            lists.push(RankList::new(&layout, &topology, (rank, &layout.roles(rank)?), &list)?);
        }
        Ok(Self { layout, topology, microbatches, lists, order })
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> &JobLayout {
        &self.layout
    }

    /// Returns the number of microbatches per LLM DP rank.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Returns a world rank's actions, in order.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn actions(&self, rank: usize) -> &[RankAction] {
        &self.lists[rank].actions
    }

    /// Returns a world rank's launches in order: each message in the rank's actions once, with `before`
    /// ascending.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the actions lack a message, which is a defect.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn launches(&self, rank: usize) -> Result<Vec<RankLaunch>> {
        self.lists[rank].launches(&self.order, rank)
    }

    /// Returns the world ranks that run a part, by TP rank.
    ///
    /// # Panics
    /// If there is no such part.
    #[must_use]
    pub fn part_ranks(&self, part: Part) -> &[usize] {
        self.layout.world_ranks(self.topology.rank(part))
    }

    /// Returns whether both parts exist, and rows go from one to the other.
    #[must_use]
    pub fn is_linked(&self, [own, other]: [Part; 2]) -> bool {
        let has = |Part { microbatch, stage }: Part| {
            let replicas = || self.layout.modules()[self.layout.stage_module(stage)].dp_size;
            usize::from(stage) < self.layout.stage_count()
                && (microbatch as usize) < self.microbatches * replicas()
        };
        let (upstream, downstream) = if own.stage < other.stage { (own, other) } else { (other, own) };
        has(own) && has(other) && self.topology.downstream_parts(upstream).contains(&downstream)
    }

    /// Returns message rows at this end, in message order; none if the message is not sent.
    ///
    /// Between two modules, they are media rows ([`RoutedMedium`]); inside a module, all microbatch rows.
    ///
    /// - `own`: part at this end
    /// - `other`: part at the remote end
    /// - `encoder_rows`: number of rows for a medium between two encoder stages
    ///
    /// # Panics
    /// If a part does not exist.
    #[must_use]
    pub fn rows(
        &self,
        plan: &PipelineStepPlan,
        [own, other]: [Part; 2],
        encoder_rows: impl Fn(&RoutedMedium) -> usize,
    ) -> Vec<Range<usize>> {
        let (upstream, downstream) = if own.stage < other.stage { (own, other) } else { (other, own) };
        let [from, to] = [upstream, downstream].map(|part| self.layout.stage_module(part.stage));
        if from != to {
            let end = if own == downstream { RouteEnd::Destination } else { RouteEnd::Source };
            let between = [upstream.microbatch, downstream.microbatch];
            let elements = plan.module_route(from).elements(between, end, 1).into_iter();
            return elements
                .map(|rows| rows.from..rows.from + rows.len)
                .filter(|rows| !rows.is_empty())
                .collect();
        }
        let rows = if from + 1 == self.layout.modules().len() {
            tokens(plan, &self.layout, self.layout.modules()[from].module, upstream.microbatch)
        } else {
            plan.module_route(from).source_media(upstream.microbatch).map(encoder_rows).sum()
        };
        (rows > 0).then_some(0..rows).into_iter().collect()
    }

    /// Returns a digest over the layout and all actions, for comparison between ranks.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut digest = Xxh3::new();
        self.layout.add_to(&mut digest);
        for RankAction { action, other_end } in self.lists.iter().flat_map(|list| &list.actions) {
            digest.update(action.to_string().as_bytes());
            digest.update(&other_end.map_or(u64::MAX, |end| end.rank as u64).to_le_bytes());
        }
        digest.digest()
    }
}

/// Message on a rank: flow, edge, whether the rank sends it, and the world rank at the remote end.
type Key = (Flow, StageEdge, bool, usize);

/// World rank actions, with the messages by edge.
struct RankList {
    actions: Vec<RankAction>,
    /// First action for every pipeline rank action, then the number of actions.
    starts: Vec<usize>,
    /// Action index for every message.
    messages: BTreeMap<Key, usize>,
}

impl RankList {
    /// Lists a world rank's actions: a send to a pipeline rank becomes a send to each world rank there that
    /// this rank serves.
    fn new(
        layout: &JobLayout,
        topology: &Topology,
        (rank, roles): (usize, &[RankRole]),
        list: &[Action],
    ) -> Result<Self> {
        let mut own = Self { actions: Vec::new(), starts: Vec::new(), messages: BTreeMap::new() };
        for &action in list {
            own.starts.push(own.actions.len());
            let Some(StageTransfer { flow, is_send, edge, peer }) = StageTransfer::of(topology, action)
            else {
                own.actions.push(RankAction { action, other_end: None });
                continue;
            };
            let part = if (flow == Flow::Activations) == is_send { edge.upstream } else { edge.downstream };
            let role = part_role(roles, part)?;
            let peers = if is_send {
                layout.targets(rank, role, peer)
            } else {
                vec![layout.source(peer, rank, role)]
            };
            for peer in peers.into_iter().filter(|&peer| peer != rank) {
                own.messages.insert((flow, edge, is_send, peer), own.actions.len());
                let other_end = Some(MessageEnd { rank: peer, part: edge.other(part) });
                own.actions.push(RankAction { action, other_end });
            }
        }
        own.starts.push(own.actions.len());
        Ok(own)
    }

    /// Lists the messages in step order.
    fn launches(&self, order: &StepOrder, rank: usize) -> Result<Vec<RankLaunch>> {
        let launch = |message: OwnMessage| {
            let peer = if message.is_send { message.lane.to } else { message.lane.from };
            let key = (message.flow, message.edge, message.is_send, peer);
            let &action = self.messages.get(&key).ok_or_else(|| {
                let (stage, microbatch) = (message.edge.upstream.stage, message.edge.upstream.microbatch);
                let reason =
                    format!("rank {rank} lacks the message of microbatch {microbatch} in stage {stage}");
                Error::InvalidSetting { setting: "order of messages", reason }
            })?;
            Ok(RankLaunch { action, before: self.starts[message.before] })
        };
        order.rank_messages(rank).into_iter().map(launch).collect()
    }
}

impl RankAction {
    /// Returns the message, if the action sends or receives.
    #[must_use]
    pub fn message(&self) -> Option<Message> {
        match self.action {
            Action::Recv(message)
            | Action::Send(message)
            | Action::RecvGrad(message)
            | Action::SendGrad(message) => Some(message),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MediumPlan, MicrobatchPlan, ModuleParallelism, Placement};
    use super::*;
    use dflop_balancer::schedule::ScheduleKind;
    use dflop_models::ModuleKind;
    use std::collections::BTreeSet;

    fn schedule(placement: Placement, encoder: [usize; 3], llm: [usize; 3]) -> StepSchedule {
        let module = |kind, [stages, dp_size, tp_size]: [usize; 3]| {
            ModuleParallelism::even(kind, stages, stages).dp_size(dp_size).tp_size(tp_size)
        };
        let modules = vec![module(ModuleKind::Vision, encoder), module(ModuleKind::Llm, llm)];
        let layout = JobLayout::new(placement, modules, ScheduleKind::OneForwardOneBackward).unwrap();
        StepSchedule::new(layout, 3).unwrap()
    }

    fn schedules() -> [StepSchedule; 4] {
        [
            schedule(Placement::Disaggregated, [2, 2, 1], [2, 3, 1]),
            schedule(Placement::Disaggregated, [1, 3, 1], [2, 2, 2]),
            schedule(Placement::Disaggregated, [1, 1, 2], [1, 2, 1]),
            schedule(Placement::Colocated, [1, 4, 1], [2, 2, 1]),
        ]
    }

    #[test]
    fn every_send_has_its_receive_and_every_message_a_launch() {
        for step in schedules() {
            let mut ends = [BTreeSet::new(), BTreeSet::new()];
            for rank in 0..step.layout().world_size() {
                for own in step.actions(rank) {
                    let (Some(message), Some(other)) = (own.message(), own.other_end) else { continue };
                    let is_send = matches!(own.action, Action::Send(_) | Action::SendGrad(_));
                    let is_gradient = matches!(own.action, Action::SendGrad(_) | Action::RecvGrad(_));
                    let ranks = if is_send { [rank, other.rank] } else { [other.rank, rank] };
                    let parts = [message.part(), other.part];
                    let parts = if is_send { parts } else { [parts[1], parts[0]] };
                    assert!(ends[usize::from(is_send)].insert((ranks, parts, is_gradient)));
                }
                let launches = step.launches(rank).unwrap();
                let launched: BTreeSet<usize> = launches.iter().map(|launch| launch.action).collect();
                let messages =
                    (0..step.actions(rank).len()).filter(|&at| step.actions(rank)[at].message().is_some());
                assert!(launched.iter().copied().eq(messages));
                assert_eq!(launches.len(), launched.len());
                assert!(launches.is_sorted_by_key(|launch| launch.before));
            }
            assert_eq!(ends[0], ends[1]);
            assert!(!ends[0].is_empty());
        }
    }

    #[test]
    fn both_ends_of_a_message_have_as_many_rows() {
        for step in schedules() {
            let replicas = step.layout().modules()[1].dp_size;
            let medium = |tokens| MediumPlan { module: ModuleKind::Vision, tokens, cost_ns: tokens as u64 };
            let microbatch = |at: usize| {
                let media: Vec<MediumPlan> = (0..at % 4).map(|index| medium(index + at)).collect();
                MicrobatchPlan { tokens: 7 + media.iter().map(|medium| medium.tokens).sum::<usize>(), media }
            };
            let microbatches = (0..3 * replicas).map(microbatch).collect();
            let plan = PipelineStepPlan::new(step.layout(), 0, 1, microbatches).unwrap();
            let mut rows_between = 0;
            for rank in 0..step.layout().world_size() {
                for own in step.actions(rank) {
                    let (Some(message), Some(other)) = (own.message(), own.other_end) else { continue };
                    let len =
                        |ends| step.rows(&plan, ends, |row| 4 * row.tokens).iter().map(Range::len).sum();
                    let lens: [usize; 2] =
                        [len([message.part(), other.part]), len([other.part, message.part()])];
                    assert_eq!(lens[0], lens[1]);
                    rows_between += lens[0];
                }
            }
            assert!(rows_between > 0);
        }
    }

    #[test]
    fn lists_that_would_be_too_long_are_refused() {
        let layout = schedule(Placement::Disaggregated, [1, 1, 1], [1, 1, 1]).layout;
        for microbatches in [0, usize::MAX] {
            let error = StepSchedule::new(layout.clone(), microbatches).err().unwrap().to_string();
            assert!(error.starts_with("invalid `microbatches`"), "{error}");
        }
    }
}
