//! Compares planning and balancing methods on a dataset's shapes, and measures the search's CPU time.
//!
//! ```sh
//! cargo run --release -p dflop-planner --example methods -- MODEL SHAPES.csv GPUS GLOBAL_BATCH [WORD...]
//! ```
//!
//! `SHAPES.csv` starts with the columns `tiles` and `seq_len`; times are predicted for a preset A100. Words:
//! `links` (NVLink of 240 GB/s, InfiniBand of 12.5 GB/s a GPU), `joint`, `any`, `zero1`, `sp`, `uneven`,
//! `recompute`, `ahead`, `schedules`, `batches=N`, `seed=N`, `gib=N`; `plan` leaves the comparison out.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use dflop_costmodel::{DeviceRate, ModelSpec};
use dflop_planner::{
    Cluster, Degrees, EncoderSplit, ItemSize, Link, Links, ModelCostsBuilder, ModulePlan, ParallelismPlan,
    PlanProblem, SearchSpaceOptions, Workload, compare, plan,
};
use rustix::time::{ClockId, clock_gettime};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, shapes, gpus, global_batch, words @ ..] = &arguments[..] else {
        return Err("MODEL SHAPES.csv GPUS GLOBAL_BATCH [WORD...]".into());
    };
    let has = |word: &str| words.iter().any(|given| given == word);
    let number = |name: &str, or: u64| {
        let given = words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        given.map_or(Ok(or), str::parse)
    };
    let link = |bytes_per_second, latency_seconds| Link { bytes_per_second, latency_seconds };
    let links = has("links").then(|| Links { nvlink: link(240e9, 5e-6), infiniband: link(12.5e9, 15e-6) });
    let spec = ModelSpec::preset(model)?;
    let costs = ModelCostsBuilder::new(&spec)
        .rate(DeviceRate::preset("a100")?)
        .tensor_parallel_link(links.map(|links| links.nvlink))
        .sequence_parallel(has("sp"))
        .build()?;
    let batches = number("batches", 10)? as usize;
    let workload = Workload::draw(&read(shapes)?, global_batch.parse()?, batches, number("seed", 0)?)?;
    let memory_bytes = number("gib", 80)? << 30;
    let problem = PlanProblem {
        encoders: costs.encoder_costs(),
        llm: &costs.llm,
        workload: &workload,
        cluster: Cluster { gpus: gpus.parse()?, gpus_per_node: 8, memory_bytes, links },
        options: SearchSpaceOptions {
            is_disaggregated: !has("joint"),
            is_joint: has("joint") || has("any"),
            has_uneven_layers: has("uneven"),
            has_recomputation: has("recompute"),
            has_encoder_ahead: has("ahead"),
            has_other_schedules: has("schedules"),
            has_sharded_optimizer: has("zero1"),
            ..SearchSpaceOptions::default()
        },
        encoder_split: EncoderSplit::Tile,
        memory_margin: 1.1,
    };
    let start = cpu_seconds();
    let found = plan(&problem)?;
    println!("search: {:.3} s CPU, {} plans simulated", cpu_seconds() - start, found.plans_simulated);
    println!("{:>22} {:9.4} s of {}", "bound", found.lower_bound_seconds, problem.options);
    if has("plan") {
        println!("{:>22} {:9.4} s {}", "plan", found.step_seconds, show(&found.plan));
        return Ok(());
    }
    for score in compare(&problem, &found)?.methods {
        let fits = if score.fits { "" } else { " does not fit" };
        let idle = 100.0 * score.idle_fraction;
        let (name, seconds) = (score.method.name(), score.step_seconds);
        println!("{name:>22} {seconds:9.4} s {idle:5.1} % idle {}{fits}", show(&score.plan));
    }
    Ok(())
}

fn show(plan: &ParallelismPlan) -> String {
    let module = |name: &str, ModulePlan { degrees, layers, is_recomputed }: &ModulePlan| {
        let Degrees { tp, pp, dp } = degrees;
        let again = if *is_recomputed { "r" } else { "" };
        format!("{name}({tp},{pp},{dp}){again} {layers:?}")
    };
    let encoders: Vec<String> = plan.encoders.iter().map(|encoder| module("E", encoder)).collect();
    let ParallelismPlan { llm, microbatches, placement, schedule, .. } = plan;
    let (encoders, llm) = (encoders.join(" "), module("L", llm));
    format!("{} m{microbatches} {schedule} {encoders} {llm}", placement.name())
}

fn read(path: &str) -> Result<Vec<ItemSize>, Error> {
    let size = |line: &str| -> Result<ItemSize, Error> {
        let mut columns = line.split(',').map(|column| column.trim().parse());
        let mut next = || columns.next().ok_or("a line needs two columns");
        Ok(ItemSize::from_tiles(next()??, next()??))
    };
    std::fs::read_to_string(path)?.lines().skip(1).map(size).collect()
}

fn cpu_seconds() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}
