//! Rows of `dflop simulate` for GPUs or pipelines that share samples: context parallelism.
//!
//! Fills the `dflop simulate` report.

use super::StrategyReport;
use crate::failure::Failure;
use crate::output::layouts::{excess, gib, seconds};
use dflop_costmodel::{KeyExchange, KeyExchangeKind};
use dflop_loader::{ContextGroups, ContextSummary, RankTraining, StepPlanner, compare_context};
use serde::Serialize;
use std::io::Write;

/// Largest number of GPUs that share a sample.
pub(super) const GROUP_RANKS_MAX: usize = 8;
/// Bytes of an element of keys and values.
const ELEMENT_BYTES: u32 = 2;
/// Row names of fixed degrees, by the logarithm.
const FIXED: [&str; 4] = ["", "CP 2, all", "CP 4, all", "CP 8, all"];

/// Simulated steps in which GPUs share samples.
#[derive(Debug, Serialize)]
pub(super) struct ContextReport {
    /// Largest number of GPUs that share a sample, inside a node.
    group_gpus: usize,
    /// Lower bound on the step time for every placement, whole or split, mean over the steps.
    lower_bound_seconds: f64,
    /// Every sample over the same number of GPUs, balanced by dflop; then split where that is faster.
    strategies: Vec<ContextRow>,
}

/// Simulated results for a choice of groups.
#[derive(Debug, Serialize)]
struct ContextRow {
    #[serde(flatten)]
    strategy: StrategyReport,
    /// Fraction of samples that several GPUs share.
    split_fraction: f64,
    /// Mean seconds per step in which GPUs wait for parameters and gradients; not part of the step time.
    exposed_communication_seconds: Option<f64>,
    /// `None` for pipelines.
    memory_bytes: Option<u64>,
    fits: bool,
}

impl ContextReport {
    /// Simulates samples on several GPUs; `None` if links are unknown, or no two GPUs can share a sample.
    ///
    /// - `blind_seconds`: mean step of the data-blind strategy
    pub(super) fn simulate(
        planner: &StepPlanner,
        steps: u64,
        training: &RankTraining<'_>,
        blind_seconds: f64,
        memory_max: u64,
    ) -> Result<Option<Self>, Failure> {
        let Some(links) = training.links else { return Ok(None) };
        // Groups with a power of two of GPUs do not cross nodes whose size they divide.
        let synchronization = planner.synchronization();
        let shard_ranks = synchronization.map_or(1, |own| own.shard_ranks(planner.dp_size()).get());
        let is_possible = |ranks: &usize| {
            (training.gpus_per_node as usize).is_multiple_of(*ranks)
                && planner.dp_size().is_multiple_of(*ranks)
                && (shard_ranks == 1 || shard_ranks.is_multiple_of(*ranks))
        };
        let degrees: Vec<usize> = [2, 4, GROUP_RANKS_MAX].into_iter().take_while(is_possible).collect();
        let (Some(&most), None) = (degrees.last(), planner.pad_to()) else { return Ok(None) };
        let link = Some(links.nvlink);
        let exchange = KeyExchange { kind: KeyExchangeKind::Ring, link, element_bytes: ELEMENT_BYTES };
        let fixed = degrees.iter().map(|ranks| [*ranks; 2]);
        let choices: Vec<ContextGroups> =
            fixed.chain([[1, most]]).map(|ranks| ContextGroups { ranks, exchange }).collect();
        let summaries = compare_context(planner, &choices, 0..steps, training)?;
        let lower_bound_seconds = summaries.last().map_or(0.0, |split| split.steps.bound_seconds);
        let strategies =
            summaries.iter().map(|summary| ContextRow::new(summary, blind_seconds, memory_max)).collect();
        Ok(Some(Self { group_gpus: most, lower_bound_seconds, strategies }))
    }

    /// Prints a row for each choice, and the bound.
    pub(super) fn print(
        &self,
        out: &mut impl Write,
        blind_seconds: f64,
        memory_gib: f64,
    ) -> Result<(), Failure> {
        for ContextRow { strategy, exposed_communication_seconds, memory_bytes, fits, .. } in &self.strategies
        {
            let StrategyReport { name, step_seconds, step_seconds_p95, bubble_fraction, speedup, .. } =
                strategy;
            let (idle, exposed) = (bubble_fraction * 100.0, seconds(*exposed_communication_seconds));
            write!(
                out,
                "{name:<12} {step_seconds:>12.5} {step_seconds_p95:>12.5} {idle:>6.1} % {speedup:>8.2}x"
            )?;
            match memory_bytes {
                Some(bytes) => {
                    writeln!(out, " {exposed:>10} {:>8}{}", gib(*bytes), excess(*fits, memory_gib))?;
                }
                None => writeln!(out)?,
            }
        }
        let bound = self.lower_bound_seconds;
        let speedup = if bound > 0.0 { blind_seconds / bound } else { 1.0 };
        writeln!(out, "{:<12} {bound:>12.5} {:>12} {:>8} {speedup:>8.2}x", "bound, split", "", "")?;
        Ok(())
    }

    /// Describes the split samples for people.
    ///
    /// - `ranks`: what shares samples
    pub(super) fn about(&self, ranks: &str) -> String {
        let split = self.strategies.last().map_or(0.0, |row| row.split_fraction);
        format!(
            "split: {:.0} % of the samples over 2 to {} {ranks}, keys and values in a ring; CP N, all: every sample \
             over N, balanced by dflop",
            100.0 * split,
            self.group_gpus
        )
    }
}

impl ContextRow {
    fn new(summary: &ContextSummary, blind_seconds: f64, memory_max: u64) -> Self {
        let [least, most] = summary.group_ranks;
        let name = if least == most { FIXED[least.ilog2() as usize] } else { "dflop, split" };
        let memory_bytes = summary.memory.map(|memory| memory.total());
        Self {
            strategy: StrategyReport::new(name, &summary.steps, blind_seconds),
            split_fraction: summary.split_fraction,
            exposed_communication_seconds: summary.exposed_seconds,
            memory_bytes,
            fits: memory_bytes.is_none_or(|bytes| bytes <= memory_max),
        }
    }
}
