//! Trains the example's model for `dflop demo`, balanced and data-blind on the same batches.

use dflop_balancer::Strategy;
use dflop_executor::train::{EXAMPLE_CONFIG, StepReport};

use super::config::TrainConfig;
use super::{RankTask, Setup, run_threads};
use crate::failure::Failure;

/// Steps of each run; the first one warms up and is not timed.
const STEPS: u64 = 9;
/// Order of the runs, alternating, so that other load on the machine affects both strategies.
const ORDER: [Strategy; 4] =
    [Strategy::SEARCH, Strategy::ROUND_ROBIN, Strategy::ROUND_ROBIN, Strategy::SEARCH];

/// Measured times and losses of the runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trained {
    /// Number of ranks, one thread each.
    pub(crate) ranks: usize,
    /// Timed steps of each strategy.
    pub(crate) steps: u64,
    /// Mean measured step.
    pub(crate) data_blind_seconds: f64,
    /// Mean measured step.
    pub(crate) balanced_seconds: f64,
    /// First and last loss of a balanced run.
    pub(crate) losses: [f64; 2],
    /// Largest relative difference between the losses of both strategies at the same step.
    pub(crate) loss_difference: f64,
}

/// Trains with both strategies; all ranks are threads of this process.
pub(crate) fn train(seed: u64) -> Result<Trained, Failure> {
    let mut config: TrainConfig =
        toml::from_str(EXAMPLE_CONFIG).map_err(|error| Failure::Failed(error.to_string()))?;
    (config.until, config.seed) = (Some(STEPS), seed);
    let setup = Setup::new(&config)?;
    let mut runs: Vec<Vec<StepReport>> = Vec::new();
    for strategy in ORDER {
        config.parallel.strategy = strategy;
        let mut reports = Vec::new();
        let mut keep = |report: &StepReport| {
            reports.push(report.clone());
            Ok(())
        };
        run_threads(&config, &setup, &RankTask::default(), &mut keep)?;
        runs.push(reports);
    }
    let timed = |strategy| {
        let own = runs.iter().zip(ORDER).filter(move |(_, of)| *of == strategy);
        own.flat_map(|(run, _)| run.iter().skip(1)).map(|report| report.seconds)
    };
    let mean = |strategy| timed(strategy).sum::<f64>() / timed(strategy).count().max(1) as f64;
    let losses: Vec<f64> = runs[0].iter().map(|report| report.loss).collect();
    let differences = losses.iter().zip(&runs[1]).map(|(loss, other)| ((loss - other.loss) / loss).abs());
    Ok(Trained {
        ranks: setup.job.world_size(),
        steps: timed(Strategy::SEARCH).count() as u64,
        data_blind_seconds: mean(Strategy::ROUND_ROBIN),
        balanced_seconds: mean(Strategy::SEARCH),
        losses: [losses[0], losses[losses.len() - 1]],
        loss_difference: differences.fold(0.0, f64::max),
    })
}
