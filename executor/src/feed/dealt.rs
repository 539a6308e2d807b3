//! Which media a planned step has, by microbatch of the LLM, before anything is read.

use dflop_costmodel::{Module, SampleShape};
use dflop_loader::plan::{StepPlan as LoaderPlan, StepPlanner};

use crate::error::{Error, Result};
use crate::model::model_config::ModuleKind;
use crate::pipeline::{Job, MediumPlan, MicrobatchPlan, StepPlan};

/// All that one encoder encodes of one sample: a medium of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SampleMedium {
    /// Place of the sample in the step.
    pub(super) place: u32,
    pub(super) module: ModuleKind,
    /// Predicted time of the whole encoder, nanoseconds.
    pub(super) cost_ns: u64,
}

/// A microbatch of the LLM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct DealtMicrobatch {
    /// Places of its samples, in order.
    pub(super) places: Vec<u32>,
    /// Media of its samples, those of vision before those of audio within a sample.
    pub(super) media: Vec<SampleMedium>,
}

/// The microbatches of a step, `[rounds * D]`, microbatch `k` of DP rank `d` of the LLM at `k * D + d`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Dealt {
    pub(super) step: u64,
    pub(super) microbatches: Vec<DealtMicrobatch>,
}

impl Dealt {
    /// Lists the media of a planned step from the shapes in the index.
    pub(super) fn new(job: &Job, planner: &StepPlanner, plan: &LoaderPlan) -> Self {
        let encoders: Vec<(ModuleKind, usize)> = encoders(job, planner).collect();
        let (mut shape, mut microbatches) = (SampleShape::default(), Vec::new());
        let rounds = plan.ranks.iter().map(Vec::len).max().unwrap_or(0);
        for round in 0..rounds {
            for rank in &plan.ranks {
                let places = rank.get(round).cloned().unwrap_or_default();
                let mut media = Vec::new();
                for &place in &places {
                    planner.row(plan.samples[place as usize]).read_shape(&mut shape);
                    let cost = &plan.costs[place as usize].module_ns;
                    let own = encoders.iter().filter(|(module, _)| has_media(&shape, *module));
                    media.extend(own.map(|&(module, index)| {
                        let cost_ns = cost.as_slice().get(index).copied().unwrap_or(0);
                        SampleMedium { place, module, cost_ns }
                    }));
                }
                microbatches.push(DealtMicrobatch { places, media });
            }
        }
        Self { step: plan.step, microbatches }
    }

    /// The plan of the pipeline, with the tokens that are known of samples and media.
    ///
    /// Who encodes what depends on predicted times alone, so it is the same whatever the tokens are.
    ///
    /// - `tokens`: of a sample
    /// - `medium_tokens`: of a medium
    pub(super) fn plan(
        &self,
        job: &Job,
        target_tokens: u64,
        tokens: impl Fn(u32) -> usize,
        medium_tokens: impl Fn(&SampleMedium) -> usize,
    ) -> Result<StepPlan> {
        let microbatch = |dealt: &DealtMicrobatch| {
            let medium = |medium: &SampleMedium| MediumPlan {
                module: medium.module,
                tokens: medium_tokens(medium),
                cost_ns: medium.cost_ns,
            };
            MicrobatchPlan {
                tokens: dealt.places.iter().map(|&place| tokens(place)).sum(),
                media: dealt.media.iter().map(medium).collect(),
            }
        };
        StepPlan::new(job, self.step, target_tokens, self.microbatches.iter().map(microbatch).collect())
    }

    /// Places of the samples that a replica of an encoder encodes, by round, in the order in which it does.
    pub(super) fn encoded_by(&self, job: &Job, module: ModuleKind, replica: usize) -> Result<Vec<Vec<u32>>> {
        let plan = self.plan(job, 0, |_| 2, |_| 1)?;
        let Some(route) = plan.route(job, module) else {
            let problem = format!("have no {module:?}");
            return Err(Error::InvalidSetting { setting: "modules", reason: problem });
        };
        let of_microbatch = |source: u32| {
            let place = |dealt: &DealtMicrobatch, medium: usize| dealt.media[medium].place;
            let rows = route.of_source(source);
            rows.map(|row| place(&self.microbatches[row.destination as usize], row.medium)).collect()
        };
        Ok(plan.microbatches_of(job, module, replica).map(of_microbatch).collect())
    }
}

/// The encoders of a job with the index of their times in the cost model's.
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
