//! Modules with different DP sizes feed each other as routed.

use super::common::{named, short, spans};
use dflop_balancer::schedule::{Action, ModuleStages, Part, PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, StageTimes};

#[test]
fn two_encoder_ranks_feed_four_pipelines() {
    let modules = [ModuleStages::new(1, 2), ModuleStages::new(3, 4)];
    let layout = PipelineLayout::from_modules(&modules, 2).unwrap();
    let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    // Rank 0 has the even microbatches, from LLM ranks 0 and 2, which start at ranks 2 and 8.
    let sent = |rank: usize| -> Vec<(u32, u16)> {
        let sent = |action: &Action| match action {
            Action::Send(message) => Some((message.microbatch, message.peer)),
            _ => None,
        };
        lists[rank].iter().filter_map(sent).collect()
    };
    assert_eq!(sent(0), [(0, 2), (2, 8), (4, 2), (6, 8)]);
    assert_eq!(sent(1), [(1, 5), (3, 11), (5, 5), (7, 11)]);
    // Gradients return the same way.
    let taken = |action: &Action| match action {
        Action::RecvGrad(message) => Some((message.microbatch, message.peer)),
        _ => None,
    };
    assert_eq!(lists[0].iter().filter_map(taken).collect::<Vec<_>>(), sent(0));
    assert_eq!(short(2, &lists[2]), "F0.1 F4.1 B0.1 B4.1");
}

#[test]
fn many_encoder_ranks_feed_one_pipeline_in_turn() {
    let layout =
        PipelineLayout::from_modules(&[ModuleStages::new(1, 3), ModuleStages::new(1, 1)], 5).unwrap();
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
    let layout = PipelineLayout::from_modules(&modules, 2).unwrap();
    assert_eq!(
        [layout.stage_microbatches(0), layout.stage_microbatches(1), layout.microbatches()],
        [6, 4, 6]
    );
    let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    assert_eq!(short(1, &lists[1]), "F1.0 F4.0 B1.0 B4.0");
    assert_eq!(short(4, &lists[4]), "F1.1 B1.1 F3.1 B3.1");
    let taken = ["recv 3 in stage 1 from 0", "recv 3 in stage 1 from 1", "recv 3 in stage 1 from 2"];
    assert!(taken.iter().all(|taken| named(&lists[4]).iter().any(|action| action == taken)));
    // Round 0 of the encoder takes 1, 2 and 3 ns, so both pipelines start at 3; the last two times of the
    // LLM's row are unused.
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
    assert!(PipelineLayout::from_modules(&mixed, 1).is_err());
    assert!(layout.route(0, vec![0; 6]).is_err());
}

#[test]
fn two_encoders_are_parallel_branches_or_a_chain() {
    let modules = [ModuleStages::new(1, 1), ModuleStages::new(1, 1), ModuleStages::new(1, 1)];
    let makespan_ns = |modules: &[ModuleStages]| {
        let layout = PipelineLayout::from_modules(modules, 1).unwrap();
        let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
        let times = StageTimes::new(3, 1, vec![5, 7, 1], vec![10, 3, 2]).unwrap();
        layout.simulate(&lists, &times, &Communication::free(3, 1)).unwrap().makespan_ns
    };
    assert_eq!(makespan_ns(&modules), 5 + 7 + 1 + 2 + 3 + 10);
    let branches = [modules[0].feeds(2), modules[1], modules[2]];
    assert_eq!(makespan_ns(&branches), 7 + 1 + 2 + 10);
}
