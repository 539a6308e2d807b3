//! The compiled makespan equals the simulated makespan.

use super::common::{assert_each_part_runs_once, ends_with_waiting_sends, jobs, kinds, run};
use dflop_balancer::schedule::{PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, CompiledSchedule, Simulation, StageTimes};
use proptest::prelude::*;

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

/// Repeats drawn numbers.
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

/// Compares both makespan computations, without and with communication.
fn check_both_ways(kind: ScheduleKind, layout: &PipelineLayout, drawn: &[u64], is_overlapped: bool) {
    let lists = layout.schedule(kind).unwrap();
    let times = random_times(layout, drawn);
    let rows: Vec<usize> = (0..layout.stages()).collect();
    let free = Communication::free(layout.stages(), layout.microbatches());
    let mut alone_ns = 0;
    for communication in [free, random_communication(layout, drawn, is_overlapped)] {
        let simulation = layout.simulate(&lists, &times, &communication).unwrap();
        assert_is_consistent(&simulation);
        let mut compiled = CompiledSchedule::from_layout(kind, layout, &rows, &communication).unwrap();
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
