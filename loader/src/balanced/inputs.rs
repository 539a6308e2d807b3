//! Prepared samples of a step to the tensors of its microbatches.

use std::sync::Arc;

use super::builder::BalancedLoaderBuilder;
use super::{Microbatch, Step};
use crate::batch::Sample;
use crate::collate::Collator;
use crate::error::Result;
use crate::prepare::{PrepareLog, Preparer, Truncated};

/// Packs microbatches, where the loader has a preparer, and counts what it packs.
pub(super) struct Packing {
    preparer: Option<Arc<Preparer>>,
    is_packed: bool,
    tokens_max: Option<u64>,
    log: Arc<PrepareLog>,
}

impl Packing {
    pub(super) fn new(settings: &BalancedLoaderBuilder, log: Arc<PrepareLog>) -> Self {
        let tokens_max = settings.planner.caps().tokens_max;
        Self { preparer: settings.preparer.clone(), is_packed: settings.is_packed, tokens_max, log }
    }

    /// Gives every microbatch its tensors, joined on the pool, and its counted tokens.
    pub(super) async fn pack(&self, collator: &Collator, step: &mut Step) -> Result<()> {
        let Some(preparer) = &self.preparer else { return Ok(()) };
        for microbatch in &mut step.microbatches {
            self.log_cut(microbatch);
            let prepared = || microbatch.samples.iter().filter_map(|sample| sample.prepared.as_ref());
            microbatch.tokens = prepared().map(|sample| sample.tokens() as u64).sum();
            microbatch.target_tokens = prepared().map(|sample| sample.target_tokens() as u64).sum();
            if self.is_packed {
                let samples = microbatch.samples.iter_mut().filter_map(Sample::take_prepared).collect();
                let preparer = preparer.clone();
                microbatch.inputs = collator.run(move || preparer.pack(samples)).await?;
            }
            microbatch.loss_scale = microbatch.target_tokens as f64 * microbatch.loss_scale_sum;
            self.count(microbatch);
        }
        Ok(())
    }

    /// Writes down which samples were cut.
    fn log_cut(&self, microbatch: &Microbatch) {
        for sample in &microbatch.samples {
            let Some(prepared) = sample.prepared.as_ref().filter(|prepared| prepared.cut_tokens > 0) else {
                continue;
            };
            let cut_tokens = prepared.cut_tokens as u64;
            let tokens = prepared.tokens() as u64 + cut_tokens;
            let (shard, key) = (sample.shard.to_string(), sample.key.clone());
            self.log.truncated(Truncated { shard, key, tokens, cut_tokens });
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
