//! Selects the samples that an encoder replica reads.

use std::sync::Arc;

use dflop_loader::{Share, StepPlan, StepPlanner};

use super::step_media::StepMedia;
use crate::pipeline::Job;
use dflop_models::ModuleKind;

/// Samples whose media an encoder replica encodes, selected from the samples of all LLM ranks, balanced round
/// by round.
#[derive(Debug, Clone)]
pub struct ReplicaShare {
    job: Arc<Job>,
    planner: StepPlanner,
    module: ModuleKind,
    replica: usize,
}

impl ReplicaShare {
    /// Creates the share for a replica.
    #[must_use]
    pub fn new(job: Arc<Job>, planner: StepPlanner, module: ModuleKind, replica: usize) -> Self {
        Self { job, planner, module, replica }
    }
}

impl Share for ReplicaShare {
    fn places(&self, plan: &StepPlan) -> dflop_loader::Result<Vec<Vec<u32>>> {
        let dealt = StepMedia::new(&self.job, &self.planner, plan);
        dealt
            .encoded_by(&self.job, self.module, self.replica)
            .map_err(|error| dflop_loader::Error::Config { setting: "share", reason: error.to_string() })
    }
}
