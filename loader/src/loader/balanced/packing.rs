//! Packs the prepared samples of a step into the tensors of its microbatches.

use std::sync::Arc;

use super::builder::BalancedLoaderBuilder;
use super::{Microbatch, Step};
use crate::decode::Collator;
use crate::error::{Error, Result};
use crate::plan::PadTo;
use crate::prepare::{PrepareLog, Preparer, TruncatedSample};

/// Packs microbatches, where the loader has a preparer, and counts what it packs.
pub(super) struct Packing {
    preparer: Option<Arc<Preparer>>,
    is_packed: bool,
    tokens_max: Option<u64>,
    pad_to: Option<PadTo>,
    dp_rank: usize,
    log: Arc<PrepareLog>,
}

impl Packing {
    pub(super) fn new(settings: &BalancedLoaderBuilder, log: Arc<PrepareLog>) -> Self {
        let (tokens_max, pad_to) = (settings.planner.caps().tokens_max, settings.planner.pad_to());
        let dp_rank = settings.dp_rank;
        Self {
            preparer: settings.preparer.clone(),
            is_packed: settings.is_packed,
            tokens_max,
            pad_to,
            dp_rank,
            log,
        }
    }

    /// Rank whose microbatches are packed.
    pub(super) fn dp_rank(&self) -> usize {
        self.dp_rank
    }

    /// Gives every microbatch its counted tokens and its tensors, joined on the pool.
    ///
    /// # Errors
    /// [`Error::MicrobatchTooLong`], with nothing packed.
    pub(super) async fn pack(&self, collator: &Collator, step: &mut Step) -> Result<()> {
        let Some(preparer) = &self.preparer else { return Ok(()) };
        for microbatch in &mut step.microbatches {
            let prepared = &microbatch.prepared;
            microbatch.tokens = prepared.iter().map(|sample| sample.tokens() as u64).sum();
            microbatch.target_tokens = prepared.iter().map(|sample| sample.target_tokens() as u64).sum();
            if let Some(to) = self.pad_to {
                microbatch.padding_tokens = to.padding_tokens(microbatch.samples.len(), microbatch.tokens);
            }
        }
        self.check_lengths(step)?;
        for microbatch in &mut step.microbatches {
            self.log_cut(microbatch);
            if self.is_packed {
                let samples = std::mem::take(&mut microbatch.prepared);
                let preparer = preparer.clone();
                microbatch.inputs = collator.run(move || preparer.pack(samples)).await?;
            }
            microbatch.loss_scale = microbatch.target_tokens as f64 * microbatch.loss_scale_sum;
            self.count(microbatch);
        }
        Ok(())
    }

    /// Ends the stream where a microbatch is longer than the tensors that all ranks count on.
    fn check_lengths(&self, step: &Step) -> Result<()> {
        let Some(to) = self.pad_to.filter(|to| to.layout.is_packed()) else { return Ok(()) };
        let tokens_needed = step.microbatches.iter().map(|microbatch| microbatch.tokens).max().unwrap_or(0);
        let is_over = |microbatch: &Microbatch| microbatch.tokens > to.tokens;
        let Some(number) = step.microbatches.iter().position(is_over) else { return Ok(()) };
        let Microbatch { tokens, planned_tokens, .. } = step.microbatches[number];
        Err(Error::MicrobatchTooLong {
            step: step.step,
            dp_rank: self.dp_rank,
            microbatch: number,
            tokens,
            planned_tokens,
            pad_to_tokens: to.tokens,
            tokens_needed,
        })
    }

    /// Writes down which samples were cut.
    fn log_cut(&self, microbatch: &Microbatch) {
        let cut = microbatch.samples.iter().zip(&microbatch.prepared);
        for (sample, prepared) in cut.filter(|(_, prepared)| prepared.cut_tokens > 0) {
            let cut_tokens = prepared.cut_tokens as u64;
            let tokens = prepared.tokens() as u64 + cut_tokens;
            let (shard, key) = (sample.shard.to_string(), sample.key.clone());
            self.log.truncated(TruncatedSample { shard, key, tokens, cut_tokens });
        }
    }

    fn count(&self, microbatch: &Microbatch) {
        let is_over = self.tokens_max.is_some_and(|tokens_max| microbatch.tokens > tokens_max);
        self.log.change(|report| {
            report.samples += microbatch.samples.len() as u64;
            report.tokens += microbatch.tokens;
            report.planned_tokens += microbatch.planned_tokens;
            report.target_tokens += microbatch.target_tokens;
            report.planned_target_tokens += microbatch.planned_target_tokens;
            report.microbatches_over_cap += u64::from(is_over);
            report.microbatch_tokens_max = report.microbatch_tokens_max.max(microbatch.tokens);
        });
    }
}
