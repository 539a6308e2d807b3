//! Inserts messages and gradient sums between the passes.
//!
//! Every message is an event in a total order over all events in the job: it comes when the receiving pass
//! would start, were all passes equally long, gradients before activations. Both action lists have the
//! message at that position. So there is an order in which everything can happen, and lists never deadlock,
//! even if a send waits for the receive.

use super::action::{Action, Message, Pass, PassKind};
use super::graph::PassGraph;
use super::layout::PipelineLayout;
use crate::error::Result;

/// Position in the total event order: tick, phase, then two numbers that make it unique.
type Place = (u32, Phase, i64, usize);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Gradients,
    Activations,
    Passes,
    Sums,
}

/// Adds messages and sums to the passes on all ranks.
pub(super) fn insert(layout: &PipelineLayout, lists: &[Vec<Pass>]) -> Result<Vec<Vec<Action>>> {
    let graph = PassGraph::new(layout, lists);
    let ticks = graph.ticks()?;
    let mut events: Vec<Vec<(Place, Action)>> = vec![Vec::new(); layout.ranks()];
    for rank in 0..layout.ranks() {
        for number in graph.rank_passes(rank) {
            let (pass, tick) = (graph.passes[number], ticks[number]);
            events[rank].push(((tick, Phase::Passes, 0, 0), pass.into()));
            for input in graph.inputs(number) {
                let sender = graph.rank(input);
                // Stages on one rank pass data in memory.
                if sender != rank {
                    let place = place(tick, pass.kind, rank, sender);
                    let [send, recv] = message(graph.passes[input], pass, [sender, rank]);
                    events[sender].push((place, send));
                    events[rank].push((place, recv));
                }
            }
        }
    }
    for (stage, tick) in graph.sum_ticks(&ticks).into_iter().enumerate() {
        for rank in layout.holders(stage) {
            events[rank].push(((tick, Phase::Sums, 0, stage), Action::ReduceGrads(stage as u16)));
        }
    }
    let in_order = |mut events: Vec<(Place, Action)>| {
        events.sort_by_key(|(place, _)| *place);
        events.into_iter().map(|(_, action)| action).collect()
    };
    Ok(events.into_iter().map(in_order).collect())
}

/// Orders messages within a tick: messages nearest to the loss come first, so that a rank sends before it
/// receives.
fn place(tick: u32, kind: PassKind, receiver: usize, sender: usize) -> Place {
    if kind.is_backward() {
        (tick, Phase::Gradients, receiver as i64, sender)
    } else {
        (tick, Phase::Activations, -(receiver as i64), sender)
    }
}

/// Builds both ends of the message between two passes.
fn message(from: Pass, to: Pass, [sender, receiver]: [usize; 2]) -> [Action; 2] {
    let end = |pass: Pass, peer: usize| {
        let (microbatch, stage) = (pass.part.microbatch, pass.part.stage);
        Message { microbatch, stage, peer: peer as u16 }
    };
    let (send, recv) = (end(from, receiver), end(to, sender));
    if to.kind.is_backward() {
        [Action::SendGrad(send), Action::RecvGrad(recv)]
    } else {
        [Action::Send(send), Action::Recv(recv)]
    }
}
