//! Impossible layouts, lists and times are rejected.

use super::common::equal_times;
use dflop_balancer::schedule::{Action, Message, ModuleStages, Part, PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, CompiledSchedule, Error, StageTimes, simulate};

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
        assert!(
            matches!(PipelineLayout::from_modules(&modules, 1), Err(Error::Config { .. })),
            "{modules:?}"
        );
    }
    assert!(PipelineLayout::chain(0, 1, 1).is_err() && PipelineLayout::chain(1, 0, 1).is_err());
    assert!(PipelineLayout::chain(60_000, 1, 60_000).is_err());
    let layout =
        || PipelineLayout::from_modules(&[ModuleStages::new(1, 2), ModuleStages::new(1, 1)], 2).unwrap();
    assert!(matches!(layout().route(0, vec![0]), Err(Error::Length { .. })));
    assert!(layout().route(1, vec![0, 0]).is_err());
    let error = layout().route(0, vec![0, 2]).unwrap_err().to_string();
    assert!(error.contains("microbatch 1 goes to replica 2 of 2"), "{error}");
    let interleaved = ScheduleKind::Interleaved { chunks: 2 };
    assert!(layout().schedule(interleaved).is_err());
    let of_chunks =
        |stages, dp_size| PipelineLayout::from_modules(&[ModuleStages::new(stages, dp_size).chunks(2)], 2);
    assert!(of_chunks(3, 1).is_err(), "three stages are no pairs");
    let single = of_chunks(4, 1).unwrap();
    assert_eq!(
        single.schedule(interleaved).unwrap(),
        PipelineLayout::chain(2, 2, 2).unwrap().schedule(interleaved).unwrap()
    );
    let error = of_chunks(4, 2).unwrap().schedule(interleaved).unwrap_err().to_string();
    assert!(error.contains("is for a single pipeline, got 4 ranks"), "{error}");
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
    assert_eq!(error, "deadlock: rank 0 never completes `recv gradient 0 in stage 0 from 1`");
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
    let compile = |rows: &[usize]| CompiledSchedule::from_layout(ScheduleKind::GPipe, &layout, rows, &free);
    assert!(compile(&[0]).is_err() && compile(&[0, 1]).is_ok());
    assert!(CompiledSchedule::new(ScheduleKind::GPipe, &[], 1).is_err());
    assert!(CompiledSchedule::new(ScheduleKind::Interleaved { chunks: 2 }, &[0, 1, 2], 1).is_err());
}
