//! Checks the planner settings, each alone and against the model.

use std::num::NonZeroU64;

use super::StepPlannerBuilder;
use crate::error::{Error, Result, check_at_most};
use crate::plan::config::{COUNT_MAX, PAD_TO_TOKENS_MAX, PadTo, PlanConfig};
use crate::plan::stage_layers::StageLayers;

/// Largest global batch, in samples.
const GLOBAL_BATCH_MAX: u64 = 1 << 24;
/// Maximum number of pipeline stages per module.
const STAGES_MAX: usize = 1_024;

impl StepPlannerBuilder {
    /// Returns the global batch, if it fills the microbatches of all ranks.
    pub(super) fn checked_batch(&self) -> Result<NonZeroU64> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let Some(global_batch) = NonZeroU64::new(self.global_batch) else {
            return invalid("global_batch", "must be at least 1".into());
        };
        if self.config.dp_size == 0 {
            return invalid("dp_size", "must be at least 1".into());
        }
        if self.config.microbatches == 0 {
            return invalid("microbatches", "must be at least 1".into());
        }
        check_at_most("global_batch", self.global_batch, GLOBAL_BATCH_MAX)?;
        check_at_most("first_epoch", self.first_epoch, COUNT_MAX)?;
        if let Some(PadTo { tokens, .. }) = self.config.pad_to {
            check_at_most("pad_to_tokens", tokens, PAD_TO_TOKENS_MAX)?;
            if tokens == 0 {
                return invalid("pad_to_tokens", "must be at least 1".into());
            }
        }
        let groups = self.config.dp_size.saturating_mul(self.config.microbatches) as u64;
        if self.global_batch < groups {
            let reason = format!("{} samples cannot fill {groups} microbatches", self.global_batch);
            return invalid("global_batch", reason);
        }
        Ok(global_batch)
    }

    /// Checks that every module has a DP size, and that the last one equals the number of ranks.
    pub(super) fn check_module_dp_sizes(&self) -> Result<()> {
        let (sizes, modules) = (&self.config.module_dp_sizes, self.model.modules());
        let is_right = sizes.len() == modules.len()
            && sizes.last() == Some(&self.config.dp_size)
            && !sizes.contains(&0)
            && self.config.synchronization.is_none();
        if sizes.is_empty() || is_right {
            return Ok(());
        }
        let names: Vec<_> = modules.iter().map(|module| module.name()).collect();
        let reason = format!(
            "expected one DP size of at least 1 for each of {}, {} for the last, of modules on devices of their \
             own; got {sizes:?}",
            names.join(", "),
            self.config.dp_size
        );
        Err(Error::Config { setting: "module_dp_sizes", reason })
    }

    /// Returns the stage layers, where stages hold multiple modules.
    pub(super) fn checked_layers(&self) -> Result<Option<StageLayers>> {
        let Some(layers) = &self.layers else { return Ok(None) };
        let PlanConfig { module_dp_sizes, synchronization, pad_to, .. } = &self.config;
        let is_alone = self.stages.is_none() && module_dp_sizes.is_empty();
        if !is_alone || synchronization.is_some() || pad_to.is_some() {
            let reason =
                "cannot be used with `stages`, `module_dp_sizes`, `one_device` or a fixed length".into();
            return Err(Error::Config { setting: "stage_layers", reason });
        }
        StageLayers::new(layers, self.model.modules(), STAGES_MAX).map(Some)
    }

    /// Returns the pipeline stages of every module.
    pub(super) fn checked_stages(&self) -> Result<Vec<usize>> {
        let modules = self.model.modules();
        if self.config.synchronization.is_some() {
            if self.stages.is_none() {
                return Ok(vec![1]);
            }
            let reason = "modules that share one device have no pipeline stages".into();
            return Err(Error::Config { setting: "stages", reason });
        }
        let stages = self.stages.clone().unwrap_or_else(|| vec![1; modules.len()]);
        if stages.len() == modules.len() && stages.iter().all(|count| (1..=STAGES_MAX).contains(count)) {
            return Ok(stages);
        }
        let names: Vec<_> = modules.iter().map(|module| module.name()).collect();
        let reason =
            format!("give one number of stages, 1 to {STAGES_MAX}, for each of {}", names.join(", "));
        Err(Error::Config { setting: "stages", reason })
    }
}

/// Returns the error for a global batch with more samples than the data.
pub(super) fn larger_than_data(global_batch: u64, samples: u64) -> Error {
    let reason = format!(
        "{global_batch} samples are more than the {samples} of the data, so that a step would have samples several \
         times; use a smaller global batch, or allow that with `repeat_samples`"
    );
    Error::Config { setting: "global_batch", reason }
}
