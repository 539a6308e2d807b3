//! Packs prepared microbatch samples into tensors.

use std::sync::Arc;

use dflop_samples::inputs::{Filler, SampleProcessor};

use super::Microbatch;
use super::settings::BalancedSettings;
use crate::decode::Collator;
use crate::error::Result;
use crate::flow::{PrepareLog, TruncatedSample};
use crate::plan::PadTo;

/// Packs microbatches, where the loader has a preparer, and counts packed tokens.
pub(super) struct Packing {
    preparer: Option<Arc<dyn SampleProcessor>>,
    /// Filler for packed microbatches; `None` if samples are left unpacked.
    filler: Option<Arc<Filler>>,
    tokens_max: Option<u64>,
    pad_to: Option<PadTo>,
    requires_targets: bool,
    log: Arc<PrepareLog>,
}

impl Packing {
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) if a processor refuses the blank medium that
    /// microbatches need.
    pub(super) fn new(settings: &BalancedSettings, log: Arc<PrepareLog>) -> Result<Self> {
        let (planner, preparer) = (&settings.planner, settings.preparer.clone());
        let filler = match &preparer {
            Some(preparer) if settings.is_packed => Some(Arc::new(preparer.filler(planner.towers())?)),
            _ => None,
        };
        let (tokens_max, pad_to) = (planner.caps().tokens_max, planner.pad_to());
        let requires_targets = preparer.as_ref().is_some_and(|preparer| preparer.requires_targets());
        Ok(Self { preparer, filler, tokens_max, pad_to, requires_targets, log })
    }

    /// Returns whether a step without a training target is an error.
    pub(super) fn requires_targets(&self) -> bool {
        self.requires_targets
    }

    /// Replaces the planned microbatch tokens by the counted tokens.
    pub(super) fn count_tokens(&self, microbatch: &mut Microbatch) {
        if self.preparer.is_none() {
            return;
        }
        let prepared = &microbatch.prepared;
        microbatch.tokens = prepared.iter().map(|sample| sample.tokens() as u64).sum();
        microbatch.target_tokens = prepared.iter().map(|sample| sample.target_tokens() as u64).sum();
        microbatch.loss_scale = microbatch.target_tokens as f64 * microbatch.loss_scale_sum;
        if let Some(to) = self.pad_to {
            microbatch.padding_tokens = to.padding_tokens(microbatch.samples.len(), microbatch.tokens);
        }
    }

    /// Returns the fixed length if a microbatch is longer than the tensors that all ranks count on.
    pub(super) fn too_long(&self, microbatch: &Microbatch) -> Option<u64> {
        let to = self.pad_to.filter(|to| self.preparer.is_some() && to.layout.is_packed())?;
        let filler = self.filler.as_ref().map_or(0, |filler| filler.tokens_for(&microbatch.prepared));
        (microbatch.tokens + filler > to.tokens).then_some(to.tokens)
    }

    /// Packs the microbatch tensors on the pool.
    pub(super) async fn pack(&self, collator: &Collator, microbatch: &mut Microbatch) -> Result<()> {
        let Some(preparer) = self.preparer.clone() else { return Ok(()) };
        self.log_cut(microbatch);
        if let Some(filler) = self.filler.clone() {
            let samples = std::mem::take(&mut microbatch.prepared);
            let inputs = collator.run(move || preparer.pack(samples, &filler)).await?;
            let tokens = inputs.tensor("input_ids").map_or(0, |ids| ids.values.len() as u64);
            microbatch.padding_tokens = tokens.saturating_sub(microbatch.tokens);
            microbatch.inputs = Some(inputs);
        }
        self.count(microbatch);
        Ok(())
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
