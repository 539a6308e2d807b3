//! Measures a small model on this machine, predicts from the profile, and compares with microbatches that
//! run.
//!
//! ```sh
//! cargo run --release -p dflop-executor --example measure -- SECONDS MICROBATCHES REPEATS [THREADS]
//! ```
//!
//! The model has a vision tower with three layers and width 128, and a language model with four layers and
//! width 256. For any other model use `dflop profile --check`. `PROFILE` names a profile to use instead of
//! measuring one.
#![allow(clippy::print_stdout, reason = "this is a program")]

use std::error::Error;

use dflop_costmodel::config::Documents;
use dflop_costmodel::{CostModel, ModelSpec, Profile, ProfileOptions};
use dflop_device::Cpu;
use dflop_executor::profile::check::{CheckOptions, check};
use dflop_executor::profile::{MeasureOptions, MeasuredModel, measure};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (seconds, microbatches, repeats, threads) = (number(30), number(24), number(5), number(1));
    let config = serde_json::json!({
        "model_type": "internvl", "downsample_ratio": 0.5,
        "vision_config": {"model_type": "internvl_vision", "hidden_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 4, "intermediate_size": 512, "image_size": 112, "patch_size": 14},
        "text_config": {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048},
    });
    let documents = Documents { config: config.clone(), ..Documents::default() };
    let model = MeasuredModel::from_config(&config, ModelSpec::from_hugging_face("small", &documents)?)?;
    let device = Cpu::new(threads)?;
    let text = match std::env::var("PROFILE") {
        Ok(path) => std::fs::read_to_string(path)?,
        Err(_) => measured(&model, &device, seconds as f64)?,
    };
    let read = Profile::parse([("measured.csv", text.as_str())])?;
    let predictor = CostModel::from_profile(model.spec.clone(), &read, ProfileOptions::default())?;
    let options = CheckOptions { microbatches, repeats, ..CheckOptions::default() };
    let report = check(&model, &predictor, &device, &options, |line| println!("{line}"))?;
    println!(
        "{:>7} {:>4} {:>7} {:>7} {:>10} {:>10} {:>8} {:>8} {:>10}",
        "module", "mb", "samples", "tokens", "predicted", "measured", "error", "spread", "corrected"
    );
    for row in &report.microbatches {
        let percent = |ns: u64| 100.0 * (ns as f64 / row.measured_ns as f64 - 1.0);
        let corrected = row.corrected_ns.map_or_else(String::new, |ns| format!("{:+.1} %", percent(ns)));
        println!(
            "{:>7} {:>4} {:>7} {:>7} {:>8.2}ms {:>8.2}ms {:>+6.1} % {:>6.1} % {corrected:>10}",
            row.module,
            row.microbatch,
            row.samples,
            row.tokens,
            row.predicted_ns as f64 / 1e6,
            row.measured_ns as f64 / 1e6,
            percent(row.predicted_ns),
            100.0 * row.spread,
        );
    }
    for module in &report.modules {
        println!("{module:#?}");
    }
    Ok(())
}

/// Measures a profile and returns its text; `OUT` names a file to write it to.
fn measured(model: &MeasuredModel, device: &Cpu, seconds_max: f64) -> Result<String, Box<dyn Error>> {
    let options = MeasureOptions { seconds_max, tokens_max: 2048, ..MeasureOptions::default() };
    let profile = measure(model, device, &options, |line| println!("{line}"))?;
    for module in &profile.modules {
        let share = 100.0 * module.flops / profile.peak_flops;
        println!("{}: {share:.0} % of the peak at {} tokens", module.module, module.tokens);
    }
    let text = profile.file.to_csv();
    if let Ok(path) = std::env::var("OUT") {
        std::fs::write(path, &text)?;
    }
    Ok(text)
}
