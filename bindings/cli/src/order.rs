//! `dflop order`: who gets what, step by step.

use clap::Args;
use dflop_balancer::Strategy;
use dflop_loader::plan::{StepPlan, StepPlanner};
use serde::Serialize;

use crate::data_set::IndexedArgs;
use crate::output::{Failure, Output, write_json};
use crate::planner::{PlanArgs, parse_strategy};

/// Print which samples every rank and microbatch gets, a line per step.
///
/// The samples of a step do not depend on the number of ranks.
#[derive(Debug, Args)]
pub(crate) struct OrderArgs {
    #[command(flatten)]
    data_set: IndexedArgs,
    #[command(flatten)]
    plan: PlanArgs,
    /// Strategy: `search`, `multi_lpt`, `lpt`, `random`, or `round_robin` (also `data-blind`).
    #[arg(long, value_name = "NAME", default_value = "search", value_parser = parse_strategy)]
    strategy: Strategy,
    /// Epoch whose first sample begins step 0.
    #[arg(long, value_name = "E", default_value_t = 0)]
    epoch: u64,
    /// First step.
    #[arg(long, value_name = "T", default_value_t = 0)]
    from_step: u64,
    /// Number of steps [default: to the end of the epoch].
    #[arg(long, value_name = "K")]
    steps: Option<u64>,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct OrderLine<'a> {
    step: u64,
    /// Keys by rank and microbatch.
    keys: Vec<Vec<Vec<&'a str>>>,
    /// Sample numbers in the index, which tell equal keys apart.
    samples: Vec<Vec<Vec<u64>>>,
    digest: String,
    makespan_ns: u64,
    lower_bound_ns: u64,
    target_tokens: u64,
}

pub(crate) fn run(args: &OrderArgs, out: &mut Output) -> Result<(), Failure> {
    let planner = args.plan.planner(args.data_set.open()?, args.epoch)?.strategy(args.strategy);
    let until = match args.steps {
        None => planner.steps().per_epoch(),
        Some(steps) => args
            .from_step
            .checked_add(steps)
            .ok_or_else(|| Failure::Misuse("invalid `--from-step`: step numbers overflow".into()))?,
    };
    for step in args.from_step..until {
        let plan = planner.plan(step)?;
        let line = line(&planner, &plan);
        if args.json { write_json(out, &line)? } else { print(out, &line)? }
    }
    Ok(())
}

fn line<'a>(planner: &'a StepPlanner, plan: &StepPlan) -> OrderLine<'a> {
    let key = |place: &u32| planner.index().sample(plan.samples[*place as usize].sample).key();
    let number = |place: &u32| plan.samples[*place as usize].sample;
    OrderLine {
        step: plan.step,
        keys: by_rank(plan, key),
        samples: by_rank(plan, number),
        digest: plan.digest.to_string(),
        makespan_ns: plan.makespan_ns,
        lower_bound_ns: plan.bound.ns,
        target_tokens: plan.target_tokens,
    }
}

/// Something of every sample, by rank and microbatch.
fn by_rank<T>(plan: &StepPlan, of: impl Fn(&u32) -> T) -> Vec<Vec<Vec<T>>> {
    let microbatch = |places: &Vec<u32>| places.iter().map(&of).collect();
    let rank = |microbatches: &Vec<Vec<u32>>| microbatches.iter().map(microbatch).collect();
    plan.ranks.iter().map(rank).collect()
}

fn print(out: &mut impl std::io::Write, line: &OrderLine<'_>) -> Result<(), Failure> {
    let milliseconds = line.makespan_ns as f64 / 1e6;
    writeln!(out, "step {} digest {} predicted {milliseconds:.1} ms", line.step, line.digest)?;
    for (rank, microbatches) in line.keys.iter().enumerate() {
        let shown: Vec<String> = microbatches.iter().map(|keys| keys.join(" ")).collect();
        writeln!(out, "  rank {rank}: {}", shown.join(" | "))?;
    }
    Ok(())
}
