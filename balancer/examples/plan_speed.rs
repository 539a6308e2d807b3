//! Measures the planner's CPU time on a dataset's shapes.
//!
//! ```sh
//! cargo run --release -p dflop-balancer --example plan_speed -- MODEL SHAPES.csv GPUS GLOBAL_BATCH [REPEATS]
//! ```
//!
//! `SHAPES.csv` starts with the columns `tiles` and `seq_len`. Times are predicted for a preset A100. Prints
//! the plan, and seconds of CPU: the best and the worst of the repeats.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use dflop_balancer::planner::{
    Cluster, EncoderSplit, ItemSize, ModelCostsBuilder, PlanProblem, SearchSpaceOptions, Workload, plan,
};
use dflop_costmodel::{DeviceRate, ModelSpec};
use rustix::time::{ClockId, clock_gettime};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, shapes, gpus, global_batch, rest @ ..] = &arguments[..] else {
        return Err("MODEL SHAPES.csv GPUS GLOBAL_BATCH [REPEATS]".into());
    };
    let repeats = rest.first().map_or(Ok(5), |repeats| repeats.parse())?;
    let costs =
        ModelCostsBuilder::new(&ModelSpec::preset(model)?).rate(DeviceRate::preset("a100")?).build()?;
    let workload = Workload::draw(&read(shapes)?, global_batch.parse()?, 50, 0)?;
    let problem = PlanProblem {
        encoder: &costs[0],
        llm: &costs[1],
        workload: &workload,
        cluster: Cluster { gpus: gpus.parse()?, gpus_per_node: 8, memory_bytes: 80 << 30, links: None },
        options: SearchSpaceOptions::default(),
        encoder_split: EncoderSplit::Tile,
        memory_margin: 1.1,
    };
    let mut seconds = Vec::new();
    for _ in 0..repeats {
        let start = cpu_seconds();
        let found = plan(&problem)?;
        seconds.push(cpu_seconds() - start);
        if seconds.len() == 1 {
            println!("{model}: {:?}, {:.4} s a step", found.plan, found.step_seconds);
            println!("{} plans bounded, {} simulated", found.plans_bounded, found.plans_simulated);
        }
    }
    seconds.sort_by(f64::total_cmp);
    println!("{:.4} to {:.4} s", seconds[0], seconds[seconds.len() - 1]);
    Ok(())
}

fn read(path: &str) -> Result<Vec<ItemSize>, Error> {
    let size = |line: &str| -> Result<ItemSize, Error> {
        let mut columns = line.split(',').map(|column| column.trim().parse());
        let mut next = || columns.next().ok_or("a line needs two columns");
        Ok(ItemSize::of_tiles(next()??, next()??))
    };
    std::fs::read_to_string(path)?.lines().skip(1).map(size).collect()
}

/// Returns the CPU time of this thread, which is the only one.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
