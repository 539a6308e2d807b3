//! Measures a search's gap by CPU time: `cargo run --release --example time_to_gap -- MS[,MS…] FILE…`.
//!
//! Prints a line per instance file: items, groups and modules, the bound, then per time limit the gap, the
//! CPU milliseconds actually spent (with the bound, without reading the file) and the work units. Only this
//! thread's CPU time counts.
#![expect(clippy::print_stdout, reason = "an example prints its result")]

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;

fn cpu_ms() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let limits = args.next().unwrap_or_else(|| "1,10".to_owned());
    let limits: Vec<f64> = limits.split(',').map(str::parse).collect::<Result<_, _>>()?;
    for file in args {
        let instance = Instance::from_json(&std::fs::read_to_string(&file)?)?;
        print!("{:<22}", instance.name());
        for (column, &limit) in limits.iter().enumerate() {
            let start = cpu_ms();
            let mut budget = Budget::work(u64::MAX).deadline(move || cpu_ms() - start >= limit);
            let found = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut budget)?;
            let taken = cpu_ms() - start;
            if column == 0 {
                print!(" {:<12}", found.bound.kind);
            }
            print!(" | {:>8.5} % {taken:>7.2} ms {:>8} units", found.gap() * 100.0, found.work_spent);
        }
        println!();
    }
    Ok(())
}
