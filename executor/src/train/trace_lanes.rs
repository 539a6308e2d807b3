//! Trace events for communication lanes: a thread for each lane on a rank.

use serde_json::{Value, json};

use super::trace::microseconds;
use crate::pipeline::{CommunicationKind, CommunicationLane, TimedCommunication};

/// Lane thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaneThread {
    number: u32,
    /// End time for the last event in the lane, in nanoseconds.
    until_ns: u64,
}

impl LaneThread {
    pub(super) const fn new(number: u32) -> Self {
        Self { number, until_ns: 0 }
    }

    pub(super) const fn number(self) -> u32 {
        self.number
    }

    /// Returns the event for a communication. A communication from the previous step may end late, and events
    /// on a thread must not overlap: the event begins when the lane is free.
    ///
    /// - `(rank, step, start_ns)`: step start since the run start
    pub(super) fn event(
        &mut self,
        (rank, step, start_ns): (usize, u64, u64),
        timed: &TimedCommunication,
    ) -> Value {
        let since_run = |ns: i64| start_ns.saturating_add_signed(ns);
        let end_ns = since_run(timed.end_ns).max(self.until_ns);
        let begin_ns = since_run(timed.start_ns).clamp(self.until_ns, end_ns);
        self.until_ns = end_ns;
        let TimedCommunication { kind, stage, microbatch, bytes, exposed_ns, .. } = *timed;
        let name = match (kind, microbatch) {
            (CommunicationKind::Activations, Some(microbatch)) => {
                format!("activations {microbatch} of stage {stage}")
            }
            (CommunicationKind::Gradients, Some(microbatch)) => {
                format!("gradients {microbatch} of stage {stage}")
            }
            (kind, _) => format!("{} of stage {stage}", kind_name(kind)),
        };
        json!({
            "ph": "X", "name": name, "cat": kind_name(kind), "pid": rank, "tid": self.number,
            "ts": microseconds(begin_ns), "dur": microseconds(end_ns - begin_ns),
            "args": {
                "step": step, "microbatch": microbatch, "stage": stage, "bytes": bytes, "exposed_ns": exposed_ns,
            },
        })
    }
}

/// Returns the events that name a thread and sort it below the pass threads.
pub(super) fn name(rank: usize, thread: u32, lane: CommunicationLane) -> [Value; 2] {
    let name = match lane {
        CommunicationLane::Send { to } => format!("send to rank {to}"),
        CommunicationLane::Receive { from } => format!("receive from rank {from}"),
        CommunicationLane::Replicas { stage } => format!("replicas of stage {stage}"),
        CommunicationLane::Tie => "tied parameters".to_owned(),
    };
    [("thread_name", json!({"name": name})), ("thread_sort_index", json!({"sort_index": thread}))]
        .map(|(kind, args)| json!({"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}))
}

const fn kind_name(kind: CommunicationKind) -> &'static str {
    match kind {
        CommunicationKind::Activations => "activations",
        CommunicationKind::Gradients => "gradients",
        CommunicationKind::AllReduce => "all-reduce",
        CommunicationKind::ReduceScatter => "reduce-scatter",
        CommunicationKind::AllGather => "all-gather",
    }
}
