//! Configures a [`BalancedLoader`].

use super::{BalancedLoader, BalancedSettings};
use crate::dataset::Dataset;
use crate::decode::{Decode, DecodePool, SIDE_WITHOUT_PIXELS, TransformStage, Transforms};
use crate::deliver::settings::{LoaderSettings, shared_settings};
use crate::deliver::watchdog::StallListener;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::fetch::Share;
use crate::flow::{ErrorBudget, SkipListener, SkipLog};
use crate::order::LoaderState;
use crate::plan::StepPlanner;
use crate::shard::FieldSelection;
use dflop_samples::inputs::SampleProcessor;
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
