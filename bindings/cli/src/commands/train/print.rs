//! Prints the run's steps and summary.
//!
//! Prints check findings as lines or as a JSON object.

use crate::failure::{Failure, escape_controls};
use crate::output::{Output, write_json};
use dflop_executor::run::{Finding, Findings, RunEnd, Status};
use dflop_executor::train::{CorrectionReport, StepReport, StopReason};
use std::io::Write;

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
}
