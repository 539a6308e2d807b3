//! Tests that the replayed step time is the longest path through the recorded rank actions.

use std::collections::BTreeMap;

use serde_json::Value;

use super::config::Job;
use crate::command::text;

/// A message end: sending and receiving rank, direction, and position among the messages between them.
type Message = (u64, u64, bool, usize);

/// A message end's microbatch and stage, rank, and place in the rank's list.
type End = (u64, u64, u64, usize);

/// Ordered actions on every rank.
type Lists = BTreeMap<u64, Vec<Value>>;

#[test]
fn a_step_is_replayed_in_the_recorded_order_with_recorded_messages() {
    for (schedule, parallel) in [
        ("1f1b", "vision = { dp = 3 }\nllm = { stages = 2, dp = 2 }"),
        ("gpipe", "llm = { layers = [2, 1], dp = 1 }"),
        ("zb-h1", "llm = { layers = [1, 2], dp = 2 }"),
    ] {
        let schedule = format!("schedule = \"{schedule}\"\n{parallel}");
        let job = Job::with(&[("llm = { stages = 1, dp = 1 }", &schedule), ("steps = 6", "steps = 2")]);
        let file = job.path("trace.json");
        let lines = job.lines(&["--trace", text(&file)]);
        let trace: Value = serde_json::from_slice(&std::fs::read(&file).expect("a trace")).expect("JSON");
        for line in lines {
            let replayed = line["replayed_seconds"].as_f64().expect("a time");
            let path = longest_path_ns(&lists(&trace, &line["step"])) as f64 / 1e9;
            assert!(path > 0.0 && (replayed - path).abs() < 1e-9, "{replayed} s, {path} s: {line}");
        }
    }
}

/// Measured actions in a step.
fn lists(trace: &Value, step: &Value) -> Lists {
    let mut lists = Lists::new();
    for event in trace.as_array().expect("events") {
        if event["ph"] == "X" && event["tid"] == 0 && event["args"]["step"] == *step {
            lists.entry(event["pid"].as_u64().expect("a rank")).or_default().push(event.clone());
        }
    }
    lists
}

fn longest_path_ns(lists: &Lists) -> u64 {
    let messages = messages(lists);
    let (mut ended, mut next) = (BTreeMap::<u64, u64>::new(), BTreeMap::<u64, usize>::new());
    // End time of every pass by category, microbatch and stage; departure time of every message.
    let (mut passes, mut left) = (BTreeMap::new(), BTreeMap::<Message, u64>::new());
    let actions: usize = lists.values().map(Vec::len).sum();
    for _ in 0..actions {
        for (&rank, list) in lists {
            let place = next.get(&rank).copied().unwrap_or(0);
            let Some(action) = list.get(place) else { continue };
            let end = ended.entry(rank).or_insert(0);
            let name = action["name"].as_str().expect("a name");
            let key = |category: &str| {
                format!("{category} {} {}", action["args"]["microbatch"], action["args"]["stage"])
            };
            if name.starts_with("send") {
                // Rows leave at the end of the pass, regardless of where the list has the send.
                let pass = key(if name.starts_with("send gradient") { "backward" } else { "forward" });
                left.insert(messages[&(rank, place)], passes[&pass]);
            } else if name.starts_with("recv") {
                let Some(&arrival) = left.get(&messages[&(rank, place)]) else { continue };
                *end = arrival.max(*end);
            } else if action["cat"] != "reduce" {
                *end += action["args"]["cpu_ns"].as_u64().expect("a time");
                // Rows leave with the input gradient, before the weight gradient.
                if !name.starts_with("backward weight") {
                    passes.insert(key(action["cat"].as_str().expect("a category")), *end);
                }
            }
            next.insert(rank, place + 1);
        }
    }
    assert!(lists.iter().all(|(rank, list)| next[rank] == list.len()), "the actions complete");
    ended.into_values().max().unwrap_or(0)
}

/// Names both ends of every message alike: sorted by microbatch and stage, the messages from a sender are in
/// the same order as the messages that the receiver lists.
fn messages(lists: &Lists) -> BTreeMap<(u64, usize), Message> {
    let mut ends = BTreeMap::<(u64, u64, bool, bool), Vec<End>>::new();
    for (&rank, list) in lists {
        for (place, action) in list.iter().enumerate().filter(|(_, action)| action["cat"] == "message") {
            let name = action["name"].as_str().expect("a name");
            let peer = name.rsplit(' ').next().and_then(|peer| peer.parse().ok()).expect("a peer");
            let (is_send, is_gradient) = (name.starts_with("send"), name.contains("gradient"));
            let (from, to) = if is_send { (rank, peer) } else { (peer, rank) };
            let number = |field: &str| action["args"][field].as_u64().expect("a number");
            let end = (number("microbatch"), number("stage"), rank, place);
            ends.entry((from, to, is_gradient, is_send)).or_default().push(end);
        }
    }
    let mut messages = BTreeMap::new();
    for ((from, to, is_gradient, _), mut own) in ends {
        own.sort_unstable();
        for (number, (_, _, rank, place)) in own.into_iter().enumerate() {
            messages.insert((rank, place), (from, to, is_gradient, number));
        }
    }
    messages
}
