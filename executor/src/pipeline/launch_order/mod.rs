//! Launch order properties: both ends of every lane list the same operations, and no launch waits for itself.
//!
//! Every rank has a host, which launches operations in order, and lanes, on which operations run in launch
//! order. An operation with several ends (a message or a collective) runs when all ends are first in their
//! lanes and all events are done. Lanes are the [`lane_order`](super::step_order) lanes for messages, and one
//! lane per replica group for gradient sums.

mod graph;
mod launches;
mod layouts;

use dflop_balancer::schedule::ScheduleKind;
use graph::{Group, Problem, check};
use launches::{Messages, Posting, Rules, launches};
use layouts::{Layout, Sizes, grid, plan};
use proptest::prelude::*;

use super::Placement;
use super::topology::Flow;

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

/// Only ranks with two encoders need messages out of send order.
#[test]
fn the_order_of_the_receiver_differs_where_two_encoders_share_ranks() {
    for schedule in ScheduleKind::ALL {
        for (seed, layout) in (0..).zip(grid(schedule)) {
            let found = problem(&layout, 3, seed, Rules { posting: Posting::Receiver, ..RULES });
            if let Some(Err(_)) = found {
                assert_ne!(layout.placement, Placement::Disaggregated, "{layout:?}");
                assert_eq!(layout.encoders.len(), 2, "{layout:?}");
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
