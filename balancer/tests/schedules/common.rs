//! Builds schedules and times for the tests, and prints them briefly.

use dflop_balancer::schedule::{
    Action, Message, ModuleStages, Part, PassKind, PipelineLayout, ScheduleKind, schedule,
};
use dflop_balancer::{Event, Simulation, StageTimes, simulate};
use proptest::prelude::*;

pub(crate) const INTERLEAVED_3: ScheduleKind = ScheduleKind::Interleaved { chunks: 3 };

pub(crate) fn kinds() -> impl Iterator<Item = ScheduleKind> {
    let more = [ScheduleKind::Interleaved { chunks: 1 }, INTERLEAVED_3];
    ScheduleKind::ALL.into_iter().chain(more)
}

/// Lists all ranks' actions for every kind and size worth trying.
pub(crate) fn chains() -> impl Iterator<Item = (ScheduleKind, PipelineLayout, Vec<Vec<Action>>)> {
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

/// Draws stages and DP sizes for modules that feed the last module or each other, with a route.
pub(crate) fn jobs() -> impl Strategy<Value = (ScheduleKind, PipelineLayout)> {
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
            let mut layout = PipelineLayout::from_modules(&described, microbatches).unwrap();
            if last > 0 && route[0] % 2 == 0 && route[1] % 2 > 0 {
                let dp_size = described[0].dp_size as u16;
                let replicas = (0..layout.microbatches()).map(|at| route[at % 20] % dp_size).collect();
                layout = layout.route(0, replicas).unwrap();
            }
            (kind, layout)
        },
    )
}

pub(crate) fn parts(layout: &PipelineLayout) -> Vec<Part> {
    let stages = 0..layout.stages() as u16;
    let of_stage = |stage: u16| {
        let microbatches = 0..layout.stage_microbatches(stage as usize) as u32;
        microbatches.map(move |microbatch| Part { microbatch, stage })
    };
    stages.flat_map(of_stage).collect()
}

pub(crate) fn assert_each_part_runs_once(layout: &PipelineLayout, lists: &[Vec<Action>]) {
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

/// Whether two parts exchange messages.
pub(crate) fn is_link(layout: &PipelineLayout, part: Part, other: Part) -> bool {
    layout.consumers(part).any(|consumer| consumer == other)
        || layout.producers(part).any(|producer| producer == other)
}

/// Runs lists with blocking sends and sums; returns whether all ranks complete.
pub(crate) fn ends_with_waiting_sends(layout: &PipelineLayout, lists: &[Vec<Action>]) -> bool {
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

pub(crate) fn named(list: &[Action]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

/// Formats passes as `F0`, `B0`, `I0`, `W0`, with the stage after a dot if it differs from the rank.
pub(crate) fn short(rank: usize, list: &[Action]) -> String {
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

pub(crate) fn run(kind: ScheduleKind, ranks: usize, microbatches: usize, times: &StageTimes) -> Simulation {
    let lists: Vec<_> = (0..ranks).map(|rank| schedule(kind, rank, ranks, microbatches)).collect();
    simulate(&lists, times).unwrap()
}

pub(crate) fn equal_times(
    stages: usize,
    microbatches: usize,
    forward_ns: u64,
    backward_ns: u64,
) -> StageTimes {
    let all = |time_ns| vec![time_ns; stages * microbatches];
    StageTimes::new(stages, microbatches, all(forward_ns), all(backward_ns)).unwrap()
}

/// Lists rank, microbatch, letter, start and end.
pub(crate) fn spans(events: &[Event]) -> Vec<(usize, u32, char, u64, u64)> {
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
