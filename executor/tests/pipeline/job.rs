//! Runs a global batch as a job of ranks that are threads.

#[allow(unused_imports, reason = "methods of devices")]
use dflop_device::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_balancer::schedule::ScheduleKind;

use dflop_comm::{Comm, Communicator, Settings};
use dflop_executor::pipeline::{
    Job, ModuleParallelism, PipelineRank, PipelineStepPlan, RankPlacement, RankStep, TimedAction,
};
use dflop_executor::{Error, Result};
use dflop_models::weights::{Seed, WeightSource};
use dflop_models::{
    Activations, BlockStage, FrozenModules, ModelConfig, ModuleKind, Stage, StageRange, StageSettings,
};

use super::batch::{Cut, Item, Sample, media_context, plan_of, text_context};
use super::device::{TestDevice, device};
use super::reference::Truth;
use super::support::{Transport, patient, run};

/// Settings of a run of a global batch.
#[derive(Clone)]
pub(crate) struct Setting {
    pub(crate) model: Arc<ModelConfig>,
    pub(crate) modules: Vec<ModuleParallelism>,
    pub(crate) schedule: ScheduleKind,
    pub(crate) activations: Activations,
    pub(crate) frozen: FrozenModules,
    pub(crate) transport: Transport,
    pub(crate) steps: u64,
    pub(crate) bucket_elements: usize,
    pub(crate) is_plan_checked: bool,
    /// Planned tokens that every microbatch lacks when it runs.
    pub(crate) surplus_tokens: usize,
    pub(crate) comm: Settings,
    pub(crate) weights: Arc<dyn WeightSource + Send + Sync>,
    /// Makes the stages that run from those of the model.
    pub(crate) stages: Arc<Stages>,
}

/// Makes a stage that runs from the one of the model.
pub(crate) type Stages =
    dyn Fn(&Setting, &StageRange, TestStage) -> Result<Box<dyn Stage<TestDevice>>> + Send + Sync;
type TestStage = BlockStage<TestDevice>;

impl Setting {
    pub(crate) fn new(model: &Arc<ModelConfig>, modules: Vec<ModuleParallelism>) -> Self {
        Self {
            model: Arc::clone(model),
            modules,
            schedule: ScheduleKind::OneForwardOneBackward,
            activations: Activations::Stored,
            frozen: FrozenModules::default(),
            transport: Transport::Threads,
            steps: 1,
            bucket_elements: 1 << 20,
            is_plan_checked: true,
            surplus_tokens: 0,
            comm: patient(),
            weights: Arc::new(Seed(1)),
            stages: Arc::new(|_, _, stage| Ok(stage.boxed())),
        }
    }

    pub(crate) fn job(&self) -> Result<Job> {
        Job::new(self.model.as_ref().clone(), self.frozen, self.modules.clone(), self.schedule)
    }
}

/// Results of all ranks after their last step.
pub(crate) struct Ran {
    pub(crate) truth: Truth,
    pub(crate) timelines: Vec<Vec<TimedAction>>,
}

struct OfRank {
    placement: RankPlacement,
    loss: f64,
    /// Gradients by stage.
    gradients: Vec<(u16, BTreeMap<String, Vec<f32>>)>,
    timeline: Vec<TimedAction>,
}

/// Builds the contexts of one rank.
pub(crate) fn work(
    job: &Job,
    placement: &RankPlacement,
    plan: &Arc<PipelineStepPlan>,
    samples: &[Sample],
    cut: &Cut,
    device: &TestDevice,
) -> RankStep<TestDevice> {
    let media_of = |microbatch: u32| -> Vec<Item> {
        cut[microbatch as usize].iter().flat_map(|&sample| samples[sample].media.clone()).collect()
    };
    let context = |microbatch: u32| {
        if placement.module == ModuleKind::Llm {
            let packed: Vec<&Sample> =
                cut[microbatch as usize].iter().map(|&sample| &samples[sample]).collect();
            let is_planned = plan.microbatches()[microbatch as usize].tokens > 0;
            return is_planned.then(|| text_context(job.model(), &packed, plan.loss_scale(), device));
        }
        let route = plan.route(job, placement.module).unwrap();
        let media: Vec<Item> =
            route.of_source(microbatch).map(|row| media_of(row.destination)[row.medium]).collect();
        (!media.is_empty()).then(|| media_context(job.model(), placement.module, &media, device))
    };
    let own = plan.microbatches_of(job, placement.module, placement.replica);
    let contexts = own.filter_map(|microbatch| Some((microbatch, Arc::new(context(microbatch)?)))).collect();
    RankStep { plan: Arc::clone(plan), contexts }
}

pub(crate) fn pipeline(
    setting: &Setting,
    job: &Arc<Job>,
    comm: Communicator,
    device: &TestDevice,
) -> Result<PipelineRank<TestDevice>> {
    let placement = job.placement(comm.rank())?;
    let stage = |range: &StageRange| -> Result<Box<dyn Stage<TestDevice>>> {
        let (activations, bucket_elements) = (setting.activations, setting.bucket_elements);
        let settings = StageSettings { activations, bucket_elements, ..StageSettings::default() };
        let weights = setting.weights.as_ref();
        let stage = setting.model.stage_with(device, range, setting.frozen, settings, weights)?;
        (setting.stages)(setting, range, stage)
    };
    let stages = job.ranges(&placement).iter().map(stage).collect::<Result<_>>()?;
    Ok(PipelineRank::new(Box::new(comm), Arc::clone(job), stages)?.check_plans(setting.is_plan_checked))
}

/// Changes the inputs of a rank before it runs a step.
pub(crate) type Tamper<'a> = &'a (dyn Fn(usize, &mut RankStep<TestDevice>) + Sync);

fn of_rank(
    setting: &Setting,
    job: &Arc<Job>,
    comm: Communicator,
    (samples, cut): (&[Sample], &Cut),
    tamper: Tamper<'_>,
) -> Result<OfRank> {
    let device = device(1);
    let rank = comm.rank();
    let mut pipeline = pipeline(setting, job, comm, &device)?;
    let placement = pipeline.placement().clone();
    let targets = samples.iter().map(Sample::target_tokens).sum();
    let mut last = None;
    for step in 0..setting.steps {
        let mut microbatches = plan_of(samples, cut);
        for microbatch in &mut microbatches {
            microbatch.tokens += setting.surplus_tokens;
        }
        let plan = Arc::new(PipelineStepPlan::new(job, step, targets, microbatches)?);
        let mut work = work(job, &placement, &plan, samples, cut, &device);
        tamper(rank, &mut work);
        let reads = device.reads();
        last = Some(pipeline.step(&work)?);
        assert_eq!(device.reads() - reads, 1, "a step waits for the device once, a microbatch never");
    }
    let last = last.expect("at least one step");
    let gradients =
        pipeline.stages().map(|(number, stage)| Ok((number, stage.parameters().gradients(&device)?)));
    Ok(OfRank {
        gradients: gradients.collect::<Result<_>>()?,
        placement,
        loss: last.loss,
        timeline: last.timeline,
    })
}

fn run_ranks(setting: &Setting, batch: (&[Sample], &Cut), tamper: Tamper<'_>) -> Vec<Result<OfRank>> {
    let job = Arc::new(setting.job().unwrap());
    run(setting.transport, job.world_size(), setting.comm, |comm| of_rank(setting, &job, comm, batch, tamper))
}

/// Runs a job in which something fails, and returns the error of every rank.
#[track_caller]
pub(crate) fn run_failing(setting: &Setting, batch: (&[Sample], &Cut), tamper: Tamper<'_>) -> Vec<Error> {
    let ranks = run_ranks(setting, batch, tamper).into_iter();
    ranks.map(|rank| rank.err().expect("all ranks fail")).collect()
}

/// Runs a job in which nothing fails. Replicas, and both copies of a tied parameter, must agree to the bit.
#[track_caller]
pub(crate) fn run_job(setting: &Setting, samples: &[Sample], cut: &Cut) -> Ran {
    let ranks = run_ranks(setting, (samples, cut), &|_, _| {});
    let ranks: Vec<OfRank> =
        ranks.into_iter().map(|rank| rank.unwrap_or_else(|error| panic!("{error}"))).collect();
    let mut gradients: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (number, of_stage) in ranks.iter().flat_map(|rank| &rank.gradients) {
        for (name, gradient) in of_stage {
            let known = gradients.entry(name.clone()).or_insert_with(|| gradient.clone());
            assert_eq!(known, gradient, "stage {number}: copies of {name} differ");
        }
    }
    for rank in &ranks {
        assert_eq!(rank.loss.to_bits(), ranks[0].loss.to_bits(), "{:?}", rank.placement);
    }
    Ran {
        truth: Truth { loss: ranks[0].loss, gradients },
        timelines: ranks.into_iter().map(|rank| rank.timeline).collect(),
    }
}
