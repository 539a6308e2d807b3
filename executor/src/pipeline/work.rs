//! What one rank is given of a step.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::job::Job;
use super::plan::{StepPlan, name};
use super::ranks::Place;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::context::{MicrobatchContext, ModuleInputs};
use crate::model::model_config::ModuleKind;

/// The plan of a step, and what this rank's own module needs of its own microbatches.
///
/// A rank of the LLM is given contexts of texts and never sees a medium; a rank of an encoder is given contexts of the media
/// that its replica encodes and never sees a text.
pub struct StepWork<D: Device> {
    /// The plan, the same on all ranks.
    pub plan: Arc<StepPlan>,
    /// Contexts by microbatch of the module ([`StepPlan::microbatches_of`]). Those planned without tokens may be left out.
    /// Nothing is computed for a microbatch without tokens.
    pub contexts: BTreeMap<u32, Arc<MicrobatchContext<D>>>,
}

impl<D: Device> StepWork<D> {
    /// The context of a microbatch that is computed.
    pub(super) fn context(&self, module: ModuleKind, microbatch: u32) -> Result<&Arc<MicrobatchContext<D>>> {
        self.contexts
            .get(&microbatch)
            .ok_or_else(|| self.refused(module, microbatch, "has no context".to_owned()))
    }

    /// Checks contexts against the plan.
    ///
    /// # Errors
    /// [`Error::Plan`] that names the microbatch whose context is missing, another replica's, or has other tokens of media or
    /// another loss scale than planned.
    pub(super) fn check(&self, job: &Job, place: &Place) -> Result<()> {
        let module = place.module;
        let own: Vec<u32> = self.plan.microbatches_of(job, module, place.replica).collect();
        for &microbatch in own.iter().filter(|&&own| tokens(&self.plan, job, module, own) > 0) {
            self.context(module, microbatch)?;
        }
        for (&microbatch, context) in &self.contexts {
            if own.binary_search(&microbatch).is_err() {
                let problem = format!("is none of replica {}", place.replica);
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
            Err(self.refused(module, microbatch, format!("has {found} {what}, planned are {planned}")))
        };
        match &context.inputs {
            ModuleInputs::Text(text) if module == ModuleKind::Llm => {
                if planned == 0 {
                    agree("tokens", context.layers.rows, 0)?;
                }
                let media = text.media.as_ref().map_or(0, |(_, rows)| *rows);
                agree("tokens of media", media, self.plan.media_tokens(microbatch))?;
                let scale = self.plan.loss_scale();
                if (text.loss_scale - scale).abs() > 1e-9 * scale {
                    let problem = format!("has the loss scale {}, the step {scale}", text.loss_scale);
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

/// Rows that the last stage of a module has of a microbatch, as planned; exact for encoders.
pub(super) fn tokens(plan: &StepPlan, job: &Job, module: ModuleKind, microbatch: u32) -> usize {
    match plan.route(job, module) {
        Some(route) => route.source_tokens(microbatch),
        None => plan.microbatches()[microbatch as usize].tokens,
    }
}
