//! Predicts microbatch times for a step, by module.

use dflop_costmodel::correction::Observation;
use dflop_costmodel::{Module, SampleShape};
use dflop_loader::{StepPlan, StepPlanner};

use super::step_media::StepMedia;
use crate::error::Result;
use crate::pipeline::{Job, PipelineStepPlan};
use dflop_models::ModuleKind;

/// Predicted times for complete modules over the microbatches in a step, numbered as in the job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PredictedTimes {
    rounds: usize,
    /// Sample indices, by module and microbatch.
    samples: Vec<Vec<Vec<u32>>>,
    /// Forward and backward time on one device, by module and microbatch, in nanoseconds.
    module_ns: Vec<Vec<u64>>,
}

impl PredictedTimes {
    /// Sums planned sample costs, including skipped samples, with the constants for each microbatch.
    pub(super) fn new(
        job: &Job,
        planner: &StepPlanner,
        media: &StepMedia,
        plan: &PipelineStepPlan,
        costs: &StepPlan,
    ) -> Result<Self> {
        let mut times = Self { rounds: plan.rounds(), ..Self::default() };
        for layout in job.modules() {
            let samples = match layout.module {
                ModuleKind::Llm => {
                    media.microbatches.iter().map(|microbatch| microbatch.samples.clone()).collect()
                }
                encoder => media.encoded(job, encoder)?,
            };
            let index = planner.model().modules().iter().position(|own| *own == costed(layout.module));
            let cost_ns = |sample: &u32| {
                let all = costs.costs[*sample as usize].module_ns;
                index.and_then(|index| all.as_slice().get(index).copied()).unwrap_or(0)
            };
            let constants =
                index.and_then(|index| costs.constants.modules.get(index)).copied().unwrap_or_default();
            let microbatch_ns =
                |samples: &Vec<u32>| constants.microbatch_ns(samples.iter().map(cost_ns).sum());
            times.module_ns.push(samples.iter().map(microbatch_ns).collect());
            times.samples.push(samples);
        }
        Ok(times)
    }

    /// Returns the number of microbatches per LLM DP rank.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Returns the time of a module over a microbatch, in nanoseconds.
    ///
    /// # Panics
    /// If the job has no such module or microbatch.
    #[must_use]
    pub fn module_ns(&self, module: usize, microbatch: u32) -> u64 {
        self.module_ns[module][microbatch as usize]
    }

    /// Returns sample indices in the step plan, by module and microbatch.
    pub(crate) fn samples(&self) -> &[Vec<Vec<u32>>] {
        &self.samples
    }

    /// Returns observations for the correction, one per microbatch; microbatches without work are left out.
    ///
    /// - `measured_ns`: module forward and backward time over a microbatch, summed over stages
    pub(crate) fn observations(
        &self,
        job: &Job,
        planner: &StepPlanner,
        plan: &StepPlan,
        measured_ns: impl Fn(usize, usize) -> u64,
    ) -> Vec<Observation> {
        let (mut shape, mut all) = (SampleShape::default(), Vec::new());
        for (index, layout) in job.modules().iter().enumerate() {
            for (microbatch, indices) in self.samples[index].iter().enumerate() {
                let (module, measured_ns) = (costed(layout.module), measured_ns(index, microbatch));
                let mut samples = Vec::with_capacity(indices.len());
                for &sample in indices {
                    planner.row(plan.samples[sample as usize]).read_shape(&mut shape);
                    samples.extend(planner.model().sample_times(Some(module), &shape));
                }
                if measured_ns > 0 && !samples.is_empty() {
                    let constants = planner.model().sample_constants(Some(module), &samples);
                    let (module, rank) = (Some(module), (microbatch % layout.dp_size) as u32);
                    all.push(Observation { module, rank, measured_ns, constants, samples });
                }
            }
        }
        all
    }
}

/// Returns the corresponding module in the cost model.
pub(crate) fn costed(module: ModuleKind) -> Module {
    match module {
        ModuleKind::Vision => Module::Vision,
        ModuleKind::Audio => Module::Audio,
        ModuleKind::Llm => Module::Llm,
    }
}
