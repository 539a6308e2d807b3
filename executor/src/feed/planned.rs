//! What the cost model says of the microbatches of a step, module by module.

use dflop_costmodel::correction::Observation;
use dflop_costmodel::{Module, SampleShape};
use dflop_loader::plan::{StepPlan as LoaderPlan, StepPlanner};

use super::dealt::Dealt;
use crate::error::Result;
use crate::model::model_config::ModuleKind;
use crate::pipeline::{Job, StepPlan};

/// Predicted times of whole modules over the microbatches of a step, as the job numbers both.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlannedTimes {
    rounds: usize,
    /// Places of samples, by module and microbatch.
    places: Vec<Vec<Vec<u32>>>,
    /// Forward and backward on one device, by module and microbatch, nanoseconds.
    module_ns: Vec<Vec<u64>>,
}

impl PlannedTimes {
    /// Adds up the planned costs of samples; a sample that turned out bad is planned all the same.
    pub(super) fn new(
        job: &Job,
        planner: &StepPlanner,
        dealt: &Dealt,
        plan: &StepPlan,
        costs: &LoaderPlan,
    ) -> Result<Self> {
        let mut times = Self { rounds: plan.rounds(), ..Self::default() };
        for layout in job.modules() {
            let places = match layout.module {
                ModuleKind::Llm => {
                    dealt.microbatches.iter().map(|microbatch| microbatch.places.clone()).collect()
                }
                encoder => {
                    let by_replica =
                        (0..layout.dp_size).map(|replica| dealt.encoded_by(job, encoder, replica));
                    let by_replica = by_replica.collect::<Result<Vec<_>>>()?;
                    let rounds = 0..plan.rounds();
                    let of_round = |round: usize| by_replica.iter().map(move |own| own[round].clone());
                    rounds.flat_map(of_round).collect::<Vec<Vec<u32>>>()
                }
            };
            let index = planner.model().modules().iter().position(|own| *own == costed(layout.module));
            let cost_ns = |place: &u32| {
                let all = costs.costs[*place as usize].module_ns;
                index.and_then(|index| all.as_slice().get(index).copied()).unwrap_or(0)
            };
            times.module_ns.push(places.iter().map(|places| places.iter().map(cost_ns).sum()).collect());
            times.places.push(places);
        }
        Ok(times)
    }

    /// Microbatches of every DP rank of the LLM.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Returns the time of a module over one of its microbatches, in nanoseconds.
    ///
    /// # Panics
    /// If the job has no such module or microbatch.
    #[must_use]
    pub fn module_ns(&self, module: usize, microbatch: u32) -> u64 {
        self.module_ns[module][microbatch as usize]
    }

    /// Microbatches of every module.
    pub(crate) fn microbatches(&self) -> impl Iterator<Item = usize> + '_ {
        self.module_ns.iter().map(Vec::len)
    }

    /// What measured times say for the correction, microbatch by microbatch; those without work are left out.
    ///
    /// - `measured_ns`: forward and backward of a module over a microbatch, all its stages
    pub(crate) fn observations(
        &self,
        job: &Job,
        planner: &StepPlanner,
        plan: &LoaderPlan,
        measured_ns: impl Fn(usize, usize) -> u64,
    ) -> Vec<Observation> {
        let (mut shape, mut all) = (SampleShape::default(), Vec::new());
        for (index, layout) in job.modules().iter().enumerate() {
            for (microbatch, places) in self.places[index].iter().enumerate() {
                let (module, measured_ns) = (costed(layout.module), measured_ns(index, microbatch));
                let mut samples = Vec::with_capacity(places.len());
                for &place in places {
                    planner.row(plan.samples[place as usize]).read_shape(&mut shape);
                    // A sample that the model refuses was planned at no cost.
                    samples.extend(planner.model().predict_uncorrected(module, &shape).ok().flatten());
                }
                if measured_ns > 0 && !samples.is_empty() {
                    all.push(Observation { module, measured_ns, samples });
                }
            }
        }
        all
    }
}

/// The module as the cost model names it.
fn costed(module: ModuleKind) -> Module {
    match module {
        ModuleKind::Vision => Module::Vision,
        ModuleKind::Audio => Module::Audio,
        ModuleKind::Llm => Module::Llm,
    }
}
