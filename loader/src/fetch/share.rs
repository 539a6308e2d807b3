//! Selects the samples of a step that this loader has to read.

use std::fmt::Debug;

use crate::error::Result;
use crate::plan::StepPlan;

/// Returns the samples of a step that a loader delivers, microbatch by microbatch.
///
/// That of a DP rank is [`DpShare`]. Others are for stages that do not work through a rank's microbatches,
/// such as the replicas of an encoder among which the media of all ranks are balanced again.
pub trait Share: Debug + Send + Sync {
    /// Returns places in [`StepPlan::samples`], by microbatch; a pure function of the plan.
    ///
    /// # Errors
    /// If the plan cannot be shared like this; ends the stream.
    fn places(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>>;
}

/// The microbatches that the plan gives a DP rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DpShare(
    /// The rank.
    pub usize,
);

impl Share for DpShare {
    fn places(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>> {
        Ok(plan.ranks[self.0].clone())
    }
}
