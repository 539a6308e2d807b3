//! Shows data-parallel layouts beside a pipeline plan: step time, memory, and settings for a trainer.

use std::io::Write;

use dflop_balancer::Error;
use dflop_costmodel::memory::ReplicaMemory;
use dflop_planner::{DataParallelPlan, PlanProblem, PlanReport, data_parallel};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::layouts::{BYTES_PER_GIB, NAME_COLUMNS, excess, seconds, trainer_settings};
use crate::report::{Basis, RunReport, verdict};

/// Name of the plan in place of a layout.
const PIPELINE: &str = "pipeline";

/// Adds the fastest data-parallel layout that fits to the error of a search without a plan.
pub(super) fn with_layout(error: Error, problem: &PlanProblem<'_>, memory: &ReplicaMemory<'_>) -> Error {
    let Error::NothingFits { reason } = error else { return error };
    let mut layouts = data_parallel(problem, memory).unwrap_or_default();
    layouts.retain(|layout| layout.fits);
    let fastest = layouts.iter().min_by(|one, other| one.step_seconds.total_cmp(&other.step_seconds));
    let reason = match fastest {
        Some(DataParallelPlan { layout, microbatches, step_seconds, .. }) => format!(
            "{reason}; without a pipeline {layout} fits, with {microbatches} microbatches and {step_seconds:.4} s \
             per step"
        ),
        None => reason,
    };
    Error::NothingFits { reason }
}

/// Data-parallel layouts on a plan's batches.
#[derive(Debug, Default, Serialize)]
pub(super) struct LayoutsJson {
    /// Fastest layout that fits; `pipeline` if none is faster than the plan.
    fastest: String,
    /// Layouts, the least divided state first.
    data_parallel: Vec<LayoutJson>,
    /// Why there are no layouts.
    #[serde(skip_serializing_if = "Option::is_none")]
    data_parallel_missing: Option<String>,
    /// Memory that a layout may use, in GiB, without the margin.
    #[serde(skip)]
    limit_gib: f64,
}

#[derive(Debug, Serialize)]
struct LayoutJson {
    layout: String,
    /// Microbatches per GPU, as few as fit.
    microbatches: u32,
    /// LLM tokens in the largest microbatch.
    microbatch_tokens_max: u64,
    /// Whether the backward pass recomputes all layers.
    recompute: bool,
    /// Mean step with exposed communication.
    step_seconds: f64,
    step_seconds_p95: f64,
    /// Part of the step in which GPUs wait for parameters and gradients; `None` without links.
    exposed_communication_seconds: Option<f64>,
    /// Step time over the plan's step time.
    ratio: f64,
    /// Memory per GPU.
    gib: f64,
    fits: bool,
    /// Settings for a trainer.
    trainer: String,
}

impl LayoutJson {
    fn new(plan: &DataParallelPlan, pipeline_seconds: f64, has_links: bool) -> Self {
        let mut trainer = trainer_settings(plan.layout);
        if plan.is_recomputed {
            trainer.push_str("; activation checkpointing in every layer");
        }
        Self {
            layout: plan.layout.to_string(),
            microbatches: plan.microbatches,
            microbatch_tokens_max: plan.microbatch_tokens_max,
            recompute: plan.is_recomputed,
            step_seconds: plan.step_seconds,
            step_seconds_p95: plan.step_seconds_p95,
            exposed_communication_seconds: has_links.then_some(plan.exposed_seconds),
            ratio: plan.step_seconds / pipeline_seconds.max(f64::MIN_POSITIVE),
            gib: plan.memory.total() as f64 / BYTES_PER_GIB,
            fits: plan.fits,
            trainer,
        }
    }
}

impl LayoutsJson {
    /// Compares layouts with the plan found.
    ///
    /// - `layouts`: scores on the problem's batches, or why there are none
    pub(super) fn new(
        problem: &PlanProblem<'_>,
        found: &PlanReport,
        layouts: Result<Vec<DataParallelPlan>, Error>,
    ) -> Self {
        let limit_gib = problem.cluster.memory_bytes as f64 / problem.memory_margin / BYTES_PER_GIB;
        let (plans, missing) = match layouts {
            Ok(plans) => (plans, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let has_links = problem.cluster.links.is_some();
        let layout = |plan| LayoutJson::new(plan, found.step_seconds, has_links);
        let mut layouts = Self {
            fastest: PIPELINE.to_owned(),
            data_parallel: plans.iter().map(layout).collect(),
            data_parallel_missing: missing,
            limit_gib,
        };
        if let Some(best) = layouts.best().filter(|best| best.ratio < 1.0) {
            layouts.fastest = best.layout.clone();
        }
        layouts
    }

    /// Returns the fastest layout that fits.
    fn best(&self) -> Option<&LayoutJson> {
        let fitting = self.data_parallel.iter().filter(|layout| layout.fits);
        fitting.min_by(|one, other| one.step_seconds.total_cmp(&other.step_seconds))
    }

    /// Describes the fastest layout, if it is faster than the plan.
    fn winner_text(&self) -> Option<String> {
        let best = self.best().filter(|best| best.ratio < 1.0)?;
        Some(format!(
            "{} is fastest: {:.4} s per step, {:.2} times that of the best pipeline plan",
            best.layout, best.step_seconds, best.ratio
        ))
    }

    /// Prints the fastest layout, if it is faster than the plan.
    pub(super) fn print_winner(&self, out: &mut impl Write) -> Result<(), Failure> {
        self.winner_text().map_or(Ok(()), |text| Ok(writeln!(out, "{text}")?))
    }

    /// Prints a table with all layouts, and the trainer settings for the fastest.
    pub(super) fn print(&self, out: &mut impl Write) -> Result<(), Failure> {
        if let Some(reason) = &self.data_parallel_missing {
            writeln!(out, "data-parallel layouts are not compared: {reason}")?;
            return Ok(());
        }
        writeln!(
            out,
            "{:<NAME_COLUMNS$} {:>9} {:>9} {:>10} {:>7} {:>12} {:>8} {:>8}",
            "data-parallel, balanced by dflop",
            "step s",
            "p95 s",
            "exposed s",
            "ratio",
            "microbatches",
            "tokens",
            "GiB"
        )?;
        for layout in &self.data_parallel {
            let LayoutJson { layout: name, microbatches, microbatch_tokens_max, recompute, .. } = layout;
            let note = if *recompute { "  recomputed" } else { "" };
            let limit_gib = (self.limit_gib * 10.0).round() / 10.0;
            writeln!(
                out,
                "{name:<NAME_COLUMNS$} {:>9.4} {:>9.4} {:>10} {:>7.3} {microbatches:>12} {microbatch_tokens_max:>8} \
                 {:>8.1}{note}{}",
                layout.step_seconds,
                layout.step_seconds_p95,
                seconds(layout.exposed_communication_seconds),
                layout.ratio,
                layout.gib,
                excess(layout.fits, limit_gib)
            )?;
        }
        let has_links =
            self.data_parallel.iter().all(|layout| layout.exposed_communication_seconds.is_some());
        if !has_links {
            writeln!(out, "links are unknown and communication is free: give `--links`")?;
        }
        if let Some(best) = self.best() {
            writeln!(out, "{}: {}, {} microbatches", best.layout, best.trainer, best.microbatches)?;
        }
        Ok(())
    }

    /// Adds the layouts to a report for a browser.
    pub(super) fn add_to(&self, report: &mut RunReport) {
        if let Some(text) = self.winner_text() {
            report.verdict.insert(0, verdict(Basis::Simulated, text + "."));
        }
        for layout in &self.data_parallel {
            let LayoutJson { step_seconds, ratio, gib, fits, .. } = layout;
            let fits = if *fits { "" } else { ", does not fit" };
            let text = format!("{step_seconds:.4} s, {ratio:.3} of the plan's step, {gib:.1} GiB{fits}");
            report.fact(&layout.layout, text);
        }
    }
}
