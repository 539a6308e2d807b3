//! What schedules and their simulation promise: lists that fit together, closed forms, timelines made by hand,
//! and two ways to the same makespan.

use dflop_balancer::schedule::{
    Action, Message, ModuleStages, Part, PassKind, PipelineLayout, ScheduleKind, schedule,
};
use dflop_balancer::{Communication, CompiledSchedule, Error, Event, Simulation, StageTimes, simulate};
use proptest::prelude::*;

const INTERLEAVED_3: ScheduleKind = ScheduleKind::Interleaved { chunks: 3 };

fn kinds() -> impl Iterator<Item = ScheduleKind> {
    let more = [ScheduleKind::Interleaved { chunks: 1 }, INTERLEAVED_3];
    ScheduleKind::ALL.into_iter().chain(more)
}

/// Every kind and size worth trying: the lists of all ranks.
fn chains() -> impl Iterator<Item = (ScheduleKind, PipelineLayout, Vec<Vec<Action>>)> {
    kinds().flat_map(|kind| {
        (1..=7).flat_map(move |ranks| {
            (0..=17).map(move |microbatches| {
                let layout = PipelineLayout::chain(ranks, kind.chunks(), microbatches).unwrap();
                let lists = layout.schedule(kind).unwrap();
                (kind, layout, lists)
            })
        })
    })
}

/// Stages and DP sizes of modules, of which the first feed the last or one another, with a route.
fn jobs() -> impl Strategy<Value = (ScheduleKind, PipelineLayout)> {
    let kind = prop::sample::select(vec![
        ScheduleKind::GPipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::ZeroBubble,
    ]);
    let modules = prop::collection::vec((1..4_usize, 1..6_usize), 1..4);
    (kind, modules, 1..5_usize, any::<bool>(), prop::collection::vec(0..60_u16, 20)).prop_map(
        |(kind, modules, microbatches, are_parallel, route)| {
            let last = modules.len() - 1;
            let feeds = |index: usize| if are_parallel { last } else { index + 1 };
            let described: Vec<ModuleStages> = modules
                .iter()
                .enumerate()
                .map(|(index, &(stages, dp_size))| ModuleStages::new(stages, dp_size).feeds(feeds(index)))
                .map(|module| if route[1] % 2 == 0 { module.share_rounds() } else { module })
                .collect();
            let mut layout = PipelineLayout::of_modules(&described, microbatches).unwrap();
            if last > 0 && route[0] % 2 == 0 && route[1] % 2 > 0 {
                let dp_size = described[0].dp_size as u16;
                let replicas = (0..layout.microbatches()).map(|at| route[at % 20] % dp_size).collect();
                layout = layout.route(0, replicas).unwrap();
            }
            (kind, layout)
        },
    )
}

fn parts(layout: &PipelineLayout) -> Vec<Part> {
    let stages = 0..layout.stages() as u16;
    let of_stage = |stage: u16| {
        let microbatches = 0..layout.microbatches_of(stage as usize) as u32;
        microbatches.map(move |microbatch| Part { microbatch, stage })
    };
    stages.flat_map(of_stage).collect()
}

fn assert_each_part_runs_once(layout: &PipelineLayout, lists: &[Vec<Action>]) {
    for part in parts(layout) {
        let rank = layout.rank(part);
        let places = |list: &[Action], kinds: &[PassKind]| -> Vec<usize> {
            let is_wanted = |action: &Action| {
                action.pass().is_some_and(|pass| pass.part == part && kinds.contains(&pass.kind))
            };
            (0..list.len()).filter(|&at| is_wanted(&list[at])).collect()
        };
        for (other, list) in lists.iter().enumerate() {
            let forward = places(list, &[PassKind::Forward]);
            let input = places(list, &[PassKind::Backward, PassKind::BackwardInput]);
            let weight = places(list, &[PassKind::Backward, PassKind::BackwardWeight]);
            assert_eq!([forward.len(), input.len(), weight.len()], [usize::from(other == rank); 3]);
            if other == rank {
                assert!(forward < input && input <= weight);
            }
        }
    }
    for stage in 0..layout.stages() {
        for (rank, list) in lists.iter().enumerate() {
            let sums = list.iter().filter(|action| **action == Action::ReduceGrads(stage as u16));
            assert_eq!(sums.count(), usize::from(layout.holders(stage).any(|holder| holder == rank)));
        }
    }
}

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
                ScheduleKind::OneForwardOneBackward => microbatches.min(ranks - rank),
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

/// Whether two parts exchange messages.
fn is_link(layout: &PipelineLayout, part: Part, other: Part) -> bool {
    layout.takers(part).any(|taker| taker == other) || layout.givers(part).any(|giver| giver == other)
}

/// Runs lists in which a send waits for its receive and a sum for all its ranks; returns whether all end.
fn ends_with_waiting_sends(layout: &PipelineLayout, lists: &[Vec<Action>]) -> bool {
    let mut next = vec![0; lists.len()];
    loop {
        let before = next.clone();
        for rank in 0..lists.len() {
            let action = |rank: usize| lists[rank].get(next[rank]).copied();
            let meets = |peer: u16, wanted: fn(Message) -> Action, sent: Message| {
                let Some(Action::Recv(taken) | Action::RecvGrad(taken)) = action(peer as usize) else {
                    return false;
                };
                action(peer as usize) == Some(wanted(taken))
                    && taken.peer as usize == rank
                    && is_link(layout, sent.part(), taken.part())
            };
            match action(rank) {
                Some(Action::Send(sent)) if meets(sent.peer, Action::Recv, sent) => {
                    next[rank] += 1;
                    next[sent.peer as usize] += 1;
                }
                Some(Action::SendGrad(sent)) if meets(sent.peer, Action::RecvGrad, sent) => {
                    next[rank] += 1;
                    next[sent.peer as usize] += 1;
                }
                Some(sum @ Action::ReduceGrads(stage))
                    if layout.holders(stage as usize).all(|holder| action(holder) == Some(sum)) =>
                {
                    layout.holders(stage as usize).for_each(|holder| next[holder] += 1);
                }
                Some(action) if action.pass().is_some() => next[rank] += 1,
                _ => {}
            }
        }
        if before == next {
            return lists.iter().zip(&next).all(|(list, next)| list.len() == *next);
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

fn named(list: &[Action]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

/// Passes as `F0`, `B0`, `I0`, `W0`, with the stage behind a dot if it is another than the rank.
fn short(rank: usize, list: &[Action]) -> String {
    let pass = |action: &Action| {
        let pass = action.pass()?;
        let letter = match pass.kind {
            PassKind::Forward => 'F',
            PassKind::Backward => 'B',
            PassKind::BackwardInput => 'I',
            PassKind::BackwardWeight => 'W',
        };
        let stage = pass.part.stage as usize;
        let stage = if stage == rank { String::new() } else { format!(".{stage}") };
        Some(format!("{letter}{}{stage}", pass.part.microbatch))
    };
    list.iter().filter_map(pass).collect::<Vec<_>>().join(" ")
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
    // Figure 3 (top) of the paper, with 3 ranks: every rank is 2 rounds behind with its weights.
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

fn run(kind: ScheduleKind, ranks: usize, microbatches: usize, times: &StageTimes) -> Simulation {
    let lists: Vec<_> = (0..ranks).map(|rank| schedule(kind, rank, ranks, microbatches)).collect();
    simulate(&lists, times).unwrap()
}

fn equal_times(stages: usize, microbatches: usize, forward_ns: u64, backward_ns: u64) -> StageTimes {
    let all = |time_ns| vec![time_ns; stages * microbatches];
    StageTimes::new(stages, microbatches, all(forward_ns), all(backward_ns)).unwrap()
}

#[test]
fn equal_microbatches_meet_the_closed_form() {
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward] {
        for ranks in 1..7 {
            for microbatches in 1..12 {
                let simulation = run(kind, ranks, microbatches, &equal_times(ranks, microbatches, 3, 6));
                assert_eq!(simulation.makespan_ns as usize, 9 * (microbatches + ranks - 1));
                assert_eq!(simulation.idle_ns(), vec![9 * (ranks as u64 - 1); ranks]);
                // Against the ideal time the bubble is (p - 1) / m, against all the time as follows.
                let bubble = (ranks - 1) as f64 / (microbatches + ranks - 1) as f64;
                assert!((simulation.bubble_fraction() - bubble).abs() < 1e-12);
                assert!(simulation.bubbles().iter().all(|found| (found - bubble).abs() < 1e-12));
            }
        }
    }
}

#[test]
fn interleaving_divides_the_bubble_by_the_chunks() {
    for chunks in 1..5 {
        let kind = ScheduleKind::Interleaved { chunks: chunks as u16 };
        for ranks in 1..6 {
            for microbatches in (1..5).map(|groups| groups * ranks) {
                let times = equal_times(ranks * chunks, microbatches, 3, 6);
                let simulation = run(kind, ranks, microbatches, &times);
                let ideal_ns = 9 * chunks * microbatches;
                let bubble_ns = 9 * (ranks - 1);
                assert_eq!(simulation.makespan_ns as usize, ideal_ns + bubble_ns);
                // bubble / ideal = (p - 1) / (v m)
                assert_eq!(bubble_ns * chunks * microbatches, ideal_ns * (ranks - 1));
            }
        }
    }
}

#[test]
fn zero_bubble_meets_the_bubble_of_the_paper() {
    for ranks in 1..8 {
        for microbatches in ranks..20 {
            for (forward, input, weight) in [(1, 1, 1), (5, 5, 5), (4, 5, 3), (10, 12, 8), (7, 7, 0)] {
                let times = equal_times(ranks, microbatches, forward, input + weight);
                let times = times.weight_ns(vec![weight; ranks * microbatches]).unwrap();
                let simulation = run(ScheduleKind::ZeroBubble, ranks, microbatches, &times);
                let ideal_ns = (forward + input + weight) * microbatches as u64;
                let bubble_ns = (ranks as u64 - 1) * (forward + input - weight);
                assert_eq!(simulation.makespan_ns - ideal_ns, bubble_ns, "{ranks} {microbatches} {weight}");
            }
            let third = equal_times(ranks, microbatches, 1, 2);
            let plain = run(ScheduleKind::OneForwardOneBackward, ranks, microbatches, &third);
            let zero = run(ScheduleKind::ZeroBubble, ranks, microbatches, &third);
            assert_eq!(3 * zero.idle_ns()[0], plain.idle_ns()[0]);
        }
    }
}

/// Rank, microbatch, letter, start, end.
fn spans(events: &[Event]) -> Vec<(usize, u32, char, u64, u64)> {
    let letter = |kind| match kind {
        PassKind::Forward => 'F',
        PassKind::Backward => 'B',
        PassKind::BackwardInput => 'I',
        PassKind::BackwardWeight => 'W',
    };
    let span =
        |event: &Event| (event.rank, event.microbatch, letter(event.kind), event.start_ns, event.end_ns);
    events.iter().map(span).collect()
}

#[test]
fn a_timeline_made_by_hand_is_reproduced() {
    // Stage 0: 3 and 6 ns, stage 1: 6 and 3 ns; forward is a third.
    let times = StageTimes::split(2, 2, &[3, 6, 6, 3]).unwrap();
    let simulation = run(ScheduleKind::OneForwardOneBackward, 2, 2, &times);
    let expected = [
        (0, 0, 'F', 0, 1),
        (0, 1, 'F', 1, 3),
        (0, 0, 'B', 7, 9),
        (0, 1, 'B', 10, 14),
        (1, 0, 'F', 1, 3),
        (1, 0, 'B', 3, 7),
        (1, 1, 'F', 7, 8),
        (1, 1, 'B', 8, 10),
    ];
    assert_eq!(spans(&simulation.events), expected);
    assert_eq!((simulation.makespan_ns, &simulation.busy_ns), (14, &vec![9, 9]));
    let path: Vec<String> = simulation.critical_path.iter().map(ToString::to_string).collect();
    let expected = [
        "forward 0 in stage 0 on rank 0: 1 ns",
        "forward 0 in stage 1 on rank 1: 2 ns",
        "backward 0 in stage 1 on rank 1: 4 ns",
        "forward 1 in stage 1 on rank 1: 1 ns",
        "backward 1 in stage 1 on rank 1: 2 ns",
        "backward 1 in stage 0 on rank 0: 4 ns",
    ];
    assert_eq!(path, expected);
}

#[test]
fn split_backward_passes_made_by_hand_are_reproduced() {
    // 2 ns forward, 3 ns input, 1 ns weight; two ranks, two microbatches.
    let times = equal_times(2, 2, 2, 4).weight_ns(vec![1; 4]).unwrap();
    let simulation = run(ScheduleKind::ZeroBubble, 2, 2, &times);
    let expected = [
        (0, 0, 'F', 0, 2),
        (0, 1, 'F', 2, 4),
        (0, 0, 'I', 7, 10),
        (0, 0, 'W', 10, 11),
        (0, 1, 'I', 12, 15),
        (0, 1, 'W', 15, 16),
        (1, 0, 'F', 2, 4),
        (1, 0, 'I', 4, 7),
        (1, 1, 'F', 7, 9),
        (1, 1, 'I', 9, 12),
        (1, 0, 'W', 12, 13),
        (1, 1, 'W', 13, 14),
    ];
    assert_eq!(spans(&simulation.events), expected);
}

#[test]
fn messages_and_sums_made_by_hand_are_reproduced() {
    // 1 ns forward, 2 ns backward, activations 3 ns, gradients 4 ns on their way.
    let layout = PipelineLayout::chain(2, 1, 2).unwrap();
    let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    let times = equal_times(2, 2, 1, 2);
    let messages = Communication::free(2, 2).messages(&[3, 0], &[4, 0]).unwrap();
    let run = |communication: &Communication| layout.simulate(&lists, &times, communication).unwrap();
    let simulation = run(&messages);
    let expected = [
        (0, 0, 'F', 0, 1),
        (0, 1, 'F', 1, 2),
        (0, 0, 'B', 11, 13),
        (0, 1, 'B', 14, 16),
        (1, 0, 'F', 4, 5),
        (1, 0, 'B', 5, 7),
        (1, 1, 'F', 7, 8),
        (1, 1, 'B', 8, 10),
    ];
    assert_eq!(spans(&simulation.events), expected);
    // The last stage has nothing to do after 10, so that its sum is hidden up to 6 ns.
    for (reduce_ns, makespan_ns) in [([0, 6], 16), ([0, 7], 17), ([5, 0], 21), ([5, 12], 22)] {
        for is_overlapped in [false, true] {
            let sums = messages.clone().reduce_grads(reduce_ns.to_vec(), is_overlapped).unwrap();
            assert_eq!(run(&sums).makespan_ns, makespan_ns);
        }
    }
}

#[test]
fn an_overlapped_sum_hides_behind_other_chunks() {
    // One rank, two chunks, one microbatch: F0 F1 B1 (sum of stage 1) B0 (sum of stage 0).
    let layout = PipelineLayout::chain(1, 2, 1).unwrap();
    let lists = layout.schedule(ScheduleKind::Interleaved { chunks: 2 }).unwrap();
    let times = equal_times(2, 1, 1, 2);
    let makespan_ns = |is_overlapped| {
        let sums = Communication::free(2, 1).reduce_grads(vec![1, 2], is_overlapped).unwrap();
        layout.simulate(&lists, &times, &sums).unwrap().makespan_ns
    };
    assert_eq!((makespan_ns(true), makespan_ns(false)), (7, 9));
}

#[test]
fn two_encoder_ranks_feed_four_pipelines() {
    let modules = [ModuleStages::new(1, 2), ModuleStages::new(3, 4)];
    let layout = PipelineLayout::of_modules(&modules, 2).unwrap();
    let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    // Rank 0 has the even microbatches: those of LLM ranks 0 and 2, which begin at ranks 2 and 8.
    let sent = |rank: usize| -> Vec<(u32, u16)> {
        let sent = |action: &Action| match action {
            Action::Send(message) => Some((message.microbatch, message.peer)),
            _ => None,
        };
        lists[rank].iter().filter_map(sent).collect()
    };
    assert_eq!(sent(0), [(0, 2), (2, 8), (4, 2), (6, 8)]);
    assert_eq!(sent(1), [(1, 5), (3, 11), (5, 5), (7, 11)]);
    // Gradients come back the same way.
    let taken = |action: &Action| match action {
        Action::RecvGrad(message) => Some((message.microbatch, message.peer)),
        _ => None,
    };
    assert_eq!(lists[0].iter().filter_map(taken).collect::<Vec<_>>(), sent(0));
    assert_eq!(short(2, &lists[2]), "F0.1 F4.1 B0.1 B4.1");
}

#[test]
fn many_encoder_ranks_feed_one_pipeline_in_turn() {
    let layout = PipelineLayout::of_modules(&[ModuleStages::new(1, 3), ModuleStages::new(1, 1)], 5).unwrap();
    let ranks: Vec<usize> = (0..5).map(|microbatch| layout.rank(Part { microbatch, stage: 0 })).collect();
    assert_eq!(ranks, [0, 1, 2, 0, 1]);
    let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    assert_eq!(short(0, &lists[0]), "F0 B0 F3 B3");
    let times = StageTimes::new(2, 5, [vec![6; 5], vec![2; 5]].concat(), [vec![9; 5], vec![2; 5]].concat());
    let simulation = layout.simulate(&lists, &times.unwrap(), &Communication::free(2, 5)).unwrap();
    // The LLM: idle until 6, then microbatches 0, 1, 2; microbatch 3 comes from rank 0, busy with 9 ns of
    // backward pass 0 from 10 on and then with 6 ns of forward pass 3.
    let llm: Vec<_> = spans(&simulation.events).into_iter().filter(|span| span.0 == 3).collect();
    assert_eq!(llm[..3], [(3, 0, 'F', 6, 8), (3, 0, 'B', 8, 10), (3, 1, 'F', 10, 12)]);
    assert_eq!(llm[6], (3, 3, 'F', 25, 27));
}

#[test]
fn encoder_ranks_that_share_rounds_feed_all_pipelines() {
    let modules = [ModuleStages::new(1, 3).share_rounds(), ModuleStages::new(1, 2)];
    let layout = PipelineLayout::of_modules(&modules, 2).unwrap();
    assert_eq!([layout.microbatches_of(0), layout.microbatches_of(1), layout.microbatches()], [6, 4, 6]);
    let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    assert_eq!(short(1, &lists[1]), "F1.0 F4.0 B1.0 B4.0");
    assert_eq!(short(4, &lists[4]), "F1.1 B1.1 F3.1 B3.1");
    let taken = ["recv 3 in stage 1 from 0", "recv 3 in stage 1 from 1", "recv 3 in stage 1 from 2"];
    assert!(taken.iter().all(|taken| named(&lists[4]).iter().any(|action| action == taken)));
    // Round 0 of the encoder takes 1, 2 and 3 ns, so that both pipelines begin at 3; the last two times of
    // the LLM's row belong to nobody.
    let forward = [1, 2, 3, 1, 1, 1, 4, 5, 4, 5, 99, 99];
    let backward = [1, 1, 1, 2, 2, 2, 6, 6, 6, 6, 99, 99];
    let times = StageTimes::new(2, 6, forward.to_vec(), backward.to_vec()).unwrap();
    let simulation = layout.simulate(&lists, &times, &Communication::free(2, 6)).unwrap();
    let llm: Vec<_> = spans(&simulation.events).into_iter().filter(|span| span.0 >= 3).collect();
    assert_eq!(llm[0], (3, 0, 'F', 3, 7));
    assert_eq!(llm[4..6], [(4, 1, 'F', 3, 8), (4, 1, 'B', 8, 14)]);
    // The slower pipeline ends at 25; then the shares of round 1 go backward.
    assert_eq!(simulation.makespan_ns, 27);
    let mixed = [ModuleStages::new(1, 2).share_rounds(), ModuleStages::new(1, 2), ModuleStages::new(1, 4)];
    assert!(PipelineLayout::of_modules(&mixed, 1).is_err());
    assert!(layout.route(0, vec![0; 6]).is_err());
}

#[test]
fn two_encoders_are_parallel_branches_or_a_chain() {
    let modules = [ModuleStages::new(1, 1), ModuleStages::new(1, 1), ModuleStages::new(1, 1)];
    let makespan_ns = |modules: &[ModuleStages]| {
        let layout = PipelineLayout::of_modules(modules, 1).unwrap();
        let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
        let times = StageTimes::new(3, 1, vec![5, 7, 1], vec![10, 3, 2]).unwrap();
        layout.simulate(&lists, &times, &Communication::free(3, 1)).unwrap().makespan_ns
    };
    assert_eq!(makespan_ns(&modules), 5 + 7 + 1 + 2 + 3 + 10);
    let branches = [modules[0].feeds(2), modules[1], modules[2]];
    assert_eq!(makespan_ns(&branches), 7 + 1 + 2 + 10);
}

#[test]
fn a_layout_that_makes_no_sense_is_refused() {
    for modules in [
        vec![],
        vec![ModuleStages::new(0, 1)],
        vec![ModuleStages::new(1, 0)],
        vec![ModuleStages::new(1, 70_000)],
        vec![ModuleStages::new(1, 1), ModuleStages::new(1, 1).feeds(0), ModuleStages::new(1, 1)],
        vec![ModuleStages::new(1, 1).feeds(7), ModuleStages::new(1, 1)],
    ] {
        assert!(matches!(PipelineLayout::of_modules(&modules, 1), Err(Error::Config { .. })), "{modules:?}");
    }
    assert!(PipelineLayout::chain(0, 1, 1).is_err() && PipelineLayout::chain(1, 0, 1).is_err());
    assert!(PipelineLayout::chain(60_000, 1, 60_000).is_err());
    let layout =
        || PipelineLayout::of_modules(&[ModuleStages::new(1, 2), ModuleStages::new(1, 1)], 2).unwrap();
    assert!(matches!(layout().route(0, vec![0]), Err(Error::Length { .. })));
    assert!(layout().route(1, vec![0, 0]).is_err());
    let error = layout().route(0, vec![0, 2]).unwrap_err().to_string();
    assert!(error.contains("microbatch 1 goes to replica 2 of 2"), "{error}");
    assert!(layout().schedule(ScheduleKind::Interleaved { chunks: 2 }).is_err());
}

#[test]
fn lists_that_wait_for_one_another_are_an_error() {
    let times = StageTimes::split(2, 1, &[3, 3]).unwrap();
    let message = |stage, peer| Message { microbatch: 0, stage, peer };
    let part = Part { microbatch: 0, stage: 0 };
    let early = [
        vec![Action::RecvGrad(message(0, 1)), Action::Forward(part), Action::Send(message(0, 1))],
        vec![Action::Recv(message(1, 0))],
    ];
    let error = simulate(&early, &times).unwrap_err().to_string();
    assert_eq!(error, "rank 0 waits for ever at `recv gradient 0 in stage 0 from 1`");
}

#[test]
fn what_cannot_be_done_is_an_error() {
    let times = StageTimes::split(2, 1, &[3, 3]).unwrap();
    let own = Part { microbatch: 0, stage: 1 };
    let message = |microbatch, stage, peer| Message { microbatch, stage, peer };
    let impossible = [
        Action::Forward(own),
        Action::Backward(own),
        Action::BackwardInput(own),
        Action::BackwardWeight(own),
        Action::SendGrad(message(0, 1, 0)),
        Action::Recv(message(0, 1, 0)),
        Action::Recv(message(7, 1, 0)),
        Action::Recv(message(0, 9, 0)),
        Action::Send(message(0, 1, 0)),
        Action::RecvGrad(message(0, 1, 0)),
        Action::Forward(Part { microbatch: 0, stage: 0 }),
        Action::ReduceGrads(0),
        Action::ReduceGrads(9),
    ];
    for action in impossible {
        let found = simulate(&[vec![], vec![action]], &times).unwrap_err();
        assert!(
            matches!(found, Error::Deadlock { rank: 1, action: at } if at == action.to_string()),
            "{action}"
        );
    }
    // Nothing is done twice.
    let lists =
        PipelineLayout::chain(2, 1, 1).unwrap().schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    for rank in 0..2 {
        for at in 0..lists[rank].len() - 1 {
            let mut twice = lists.clone();
            twice[rank].insert(at, lists[rank][at]);
            assert!(simulate(&twice, &times).is_err(), "{}", lists[rank][at]);
        }
    }
}

#[test]
fn wrong_lengths_are_errors() {
    let times = equal_times(2, 3, 1, 1);
    assert!(simulate(&[], &times).is_err());
    assert!(simulate(&[vec![], vec![], vec![]], &times).is_err());
    let layout = PipelineLayout::chain(2, 1, 3).unwrap();
    let lists = layout.schedule(ScheduleKind::GPipe).unwrap();
    let free = Communication::free(2, 3);
    assert!(layout.simulate(&lists[1..], &times, &free).is_err());
    assert!(layout.simulate(&lists, &equal_times(2, 4, 1, 1), &free).is_err());
    assert!(layout.simulate(&lists, &times, &Communication::free(2, 4)).is_err());
    assert!(free.clone().messages(&[1], &[1, 1]).is_err());
    assert!(free.clone().messages(&[u64::MAX, 0], &[1, 1]).is_err());
    assert!(free.clone().reduce_grads(vec![1], true).is_err());
    assert!(free.clone().messages(&[1; 6], &[1; 2]).is_ok());
    let compile = |rows: &[usize]| CompiledSchedule::of_layout(ScheduleKind::GPipe, &layout, rows, &free);
    assert!(compile(&[0]).is_err() && compile(&[0, 1]).is_ok());
    assert!(CompiledSchedule::new(ScheduleKind::GPipe, &[], 1).is_err());
    assert!(CompiledSchedule::new(ScheduleKind::Interleaved { chunks: 2 }, &[0, 1, 2], 1).is_err());
}

fn assert_is_consistent(simulation: &Simulation) {
    assert!(simulation.busy_ns.iter().all(|busy_ns| *busy_ns <= simulation.makespan_ns));
    let mut at_ns = 0;
    for step in &simulation.critical_path {
        assert_eq!(step.start_ns, at_ns, "{step}");
        at_ns = step.end_ns;
    }
    assert_eq!(at_ns, simulation.makespan_ns);
    for pair in simulation.events.windows(2) {
        assert!(pair[0].rank < pair[1].rank || pair[0].end_ns <= pair[1].start_ns);
    }
}

/// Numbers drawn once, used from the start again.
fn cycled(drawn: &[u64], count: usize, skip: usize) -> Vec<u64> {
    drawn.iter().copied().cycle().skip(skip).take(count).collect()
}

fn random_times(layout: &PipelineLayout, drawn: &[u64]) -> StageTimes {
    let (stages, microbatches) = (layout.stages(), layout.microbatches());
    let count = stages * microbatches;
    let (forward, backward) = (cycled(drawn, count, 0), cycled(drawn, count, 17));
    let weight = backward.iter().zip(cycled(drawn, count, 5)).map(|(all, part)| part.min(*all)).collect();
    StageTimes::new(stages, microbatches, forward, backward).unwrap().weight_ns(weight).unwrap()
}

fn random_communication(layout: &PipelineLayout, drawn: &[u64], is_overlapped: bool) -> Communication {
    let (stages, microbatches) = (layout.stages(), layout.microbatches());
    let count = stages * microbatches;
    Communication::free(stages, microbatches)
        .messages(&cycled(drawn, count, 3), &cycled(drawn, count, 11))
        .unwrap()
        .reduce_grads(cycled(drawn, stages, 7), is_overlapped)
        .unwrap()
}

/// Both ways to the makespan, without and with communication.
fn check_both_ways(kind: ScheduleKind, layout: &PipelineLayout, drawn: &[u64], is_overlapped: bool) {
    let lists = layout.schedule(kind).unwrap();
    let times = random_times(layout, drawn);
    let rows: Vec<usize> = (0..layout.stages()).collect();
    let free = Communication::free(layout.stages(), layout.microbatches());
    let mut alone_ns = 0;
    for communication in [free, random_communication(layout, drawn, is_overlapped)] {
        let simulation = layout.simulate(&lists, &times, &communication).unwrap();
        assert_is_consistent(&simulation);
        let mut compiled = CompiledSchedule::of_layout(kind, layout, &rows, &communication).unwrap();
        assert_eq!(compiled.makespan_ns(&times), simulation.makespan_ns, "{kind} {layout:?}");
        assert!(simulation.makespan_ns >= alone_ns, "communication costs");
        alone_ns = simulation.makespan_ns;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_compiled_makespan_is_that_of_the_simulation(
        ranks in 1..6_usize,
        microbatches in 1..10_usize,
        is_overlapped in any::<bool>(),
        drawn in prop::collection::vec(0..1_000_u64, 61),
    ) {
        for kind in kinds() {
            let layout = PipelineLayout::chain(ranks, kind.chunks(), microbatches).unwrap();
            check_both_ways(kind, &layout, &drawn, is_overlapped);
            let times = random_times(&layout, &drawn);
            let rows: Vec<usize> = (0..layout.stages()).collect();
            let mut compiled = CompiledSchedule::new(kind, &rows, microbatches).unwrap();
            prop_assert_eq!(compiled.makespan_ns(&times), run(kind, ranks, microbatches, &times).makespan_ns);
        }
    }

    #[test]
    fn jobs_fit_together_whatever_their_dp_sizes_and_routes(
        (kind, layout) in jobs(),
        is_overlapped in any::<bool>(),
        drawn in prop::collection::vec(0..1_000_u64, 61),
    ) {
        let lists = layout.schedule(kind).unwrap();
        assert_each_part_runs_once(&layout, &lists);
        prop_assert!(ends_with_waiting_sends(&layout, &lists));
        check_both_ways(kind, &layout, &drawn, is_overlapped);
    }
}
