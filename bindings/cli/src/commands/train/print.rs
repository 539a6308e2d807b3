//! Prints the run's steps and summary.

use std::io::Write;

use dflop_executor::run::RunEnd;
use dflop_executor::train::{CorrectionReport, StepReport, StopReason};

use crate::failure::Failure;
use crate::output::{Output, write_json};

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
