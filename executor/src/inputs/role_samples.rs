//! Turns the samples that a rank reads for a role into microbatches and routes, without a model.
//!
//! An [`InputReader`](super::InputReader) builds contexts for the executor's stages from the same samples and
//! counts; here they stay prepared samples, for stages of another framework, which exchanges the counts as
//! well.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_loader::inputs::PreparedSample;
use dflop_loader::{Step, StepPlan, StepPlanner};
use dflop_models::ModuleKind;

use super::inputs_ahead::SameDigests;
use super::module_reader::prepared;
use super::predicted_times::{COLUMNS, SkippedSample, TokenCounts};
use super::step_media::{StepMedia, media_places};
use crate::error::{Error, Result};
use crate::pipeline::{JobLayout, PipelineStepPlan, RankRole, module_name};

/// Samples that a rank has prepared for a role in a step.
#[derive(Debug)]
pub struct RoleSamples {
    role: RankRole,
    plan: Arc<StepPlan>,
    media: StepMedia,
    samples: BTreeMap<u32, PreparedSample>,
}

/// Microbatches for a role in a step, and the plan that all ranks share.
#[derive(Debug)]
pub struct RoleInputs {
    /// Step plan, the same on all ranks.
    pub plan: PipelineStepPlan,
    /// Sample index in the loader's plan for every medium, by LLM microbatch.
    pub media_samples: Vec<Vec<u32>>,
    /// Microbatches that the role computes, by round.
    pub microbatches: Vec<RoleMicrobatch>,
    /// Samples left out of the step, the same on all ranks.
    pub skipped: Vec<SkippedSample>,
}

/// Microbatch for a role.
#[derive(Debug)]
pub struct RoleMicrobatch {
    /// Microbatch number in the module.
    pub microbatch: u32,
    /// Sample indices in the loader's plan, in order.
    pub plan_indices: Vec<u32>,
    /// Samples, in order.
    pub samples: Vec<PreparedSample>,
}

impl RoleSamples {
    /// Collects the samples in a step that the loader delivered
    /// [unpacked](dflop_loader::BalancedLoaderBuilder::unpacked): an LLM replica's samples, or a
    /// [`ReplicaShare`](super::ReplicaShare).
    #[must_use]
    pub fn new(layout: &JobLayout, role: RankRole, planner: &StepPlanner, step: Step) -> Self {
        let Step { plan, microbatches, .. } = step;
        let media = StepMedia::new(layout, planner, &plan);
        Self { role, plan, media, samples: prepared(microbatches) }
    }

    /// Returns the loader's plan.
    #[must_use]
    pub fn plan(&self) -> &Arc<StepPlan> {
        &self.plan
    }

    /// Returns this rank's counts, to be summed over all roles on all ranks: a digest, and tokens by sample.
    #[must_use]
    pub fn counts(&self, layout: &JobLayout) -> Vec<u64> {
        let mut counts = SameDigests::words(Some(self.plan.digest.to_u64()));
        let own = std::iter::once((&self.role, &self.samples));
        counts.extend(TokenCounts::own(layout, self.plan.samples.len(), own));
        counts
    }

    /// Builds the microbatches from the counts summed over all roles on all ranks. Leaves out samples that
    /// any rank could not prepare.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the counts are not the sum over all roles, or ranks have different plans;
    /// [`Error::Plan`] if this rank lacks a sample that the others have.
    pub fn inputs(self, layout: &JobLayout, mut counts: Vec<u64>) -> Result<RoleInputs> {
        let Self { role, plan, media, mut samples } = self;
        let signs = SameDigests::words(None).len();
        let expected = signs + plan.samples.len() * COLUMNS;
        if counts.len() != expected {
            return refuse(format!("expected {expected} numbers, found {}", counts.len()));
        }
        let table = counts.split_off(signs);
        let roles = role_count(layout);
        if counts[0] != roles as u64 {
            return refuse(format!("expected the sum over {roles} roles on all ranks, found {}", counts[0]));
        }
        if SameDigests::from_sums(&counts, roles) != SameDigests::Yes {
            return refuse(format!("ranks have different plans for step {}", plan.step));
        }
        let counts = TokenCounts::from_sum(layout, table);
        let step_plan = media.plan(
            layout,
            counts.target_tokens(&media),
            |sample| counts.tokens(sample),
            |medium| counts.medium_tokens(medium.sample, medium.module),
        )?;
        let mut microbatches = Vec::new();
        for (microbatch, plan_indices) in
            media.kept(layout, &step_plan, &role, |index| counts.is_kept(index))?
        {
            let mut own = Vec::with_capacity(plan_indices.len());
            for index in &plan_indices {
                let sample = samples.remove(index);
                own.push(sample.ok_or_else(|| missing(plan.step, (role.module, microbatch), *index))?);
            }
            microbatches.push(RoleMicrobatch { microbatch, plan_indices, samples: own });
        }
        let tasks = media.microbatches.iter().map(|microbatch| &microbatch.media);
        let media_samples = tasks.map(|tasks| tasks.iter().map(|task| task.sample).collect()).collect();
        Ok(RoleInputs { skipped: counts.skipped(&media), plan: step_plan, media_samples, microbatches })
    }
}

impl RoleMicrobatch {
    /// Returns the rows for media in the packed samples, in route order: for each sample images, then videos,
    /// then audio clips.
    #[must_use]
    pub fn media_places(&self) -> Vec<u32> {
        media_places(&self.samples)
    }
}

/// Returns the number of roles on all ranks.
fn role_count(layout: &JobLayout) -> usize {
    let ranks = (0..layout.world_size()).map(|rank| layout.roles(rank).map_or(0, |roles| roles.len()));
    ranks.sum()
}

fn refuse<T>(reason: String) -> Result<T> {
    Err(Error::InvalidSetting { setting: "counts", reason })
}

fn missing(step: u64, (module, microbatch): (ModuleKind, u32), index: u32) -> Error {
    let problem = format!("sample {index} was prepared on other ranks, but not on this one");
    Error::Plan { step, module: module_name(module), microbatch: microbatch as usize, problem }
}
