//! Trains a decoder on packed uneven sequences: a loss curve, or tokens per second.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use dflop_comm::{Settings, threads};
use dflop_cuda::{Cuda, KernelTime};
use dflop_device::prelude::*;
use dflop_device::{Dtype, Lane};
use dflop_executor::optimizer::{AdamWSettings, JobOptimizer, JobOptimizerSettings, LearningRate, Precision};
use dflop_models::weights::{self, WeightSource};
use dflop_models::{Activations, BlockOutput, BlockStage, ModelConfig, ModuleKind, Stage, assemble};
use serde_json::{Value, json};

use super::report::{median, wait};
use crate::arguments::Arguments;
use crate::models::{Pack, Uniform};
use crate::report::{self, Outcome};
use crate::{Result, device, models};

/// Steps that are not timed.
const WARM_UP_STEPS: usize = 3;
/// Seconds in which cuDNN plans are built and cuDNN times compared with the times of our kernels.
const SETTLING_SECONDS: f64 = 30.0;
/// Maximum ratio between the loss after training and the loss before, for a curve.
const LEARNED: f64 = 0.8;
/// Size limit for a weights file in bytes: none.
const PIECE_BYTES_MAX: u64 = u64::MAX;

/// Training plan.
struct Plan {
    document: Value,
    steps: usize,
    /// Number of tokens per step.
    tokens: usize,
    learning_rate: f64,
    activations: Activations,
}

impl Plan {
    /// Returns the plan for a loss curve or for a speed measurement.
    fn of(set: &str, is_tiny: bool) -> Result<Self> {
        let curve = Self {
            document: models::medium(),
            steps: 200,
            tokens: 4096,
            learning_rate: 1e-3,
            activations: Activations::Stored,
        };
        let speed = Self {
            document: models::large(),
            steps: WARM_UP_STEPS + 12,
            tokens: 8192,
            learning_rate: 1e-4,
            activations: Activations::Recomputed,
        };
        let tiny = |plan: Self, steps, learning_rate| {
            let document = models::tiny();
            Self { document, steps, tokens: 48, learning_rate, ..plan }
        };
        match (set, is_tiny) {
            ("curve", false) => Ok(curve),
            ("curve", true) => Ok(Plan { tokens: 160, ..tiny(curve, 40, 1e-2) }),
            ("throughput", false) => Ok(speed),
            ("throughput", true) => Ok(tiny(speed, WARM_UP_STEPS + 2, 1e-3)),
            _ => Err(format!("`--set` is `curve` or `throughput`, not `{set}`").into()),
        }
    }
}

/// Step times, in seconds.
struct StepTimes {
    /// From the first call to the last result.
    wall: f64,
    /// Until the host had queued forward and backward.
    queued: f64,
    /// Device time from the first forward work to the last backward work.
    passes: f64,
    /// Device time between the end of a step and the passes in the next step.
    between: f64,
    /// Kernels and matrix products, a number.
    launches: f64,
}

/// Trains by the `--set` plan.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome> {
    let plan = Plan::of(&arguments.set, arguments.is_tiny)?;
    let part = arguments.set.as_str();
    let config = ModelConfig::from_config(&plan.document)?;
    let device = if arguments.is_fastest {
        match device::cuda_with_cudnn() {
            Ok(device) => device,
            Err(error) => {
                let part = format!("{part} cuDNN");
                return Ok(report::summary(&part, Outcome::Skipped, &error.to_string(), "runs"));
            }
        }
    } else {
        device::cuda(Dtype::Bf16)?
    };
    let seed = arguments.seed.unwrap_or(1);
    let vocabulary = config.llm.spec.vocab as usize;
    let packs: Vec<Pack> =
        (0..plan.steps).map(|step| Pack::new(seed, step, plan.tokens, vocabulary)).collect();
    let mut stage = stage(&config, &device, plan.activations, &Uniform(seed))?;
    if let Some(directory) = &arguments.directory {
        write(directory, &plan, &packs, (part == "curve").then_some(&stage))?;
    }
    if arguments.is_fastest && !arguments.is_tiny {
        let seconds = arguments.settling_seconds.unwrap_or(SETTLING_SECONDS);
        settle(&config, &mut stage, &packs, seconds)?;
    }
    let (losses, times) = train(part, &plan, &config, &mut stage, &packs)?;
    device::report_attention(part, &device);
    if part == "throughput" {
        kernels(&config, &mut stage, &packs[0])?;
    }
    if part == "curve" {
        return Ok(judge_curve(&losses));
    }
    let way = if arguments.is_fastest { "fastest" } else { "own" };
    Ok(judge_speed(&device, &plan, way, &losses, &times))
}

fn stage(
    config: &ModelConfig,
    device: &Cuda,
    activations: Activations,
    source: &dyn WeightSource,
) -> Result<BlockStage<Cuda>> {
    models::whole(config, ModuleKind::Llm, device, activations, source)
}

/// Writes the configuration, the packs and, for a curve, the weights.
fn write(directory: &Path, plan: &Plan, packs: &[Pack], stage: Option<&BlockStage<Cuda>>) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut document = plan.document.clone();
    document["learning_rate"] = plan.learning_rate.into();
    document["is_recomputed"] = (plan.activations == Activations::Recomputed).into();
    document["warm_up_steps"] = WARM_UP_STEPS.into();
    std::fs::write(directory.join("config.json"), document.to_string())?;
    models::write_packs(directory, packs)?;
    if let Some(stage) = stage {
        let tensors = assemble(stage)?.unwrap_or_default();
        weights::write(directory, tensors, PIECE_BYTES_MAX)?;
    }
    Ok(())
}

/// Runs passes over all packs until cuDNN plans are built and an engine is chosen for each shape.
fn settle(config: &ModelConfig, stage: &mut BlockStage<Cuda>, packs: &[Pack], seconds: f64) -> Result<()> {
    let (start, device) = (Instant::now(), stage.device().clone());
    while start.elapsed().as_secs_f64() < seconds {
        for pack in packs {
            let context = Arc::new(pack.context(&config.llm, &device)?);
            stage.forward(0, context, None)?;
            stage.backward(0, None)?;
        }
        wait(&device)?;
    }
    Ok(())
}

/// Runs all steps; returns losses and times.
fn train(
    part: &str,
    plan: &Plan,
    config: &ModelConfig,
    stage: &mut BlockStage<Cuda>,
    packs: &[Pack],
) -> Result<(Vec<f64>, Vec<StepTimes>)> {
    let device = stage.device().clone();
    let settings = JobOptimizerSettings {
        learning_rate: LearningRate::constant(plan.learning_rate),
        adamw: AdamWSettings { precision: Precision::Bf16, ..AdamWSettings::default() },
        gradient_norm_max: Some(1.0),
        skip_nonfinite: 0,
    };
    let comm = threads::world(1, Settings::default())?.remove(0);
    let mut optimizer = JobOptimizer::new(settings, &comm, [&*stage])?;
    let (mut losses, mut times) = (Vec::new(), Vec::new());
    let mut end = device.mark(Lane::Compute)?;
    for (step, pack) in packs.iter().enumerate() {
        let (start, launches) = (Instant::now(), device.launches());
        let context = Arc::new(pack.context(&config.llm, &device)?);
        let first = device.mark(Lane::Compute)?;
        let BlockOutput::Loss(loss) = stage.forward(0, context, None)? else {
            return Err("expected a loss of the whole model, found rows".into());
        };
        stage.backward(0, None)?;
        let last = device.mark(Lane::Compute)?;
        let queued = start.elapsed().as_secs_f64();
        // the only wait in a step; the loss is read after it
        let report = optimizer.update([&mut *stage])?;
        let next = device.mark(Lane::Compute)?;
        let loss = stage.read_loss(0, &loss)? / pack.targets() as f64;
        let nanoseconds = |from, to| device.busy_ns(from, to) as f64 * 1e-9;
        let between = nanoseconds(&end, &first);
        let passes = nanoseconds(&first, &last);
        let (wall, launches) = (start.elapsed().as_secs_f64(), (device.launches() - launches) as f64);
        times.push(StepTimes { wall, queued, passes, between, launches });
        end = next;
        losses.push(loss);
        report::result(
            part,
            json!({"side": "dflop", "step": step, "loss": loss, "gradient_norm": report.gradient_norm,
                "seconds": times[step].wall}),
        );
    }
    Ok((losses, times))
}

/// Prints the time of every kernel in a further step's forward and backward passes.
fn kernels(config: &ModelConfig, stage: &mut BlockStage<Cuda>, pack: &Pack) -> Result<()> {
    let device = stage.device().clone();
    device.record_kernel_times(true);
    let context = Arc::new(pack.context(&config.llm, &device)?);
    stage.forward(0, context, None)?;
    stage.backward(0, None)?;
    device.record_kernel_times(false);
    for KernelTime { name, launches, nanoseconds } in device.take_kernel_times()? {
        let seconds = nanoseconds as f64 * 1e-9;
        eprintln!("{name:>60}: {launches:4} launches, {:8.3} ms", 1e3 * seconds);
        report::result(
            "kernels",
            json!({"side": "dflop", "name": name, "launches": launches, "seconds": seconds}),
        );
    }
    Ok(())
}

fn judge_curve(losses: &[f64]) -> Outcome {
    let window = (losses.len() / 10).max(1);
    let mean = |some: &[f64]| some.iter().sum::<f64>() / some.len() as f64;
    let (first, last) = (mean(&losses[..window]), mean(&losses[losses.len() - window..]));
    let is_learned = last < LEARNED * first && losses.iter().all(|loss| loss.is_finite());
    let outcome = if is_learned { Outcome::Passed } else { Outcome::Failed };
    let figure = format!("{} steps, loss {first:.3} to {last:.3}", losses.len());
    report::summary("curve", outcome, &figure, "the loss falls by a fifth; beside PyTorch's below")
}

fn judge_speed(device: &Cuda, plan: &Plan, way: &str, losses: &[f64], times: &[StepTimes]) -> Outcome {
    let of = |value: fn(&StepTimes) -> f64| median(times.iter().skip(WARM_UP_STEPS).map(value).collect());
    let wall = of(|times| times.wall);
    let (queued, passes, between) =
        (of(|times| times.queued), of(|times| times.passes), of(|times| times.between));
    let (rate, launches) = (plan.tokens as f64 / wall, of(|times| times.launches));
    report::result(
        "throughput",
        json!({"name": "decoder", "side": "dflop", "way": way, "tokens_per_second": rate, "step_seconds": wall,
            "queued_seconds": queued, "passes_seconds": passes, "between_seconds": between,
            "launches": launches, "memory_bytes": device.memory_used_bytes()}),
    );
    eprintln!("queued after {queued:.4} s, passes {passes:.4} s, idle between steps {between:.4} s");
    let is_finite = losses.iter().all(|loss| loss.is_finite());
    let outcome = if is_finite { Outcome::Passed } else { Outcome::Failed };
    let figure = format!("{rate:.0} tokens/s, {:.1} ms and {launches} launches a step", 1e3 * wall);
    let part = if way == "fastest" { "throughput cuDNN" } else { "throughput" };
    report::summary(part, outcome, &figure, "runs; beside PyTorch's below")
}
