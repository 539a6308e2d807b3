#![expect(clippy::print_stdout, reason = "an example talks on stdout")]
use dflop_balancer::*;
use std::error::Error;
fn cpu() -> f64 { let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime); t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9 }
const SET: &[(&str, usize, &[usize], f64)] = &[
    ("sq7_n512_m64", 4, &[1, 3], 1.173), ("il8_n512_m64", 4, &[1, 3], 1.017), ("iq72_n512_m64", 4, &[1, 3], 1.186),
    ("sq7_n2048_m128", 8, &[2, 6], 1.411), ("il8_n2048_m128", 8, &[2, 6], 0.), ("iq72_n2048_m128", 8, &[2, 6], 0.),
    ("aud_n512_m64", 8, &[1, 6, 1], 1.322),
    ("sq7_n512_m128", 8, &[2, 6], 0.), ("il8_n512_m128", 8, &[2, 6], 0.), ("iq72_n512_m128", 8, &[2, 6], 1.436),
    ("giant_n512_m64", 8, &[2, 6], 1.867), ("pareto_n512_m64", 8, &[2, 6], 2.778),
];
fn main() -> Result<(), Box<dyn Error>> {
    let n = std::env::var("N").ok().and_then(|v| v.parse().ok()).unwrap_or(7);
    for (name, dp, stages, _) in SET.iter().take(n) {
        for seed in 0..2 {
            let text = std::fs::read_to_string(format!("/work/shared/instances/{name}_s{seed}.json"))?;
            let instance = Instance::from_json(&text)?;
            let config = PipelineConfig::new(*dp, stages.to_vec()).objective(if std::env::var("MM").is_ok() {PipelineObjective::MinMax} else {PipelineObjective::Makespan});
            let k = instance.groups() / dp;
            let all: Vec<u32> = (0..instance.items() as u32).collect();
            let floor = *instance.load_ns(&all).iter().max().unwrap() as f64 / *dp as f64;
            let start = cpu();
            let found = balance_pipeline(&instance, &config, Strategy::Search, &Caps::default(), &mut Budget::work(std::env::var("WORK").unwrap().parse().unwrap()))?;
            let ms = (cpu() - start) * 1e3;
            println!("{name}_s{seed} K {k} {:.4} bound {:.4} {ms:.1} ms {} units", found.makespan_ns as f64 / floor, found.bound.ns as f64 / floor, found.work_spent);
        }
    }
    Ok(())
}
