//! Prints the run's steps and summary.
//!
//! Trains the example's model for `dflop demo`, balanced and data-blind on the same batches.
//!
//! Prints check findings as lines or as a JSON object.

use super::report::{MeasuredRun, study_of_runs};
use crate::failure::{Failure, escape_controls};
use crate::output::{Output, write_json};
use crate::report::Study;
use dflop_balancer::Strategy;
use dflop_executor::run::{Finding, Findings, Run, RunConfig, RunEnd, RunOptions, Status};
use dflop_executor::train::{CorrectionReport, EXAMPLE_CONFIG, EvaluationReport, StepReport, StopReason};
use std::io::Write;
use std::ops::ControlFlow;

/// Prints steps as they complete.
pub(crate) struct Printer<'a> {
    out: &'a mut Output,
    is_json: bool,
    steps: u64,
    tokens: u64,
    seconds: f64,
    data_wait_seconds: f64,
    losses: Option<[f64; 2]>,
    skipped_updates: u64,
    correction: Option<CorrectionReport>,
}

impl<'a> Printer<'a> {
    pub(crate) fn new(out: &'a mut Output, is_json: bool) -> Self {
        Self {
            out,
            is_json,
            steps: 0,
            tokens: 0,
            seconds: 0.0,
            data_wait_seconds: 0.0,
            losses: None,
            skipped_updates: 0,
            correction: None,
        }
    }

    pub(crate) fn step(&mut self, report: &StepReport) -> Result<(), Failure> {
        self.steps += 1;
        self.tokens += report.tokens;
        self.seconds += report.seconds;
        self.data_wait_seconds += report.idle.data_wait_seconds;
        self.skipped_updates += u64::from(report.is_skipped);
        if !report.is_skipped {
            let first = self.losses.map_or(report.loss, |[first, _]| first);
            self.losses = Some([first, report.loss]);
        }
        self.correction = report.correction.clone().or(self.correction.take());
        if self.is_json {
            write_json(self.out, report)?;
        } else {
            self.line(report)?;
        }
        // Flushed per step, so that whoever follows the run sees it immediately.
        Ok(self.out.flush()?)
    }

    fn line(&mut self, report: &StepReport) -> Result<(), Failure> {
        if let Some(start) = &report.start {
            writeln!(self.out, "start {start}")?;
        }
        let StepReport { step, loss, tokens, seconds, tokens_per_second, .. } = report;
        write!(
            self.out,
            "step {step:>5}  loss {loss:.4}  {tokens} tokens in {seconds:.3} s, {tokens_per_second:.0}/s  MFU {:.1} %  \
             idle {:.1} %  data {:.1} ms",
            100.0 * report.mfu,
            100.0 * report.idle.gap_seconds() / seconds,
            1e3 * report.idle.data_wait_seconds,
        )?;
        if let Some(bubble) = report.bubble_fraction {
            write!(self.out, "  bubble {:.1} %", 100.0 * bubble)?;
        }
        write!(self.out, "  exposed communication {:.1} ms", 1e3 * report.exposed_communication_seconds)?;
        if report.skipped_samples > 0 {
            write!(self.out, "  {} bad samples skipped", report.skipped_samples)?;
        }
        if report.is_skipped {
            write!(self.out, "  not finite, no update")?;
        }
        writeln!(self.out)?;
        if let Some(evaluation) = &report.evaluation {
            let EvaluationReport { loss, target_tokens, samples, seconds, .. } = evaluation;
            writeln!(
                self.out,
                "eval {step:>5}  loss {loss:.4}  {target_tokens} target tokens, {samples} samples in \
                 {seconds:.3} s"
            )?;
        }
        Ok(())
    }

    /// Prints the summary of the run; on standard error why it stopped early, if a signal stopped it.
    pub(crate) fn end(self, end: &RunEnd) -> Result<(), Failure> {
        report_stop(end);
        let Some([first, last]) = self.losses.filter(|_| !self.is_json) else { return Ok(()) };
        let Self { out, steps, tokens, seconds, data_wait_seconds, correction, .. } = self;
        writeln!(
            out,
            "{steps} steps in {seconds:.1} s: loss {first:.4} to {last:.4}, {:.0} tokens/s, {:.2} % of the time waiting for data",
            tokens as f64 / seconds,
            100.0 * data_wait_seconds / seconds
        )?;
        for slow in correction.iter().flat_map(|correction| &correction.slow_ranks) {
            let (rank, factor) = (slow.rank, slow.factor);
            writeln!(out, "replica {rank} takes {factor:.2} times as long as the others for the same work")?;
        }
        if let Some(CorrectionReport {
            error_uncorrected,
            error_corrected: Some(corrected),
            is_applied,
            ..
        }) = correction
        {
            let applied = if is_applied { "" } else { ", not applied" };
            writeln!(
                out,
                "predicted stage times: {:.1} % off, {:.1} % with learned corrections{applied}",
                100.0 * error_uncorrected,
                100.0 * corrected,
            )?;
        }
        Ok(())
    }
}

/// Reports a run that a signal stopped. A run with a closed output ends without a message.
#[expect(clippy::print_stderr, reason = "standard output has the results alone")]
fn report_stop(RunEnd { stopped, steps, checkpoint, .. }: &RunEnd) {
    let Some(reason) = stopped.filter(|reason| *reason != StopReason::OutputClosed) else { return };
    let saved = checkpoint.as_ref().map_or_else(
        || "no checkpoint, as there is no directory for them".to_owned(),
        |directory| format!("checkpoint `{}`", directory.display()),
    );
    eprintln!("dflop: stopped by {reason} after step {}, {saved}", steps - 1);
}

/// Column widths for status and subject, so that findings are aligned.
const STATUS_COLUMNS: usize = 8;
const SUBJECT_COLUMNS: usize = 14;

/// Prints findings: all from rank 0, only the failed findings from other ranks.
///
/// # Errors
/// [`Failure::Failed`] if a finding is wrong.
pub(super) fn print_findings(mut findings: Findings, is_json: bool, out: &mut Output) -> Result<(), Failure> {
    if findings.rank > 0 {
        findings.checks.retain(|check| check.status == Status::Wrong);
    }
    let is_silent = findings.rank > 0 && findings.wrong == 0;
    match is_json {
        true if !is_silent => write_json(out, &findings)?,
        true => {}
        false => findings.checks.iter().try_for_each(|check| print_line(findings.rank, check, out))?,
    }
    let rank = findings.rank;
    match findings.wrong {
        0 => Ok(()),
        1 => Err(Failure::Failed(format!("the check of rank {rank} found 1 fault"))),
        wrong => Err(Failure::Failed(format!("the check of rank {rank} found {wrong} faults"))),
    }
}

fn print_line(rank: usize, check: &Finding, out: &mut Output) -> Result<(), Failure> {
    let Finding { status, subject, finding, advice } = check;
    let rank = if rank > 0 { format!("rank {rank}: ") } else { String::new() };
    let advice = advice.as_ref().map_or_else(String::new, |advice| format!("; {advice}"));
    // A message with several lines, such as a place in the configuration, continues below the start.
    let indent = format!("\n{}", " ".repeat(STATUS_COLUMNS + SUBJECT_COLUMNS + 2));
    let lines: Vec<_> = finding.lines().map(escape_controls).collect();
    let (status, finding) = (status.name(), lines.join(&indent));
    writeln!(out, "{status:<STATUS_COLUMNS$} {subject:<SUBJECT_COLUMNS$} {rank}{finding}{advice}")?;
    Ok(())
}

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
    use crate::output::Sink;

    fn findings(rank: usize) -> Findings {
        let finding = |status, subject, finding: &str, advice: Option<&str>| Finding {
            status,
            subject,
            finding: finding.to_owned(),
            advice: advice.map(str::to_owned),
        };
        let checks = vec![
            finding(Status::Ok, "ranks", "2 ranks", None),
            finding(Status::Wrong, "token", "is not set", Some("set it")),
            finding(Status::Wrong, "model", "line 2\n| x", None),
        ];
        Findings { rank, wrong: 2, checks }
    }

    fn printed(findings: Findings, is_json: bool) -> (String, Result<(), Failure>) {
        let mut out = Output::new(Sink::Memory(Vec::new()));
        let done = print_findings(findings, is_json, &mut out);
        let Ok(Sink::Memory(bytes)) = out.into_inner() else { panic!("the output is in memory") };
        (String::from_utf8(bytes).unwrap(), done)
    }

    #[test]
    fn rank_0_prints_all_and_other_ranks_their_faults() {
        let (text, done) = printed(findings(0), false);
        let lines = [
            "ok       ranks          2 ranks\n",
            "wrong    token          is not set; set it\n",
            "wrong    model          line 2\n                        | x\n",
        ];
        assert_eq!(text, lines.concat());
        assert!(
            matches!(done, Err(Failure::Failed(message)) if message == "the check of rank 0 found 2 faults")
        );
        let (text, _) = printed(findings(3), false);
        assert!(text.starts_with("wrong    token          rank 3: is not set; set it\n"));
    }

    #[test]
    fn json_is_one_object_with_a_count() {
        let value: serde_json::Value = serde_json::from_str(&printed(findings(0), true).0).unwrap();
        assert_eq!((&value["rank"], &value["wrong"]), (&0.into(), &2.into()));
        assert_eq!(value["checks"][0]["status"], "ok");
        assert_eq!(value["checks"][1]["advice"], "set it");
        assert_eq!(value["checks"].as_array().map(Vec::len), Some(3));
        let sound = Findings { rank: 1, wrong: 0, checks: Vec::new() };
        assert!(printed(sound, true).0.is_empty(), "a rank without faults is silent");
    }

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
