//! Schedules list every pass once, in the published order, and never deadlock.

use super::common::{assert_each_part_runs_once, chains, ends_with_waiting_sends, named, short};
use dflop_balancer::schedule::{Action, PassKind, PipelineLayout, ScheduleKind, schedule};

#[test]
fn each_microbatch_is_once_forward_and_then_once_backward() {
    for (_, layout, lists) in chains() {
        assert_each_part_runs_once(&layout, &lists);
    }
}

#[test]
fn microbatches_in_flight_stay_within_their_bound() {
    for (kind, layout, lists) in chains() {
        let (ranks, microbatches) = (layout.ranks(), layout.microbatches());
        for (rank, list) in lists.iter().enumerate() {
            let (mut in_flight, mut most) = (0_usize, 0);
            for pass in list.iter().filter_map(|action| action.pass()) {
                match pass.kind {
                    PassKind::Forward => in_flight += 1,
                    PassKind::Backward | PassKind::BackwardWeight => in_flight -= 1,
                    PassKind::BackwardInput => {}
                }
                most = most.max(in_flight);
            }
            let bound = match kind {
                ScheduleKind::GPipe => microbatches,
                // A chain has no encoder that could run ahead.
                ScheduleKind::OneForwardOneBackward | ScheduleKind::EncoderAhead { .. } => {
                    microbatches.min(ranks - rank)
                }
                ScheduleKind::Interleaved { chunks: 1 } => microbatches.min(2 * (ranks - rank - 1) + 1),
                ScheduleKind::Interleaved { chunks } => {
                    let left_over = if microbatches < ranks { 0 } else { microbatches % ranks };
                    let warm_up = 2 * (ranks - rank - 1) + usize::from(chunks - 1) * (ranks + left_over);
                    (microbatches * usize::from(chunks)).min(warm_up + 1)
                }
                _ => microbatches.min(ranks),
            };
            assert!(most <= bound, "{kind}, rank {rank} of {ranks}, {microbatches}: {most} above {bound}");
            let is_exact = microbatches.is_multiple_of(ranks) || kind.chunks() == 1;
            assert!(most == bound || !is_exact, "{kind}, rank {rank} of {ranks}: {most} below {bound}");
        }
    }
}

#[test]
fn no_rank_waits_for_ever_even_if_sends_wait_for_receives() {
    for (kind, layout, lists) in chains() {
        let size = (layout.ranks(), layout.microbatches());
        assert!(ends_with_waiting_sends(&layout, &lists), "{kind} {size:?}");
    }
}

#[test]
fn a_list_that_sends_too_late_does_wait_for_ever() {
    let layout = PipelineLayout::chain(2, 1, 2).unwrap();
    let mut lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    let late = lists[0].iter().position(|action| matches!(action, Action::Send(_))).unwrap();
    let sent = lists[0].remove(late);
    lists[0].push(sent);
    assert!(!ends_with_waiting_sends(&layout, &lists));
}

#[test]
fn passes_are_in_the_published_order() {
    let of = |kind, rank, ranks, microbatches| short(rank, &schedule(kind, rank, ranks, microbatches));
    let kind = ScheduleKind::OneForwardOneBackward;
    assert_eq!(of(kind, 0, 3, 4), "F0 F1 F2 B0 F3 B1 B2 B3");
    assert_eq!(of(kind, 2, 3, 4), "F0 B0 F1 B1 F2 B2 F3 B3");
    assert_eq!(of(ScheduleKind::GPipe, 1, 3, 3), "F0 F1 F2 B0 B1 B2");
    let kind = ScheduleKind::Interleaved { chunks: 2 };
    assert_eq!(of(kind, 0, 2, 4), "F0 F1 F0.2 F1.2 F2 B0.2 F3 B1.2 F2.2 B0 F3.2 B1 B2.2 B3.2 B2 B3");
    assert_eq!(of(kind, 1, 2, 2), "F0 F1 F0.3 B0.3 F1.3 B1.3 B0 B1");
    // Figure 3 (top) of the paper, with 3 ranks: every rank delays its weights by 2 rounds.
    assert_eq!(of(ScheduleKind::ZeroBubble, 0, 3, 4), "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3");
    assert_eq!(of(ScheduleKind::ZeroBubble, 1, 3, 4), "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3");
    assert_eq!(of(ScheduleKind::ZeroBubble, 2, 3, 4), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3");
}

#[test]
fn a_rank_gives_before_it_takes() {
    let list = schedule(ScheduleKind::OneForwardOneBackward, 1, 3, 3);
    let expected = [
        "recv 0 in stage 1 from 0",
        "forward 0 in stage 1",
        "send 0 in stage 1 to 2",
        "recv 1 in stage 1 from 0",
        "forward 1 in stage 1",
        "recv gradient 0 in stage 1 from 2",
        "send 1 in stage 1 to 2",
        "backward 0 in stage 1",
        "send gradient 0 in stage 1 to 0",
        "recv 2 in stage 1 from 0",
        "forward 2 in stage 1",
        "recv gradient 1 in stage 1 from 2",
        "send 2 in stage 1 to 2",
        "backward 1 in stage 1",
        "send gradient 1 in stage 1 to 0",
        "recv gradient 2 in stage 1 from 2",
        "backward 2 in stage 1",
        "send gradient 2 in stage 1 to 0",
        "reduce gradients of stage 1",
    ];
    assert_eq!(named(&list), expected);
}
