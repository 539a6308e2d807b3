//! Trains the example's model for `dflop demo`, balanced and data-blind on the same batches.

use dflop_balancer::Strategy;
use dflop_executor::train::{EXAMPLE_CONFIG, StepReport};

use super::config::TrainConfig;
use super::rank::part;
use super::report::{MeasuredRun, study_of_runs};
use super::{RankTask, Setup, run_threads};
use crate::failure::Failure;
use crate::report::Study;

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

/// Trains with both strategies; all ranks are threads of this process. Returns the results, and the last
/// steps pass by pass.
///
/// - `previews`: number of samples with previews
pub(crate) fn train(seed: u64, previews: usize) -> Result<(Trained, Study), Failure> {
    let mut config: TrainConfig =
        toml::from_str(EXAMPLE_CONFIG).map_err(|error| Failure::Failed(error.to_string()))?;
    (config.until, config.seed) = (Some(STEPS), seed);
    let setup = Setup::new(&config)?;
    let scratch = tempfile::tempdir()?;
    let trace = |run: usize| scratch.path().join(format!("{run}.json"));
    let mut runs: Vec<Vec<StepReport>> = Vec::new();
    for (run, strategy) in ORDER.into_iter().enumerate() {
        config.parallel.strategy = strategy;
        let mut reports = Vec::new();
        let mut keep = |report: &StepReport| {
            reports.push(report.clone());
            Ok(())
        };
        let task = RankTask { trace: Some(trace(run)), ..RankTask::default() };
        run_threads(&config, &setup, &task, &mut keep)?;
        runs.push(reports);
    }
    let timed = |strategy| {
        let own = runs.iter().zip(ORDER).filter(move |(_, of)| *of == strategy);
        own.flat_map(|(run, _)| run.iter().skip(1)).map(|report| report.seconds)
    };
    let mean = |strategy| timed(strategy).sum::<f64>() / timed(strategy).count().max(1) as f64;
    let losses: Vec<f64> = runs[0].iter().map(|report| report.loss).collect();
    let differences = losses.iter().zip(&runs[1]).map(|(loss, other)| ((loss - other.loss) / loss).abs());
    let trained = Trained {
        ranks: setup.job.world_size(),
        steps: timed(Strategy::SEARCH).count() as u64,
        data_blind_seconds: mean(Strategy::ROUND_ROBIN),
        balanced_seconds: mean(Strategy::SEARCH),
        losses: [losses[0], losses[losses.len() - 1]],
        loss_difference: differences.fold(0.0, f64::max),
    };
    let steps = trained.steps;
    let run = |run: usize, mean_seconds: f64| MeasuredRun {
        strategy: ORDER[run],
        traces: (0..setup.job.world_size()).map(|rank| part(&trace(run), rank)).collect(),
        mean: Some((mean_seconds, steps)),
    };
    // The last run of each.
    let runs = [run(2, trained.data_blind_seconds), run(3, trained.balanced_seconds)];
    let found = study_of_runs(&config, &setup, "A small model on this machine", &runs, previews)?;
    Ok((trained, found.study))
}
