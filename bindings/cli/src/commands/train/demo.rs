//! Trains the example's model for `dflop demo`, balanced and data-blind on the same batches.

use std::ops::ControlFlow;

use dflop_balancer::Strategy;
use dflop_executor::run::{Run, RunConfig, RunOptions};
use dflop_executor::train::{EXAMPLE_CONFIG, StepReport};

use super::report::{MeasuredRun, study_of_runs};
use crate::failure::Failure;
use crate::report::Study;

/// Number of steps per run; the first step warms up and is not timed.
const STEPS: u64 = 9;
/// Pass wall time over pass CPU time above which a machine counts as busy.
const BUSY_FACTOR: f64 = 1.25;
/// Order of the runs, alternating, so that other load on the machine affects both strategies.
const ORDER: [Strategy; 4] =
    [Strategy::SEARCH, Strategy::ROUND_ROBIN, Strategy::ROUND_ROBIN, Strategy::SEARCH];

/// Measured times and losses from the runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trained {
    /// Number of ranks, a thread each.
    pub(crate) ranks: usize,
    /// Number of timed steps per strategy.
    pub(crate) steps: u64,
    /// Mean measured step.
    pub(crate) data_blind_seconds: f64,
    /// Mean measured step.
    pub(crate) balanced_seconds: f64,
    /// The same steps by CPU pass time, as if every rank had a core to itself.
    pub(crate) by_cpu: CpuTimes,
    /// First and last loss in a balanced run.
    pub(crate) losses: [f64; 2],
    /// Largest relative difference between the losses with both strategies at the same step.
    pub(crate) loss_difference: f64,
}

impl Trained {
    /// Returns whether other work on the machine made steps so much longer that times on the clock say
    /// little.
    pub(crate) fn is_machine_busy(&self) -> bool {
        self.by_cpu.busy_factor > BUSY_FACTOR
    }

    /// Returns whether even the times by CPU do not tell which strategy is faster.
    pub(crate) fn is_unclear(&self) -> bool {
        let [low, high] = self.by_cpu.speedup_range;
        low < 1.0 && high > 1.0
    }
}

/// Steps by CPU pass time, which other work on the machine changes little.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CpuTimes {
    /// Mean step.
    pub(crate) data_blind_seconds: f64,
    /// Mean step.
    pub(crate) balanced_seconds: f64,
    /// Median of data-blind over balanced time, over step pairs on the same batch.
    pub(crate) speedup: f64,
    /// Tenth and ninetieth percentile of these ratios.
    pub(crate) speedup_range: [f64; 2],
    /// Pass wall time over pass CPU time, all steps together: 1 on a machine without other work.
    pub(crate) busy_factor: f64,
}

impl CpuTimes {
    /// - `runs`: strategy of every run, and the pass time per step by CPU and by wall clock, in seconds; runs
    ///   use the same batches in the same order
    fn of(runs: &[(Strategy, Vec<[f64; 2]>)]) -> Self {
        let of = |strategy: Strategy| {
            let own = runs.iter().filter(move |(of, _)| *of == strategy);
            own.flat_map(|(_, steps)| steps.iter().map(|[cpu, _]| *cpu))
        };
        let mean = |strategy| of(strategy).sum::<f64>() / of(strategy).count().max(1) as f64;
        let pairs = of(Strategy::ROUND_ROBIN).zip(of(Strategy::SEARCH));
        let mut ratios: Vec<f64> = pairs.map(|(blind, balanced)| blind / balanced).collect();
        ratios.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = ratios.len().saturating_sub(1);
            ratios.get((share * last as f64).round() as usize).copied().unwrap_or(1.0)
        };
        let sum = |place: usize| -> f64 {
            runs.iter().flat_map(|(_, steps)| steps.iter().map(move |times| times[place])).sum()
        };
        Self {
            data_blind_seconds: mean(Strategy::ROUND_ROBIN),
            balanced_seconds: mean(Strategy::SEARCH),
            speedup: at(0.5),
            speedup_range: [at(0.1), at(0.9)],
            busy_factor: if sum(0) > 0.0 { sum(1) / sum(0) } else { 1.0 },
        }
    }
}

/// Trains with both strategies; all ranks are threads of this process. Returns the results, and the last
/// steps pass by pass.
///
/// - `previews`: number of samples with previews
pub(crate) fn train(seed: u64, previews: usize) -> Result<(Trained, Study), Failure> {
    let scratch = tempfile::tempdir()?;
    let trace = |run: usize| scratch.path().join(format!("{run}.json"));
    let (mut runs, mut last): (Vec<Vec<StepReport>>, _) = (Vec::new(), None);
    for (at, strategy) in ORDER.into_iter().enumerate() {
        let mut config = RunConfig::from_toml(EXAMPLE_CONFIG)?;
        (config.seed, config.parallel.strategy) = (seed, strategy);
        let options = RunOptions { until: Some(STEPS), trace: Some(trace(at)), ..RunOptions::default() };
        let run = Run::new(config, options);
        let mut reports = Vec::new();
        run.start(&mut |report| {
            reports.push(report.clone());
            ControlFlow::Continue(())
        })?;
        runs.push(reports);
        last = Some(run);
    }
    let Some(last) = last else { unreachable!("there are runs") };
    let ranks = last.setup()?.job().world_size();
    let timed = |strategy| {
        let own = runs.iter().zip(ORDER).filter(move |(_, of)| *of == strategy);
        own.flat_map(|(run, _)| run.iter().skip(1)).map(|report| report.seconds)
    };
    let mean = |strategy| timed(strategy).sum::<f64>() / timed(strategy).count().max(1) as f64;
    let times_of = |run: &Vec<StepReport>| {
        run.iter().skip(1).map(|report| [report.replayed_seconds, report.pipeline_seconds]).collect()
    };
    let times: Vec<(Strategy, Vec<[f64; 2]>)> = ORDER.into_iter().zip(runs.iter().map(times_of)).collect();
    let losses: Vec<f64> = runs[0].iter().map(|report| report.loss).collect();
    let differences = losses.iter().zip(&runs[1]).map(|(loss, other)| ((loss - other.loss) / loss).abs());
    let trained = Trained {
        ranks,
        steps: timed(Strategy::SEARCH).count() as u64,
        data_blind_seconds: mean(Strategy::ROUND_ROBIN),
        balanced_seconds: mean(Strategy::SEARCH),
        by_cpu: CpuTimes::of(&times),
        losses: [losses[0], losses[losses.len() - 1]],
        loss_difference: differences.fold(0.0, f64::max),
    };
    let steps = trained.steps;
    let run = |run: usize, mean_seconds: f64| MeasuredRun {
        strategy: ORDER[run],
        trace: trace(run),
        mean: Some((mean_seconds, steps)),
    };
    // The last run of each.
    let runs = [run(2, trained.data_blind_seconds), run(3, trained.balanced_seconds)];
    let found = study_of_runs(&last, "A small model on this machine", &runs, previews)?;
    Ok((trained, found.study))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trained(by_cpu: CpuTimes) -> Trained {
        Trained {
            ranks: 2,
            steps: 4,
            data_blind_seconds: 1.0,
            balanced_seconds: 1.0,
            by_cpu,
            losses: [1.0, 0.5],
            loss_difference: 0.0,
        }
    }

    #[test]
    fn pairs_of_steps_on_the_same_batch_are_compared_by_cpu_time() {
        // wall times show the opposite, because other work ran during the balanced steps
        let balanced = vec![[1.0, 9.0], [2.0, 9.0]];
        let blind = vec![[1.5, 1.5], [2.4, 2.4]];
        let times = CpuTimes::of(&[(Strategy::SEARCH, balanced), (Strategy::ROUND_ROBIN, blind)]);
        assert!((times.speedup_range[0] - 1.2).abs() < 1e-9 && (times.speedup_range[1] - 1.5).abs() < 1e-9);
        assert!(
            (times.balanced_seconds - 1.5).abs() < 1e-9 && (times.data_blind_seconds - 1.95).abs() < 1e-9
        );
        assert!((times.busy_factor - 21.9 / 6.9).abs() < 1e-9);
        assert!(trained(times).is_machine_busy() && !trained(times).is_unclear());
    }

    #[test]
    fn ratios_on_both_sides_of_one_tell_nothing() {
        let runs = [
            (Strategy::SEARCH, vec![[1.0, 1.0]; 4]),
            (Strategy::ROUND_ROBIN, vec![[0.8, 0.8], [1.0, 1.0], [1.0, 1.0], [1.4, 1.4]]),
        ];
        let times = CpuTimes::of(&runs);
        assert!(trained(times).is_unclear() && !trained(times).is_machine_busy());
        // no steps at all
        let none = CpuTimes::of(&[]);
        assert!((none.speedup - 1.0).abs() < 1e-9 && (none.busy_factor - 1.0).abs() < 1e-9);
    }
}
