//! Compares planned sends and receives between ranks, if messages are matched only by order.
//!
//! Such a transport pairs the first message in a lane with the first receive, regardless of content. So
//! before a step both ends of every lane compare a hash over the messages: stage, microbatch, rows and bytes,
//! in order. The comparison exchanges one number per rank; only if it fails, hashes for single lanes are
//! exchanged, to name the two ranks that differ.

use std::collections::{BTreeMap, BTreeSet};

use dflop_comm::{Cause, Comm, Failure, StepContext};
use dflop_device::{Device, MessageLane};
use xxhash_rust::xxh3::Xxh3;

use super::job::Job;
use super::rank_step::tokens;
use super::step_order::{SentMessage, sent_messages};
use super::topology::{Flow, StageEdge, Topology};
use super::transfer_buffers::StepView;
use crate::error::Result;

/// Messages between all ranks in steps with a number of rounds.
pub(super) struct MessageCheck {
    /// Messages in send order.
    messages: Vec<(MessageLane, StageEdge)>,
    /// Size of a row element in bytes.
    element_bytes: usize,
}

/// Messages in a lane, as seen from one end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Digest {
    hash: u64,
    messages: u64,
    rows: u64,
}

/// Count of numbers that a lane end contributes to an exchange.
const NUMBERS: usize = 7;

impl MessageCheck {
    /// Lists messages between all ranks, for this element size.
    pub(super) fn new(job: &Job, topology: &Topology, element_bytes: usize) -> Result<Self> {
        let ranks: Vec<usize> = (0..job.world_size()).collect();
        let sent = sent_messages(job, topology, &ranks)?.into_iter().filter(|sent| sent.to != sent.from);
        let lane = |SentMessage { from, to, flow, edge }| (MessageLane::of(from, to, edge.tag(flow)), edge);
        let messages = sent.map(lane).collect();
        Ok(Self { messages, element_bytes })
    }

    /// Opens the lanes for a step, and compares the messages at both ends; all ranks call it.
    ///
    /// # Errors
    /// [`crate::Error::Comm`] that names the ranks of a lane whose messages differ: the job has ended.
    pub(super) fn run<D: Device>(&self, view: &StepView<'_, D>) -> Result<()> {
        let at = StepContext::step(view.rank_step.plan.step(), "compare messages");
        let planned = self.messages.iter().filter(|(lane, edge)| is_planned(view, *lane, *edge));
        let lanes: BTreeSet<MessageLane> = planned.map(|&(lane, _)| lane).collect();
        view.comm.open_lanes(at, &lanes)?;
        let ends = self.ends(view)?;
        // one end adds, the opposite end subtracts
        let sign = |sum: u64, (lane, digest): (&MessageLane, &Digest)| {
            let word = mixed(*lane, digest.hash);
            if lane.from == view.rank { sum.wrapping_add(word) } else { sum.wrapping_sub(word) }
        };
        let sum = ends.iter().fold(0, sign);
        let sums = view.comm.host().gather(at, &[sum])?;
        if sums.into_iter().fold(0, u64::wrapping_add) == 0 {
            return Ok(());
        }
        Err(refuse(view.comm.host(), at, &ends)?.into())
    }

    /// Returns the messages in the lanes that end on this rank.
    fn ends<D: Device>(&self, view: &StepView<'_, D>) -> Result<BTreeMap<MessageLane, Digest>> {
        let mut hashes = BTreeMap::<MessageLane, (Xxh3, Digest)>::new();
        let mut add = |lane: MessageLane, edge: StageEdge| -> Result<()> {
            let rows = view.rows(lane_flow(lane), edge)?;
            if rows == 0 {
                return Ok(());
            }
            let (hash, digest) = hashes.entry(lane).or_insert_with(|| (Xxh3::new(), Digest::default()));
            let bytes = rows * view.width(edge) * self.element_bytes;
            let parts = [edge.upstream, edge.downstream];
            let places =
                parts.into_iter().flat_map(|part| [u64::from(part.stage), u64::from(part.microbatch)]);
            for word in places.chain([rows as u64, bytes as u64]) {
                hash.update(&word.to_le_bytes());
            }
            digest.messages += 1;
            digest.rows += rows as u64;
            Ok(())
        };
        for &(lane, edge) in self.messages.iter().filter(|(lane, _)| lane.from == view.rank) {
            add(lane, edge)?;
        }
        // receives are posted in lane order
        for ((from, flow), edges) in view.lane_order.lanes() {
            let lane = MessageLane { from, to: view.rank, flow: flow.bit() };
            for &edge in edges.iter().filter(|_| from != view.rank) {
                add(lane, edge)?;
            }
        }
        let digest =
            |(lane, (hash, digest)): (_, (Xxh3, Digest))| (lane, Digest { hash: hash.digest(), ..digest });
        Ok(hashes.into_iter().map(digest).collect())
    }
}

fn lane_flow(lane: MessageLane) -> Flow {
    if lane.flow == Flow::Activations.bit() { Flow::Activations } else { Flow::Gradients }
}

/// Returns whether a message may have rows, as far as every rank can determine from the plan.
fn is_planned<D: Device>(view: &StepView<'_, D>, lane: MessageLane, edge: StageEdge) -> bool {
    if lane_flow(lane) == Flow::Gradients && !view.has_gradients(edge) {
        return false;
    }
    if view.is_routed(edge) {
        let (route, [source, destination]) = view.route(edge);
        return route.tokens_between(source, destination) > 0;
    }
    tokens(&view.rank_step.plan, view.job, view.module(edge.upstream), edge.upstream.microbatch) > 0
}

fn mixed(lane: MessageLane, hash: u64) -> u64 {
    let mut mixed = Xxh3::new();
    for word in [lane.from as u64, lane.to as u64, lane.flow, hash] {
        mixed.update(&word.to_le_bytes());
    }
    mixed.digest()
}

/// Exchanges the messages in all lanes, and ends the job with the first lane whose ends differ; all ranks
/// call it.
fn refuse(
    host: &dyn Comm,
    at: StepContext,
    own: &BTreeMap<MessageLane, Digest>,
) -> dflop_comm::Result<dflop_comm::Error> {
    let most = host.gather(at, &[own.len() as u64])?.into_iter().max().unwrap_or(0) as usize;
    let mut numbers = vec![u64::MAX; NUMBERS * most];
    for ((lane, digest), place) in own.iter().zip(numbers.chunks_mut(NUMBERS)) {
        let end = u64::from(lane.from == host.rank());
        let Digest { hash, messages, rows } = *digest;
        place.copy_from_slice(&[lane.from as u64, lane.to as u64, lane.flow, end, hash, messages, rows]);
    }
    // for each lane the receiver's expected messages, and the sender's messages
    let mut lanes = BTreeMap::<[u64; 3], [Digest; 2]>::new();
    for of_end in host.gather(at, &numbers)?.chunks(NUMBERS).filter(|of_end| of_end[0] != u64::MAX) {
        let digest = Digest { hash: of_end[4], messages: of_end[5], rows: of_end[6] };
        lanes.entry([of_end[0], of_end[1], of_end[2]]).or_default()[of_end[3] as usize] = digest;
    }
    let differing = lanes.into_iter().find(|(_, [expected, sent])| expected != sent);
    let message = match differing {
        Some(([from, to, flow], [expected, sent])) => {
            let flow = if flow == 0 { "activations" } else { "gradients" };
            let text = |digest: Digest| {
                let Digest { hash, messages, rows } = digest;
                format!("{messages} messages of {rows} rows ({hash:#018x})")
            };
            let (sent, expected) = (text(sent), text(expected));
            format!(
                "messages of step {} differ: rank {from} sends {sent} of {flow} to rank {to}, which expects {expected}",
                at.step
            )
        }
        None => format!("messages of step {} differ between ranks", at.step),
    };
    let by = host.world_rank(host.rank());
    Ok(host.fail(Failure { cause: Cause::Mismatch, culprit: None, by, at, message }))
}
