//! Writes a run timeline as trace events, to be opened in Perfetto or `chrome://tracing`.
//!
//! Every rank is a process with two threads: `measured` has the actions as they ran, `predicted` as they were
//! simulated. The event arguments contain both durations. A predicted step starts with the measured step, or
//! when the previous predicted step has ended. A thread for each communication lane in use follows.
//!
//! Events are written as they occur, one per line, in the JSON array format, where the closing bracket is
//! optional: a killed run's trace can be opened, too.
//!
//! # Source
//! The Chromium project: "Trace Event Format", 2016, complete (`X`) and metadata (`M`) events.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::ops::Range;

use dflop_balancer::schedule::Action;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::pipeline::{CommunicationKind, CommunicationLane, TimedAction, TimedCommunication};

/// Thread numbers within a rank.
const MEASURED: u32 = 0;
const PREDICTED: u32 = 1;
/// Thread number for the first communication lane.
const FIRST_LANE: u32 = 2;

/// Action in a step, with times since the step start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedAction {
    /// Executed action.
    pub action: Action,
    /// Measured time range, in nanoseconds.
    pub measured_ns: Range<u64>,
    /// CPU time spent in the measured range, in nanoseconds.
    pub busy_ns: u64,
    /// Simulated time range in nanoseconds, if the action was simulated.
    pub predicted_ns: Option<Range<u64>>,
    /// Step plan indices for the samples in a forward pass; empty for other actions.
    pub samples: Vec<u32>,
}

impl TracedAction {
    /// Combines a timed action with a simulated time range.
    #[must_use]
    pub fn new(timed: &TimedAction, predicted_ns: Option<Range<u64>>) -> Self {
        let TimedAction { action, start_ns, end_ns, busy_ns } = *timed;
        Self { action, measured_ns: start_ns..end_ns, busy_ns, predicted_ns, samples: Vec::new() }
    }
}

/// Trace event writer.
#[derive(Debug)]
pub struct TraceWriter<W: Write> {
    output: W,
    is_empty: bool,
    /// End time for the last predicted step, by rank, in nanoseconds.
    predicted_until_ns: BTreeMap<usize, u64>,
    /// Communication lane threads, by rank.
    lanes: BTreeMap<usize, BTreeMap<CommunicationLane, LaneThread>>,
}

impl<W: Write> TraceWriter<W> {
    /// Starts a trace; `output` should be buffered.
    ///
    /// # Errors
    /// [`Error::Trace`].
    pub fn new(mut output: W) -> Result<Self> {
        output.write_all(b"[").map_err(Error::Trace)?;
        let (predicted_until_ns, lanes) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { output, is_empty: true, predicted_until_ns, lanes })
    }

    /// Names a rank and the rank's threads; call once per rank, before any step.
    ///
    /// # Errors
    /// [`Error::Trace`].
    pub fn rank(&mut self, rank: usize, name: &str) -> Result<()> {
        let meta = |kind: &str, tid: u32, args: Value| json!({"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": args});
        self.event(&meta("process_name", 0, json!({"name": name})))?;
        self.event(&meta("process_sort_index", 0, json!({"sort_index": rank})))?;
        self.event(&meta("thread_name", MEASURED, json!({"name": "measured"})))?;
        self.event(&meta("thread_name", PREDICTED, json!({"name": "predicted"})))
    }

    /// Writes a rank's actions in a step.
    ///
    /// - `start_ns`: step start since the run start, in nanoseconds; not before the previous step start
    ///
    /// # Errors
    /// [`dflop_models::Error::Input`] with the action that ends before it starts; [`Error::Trace`].
    pub fn step(&mut self, rank: usize, step: u64, start_ns: u64, actions: &[TracedAction]) -> Result<()> {
        for action in actions {
            let ranges = [Some(&action.measured_ns), action.predicted_ns.as_ref()];
            if ranges.into_iter().flatten().any(|range| range.end < range.start) {
                let problem = format!("action `{}` ends before it starts", action.action);
                return Err(dflop_models::Error::Input { input: "timeline", problem }.into());
            }
        }
        let measured = |action: &TracedAction| Some(action.measured_ns.clone());
        self.thread((rank, MEASURED), step, start_ns, actions, measured)?;
        let until = self.predicted_until_ns.get(&rank).copied().unwrap_or(0);
        // A predicted step may be longer than the measured one; events of a thread must not overlap.
        let start_ns = start_ns.max(until);
        let predicted = |action: &TracedAction| action.predicted_ns.clone();
        self.thread((rank, PREDICTED), step, start_ns, actions, predicted)?;
        let length = actions.iter().filter_map(predicted).map(|range| range.end).max();
        if let Some(length) = length {
            self.predicted_until_ns.insert(rank, start_ns + length);
        }
        Ok(())
    }

    /// Writes a rank's communication in a step, each lane on a thread named at the first event.
    ///
    /// - `start_ns`: as for [`step`](Self::step)
    ///
    /// # Errors
    /// [`Error::Trace`].
    pub fn communication(
        &mut self,
        rank: usize,
        step: u64,
        start_ns: u64,
        all: &[TimedCommunication],
    ) -> Result<()> {
        for timed in all {
            let of_rank = self.lanes.entry(rank).or_default();
            let next = LaneThread::new(FIRST_LANE + of_rank.len() as u32);
            let is_new = !of_rank.contains_key(&timed.lane);
            let thread = of_rank.entry(timed.lane).or_insert(next);
            let event = thread.event((rank, step, start_ns), timed);
            let named = is_new.then(|| name(rank, thread.number(), timed.lane));
            for event in named.into_iter().flatten().chain([event]) {
                self.event(&event)?;
            }
        }
        Ok(())
    }

    /// Writes a thread's events, in order.
    fn thread(
        &mut self,
        (rank, tid): (usize, u32),
        step: u64,
        start_ns: u64,
        actions: &[TracedAction],
        range: impl Fn(&TracedAction) -> Option<Range<u64>>,
    ) -> Result<()> {
        let mut events: Vec<(Range<u64>, &TracedAction)> =
            actions.iter().filter_map(|action| Some((range(action)?, action))).collect();
        events.sort_by_key(|(range, _)| (range.start, range.end));
        for (range, action) in events {
            self.event(&json!({
                "ph": "X", "name": action.action.to_string(), "cat": category(action.action), "pid": rank, "tid": tid,
                "ts": microseconds(start_ns + range.start), "dur": microseconds(range.end - range.start),
                "args": arguments(step, action),
            }))?;
        }
        Ok(())
    }

    fn event(&mut self, event: &Value) -> Result<()> {
        // The comma comes first, so that a killed run leaves only complete events before the cut.
        let separator = if self.is_empty { "" } else { "," };
        self.is_empty = false;
        write!(self.output, "{separator}\n{event}").map_err(Error::Trace)
    }

    /// Ends the trace and returns the output.
    ///
    /// # Errors
    /// [`Error::Trace`].
    pub fn finish(mut self) -> Result<W> {
        self.output.write_all(b"\n]\n").and_then(|()| self.output.flush()).map_err(Error::Trace)?;
        Ok(self.output)
    }
}

/// Joins rank traces into a single trace, without truncated last lines from killed ranks.
///
/// Returns the output and the number of lines left out.
///
/// # Errors
/// [`Error::Trace`].
pub fn join_traces<R: BufRead, W: Write>(
    traces: impl IntoIterator<Item = R>,
    output: W,
) -> Result<(W, usize)> {
    let (mut writer, mut left_out) = (TraceWriter::new(output)?, 0);
    for trace in traces {
        for line in trace.split(b'\n') {
            let line = line.map_err(Error::Trace)?;
            let line = line.trim_ascii_start().strip_suffix(b",").unwrap_or(line.trim_ascii_start());
            if line.starts_with(b"{") {
                match serde_json::from_slice::<Value>(line) {
                    Ok(event) => writer.event(&event)?,
                    Err(_) => left_out += 1,
                }
            }
        }
    }
    Ok((writer.finish()?, left_out))
}

/// Returns the action category; viewers use the same color within a category.
fn category(action: Action) -> &'static str {
    match action {
        Action::Forward(_) => "forward",
        Action::Backward(_) | Action::BackwardInput(_) | Action::BackwardWeight(_) => "backward",
        Action::ReduceGrads(_) => "reduce",
        Action::Recv(_) | Action::Send(_) | Action::RecvGrad(_) | Action::SendGrad(_) => "message",
    }
}

fn arguments(step: u64, traced: &TracedAction) -> Value {
    let (microbatch, stage) = match traced.action {
        Action::Forward(part)
        | Action::Backward(part)
        | Action::BackwardInput(part)
        | Action::BackwardWeight(part) => (Some(part.microbatch), part.stage),
        Action::Recv(message)
        | Action::Send(message)
        | Action::RecvGrad(message)
        | Action::SendGrad(message) => (Some(message.microbatch), message.stage),
        Action::ReduceGrads(stage) => (None, stage),
    };
    let length = |range: &Range<u64>| range.end - range.start;
    let mut arguments = json!({
        "step": step, "microbatch": microbatch, "stage": stage, "measured_ns": length(&traced.measured_ns),
        "predicted_ns": traced.predicted_ns.as_ref().map(length), "cpu_ns": traced.busy_ns,
    });
    if !traced.samples.is_empty() {
        arguments["samples"] = json!(traced.samples);
    }
    arguments
}

pub(super) fn microseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}

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

#[cfg(test)]
mod tests {
    use dflop_balancer::schedule::{Message, Part};

    use super::*;

    fn traced(action: Action, measured_ns: Range<u64>, predicted_ns: Option<Range<u64>>) -> TracedAction {
        let Range { start: start_ns, end: end_ns } = measured_ns;
        TracedAction::new(&TimedAction { action, start_ns, end_ns, busy_ns: 7 }, predicted_ns)
    }

    fn actions() -> Vec<TracedAction> {
        let part = Part { microbatch: 3, stage: 1 };
        let forward = traced(Action::Forward(part), 0..2_500, Some(0..2_000));
        vec![
            traced(Action::Backward(part), 2_500..9_000, Some(2_000..8_000)),
            TracedAction { samples: vec![5, 1], ..forward },
            traced(Action::Send(Message { microbatch: 3, stage: 1, peer: 2 }), 2_500..2_500, None),
            traced(Action::ReduceGrads(1), 9_000..9_500, None),
        ]
    }

    fn events(bytes: &[u8]) -> Vec<Value> {
        serde_json::from_slice::<Value>(bytes).unwrap().as_array().unwrap().clone()
    }

    fn trace(rank: usize) -> Vec<u8> {
        let mut writer = TraceWriter::new(Vec::new()).unwrap();
        writer.rank(rank, "rank of the LLM").unwrap();
        writer.step(rank, 4, 1_000, &actions()).unwrap();
        // Starts before the prediction of the step before has ended.
        writer.step(rank, 5, 8_500, &actions()).unwrap();
        writer.finish().unwrap()
    }

    #[test]
    fn events_are_ordered_and_have_both_times() {
        let events = events(&trace(2));
        assert_eq!(events.len(), 4 + 2 * (4 + 2));
        assert_eq!(events[2]["args"]["name"], "measured");
        let forward = &events[4];
        assert_eq!(forward["name"], "forward 3 in stage 1");
        assert_eq!((&forward["ts"], &forward["dur"]), (&json!(1.0), &json!(2.5)));
        let expected = json!({"step": 4, "microbatch": 3, "stage": 1, "measured_ns": 2500, "predicted_ns": 2000,
            "cpu_ns": 7, "samples": [5, 1]});
        assert_eq!(forward["args"], expected);
        // Of events with the same start, the shorter one comes first.
        assert_eq!(events[5]["cat"], "message");
        assert_eq!(events[7]["name"], "reduce gradients of stage 1");
        assert_eq!(events[7]["args"]["predicted_ns"], Value::Null);
        for tid in [MEASURED, PREDICTED] {
            let of_thread: Vec<&Value> =
                events.iter().filter(|event| event["ph"] == "X" && event["tid"] == tid).collect();
            let mut end = 0.0;
            for event in of_thread {
                let (start, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                // The second measured step starts early on purpose.
                assert!(event["pid"] == 2 && length >= 0.0 && (start >= end || event["args"]["step"] == 5));
                assert!(tid == MEASURED || start >= end, "{event}");
                end = start + length;
            }
        }
    }

    #[test]
    fn traces_of_ranks_join_and_a_cut_one_is_saved_up_to_there() {
        let (first, second) = (trace(0), trace(1));
        let cut = &second[..second.len() - 40];
        let (joined, left_out) = join_traces([first.as_slice(), cut], Vec::new()).unwrap();
        assert_eq!((events(&joined).len(), left_out), (2 * 16 - 1, 1));
        let (joined, left_out) = join_traces([first.as_slice(), &second], Vec::new()).unwrap();
        assert_eq!((events(&joined).len(), left_out), (2 * 16, 0));
    }

    #[test]
    fn an_action_that_ends_before_it_begins_is_named() {
        let mut writer = TraceWriter::new(Vec::new()).unwrap();
        let mut wrong = actions();
        wrong[1].predicted_ns = Some(Range { start: 5, end: 4 });
        let error = writer.step(0, 0, 0, &wrong).unwrap_err().to_string();
        assert_eq!(error, "input `timeline`: action `forward 3 in stage 1` ends before it starts");
        assert_eq!(events(&writer.finish().unwrap()), Vec::<Value>::new());
    }

    #[test]
    fn every_lane_has_a_named_thread_whose_events_do_not_overlap() {
        use crate::pipeline::CommunicationKind;
        let of = |lane, kind, microbatch, start_ns, end_ns| TimedCommunication {
            lane,
            kind,
            stage: 1,
            microbatch,
            bytes: 64,
            start_ns,
            end_ns,
            exposed_ns: 500,
        };
        let (send, replicas) = (CommunicationLane::Send { to: 3 }, CommunicationLane::Replicas { stage: 1 });
        let step = [
            of(send, CommunicationKind::Activations, Some(2), 1_000, 3_000),
            // A gather that began in the step before.
            of(replicas, CommunicationKind::AllGather, None, -2_000, 1_000),
            of(replicas, CommunicationKind::ReduceScatter, None, 4_000, 6_000),
        ];
        let mut writer = TraceWriter::new(Vec::new()).unwrap();
        writer.communication(7, 0, 10_000, &step).unwrap();
        writer.communication(7, 1, 15_000, &step).unwrap();
        let events = events(&writer.finish().unwrap());
        let names: Vec<&str> = (events.iter().filter(|event| event["name"] == "thread_name"))
            .map(|event| event["args"]["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["send to rank 3", "replicas of stage 1"]);
        let first = events.iter().find(|event| event["ph"] == "X").unwrap();
        assert_eq!(first["name"], "activations 2 of stage 1");
        let expected = json!({"step": 0, "microbatch": 2, "stage": 1, "bytes": 64, "exposed_ns": 500});
        assert_eq!(first["args"], expected);
        assert_eq!((&first["ts"], &first["dur"], &first["tid"]), (&json!(11.0), &json!(2.0), &json!(2)));
        let of_replicas: Vec<(f64, f64)> = (events.iter())
            .filter(|event| event["ph"] == "X" && event["tid"] == 3)
            .map(|event| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap()))
            .collect();
        // The second gather began at 13 us, but the lane was busy until 16 us.
        assert_eq!(of_replicas, [(8.0, 3.0), (14.0, 2.0), (16.0, 0.0), (19.0, 2.0)]);
    }
}
