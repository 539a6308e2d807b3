//! Selects the step samples that this loader has to read.

use std::fmt::Debug;

use crate::error::Result;
use crate::plan::StepPlan;

/// Returns the step samples that a loader delivers, microbatch by microbatch.
///
/// [`DpShare`] is the share of a DP rank. Custom shares are for stages that do not process a rank's
/// microbatches, such as encoder replicas among which the media of all ranks are balanced again.
pub trait Share: Debug + Send + Sync {
    /// Returns positions in [`StepPlan::samples`], by microbatch; a pure function of the plan.
    ///
    /// # Errors
    /// If the plan cannot be shared like this; ends the stream.
    fn places(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>>;
}

/// Microbatches assigned to a DP rank by the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DpShare(
    /// DP rank.
    pub usize,
);

impl Share for DpShare {
    fn places(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>> {
        Ok(plan.ranks[self.0].clone())
    }
}
