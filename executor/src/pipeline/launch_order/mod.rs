//! Launch order properties: both ends of every lane list the same operations, and no launch waits for itself.
//!
//! Launch graph over all ranks: a launch waits for the previous launch in the same lane, for events, and for
//! remote ends.
//!
//! Every rank has a host, which launches operations in order, and lanes, on which operations run in launch
//! order. An operation with several ends (a message or a collective) runs when all ends are first in their
//! lanes and all events are done. Lanes are the [`lane_order`](super::step_order) lanes for messages, and one
//! lane per replica group for gradient sums.

mod launches;
mod layouts;

use super::Placement;
use super::topology::{Flow, StageEdge};
use dflop_balancer::schedule::{Pass, ScheduleKind};
use launches::{Messages, Posting, Rules, launches};
use layouts::{Layout, Sizes, grid, plan};
use proptest::prelude::*;
use std::collections::BTreeMap;

const RULES: Rules = Rules { posting: Posting::Sender, messages: Messages::Flow, is_host_waiting: false };

/// Checks a layout; `None` if no job has it.
fn problem(layout: &Layout, rounds: usize, seed: u32, rules: Rules) -> Option<Result<(), Problem>> {
    let job = layout.job()?;
    Some(check(&launches(&job, &plan(&job, rounds, seed), rules)))
}

#[test]
fn every_schedule_launches_in_an_order_without_cycles_in_a_grid_of_layouts() {
    for schedule in ScheduleKind::ALL {
        let mut jobs = 0;
        for (seed, layout) in (0..).zip(grid(schedule)) {
            let is_host_waiting = seed % 2 == 0;
            let found = problem(&layout, 3, seed, Rules { is_host_waiting, ..RULES });
            if let Some(found) = found {
                assert_eq!(found, Ok(()), "{layout:?}");
                jobs += 1;
            }
        }
        assert!(jobs >= 64, "{schedule}: {jobs} jobs");
    }
}

/// Rules by which messages of all ranks have this number of lanes.
const fn shared(lanes: u64) -> Rules {
    Rules { posting: Posting::Step, messages: Messages::Shared(lanes), is_host_waiting: false }
}

#[test]
fn messages_that_share_lanes_launch_without_cycles_in_a_grid_of_layouts() {
    for schedule in ScheduleKind::ALL {
        let mut jobs = 0;
        for (seed, layout) in (0..).zip(grid(schedule)) {
            let rules = Rules { is_host_waiting: seed % 2 == 0, ..shared(1 + u64::from(seed / 2 % 3)) };
            if let Some(found) = problem(&layout, 3, seed, rules) {
                assert_eq!(found, Ok(()), "{layout:?} {rules:?}");
                jobs += 1;
            }
        }
        assert!(jobs >= 64, "{schedule}: {jobs} jobs");
    }
}

fn sizes() -> impl Strategy<Value = Sizes> {
    [1_usize..=4, 1..=4, 1..=4]
}

fn layouts() -> impl Strategy<Value = Layout> {
    let placement =
        prop::sample::select(vec![Placement::Disaggregated, Placement::Joint, Placement::Colocated]);
    let schedule = prop::sample::select(ScheduleKind::ALL.to_vec());
    let encoders = prop::collection::vec(sizes(), 0..=2);
    (placement, encoders, sizes(), schedule, any::<bool>()).prop_map(
        |(placement, mut encoders, llm, schedule, is_vision_frozen)| {
            if placement == Placement::Colocated {
                // Encoders use as many ranks as the LLM.
                let [pp, dp, tp] = llm;
                let orders = [[tp, pp, dp], [dp, tp, pp]];
                encoders.iter_mut().zip(orders).for_each(|(encoder, order)| *encoder = order);
            }
            Layout { placement, encoders, llm, schedule, is_vision_frozen }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_launch_waits_for_itself(
        layout in layouts(), rounds in 1_usize..6, seed in any::<u32>(), is_host_waiting in any::<bool>(),
    ) {
        let found = problem(&layout, rounds, seed, Rules { is_host_waiting, ..RULES });
        prop_assume!(found.is_some());
        prop_assert_eq!(found, Some(Ok(())));
    }

    #[test]
    fn no_launch_of_shared_lanes_waits_for_itself(
        layout in layouts(), rounds in 1_usize..6, seed in any::<u32>(), lanes in 1_u64..4,
    ) {
        let found = problem(&layout, rounds, seed, shared(lanes));
        prop_assume!(found.is_some());
        prop_assert_eq!(found, Some(Ok(())));
    }
}

fn layout(placement: Placement, encoders: &[Sizes], llm: Sizes) -> Layout {
    let schedule = ScheduleKind::OneForwardOneBackward;
    Layout { placement, encoders: encoders.to_vec(), llm, schedule, is_vision_frozen: false }
}

/// A rank with both encoders needs audio clip gradients first, and the LLM sends image gradients first.
#[test]
fn receives_in_the_order_of_the_receiver_do_not_match_the_sends() {
    let joint = layout(Placement::Joint, &[[1, 1, 1], [1, 1, 1]], [1, 1, 1]);
    assert_eq!(problem(&joint, 3, 2, RULES), Some(Ok(())));
    let found = problem(&joint, 3, 2, Rules { posting: Posting::Receiver, ..RULES });
    let between = Group::Messages(1, 0, Some(Flow::Gradients));
    assert_eq!(found, Some(Err(Problem::Mismatch(between))));
}

/// Only ranks with two encoders, or with an encoder and several LLM stages, need messages out of send order.
#[test]
fn the_order_of_the_receiver_differs_where_several_stages_share_ranks() {
    for schedule in ScheduleKind::ALL {
        for (seed, layout) in (0..).zip(grid(schedule)) {
            let found = problem(&layout, 3, seed, Rules { posting: Posting::Receiver, ..RULES });
            if let Some(Err(_)) = found {
                assert_ne!(layout.placement, Placement::Disaggregated, "{layout:?}");
                assert!(layout.encoders.len() == 2 || schedule.chunks() > 1, "{layout:?}");
            }
        }
    }
}

/// Two ranks with both modules exchange activations and gradients in the same direction. The receiver posts
/// each flow in send order, but not the two flows together.
#[test]
fn a_lane_for_both_flows_does_not_match() {
    let colocated = layout(Placement::Colocated, &[[2, 1, 1]], [2, 1, 1]);
    assert_eq!(problem(&colocated, 3, 299, RULES), Some(Ok(())));
    let found = problem(&colocated, 3, 299, Rules { messages: Messages::Direction, ..RULES });
    assert_eq!(found, Some(Err(Problem::Mismatch(Group::Messages(1, 0, None)))));
}

/// The first rank posts the gradient receives before it sends the activations that they depend on.
#[test]
fn a_lane_for_both_directions_waits_for_itself() {
    let pipeline = layout(Placement::Disaggregated, &[], [2, 1, 1]);
    assert_eq!(problem(&pipeline, 3, 1, RULES), Some(Ok(())));
    let found = problem(&pipeline, 3, 1, Rules { messages: Messages::Peer, ..RULES });
    assert_eq!(found, Some(Err(Problem::Cycle)));
}

/// Orders with receives as early as allowed, or with a rank's sends only in action list order.
#[test]
fn one_lane_for_all_messages_needs_the_order_of_the_step() {
    for schedule in ScheduleKind::ALL {
        let pipeline = Layout { schedule, ..layout(Placement::Disaggregated, &[], [4, 1, 1]) };
        assert_eq!(problem(&pipeline, 3, 1, shared(1)), Some(Ok(())), "{schedule}");
        for posting in [Posting::Sender, Posting::Receiver] {
            let found = problem(&pipeline, 3, 1, Rules { posting, ..shared(1) });
            assert!(matches!(found, Some(Err(_))), "{schedule} {posting:?}");
        }
    }
}

/// Order of work on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    /// Passes, updates, and tensor-parallel sums.
    Compute,
    /// Waits on the launching host.
    Host,
    /// Messages or collectives in a rank group.
    Of(Group),
    /// Messages to and from a rank.
    Peer(usize),
    /// Messages of several ranks.
    Shared(u64),
}

/// Ranks whose operations match only by order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    World,
    /// From a world rank to another; with a single flow, or both.
    Messages(usize, usize, Option<Flow>),
    /// Ranks that share a pipeline rank.
    TensorParallel(usize),
    /// Replicas of a stage, with the same TP rank.
    Replicas(u16, usize),
    /// First and last stage of an LLM replica, with the same TP rank.
    Tie(usize, usize),
}

/// Operation, by which operation ends are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Pass(Pass),
    Sum(Pass),
    Message(Flow, StageEdge),
    Bucket(u16, usize),
    Tied,
    Wait,
    Update,
    Norm,
    Gather(u16),
}

/// End of an operation on a rank.
#[derive(Debug)]
struct Launch {
    lane: Lane,
    /// Ranks with the remote ends, if any.
    group: Option<Group>,
    step: usize,
    op: Op,
    /// Earlier launches on the rank that must be done before.
    after: Vec<usize>,
}

/// Reason why launches cannot all run.
#[derive(Debug, PartialEq, Eq)]
enum Problem {
    /// Ends in a group differ.
    Mismatch(Group),
    /// A launch waits for itself.
    Cycle,
}

/// Checks that the ends in every group match and that all launches can run.
///
/// - `ranks`: launches on every rank, in host order
fn check(ranks: &[Vec<Launch>]) -> Result<(), Problem> {
    let operations = operations(ranks)?;
    let count = operations.iter().flatten().max().map_or(0, |last| last + 1);
    let (mut waits, mut followers) = (vec![0_usize; count], vec![Vec::new(); count]);
    for (launches, operations) in ranks.iter().zip(&operations) {
        let mut last: BTreeMap<Lane, usize> = BTreeMap::new();
        for (launch, &operation) in launches.iter().zip(operations) {
            let before = last.insert(launch.lane, operation);
            for before in launch.after.iter().map(|&own| operations[own]).chain(before) {
                waits[operation] += 1;
                followers[before].push(operation);
            }
        }
    }
    let mut ready: Vec<usize> = (0..count).filter(|&operation| waits[operation] == 0).collect();
    let mut done = 0;
    while let Some(operation) = ready.pop() {
        done += 1;
        for &follower in &followers[operation] {
            waits[follower] -= 1;
            if waits[follower] == 0 {
                ready.push(follower);
            }
        }
    }
    if done == count { Ok(()) } else { Err(Problem::Cycle) }
}

/// Numbers the operations: all ends of an operation have the same number.
fn operations(ranks: &[Vec<Launch>]) -> Result<Vec<Vec<usize>>, Problem> {
    // The first rank in a group that launches an operation names it for the remaining ranks.
    let mut named: BTreeMap<Group, Vec<(usize, usize, Op)>> = BTreeMap::new();
    let (mut count, mut numbers, mut ends) = (0, Vec::new(), BTreeMap::new());
    for launches in ranks {
        let (mut of_rank, mut places) = (Vec::new(), BTreeMap::new());
        for launch in launches {
            let Some(group) = launch.group else {
                of_rank.push(count);
                count += 1;
                continue;
            };
            let place: &mut usize = places.entry(group).or_default();
            let known = named.entry(group).or_default();
            if *place == known.len() {
                known.push((count, launch.step, launch.op));
                count += 1;
            }
            let (number, step, op) = known[*place];
            if (step, op) != (launch.step, launch.op) {
                return Err(Problem::Mismatch(group));
            }
            *place += 1;
            of_rank.push(number);
        }
        for (group, place) in places {
            ends.entry(group).or_insert_with(Vec::new).push(place);
        }
        numbers.push(of_rank);
    }
    let is_whole = |group: &Group, counts: &[usize]| {
        let has_both = !matches!(group, Group::Messages(..)) || counts.len() == 2;
        has_both && counts.iter().all(|&count| count == named[group].len())
    };
    match ends.iter().find(|(group, counts)| !is_whole(group, counts)) {
        Some((&group, _)) => Err(Problem::Mismatch(group)),
        None => Ok(numbers),
    }
}
