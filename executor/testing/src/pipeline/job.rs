//! Runs a global batch as a job with thread ranks.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_balancer::schedule::ScheduleKind;
use dflop_comm::{Comm, Communicator, Settings};
use dflop_device::{Device, Runtime};
use dflop_executor::pipeline::{
    Job, ModuleParallelism, PipelineRank, PipelineStepPlan, Placement, RankRole, RankStep, TimedAction,
};
use dflop_executor::train::build_stages_over;
use dflop_executor::{Error, Result};
use dflop_models::weights::{Seed, WeightSource};
use dflop_models::{
    Activations, BlockStage, FrozenModules, ModelConfig, ModuleKind, Stage, StageRange, StageSettings,
};

use super::batch::{Cut, Item, Sample, media_context, plan_microbatches, text_context};
use super::reference::Truth;
use crate::device::TestBackend;
use crate::support::{Transport, patient, run};

/// Settings for running a global batch.
#[derive(Clone)]
pub struct Setting<D: Device> {
    /// Model that runs.
    pub model: Arc<ModelConfig>,
    /// Module placement on ranks.
    pub placement: Placement,
    /// Whether tensor-parallel ranks divide a stage; otherwise each rank computes the complete stage.
    pub is_sharded: bool,
    /// Parallelism of each module.
    pub modules: Vec<ModuleParallelism>,
    /// Pipeline schedule.
    pub schedule: ScheduleKind,
    /// Whether activations are stored or recomputed.
    pub activations: Activations,
    /// Parts that are not trained.
    pub frozen: FrozenModules,
    /// Message transport between ranks.
    pub transport: Transport,
    /// Number of steps, each on the same batch.
    pub steps: u64,
    /// Gradient bucket size in elements.
    pub bucket_elements: usize,
    /// Whether ranks compare plans.
    pub is_plan_checked: bool,
    /// Number of planned tokens that every microbatch lacks when it runs.
    pub surplus_tokens: usize,
    /// Communicator settings.
    pub comm: Settings,
    /// Initial weight source.
    pub weights: Arc<dyn WeightSource + Send + Sync>,
    /// Creates the stages that run from the model stages.
    pub stages: Arc<Stages<D>>,
}

/// Creates a stage that runs from a model stage.
pub type Stages<D> =
    dyn Fn(&Setting<D>, &StageRange, BlockStage<D>) -> Result<Box<dyn Stage<D>>> + Send + Sync;

impl<D: Device> Setting<D> {
    /// Creates the setting for a single step that stores activations and trains all parts, over threads.
    pub fn new(model: &Arc<ModelConfig>, modules: Vec<ModuleParallelism>) -> Self {
        Self {
            model: Arc::clone(model),
            placement: Placement::Disaggregated,
            is_sharded: true,
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

    /// Creates the job.
    pub fn job(&self) -> Result<Job> {
        let model = self.model.as_ref().clone();
        Job::placed(self.placement, model, self.frozen, self.modules.clone(), self.schedule)
    }
}

/// Results from all ranks after the last step.
pub struct Ran {
    /// Loss, and gradients in all stages.
    pub truth: Truth,
    /// Actions on each rank.
    pub timelines: Vec<Vec<TimedAction>>,
}

struct OfRank {
    roles: Vec<RankRole>,
    loss: f64,
    /// Gradients by stage.
    gradients: Vec<(u16, BTreeMap<String, Vec<f32>>)>,
    timeline: Vec<TimedAction>,
}

/// Builds the contexts of a rank.
pub fn work<D: Device>(
    job: &Job,
    roles: &[RankRole],
    plan: &Arc<PipelineStepPlan>,
    samples: &[Sample],
    cut: &Cut,
    device: &D,
) -> RankStep<D> {
    let media_of = |microbatch: u32| -> Vec<Item> {
        cut[microbatch as usize].iter().flat_map(|&sample| samples[sample].media.clone()).collect()
    };
    let context = |role: &RankRole, microbatch: u32| {
        if role.module == ModuleKind::Llm {
            let packed: Vec<&Sample> =
                cut[microbatch as usize].iter().map(|&sample| &samples[sample]).collect();
            let is_planned = plan.microbatches()[microbatch as usize].tokens > 0;
            return is_planned.then(|| text_context(job.model(), &packed, plan.loss_scale(), device));
        }
        let route = plan.route(job, role.module).unwrap();
        let media: Vec<Item> =
            route.source_media(microbatch).map(|row| media_of(row.destination)[row.medium]).collect();
        (!media.is_empty()).then(|| media_context(job.model(), role.module, &media, device))
    };
    let mut contexts = BTreeMap::new();
    for role in roles {
        for microbatch in plan.replica_microbatches(job, role.module, role.replica) {
            let context = context(role, microbatch).map(Arc::new);
            contexts.extend(context.map(|context| ((role.module, microbatch), context)));
        }
    }
    RankStep { plan: Arc::clone(plan), contexts }
}

/// Joins the job with the stages of this rank.
pub fn pipeline<B: TestBackend>(
    setting: &Setting<B::Device>,
    job: &Arc<Job>,
    comm: impl Comm + 'static,
    device: &B::Device,
) -> Result<PipelineRank<B::Device>> {
    let settings = StageSettings { activations: setting.activations, ..StageSettings::default() };
    let settings = StageSettings { bucket_elements: setting.bucket_elements, ..settings };
    let weights = setting.weights.as_ref();
    let comm = B::tensors(device, Arc::new(comm))?;
    let is_sharded = setting.is_sharded && job.modules().iter().any(|module| module.tp_size > 1);
    let stages = if is_sharded {
        build_stages_over(&*comm, job, device, setting.frozen, &settings, weights)?
    } else {
        let stage = |range: StageRange| -> Result<Box<dyn Stage<B::Device>>> {
            let stage =
                setting.model.stage_with(device, &range, setting.frozen, settings.clone(), weights)?;
            (setting.stages)(setting, &range, stage)
        };
        let roles = job.roles(comm.host().rank())?;
        roles.iter().flat_map(|role| job.ranges(role)).map(stage).collect::<Result<_>>()?
    };
    Ok(PipelineRank::over(comm, Arc::clone(job), stages)?.check_plans(setting.is_plan_checked))
}

/// Changes the inputs of a rank before it runs a step.
pub type Tamper<'a, D> = &'a (dyn Fn(usize, &mut RankStep<D>) + Sync);

fn run_rank<B: TestBackend>(
    setting: &Setting<B::Device>,
    job: &Arc<Job>,
    comm: Communicator,
    (samples, cut): (&[Sample], &Cut),
    tamper: Tamper<'_, B::Device>,
) -> Result<OfRank> {
    let device = B::open(1);
    let rank = comm.rank();
    let mut pipeline = pipeline::<B>(setting, job, comm, &device)?;
    let roles = pipeline.roles().to_vec();
    let targets = samples.iter().map(Sample::target_tokens).sum();
    let mut last = None;
    for step in 0..setting.steps {
        let mut microbatches = plan_microbatches(samples, cut);
        for microbatch in &mut microbatches {
            microbatch.tokens += setting.surplus_tokens;
        }
        let plan = Arc::new(PipelineStepPlan::new(job, step, targets, microbatches)?);
        let mut work = work(job, &roles, &plan, samples, cut, &device);
        tamper(rank, &mut work);
        let reads = device.reads();
        let outcome = pipeline.step(&work)?;
        // routers read their decisions
        if job.model().llm.experts.is_none() {
            assert_eq!(device.reads() - reads, 1, "a step waits for the device once, a microbatch never");
        }
        last = Some((outcome, work));
    }
    let (last, work) = last.expect("at least one step");
    let gradients = pipeline.stages().map(|(number, stage)| Ok((number, whole_gradients(stage, &device)?)));
    let gradients = gradients.collect::<Result<_>>()?;
    let evaluated = pipeline.evaluate(&work)? * work.plan.loss_scale();
    assert_eq!(evaluated.to_bits(), last.loss.to_bits(), "an evaluation has the losses of a step");
    Ok(OfRank { gradients, roles, loss: last.loss, timeline: last.timeline })
}

/// Returns the gradients of a stage; complete on the first tensor-parallel rank, none on the other
/// tensor-parallel ranks.
fn whole_gradients<D: Device>(stage: &dyn Stage<D>, device: &D) -> Result<BTreeMap<String, Vec<f32>>> {
    let own = stage.parameters().gradients(device)?;
    let Some(group) = stage.tensor_parallel() else { return Ok(own) };
    let mut whole = BTreeMap::new();
    for spec in stage.parameters().specs().iter().filter(|spec| spec.shares.is_none()) {
        if let Some(gradient) = own.get(&spec.name) {
            whole.extend(group.assemble(spec, gradient)?.map(|gradient| (spec.name.clone(), gradient)));
        }
    }
    Ok(whole)
}

fn run_ranks<B: TestBackend>(
    setting: &Setting<B::Device>,
    batch: (&[Sample], &Cut),
    tamper: Tamper<'_, B::Device>,
) -> Vec<Result<OfRank>> {
    let job = Arc::new(setting.job().unwrap());
    run(setting.transport, job.world_size(), setting.comm, |comm| {
        run_rank::<B>(setting, &job, comm, batch, tamper)
    })
}

/// Runs a job in which something fails, and returns an error per rank.
#[track_caller]
pub fn run_failing<B: TestBackend>(
    setting: &Setting<B::Device>,
    batch: (&[Sample], &Cut),
    tamper: Tamper<'_, B::Device>,
) -> Vec<Error> {
    let ranks = run_ranks::<B>(setting, batch, tamper).into_iter();
    ranks.map(|rank| rank.err().expect("all ranks fail")).collect()
}

/// Runs a job in which nothing fails. Replicas, and both copies of a tied parameter, must agree to the bit.
#[track_caller]
pub fn run_job<B: TestBackend>(setting: &Setting<B::Device>, samples: &[Sample], cut: &Cut) -> Ran {
    let ranks = run_ranks::<B>(setting, (samples, cut), &|_, _| {});
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
        assert_eq!(rank.loss.to_bits(), ranks[0].loss.to_bits(), "{:?}", rank.roles);
    }
    Ran {
        truth: Truth { loss: ranks[0].loss, gradients },
        timelines: ranks.into_iter().map(|rank| rank.timeline).collect(),
    }
}
