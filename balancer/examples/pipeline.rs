//! Plans a pipeline step with every strategy: `cargo run --example pipeline -- FILE DP STAGES,... [WORK]`.
#![expect(clippy::print_stdout, reason = "an example prints its result")]

use dflop_balancer::{Budget, Caps, Instance, PipelineConfig, Strategy, balance_pipeline};
use std::error::Error;
use std::time::Instant;

/// Global batch with eight samples, if no file is given.
const SMALL: &str = r#"{"n":8,"m":4,"c":2,"d":[[9,3],[9,3],[3,9],[3,9],[6,3],[3,6],[0,9],[9,0]]}"#;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let text = args.next().map_or(Ok(SMALL.to_owned()), std::fs::read_to_string)?;
    let dp_size = args.next().map_or(Ok(2), |dp_size| dp_size.parse())?;
    let stages = args.next().unwrap_or("1,1".to_owned());
    let stages = stages.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let work = args.next().map_or(Ok(20_000), |work| work.parse())?;
    let instance = Instance::from_json(&text)?;
    let config = PipelineConfig::new(dp_size, stages);
    for strategy in Strategy::for_any_size() {
        let start = Instant::now();
        let found =
            balance_pipeline(&instance, &config, strategy, &Caps::default(), &mut Budget::work(work))?;
        let millis = start.elapsed().as_secs_f64() * 1e3;
        let (gap, makespan_ns, spent) = (found.gap() * 100.0, found.makespan_ns, found.work_spent);
        println!(
            "{:<22} {strategy:<12} {makespan_ns:>12} ns gap {gap:>8.4} % {millis:>9.3} ms {spent:>8} units",
            instance.name()
        );
    }
    Ok(())
}
