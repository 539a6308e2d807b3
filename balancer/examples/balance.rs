//! Partitions an instance file with every strategy: `cargo run --example balance -- FILE [WORK]`.
#![expect(clippy::print_stdout, reason = "an example prints its result")]

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};
use std::error::Error;
use std::time::Instant;

/// Global batch with four samples for two groups, if no file is given.
const SMALL: &str =
    r#"{"name":"small","n":4,"m":2,"c":2,"d":[[9,1],[9,1],[1,9],[1,9]],"tok":[50,50,900,900]}"#;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let text = args.next().map_or(Ok(SMALL.to_owned()), std::fs::read_to_string)?;
    let work = args.next().map_or(Ok(20_000), |work| work.parse())?;
    let instance = Instance::from_json(&text)?;
    for &strategy in Strategy::ALL {
        let start = Instant::now();
        let found = match balance(&instance, strategy, &Caps::default(), &mut Budget::work(work)) {
            Err(error @ dflop_balancer::Error::TooLarge { .. }) => {
                println!("{:<22} {strategy:<12} {error}", instance.name());
                continue;
            }
            found => found?,
        };
        let millis = start.elapsed().as_secs_f64() * 1e3;
        let (gap, kind, spent) = (found.gap() * 100.0, found.bound.kind, found.work_spent);
        println!(
            "{:<22} {strategy:<12} gap {gap:>9.5} % {millis:>8.3} ms {spent:>8} units {kind:?}",
            instance.name()
        );
    }
    Ok(())
}
