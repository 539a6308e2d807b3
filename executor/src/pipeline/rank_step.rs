//! Rank inputs for a step: the plan and microbatch contexts.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_device::Device;
use dflop_models::{MicrobatchContext, ModuleInputs, ModuleKind};

use super::job::Job;
use super::layout::JobLayout;
use super::step_plan::{PipelineStepPlan, name};
use super::topology::RankRole;
use crate::error::{Error, Result};

/// Contexts for the microbatches on a rank, by module and module microbatch.
pub type RankContexts<D> = BTreeMap<(ModuleKind, u32), Arc<MicrobatchContext<D>>>;

/// Step plan, and contexts for the microbatches that this rank computes.
///
/// An LLM rank gets text contexts and needs no media; an encoder rank gets contexts for the media that its
/// replica encodes and needs no texts. A rank with several modules gets contexts for each.
pub struct RankStep<D: Device> {
    /// Step plan, the same on all ranks.
    pub plan: Arc<PipelineStepPlan>,
    /// Contexts for the microbatches on this rank ([`PipelineStepPlan::replica_microbatches`]). Nothing is
    /// computed for a microbatch without tokens, and the context may be omitted.
    pub contexts: RankContexts<D>,
}

impl<D: Device> RankStep<D> {
    /// Returns the context for a microbatch that is computed.
    pub(super) fn context(&self, module: ModuleKind, microbatch: u32) -> Result<&Arc<MicrobatchContext<D>>> {
        self.contexts
            .get(&(module, microbatch))
            .ok_or_else(|| self.refused(module, microbatch, "has no context".to_owned()))
    }

    /// Checks contexts against the plan.
    ///
    /// # Errors
    /// [`Error::Plan`] that names a microbatch whose context is missing or belongs to a different replica, or
    /// has different media tokens or a different loss scale than planned.
    pub(super) fn check(&self, job: &Job, roles: &[RankRole]) -> Result<()> {
        for RankRole { module, replica, .. } in roles {
            for own in self.plan.replica_microbatches(job, *module, *replica) {
                if tokens(&self.plan, job, *module, own) > 0 {
                    self.context(*module, own)?;
                }
            }
        }
        for (&(module, microbatch), context) in &self.contexts {
            let role = roles.iter().find(|role| role.module == module);
            let Some(role) = role else {
                let problem = "belongs to a module of other ranks".to_owned();
                return Err(self.refused(module, microbatch, problem));
            };
            if !self.plan.replica_microbatches(job, module, role.replica).any(|own| own == microbatch) {
                let problem = format!("does not belong to replica {}", role.replica);
                return Err(self.refused(module, microbatch, problem));
            }
            self.check_context(job, module, microbatch, context)?;
        }
        Ok(())
    }

    fn check_context(
        &self,
        job: &Job,
        module: ModuleKind,
        microbatch: u32,
        context: &MicrobatchContext<D>,
    ) -> Result<()> {
        let planned = tokens(&self.plan, job, module, microbatch);
        let agree = |what: &str, found: usize, planned: usize| {
            if found == planned {
                return Ok(());
            }
            Err(self.refused(module, microbatch, format!("has {found} {what}, the plan has {planned}")))
        };
        match &context.inputs {
            ModuleInputs::Text(text) if module == ModuleKind::Llm => {
                // A microbatch planned without tokens is not computed, so its context must be empty.
                if planned == 0 {
                    agree("tokens", context.layers.rows, 0)?;
                }
                let media = text.media.as_ref().map_or(0, |(_, rows)| *rows);
                agree("tokens of media", media, self.plan.media_tokens(microbatch))?;
                let scale = self.plan.loss_scale();
                // Both are 1 / target tokens; the tolerance is far below the effect of a single token.
                if (text.loss_scale - scale).abs() > 1e-9 * scale {
                    let problem = format!("has the loss scale {}, expected {scale}", text.loss_scale);
                    return Err(self.refused(module, microbatch, problem));
                }
                Ok(())
            }
            ModuleInputs::Encoder(encoder) if module != ModuleKind::Llm => {
                agree("tokens of media", encoder.tokens, planned)
            }
            _ => Err(self.refused(module, microbatch, "has the context of another module".to_owned())),
        }
    }

    fn refused(&self, module: ModuleKind, microbatch: u32, problem: String) -> Error {
        Error::Plan { step: self.plan.step(), module: name(module), microbatch: microbatch as usize, problem }
    }
}

/// Returns the planned number of rows in a microbatch at the end of a module; exact for encoders.
pub(super) fn tokens(plan: &PipelineStepPlan, job: &JobLayout, module: ModuleKind, microbatch: u32) -> usize {
    match plan.route(job, module) {
        Some(route) => route.source_tokens(microbatch),
        None => plan.microbatches()[microbatch as usize].tokens,
    }
}
