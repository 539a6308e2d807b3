//! Lists the media in a planned step by LLM microbatch, before any sample is read.

use dflop_costmodel::{Module, SampleShape};
use dflop_loader::{StepPlan, StepPlanner};

use crate::error::{Error, Result};
use crate::pipeline::{Job, MediumPlan, MicrobatchPlan, PipelineStepPlan};
use dflop_models::ModuleKind;

/// All media in a sample for an encoder; a single medium in the pipeline plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EncoderTask {
    /// Sample index in the step plan.
    pub(super) sample: u32,
    pub(super) module: ModuleKind,
    /// Predicted time for the complete encoder, in nanoseconds.
    pub(super) cost_ns: u64,
}

/// LLM microbatch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct MicrobatchMedia {
    /// Sample indices in the step plan, in order.
    pub(super) samples: Vec<u32>,
    /// Media in the samples; within a sample vision before audio.
    pub(super) media: Vec<EncoderTask>,
}

/// Microbatches in a step, `[rounds * D]`; microbatch `k` on LLM DP rank `d` is at `k * D + d`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepMedia {
    pub(super) step: u64,
    pub(super) microbatches: Vec<MicrobatchMedia>,
}

impl StepMedia {
    /// Lists the media in a planned step from the shapes in the index.
    pub(super) fn new(job: &Job, planner: &StepPlanner, plan: &StepPlan) -> Self {
        let encoders: Vec<(ModuleKind, usize)> = encoders(job, planner).collect();
        let (mut shape, mut microbatches) = (SampleShape::default(), Vec::new());
        let rounds = plan.ranks.iter().map(Vec::len).max().unwrap_or(0);
        for round in 0..rounds {
            for rank in &plan.ranks {
                let samples = rank.get(round).cloned().unwrap_or_default();
                let mut media = Vec::new();
                for &sample in &samples {
                    planner.row(plan.samples[sample as usize]).read_shape(&mut shape);
                    let cost = &plan.costs[sample as usize].module_ns;
                    let own = encoders.iter().filter(|(module, _)| has_media(&shape, *module));
                    media.extend(own.map(|&(module, index)| {
                        // An encoder that the cost model lacks has no times, and costs 0.
                        let cost_ns = cost.as_slice().get(index).copied().unwrap_or(0);
                        EncoderTask { sample, module, cost_ns }
                    }));
                }
                microbatches.push(MicrobatchMedia { samples, media });
            }
        }
        Self { step: plan.step, microbatches }
    }

    /// Builds the pipeline plan from known token counts.
    ///
    /// The assignment of media to replicas depends only on predicted times, so it is the same for any token
    /// counts.
    ///
    /// - `tokens`: number of tokens in a sample
    /// - `medium_tokens`: number of tokens for a medium
    pub(super) fn plan(
        &self,
        job: &Job,
        target_tokens: u64,
        tokens: impl Fn(u32) -> usize,
        medium_tokens: impl Fn(&EncoderTask) -> usize,
    ) -> Result<PipelineStepPlan> {
        let microbatch = |media: &MicrobatchMedia| {
            let medium = |medium: &EncoderTask| MediumPlan {
                module: medium.module,
                tokens: medium_tokens(medium),
                cost_ns: medium.cost_ns,
            };
            MicrobatchPlan {
                tokens: media.samples.iter().map(|&sample| tokens(sample)).sum(),
                media: media.media.iter().map(medium).collect(),
            }
        };
        PipelineStepPlan::new(
            job,
            self.step,
            target_tokens,
            self.microbatches.iter().map(microbatch).collect(),
        )
    }

    /// Returns the indices of samples that an encoder replica encodes, by round, in encoding order.
    pub(super) fn encoded_by(&self, job: &Job, module: ModuleKind, replica: usize) -> Result<Vec<Vec<u32>>> {
        let replicas = job.modules().iter().find(|own| own.module == module).map_or(1, |own| own.dp_size);
        Ok(self.encoded(job, module)?.into_iter().skip(replica).step_by(replicas).collect())
    }

    /// Returns the sample indices in every microbatch for an encoder, in encoding order.
    pub(super) fn encoded(&self, job: &Job, module: ModuleKind) -> Result<Vec<Vec<u32>>> {
        // Placeholder counts, as the assignment ignores them: up to two encoders with one token each per
        // sample.
        let plan = self.plan(job, 0, |_| 2, |_| 1)?;
        let (Some(route), Some(own)) =
            (plan.route(job, module), job.modules().iter().find(|own| own.module == module))
        else {
            let problem = format!("the job does not run {module:?}");
            return Err(Error::InvalidSetting { setting: "modules", reason: problem });
        };
        let of_microbatch = |source: usize| {
            let sample = |media: &MicrobatchMedia, medium: usize| media.media[medium].sample;
            let rows = route.source_media(source as u32);
            rows.map(|row| sample(&self.microbatches[row.destination as usize], row.medium)).collect()
        };
        Ok((0..plan.rounds() * own.dp_size).map(of_microbatch).collect())
    }
}

/// Iterates over the encoders in a job with the matching time indices in the cost model.
fn encoders(job: &Job, planner: &StepPlanner) -> impl Iterator<Item = (ModuleKind, usize)> {
    let index = |module| planner.model().modules().iter().position(|own| *own == module);
    let encoders = job.modules().iter().map(|layout| layout.module);
    encoders.filter_map(move |module| match module {
        ModuleKind::Vision => Some((module, index(Module::Vision).unwrap_or(usize::MAX))),
        ModuleKind::Audio => Some((module, index(Module::Audio).unwrap_or(usize::MAX))),
        ModuleKind::Llm => None,
    })
}

fn has_media(shape: &SampleShape, module: ModuleKind) -> bool {
    match module {
        ModuleKind::Vision => !(shape.images.is_empty() && shape.videos.is_empty()),
        ModuleKind::Audio => !shape.audio.is_empty(),
        ModuleKind::Llm => false,
    }
}
