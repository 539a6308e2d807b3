//! Equal microbatches match the published closed forms.

use super::common::{equal_times, run};
use dflop_balancer::Simulation;
use dflop_balancer::schedule::ScheduleKind;

/// Returns each rank's time without computation.
fn idle_ns(simulation: &Simulation) -> Vec<u64> {
    simulation.busy_ns.iter().map(|busy| simulation.makespan_ns - busy).collect()
}

#[test]
fn equal_microbatches_meet_the_closed_form() {
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward] {
        for ranks in 1..7 {
            for microbatches in 1..12 {
                let simulation = run(kind, ranks, microbatches, &equal_times(ranks, microbatches, 3, 6));
                assert_eq!(simulation.makespan_ns as usize, 9 * (microbatches + ranks - 1));
                assert_eq!(idle_ns(&simulation), vec![9 * (ranks as u64 - 1); ranks]);
                // Relative to the ideal time the bubble is (p - 1) / m, relative to the makespan as follows.
                let bubble = (ranks - 1) as f64 / (microbatches + ranks - 1) as f64;
                assert!((simulation.bubble_fraction() - bubble).abs() < 1e-12);
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
            assert_eq!(3 * idle_ns(&zero)[0], idle_ns(&plain)[0]);
        }
    }
}
