//! Simulations reproduce timelines computed by hand.

use super::common::{equal_times, run, spans};
use dflop_balancer::schedule::{PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, StageTimes};

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
    // 1 ns forward, 2 ns backward, messages of 3 ns for activations and 4 ns for gradients.
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
        // The second gradient is made at 10, but the first travels until 11.
        (0, 1, 'B', 15, 17),
        (1, 0, 'F', 4, 5),
        (1, 0, 'B', 5, 7),
        (1, 1, 'F', 7, 8),
        (1, 1, 'B', 8, 10),
    ];
    assert_eq!(spans(&simulation.events), expected);
    // The last stage is idle after 10, so its sum is hidden up to 7 ns.
    for (reduce_ns, makespan_ns) in [([0, 7], 17), ([0, 8], 18), ([5, 0], 22), ([5, 13], 23)] {
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
