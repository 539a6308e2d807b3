//! Configures a [`BalancedLoader`].
//!
//! Packs prepared microbatch samples into tensors.

use super::{BalancedLoader, BalancedSettings, Microbatch};
use crate::dataset::Dataset;
use crate::decode::{Collator, Decode, DecodePool, SIDE_WITHOUT_PIXELS, TransformStage, Transforms};
use crate::deliver::settings::{LoaderSettings, shared_settings};
use crate::deliver::watchdog::StallListener;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::fetch::Share;
use crate::flow::{ErrorBudget, PrepareLog, SkipListener, SkipLog, TruncatedSample};
use crate::order::LoaderState;
use crate::plan::{PadTo, StepPlanner};
use crate::shard::FieldSelection;
use dflop_samples::inputs::{Filler, SampleProcessor};
use dflop_samples::media::Strictness;
use dflop_samples::media::augment::Augment;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Configures a [`BalancedLoader`].
#[derive(Debug, Clone)]
pub struct BalancedLoaderBuilder {
    settings: BalancedSettings,
}

impl BalancedLoaderBuilder {
    shared_settings!(settings.shared);

    pub(super) fn new(planner: StepPlanner, dp_rank: usize) -> Self {
        Self { settings: BalancedSettings::new(planner, dp_rank) }
    }

    /// Sets all settings that the loaders share.
    #[must_use]
    pub fn settings(mut self, settings: LoaderSettings) -> Self {
        self.settings.shared = settings;
        self
    }

    /// Sets the first step, at no cost. Default: the planner step, which is 0 unless it was restored.
    #[must_use]
    pub fn from_step(mut self, step: u64) -> Self {
        self.settings.from_step = step;
        self
    }

    /// Continues with the step in a state of the planner's run; replaces [`Self::from_step`]. The planner
    /// restores a state for changed data or a different global batch.
    #[must_use]
    pub fn restore(mut self, state: LoaderState) -> Self {
        self.settings.state = Some(state);
        self
    }

    /// Ends the stream after this many steps. Default: with the run, if that ends.
    #[must_use]
    pub fn steps(mut self, steps: u64) -> Self {
        self.settings.steps = Some(steps);
        self
    }

    /// Sets how many steps are planned, read and decoded before they are asked for, as far as
    /// [`Self::buffered_bytes_max`] allows. Default: 2.
    #[must_use]
    pub fn steps_ahead(mut self, steps: usize) -> Self {
        self.settings.steps_ahead = steps;
        self
    }

    /// Rejects a microbatch that needs more bytes, decoded and prepared. Default: the memory that is
    /// available when the step is read.
    #[must_use]
    pub fn microbatch_bytes_max(mut self, bytes: u64) -> Self {
        self.settings.microbatch_bytes_max = Some(bytes);
        self
    }

    /// Sets the maximum number of bytes for unpacked compressed shards; the last shard is always kept.
    /// Default: 1 GiB.
    #[must_use]
    pub fn unpacked_bytes_max(mut self, bytes: u64) -> Self {
        self.settings.unpacked_bytes_max = bytes;
        self
    }

    /// Sets the processor that turns decoded samples into model inputs, as tensors in every microbatch. Where
    /// microbatches are planned under a token cap, no sample may be longer. Default: none.
    #[must_use]
    pub fn preparer(mut self, preparer: Arc<dyn SampleProcessor>) -> Self {
        self.settings.preparer = Some(preparer);
        self
    }

    /// Leaves prepared samples as they are, for callers that pack them themselves
    /// ([`Microbatch::prepared`](super::Microbatch::prepared), [`SampleProcessor::pack`]): microbatches have
    /// no tensors.
    #[must_use]
    pub fn unpacked(mut self) -> Self {
        self.settings.is_packed = false;
        self
    }

    /// Delivers a different share of each step than the rank's microbatches. Loss scales remain per DP rank.
    #[must_use]
    pub fn share(mut self, share: Arc<dyn Share>) -> Self {
        self.settings.share = share;
        self
    }

    /// Checks the settings and starts the decode threads.
    ///
    /// # Errors
    /// [`Error::Config`] if the rank is not below the DP size, if workers or steps ahead are zero, if no
    /// field is named or undecoded images are to be changed, if pixels are requested, which have no
    /// microbatch form yet, or a preparer for undecoded samples, or with a layout that differs from the
    /// planner's padding; [`Error::ErrorBudget`] if the index already exceeds it; [`Error::State`] if a state
    /// is from a different run.
    pub fn build(self) -> Result<BalancedLoader> {
        let settings = self.settings.checked()?;
        let (planner, shared) = (&settings.planner, &settings.shared);
        let pool = DecodePool::new(shared.workers, SIDE_WITHOUT_PIXELS)?;
        let transforms = TransformStage::new(&shared.transforms, pool.metrics().clone())?;
        let bad: Vec<_> = planner.datasets().iter().flat_map(Dataset::skipped).cloned().collect();
        let epoch = planner.steps().epoch_samples() + bad.len() as u64;
        let skips = SkipLog::new(shared.error_budget, Some(epoch)).listener(shared.skip_listener.clone());
        for skipped in bad {
            skips.push(skipped);
        }
        skips.check(false)?;
        Ok(BalancedLoader {
            next_step: Arc::new(AtomicU64::new(settings.from_step)),
            pool: Arc::new(pool),
            skips: Arc::new(skips),
            transforms,
            settings: Arc::new(settings),
            prepared: Arc::default(),
        })
    }
}

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
            Some(preparer) if settings.is_packed => {
                Some(Arc::new(preparer.filler(planner.required_encoders())?))
            }
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
