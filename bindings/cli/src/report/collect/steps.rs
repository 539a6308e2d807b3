//! Simulates planned steps under several strategies, pass by pass.

use std::ops::Range;

use dflop_balancer::schedule::{PassKind, ScheduleKind};
use dflop_balancer::{Event, Strategy, split_time};
use dflop_loader::{StepPlan, StepPlanner, Synchronization, simulate_plan};
use dflop_planner::{MethodPass, MethodStep};
use std::collections::BTreeMap;

use super::described::SampleTable;
use crate::failure::Failure;
use crate::report::document::{Bar, PassCode, Row, StudyStep, Timeline};

/// Maximum number of steps that a page shows.
const STEPS_SHOWN: u64 = 4;
/// Samples and passes after which no further step is shown.
const SAMPLES_ENOUGH: usize = 3_000;
const BARS_ENOUGH: usize = 8_000;

/// Plans and simulates steps under each strategy, and describes the samples in `table`.
///
/// - `steps`: at most 4 steps are shown, and fewer large steps
/// - `first`: first strategy index in the study
///
/// # Errors
/// [`Failure`] if a step cannot be planned, or modules have separate DP sizes, so that no rank can be
/// simulated alone.
pub(crate) fn timelines_of_plans(
    planner: &StepPlanner,
    strategies: &[Strategy],
    schedule: ScheduleKind,
    steps: Range<u64>,
    first: usize,
    table: &mut SampleTable,
) -> Result<Vec<StudyStep>, Failure> {
    let (mut shown, mut bars): (Vec<StudyStep>, usize) = (Vec::new(), 0);
    for step in steps.take(STEPS_SHOWN as usize) {
        if !shown.is_empty() && (table.len() > SAMPLES_ENOUGH || bars > BARS_ENOUGH) {
            break;
        }
        let mut timelines = Vec::with_capacity(strategies.len());
        for (index, strategy) in strategies.iter().enumerate() {
            let mut own = planner.clone().strategy(*strategy);
            // Plans for `zb-h1` are those for 1F1B.
            if schedule != ScheduleKind::ZeroBubble {
                own = own.schedule(schedule)?;
            }
            let timeline = timeline(&own, &own.plan(step)?, schedule, first + index, table)?;
            bars += timeline.rows.iter().map(|row| row.bars.len()).sum::<usize>();
            timelines.push(timeline);
        }
        shown.push(StudyStep { step, timelines });
    }
    Ok(shown)
}

/// Shows a step on a shape table under each method, in study order; a shape table names no samples.
///
/// - `modules`: module names, the LLM last
pub(crate) fn timelines_of_methods(step: u64, methods: &[MethodStep], modules: &[String]) -> StudyStep {
    let timeline = |(strategy, method): (usize, &MethodStep)| {
        let mut rows: BTreeMap<[usize; 3], Row> = BTreeMap::new();
        for &MethodPass { module, stage, rank, microbatch, is_forward, start_ns, end_ns } in &method.passes {
            let label = || format!("rank {rank} {} {stage}", modules[module]);
            let empty = || Row { label: label(), rank, module, bars: Vec::new() };
            let pass = if is_forward { PassCode::Forward } else { PassCode::Backward };
            let bar = Bar { start_ns, length_ns: end_ns - start_ns, pass, microbatch, group: 0 };
            rows.entry([rank, module, stage]).or_insert_with(empty).bars.push(bar);
        }
        Timeline {
            strategy,
            makespan_ns: method.makespan_ns,
            loads_ns: Vec::new(),
            rows: rows.into_values().collect(),
            groups: Vec::new(),
            unlisted: Vec::new(),
        }
    };
    StudyStep { step, timelines: methods.iter().enumerate().map(timeline).collect() }
}

fn timeline(
    planner: &StepPlanner,
    plan: &StepPlan,
    schedule: ScheduleKind,
    strategy: usize,
    table: &mut SampleTable,
) -> Result<Timeline, Failure> {
    let mut index_of = |place: &u32| {
        let (sample, cost) = (plan.samples[*place as usize], &plan.costs[*place as usize]);
        table.sample_index(planner.datasets(), sample.dataset, sample.sample, cost)
    };
    let groups = plan.ranks.iter().flatten();
    let groups = groups.map(|places| places.iter().map(&mut index_of).collect()).collect();
    let (rows, makespan_ns) = match planner.synchronization() {
        Some(meet) if meet.meets_in_layers() || plan.context.is_some() => {
            (lockstep_rows(planner, plan, meet), plan.makespan_ns)
        }
        _ => {
            let (rows, makespan_ns) = pipeline_rows(planner, plan, schedule)?;
            // Ranks that share samples also wait for each other.
            (rows, if plan.context.is_some() { plan.makespan_ns } else { makespan_ns })
        }
    };
    Ok(Timeline {
        strategy,
        makespan_ns,
        loads_ns: loads_ns(planner, plan),
        rows,
        groups,
        unlisted: Vec::new(),
    })
}

/// Simulates every rank for itself; returns the rows, and the slowest rank's makespan in nanoseconds.
fn pipeline_rows(
    planner: &StepPlanner,
    plan: &StepPlan,
    schedule: ScheduleKind,
) -> Result<(Vec<Row>, u64), Failure> {
    let (mut rows, mut makespan_ns, mut first_group) = (Vec::new(), 0, 0);
    for (rank, simulation) in simulate_plan(planner, plan, schedule)?.into_iter().enumerate() {
        makespan_ns = makespan_ns.max(simulation.makespan_ns);
        let mut own = rows_of_rank(planner, rank);
        for event in &simulation.events {
            own[event.stage].bars.push(bar(event, first_group));
        }
        rows.append(&mut own);
        first_group += plan.ranks[rank].len() as u32;
    }
    Ok((rows, makespan_ns))
}

/// Returns a row for each rank, whose passes through a module start when the shard group has met.
fn lockstep_rows(planner: &StepPlanner, plan: &StepPlan, meet: Synchronization) -> Vec<Row> {
    let shard_ranks = meet.shard_ranks(plan.ranks.len()).get();
    let (slots, modules) = (planner.microbatches(), planner.model().modules().len());
    let mut rows: Vec<Row> = (0..plan.ranks.len()).flat_map(|rank| rows_of_rank(planner, rank)).collect();
    for (group, rows) in rows.chunks_mut(shard_ranks).enumerate() {
        let mut start_ns = 0;
        for slot in 0..slots {
            let passes = (0..modules).map(|module| (module, PassCode::Forward));
            let passes = passes.chain((0..modules).rev().map(|module| (module, PassCode::Backward)));
            for (module, pass) in passes {
                let mut slowest_ns = 0;
                for (rank, row) in rows.iter_mut().enumerate() {
                    let rank = group * shard_ranks + rank;
                    let (forward_ns, backward_ns) = split_time(plan.microbatch_ns(rank, slot)[module]);
                    let length_ns = if pass == PassCode::Forward { forward_ns } else { backward_ns };
                    let (microbatch, group) = (slot as u32, (rank * slots + slot) as u32);
                    row.bars.push(Bar { start_ns, length_ns, pass, microbatch, group });
                    slowest_ns = slowest_ns.max(length_ns);
                }
                start_ns += slowest_ns;
            }
        }
    }
    rows
}

/// Returns a row for each stage on a rank, without bars.
fn rows_of_rank(planner: &StepPlanner, rank: usize) -> Vec<Row> {
    let (modules, stages) = (planner.model().modules(), planner.pipeline().stages);
    let rows = stages.iter().enumerate().flat_map(|(module, &count)| {
        let name = modules.get(module).filter(|_| modules.len() == stages.len());
        (0..count).map(move |stage| {
            let label = match name {
                Some(name) => format!("rank {rank} {name} {stage}"),
                None => format!("rank {rank} stage {stage}"),
            };
            Row { label, rank, module, bars: Vec::new() }
        })
    });
    rows.collect()
}

fn bar(event: &Event, first_group: u32) -> Bar {
    Bar {
        start_ns: event.start_ns,
        length_ns: event.end_ns - event.start_ns,
        pass: match event.kind {
            PassKind::Forward => PassCode::Forward,
            PassKind::Backward => PassCode::Backward,
            PassKind::BackwardInput => PassCode::BackwardInput,
            PassKind::BackwardWeight => PassCode::BackwardWeight,
        },
        microbatch: event.microbatch,
        group: first_group + event.microbatch,
    }
}

/// Returns the predicted compute by rank and module, padding and constants of microbatches included.
fn loads_ns(planner: &StepPlanner, plan: &StepPlan) -> Vec<Vec<u64>> {
    let modules = planner.model().modules().len();
    let load = |(rank, microbatches): (usize, &Vec<Vec<u32>>)| {
        let mut load = vec![0; modules];
        for slot in 0..microbatches.len() {
            load.iter_mut().zip(plan.microbatch_ns(rank, slot)).for_each(|(sum, ns)| *sum += ns);
        }
        load
    };
    plan.ranks.iter().enumerate().map(load).collect()
}
