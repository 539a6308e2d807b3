//! Reads and prepares the samples of one rank for one module, or for modules that read the same samples.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_device::Device;
use dflop_loader::inputs::PreparedSample;
use dflop_loader::processors::{Preparer, PreparerBuilder};
use dflop_loader::{
    BalancedLoader, BalancedLoaderBuilder, Microbatch, Share, Step, StepPlan, StepPlanner, StepStream,
};
use dflop_models::ModuleKind;
use dflop_models::encoder::EncoderConfig;
use futures::future::{Either, select};
use futures::{FutureExt, StreamExt};

use super::predicted_times::TokenCounts;
use super::step_media::StepMedia;
use super::{Stop, step_media};
use crate::error::{Error, Result};
use crate::pipeline::{Job, JobLayout, PipelineStepPlan, RankContexts, RankRole};

/// Reader for LLM replica texts, encoder replica media, or both.
pub(super) struct ModuleReader {
    job: Arc<Job>,
    /// Roles, encoders before the LLM.
    pub(super) roles: Vec<RankRole>,
    preparer: Arc<Preparer>,
    pub(super) loader: Arc<BalancedLoader>,
    stream: StepStream,
}

/// Prepared samples for a step by index in the step plan.
pub(super) struct ModuleSamples {
    pub(super) plan: Arc<StepPlan>,
    pub(super) samples: BTreeMap<u32, PreparedSample>,
}

impl ModuleReader {
    /// Starts a reader for each group of rank roles that read the same samples.
    pub(super) fn all(
        job: &Arc<Job>,
        roles: Vec<RankRole>,
        planner: &StepPlanner,
        preparer: &PreparerBuilder,
        configure: impl Fn(BalancedLoaderBuilder) -> BalancedLoaderBuilder,
    ) -> Result<Vec<Self>> {
        let llm = roles.iter().find(|role| role.module == ModuleKind::Llm).map(|role| role.replica);
        let is_with_llm = |role: &RankRole| llm == Some(role.replica) && job.reads_with_llm(role.module);
        let (with_llm, alone): (Vec<_>, Vec<_>) = roles.into_iter().partition(is_with_llm);
        let groups = alone.into_iter().map(|role| vec![role]).chain([with_llm]);
        let reader = |roles| Self::new(job.clone(), roles, planner, preparer.clone(), &configure);
        groups.filter(|roles| !roles.is_empty()).map(reader).collect()
    }

    fn new(
        job: Arc<Job>,
        roles: Vec<RankRole>,
        planner: &StepPlanner,
        preparer: PreparerBuilder,
        configure: &impl Fn(BalancedLoaderBuilder) -> BalancedLoaderBuilder,
    ) -> Result<Self> {
        let last = &roles[roles.len() - 1];
        let is_llm = last.module == ModuleKind::Llm;
        let has_encoders = !is_llm || roles.len() > 1;
        let preparer = Arc::new(if has_encoders { preparer } else { preparer.counted_media() }.build()?);
        // Encoder ranks select samples by share, for which the DP rank has no meaning.
        let dp_rank = if is_llm { last.replica } else { 0 };
        let mut builder =
            BalancedLoader::builder(planner.clone(), dp_rank).preparer(preparer.clone()).unpacked();
        if !is_llm {
            let layout = JobLayout::clone(&job);
            let share = ReplicaShare::new(layout, planner.clone(), last.module, last.replica);
            builder = builder.share(Arc::new(share));
        }
        let loader = configure(builder).build()?;
        let stream = loader.stream();
        Ok(Self { job, roles, preparer, loader: Arc::new(loader), stream })
    }

    /// Returns the samples for the next step; `None` at the end of the run, and after a stop.
    pub(super) fn next(
        &mut self,
        runtime: &tokio::runtime::Runtime,
        stop: &mut Stop,
    ) -> Result<Option<ModuleSamples>> {
        let next = select(self.stream.next(), stop.stopped().boxed());
        let step = match runtime.block_on(next) {
            Either::Left((step, _)) => step.transpose()?,
            Either::Right(_) => None,
        };
        Ok(step
            .map(|Step { plan, microbatches, .. }| ModuleSamples { plan, samples: prepared(microbatches) }))
    }

    /// Returns the contexts for all module microbatches, except empty microbatches.
    pub(super) fn contexts<D: Device>(
        &self,
        device: &D,
        media: &StepMedia,
        counts: &TokenCounts,
        plan: &PipelineStepPlan,
        mut own: BTreeMap<u32, PreparedSample>,
    ) -> Result<RankContexts<D>> {
        let mut contexts = BTreeMap::new();
        for role in &self.roles {
            let module = role.module;
            for (microbatch, kept) in media.kept(&self.job, plan, role, |index| counts.is_kept(index))? {
                if let Some(index) = kept.iter().find(|index| !own.contains_key(index)) {
                    return Err(self.missing(plan, (module, microbatch), *index));
                }
                let context = match module {
                    _ if kept.is_empty() => None,
                    ModuleKind::Llm => {
                        // The LLM comes last, so it takes ownership of the samples.
                        let samples = kept.iter().filter_map(|index| own.remove(index)).collect();
                        let llm = &self.job.model().llm;
                        step_media::text_context(device, llm, &self.preparer, samples, plan.loss_scale())?
                    }
                    encoder => {
                        let samples: Vec<&PreparedSample> = kept.iter().map(|index| &own[index]).collect();
                        Some(step_media::media_context(device, self.encoder(encoder)?, encoder, &samples)?)
                    }
                };
                contexts.extend(context.map(|context| ((module, microbatch), Arc::new(context))));
            }
        }
        Ok(contexts)
    }

    fn encoder(&self, module: ModuleKind) -> Result<&EncoderConfig> {
        let model = self.job.model();
        let encoder = if module == ModuleKind::Vision { &model.vision } else { &model.audio };
        let problem = || format!("the model has no encoder for {module:?}");
        encoder.as_ref().ok_or_else(|| Error::InvalidSetting { setting: "modules", reason: problem() })
    }

    /// Returns the error for a sample that other ranks could prepare and this rank could not.
    fn missing(&self, plan: &PipelineStepPlan, (module, microbatch): (ModuleKind, u32), index: u32) -> Error {
        let skipped = self.loader.skip_log().last();
        let why = skipped.map_or(String::new(), |skipped| format!(": {}", skipped.reason));
        let module = crate::pipeline::module_name(module);
        let problem = format!("sample {index} was prepared on other ranks, but not on this one{why}");
        Error::Plan { step: plan.step(), module, microbatch: microbatch as usize, problem }
    }
}

/// Collects prepared samples by index in the step plan.
pub(super) fn prepared(microbatches: Vec<Microbatch>) -> BTreeMap<u32, PreparedSample> {
    let mut all = BTreeMap::new();
    for microbatch in microbatches {
        all.extend(microbatch.plan_indices.into_iter().zip(microbatch.prepared));
    }
    all
}

/// Samples whose media an encoder replica encodes, selected from the samples of all LLM ranks, balanced round
/// by round.
#[derive(Debug, Clone)]
pub struct ReplicaShare {
    layout: JobLayout,
    planner: StepPlanner,
    module: ModuleKind,
    replica: usize,
}

impl ReplicaShare {
    /// Creates the share for a replica.
    #[must_use]
    pub fn new(layout: JobLayout, planner: StepPlanner, module: ModuleKind, replica: usize) -> Self {
        Self { layout, planner, module, replica }
    }
}

impl Share for ReplicaShare {
    fn plan_indices(&self, plan: &StepPlan) -> dflop_loader::Result<Vec<Vec<u32>>> {
        let dealt = StepMedia::new(&self.layout, &self.planner, plan);
        dealt
            .encoded_by(&self.layout, self.module, self.replica)
            .map_err(|error| dflop_loader::Error::Config { setting: "share", reason: error.to_string() })
    }
}
