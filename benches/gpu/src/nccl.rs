//! NCCL communication: every call by one rank, and small jobs with multiple ranks on one device.
//!
//! Ranks can share a device from NCCL 2.30 on, if `NCCL_MULTI_RANK_GPU_ENABLE=1` is set. The losses are
//! compared with the same job whose tensors pass through the host.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use dflop_balancer::schedule::ScheduleKind;
use dflop_comm::launch::{Launcher, identity_from_environment};
use dflop_comm::{Comm, RankIdentity, Settings, StepContext, tcp};
use dflop_cuda::{
    Cuda, Error as CudaError, NCCL_VARIABLES, Nccl, NcclComm, NcclVersion, SearchPath, check_nccl_alone,
};
use dflop_device::{DeviceComm, Dtype, Staged};
use dflop_executor::optimizer::{Decay, JobOptimizer, JobOptimizerSettings, LearningRate};
use dflop_executor::pipeline::{Job, MicrobatchPlan, ModuleParallelism, PipelineStepPlan, RankStep};
use dflop_executor::train::join_job_over;
use dflop_models::weights::Seed;
use dflop_models::{Activations, FrozenModules, ModelConfig, ModuleKind, TextBatch};
use serde_json::json;

use crate::Result;
use crate::arguments::Arguments;
use crate::report::{self, Outcome};
use crate::{device, models};

/// Environment variable that allows it.
const IS_SHARED: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// Number of the job that the launched ranks run.
const JOB: &str = "GPU_CHECK_NCCL_JOB";
const STEPS: u64 = 5;
/// Number of tokens per microbatch.
const TOKENS: u32 = 24;
const MICROBATCHES: usize = 4;
/// Maximum relative difference between losses: NCCL may sum in a different order.
const TOLERANCE: f64 = 1e-5;

/// Means by which tensors go from rank to rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Host,
    Nccl,
}

/// A job: pipeline, data-parallel and tensor-parallel degrees.
#[derive(Debug, Clone, Copy)]
struct Degrees {
    stages: usize,
    dp: usize,
    tp: usize,
}

const JOBS: [Degrees; 5] = [
    Degrees { stages: 2, dp: 1, tp: 1 },
    Degrees { stages: 1, dp: 2, tp: 1 },
    Degrees { stages: 1, dp: 1, tp: 2 },
    Degrees { stages: 2, dp: 2, tp: 1 },
    Degrees { stages: 1, dp: 2, tp: 2 },
];

/// Starts the program again with the variables that ranks need, if some are not set: the driver reads them
/// when a process first uses it.
pub(crate) fn set_variables() -> std::io::Result<()> {
    let missing = NCCL_VARIABLES.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let missing: Vec<_> = missing.copied().collect();
    if missing.is_empty() {
        return Ok(());
    }
    let program = std::env::current_exe()?;
    Err(Command::new(program).args(std::env::args_os().skip(1)).envs(missing).exec())
}

pub(crate) fn run(_: &Arguments) -> Result<Outcome> {
    let identity = identity_from_environment()?;
    if identity.rendezvous.is_some() {
        return rank(&identity);
    }
    let search = SearchPath::from_environment();
    // the device opens the driver, which NCCL needs
    let cuda = device::cuda(Dtype::F32)?;
    let nccl = match Nccl::open(&search) {
        Err(error @ CudaError::LibraryNotFound { .. }) => {
            return Ok(report::summary("nccl", Outcome::Skipped, &error.to_string(), "NCCL"));
        }
        opened => opened?,
    };
    let (version, file) = (nccl.version(), nccl.file().display().to_string());
    let (_, calls) = check_nccl_alone(&cuda, &search)?;
    report::result("nccl", json!({"version": version.to_string(), "file": file, "ranks": 1, "right": calls}));
    let alone = format!("NCCL {version}: {} calls of one rank are right", calls.len());
    let is_allowed = std::env::var(IS_SHARED).is_ok_and(|value| value == "1");
    if version < NcclVersion::SHARED_DEVICE || !is_allowed {
        let reason = format!(
            "not run: ranks share a device from NCCL {} on, with {IS_SHARED}=1",
            NcclVersion::SHARED_DEVICE
        );
        report::result("nccl", json!({"ranks": [2, 4], "skipped": reason}));
        let figure = format!("{alone}; 2 and 4 ranks {reason}");
        return Ok(report::summary("nccl", Outcome::Passed, &figure, "right numbers"));
    }
    // a process for each rank: ranks in the same process would share the device context, in which loads on
    // one rank wait for messages on another
    let program = std::env::current_exe()?;
    let mut failed = Vec::new();
    for (index, Degrees { stages, dp, tp }) in JOBS.into_iter().enumerate() {
        let launcher = Launcher::new(&program, stages * dp * tp)?.args(["nccl"]).first_rank_prints_plainly();
        if launcher.variable(JOB, index.to_string()).run()?.failed.is_some() {
            failed.push(format!("stages {stages} dp {dp} tp {tp}"));
        }
    }
    let (outcome, found) = if failed.is_empty() {
        (Outcome::Passed, format!("within {TOLERANCE:.0e}"))
    } else {
        (Outcome::Failed, format!("NOT within {TOLERANCE:.0e} for {}", failed.join(", ")))
    };
    let figure = format!("{alone}; losses of 2 and 4 ranks {found} of those through the host");
    Ok(report::summary("nccl", outcome, &figure, &format!("{TOLERANCE:.0e}")))
}

/// Runs a job through the host and over NCCL, as one rank.
fn rank(identity: &RankIdentity) -> Result<Outcome> {
    let index: usize = std::env::var(JOB)?.parse()?;
    let degrees = *JOBS.get(index).ok_or("there is no such job")?;
    let session = tcp::connect(identity, Settings::default())?;
    let (host, job): (Arc<dyn Comm>, _) = (Arc::new(session.comm), job(degrees)?);
    let through_host = train_rank(&job, &host, Transport::Host)?;
    let losses = train_rank(&job, &host, Transport::Nccl)?;
    let largest = difference(&through_host, &losses);
    let Degrees { stages, dp, tp } = degrees;
    if identity.rank == 0 {
        report::result(
            "nccl",
            json!({"ranks": stages * dp * tp, "stages": stages, "dp": dp, "tp": tp, "losses": losses,
                "losses_through_host": through_host, "difference": largest}),
        );
    }
    Ok(if largest <= TOLERANCE { Outcome::Passed } else { Outcome::Failed })
}

/// Returns the maximum relative difference between losses; infinite for NaN, which `max` would hide.
pub(crate) fn difference(host: &[f64], nccl: &[f64]) -> f64 {
    let differences = host.iter().zip(nccl).map(|(host, nccl)| ((host - nccl) / host).abs());
    differences.fold(0.0, |worst, one| if one.is_nan() { f64::INFINITY } else { worst.max(one) })
}

/// Returns a job for a small model.
fn job(Degrees { stages, dp, tp }: Degrees) -> Result<Arc<Job>> {
    let model = ModelConfig::from_config(&models::shared())?;
    let layout = ModuleParallelism::even(ModuleKind::Llm, model.layers(ModuleKind::Llm), stages);
    let layout = layout.dp_size(dp).tp_size(tp);
    let schedule = ScheduleKind::OneForwardOneBackward;
    Ok(Arc::new(Job::new(model, FrozenModules::default(), vec![layout], schedule)?))
}

/// Returns a job for a small model with this number of stages.
pub(crate) fn stages(stages: usize) -> Result<Arc<Job>> {
    job(Degrees { stages, dp: 1, tp: 1 })
}

/// Trains as one rank.
pub(crate) fn train_rank(job: &Arc<Job>, host: &Arc<dyn Comm>, transport: Transport) -> Result<Vec<f64>> {
    let cuda = device::cuda(Dtype::F32)?;
    let comm: Arc<dyn DeviceComm<Cuda>> = match transport {
        Transport::Host => Arc::new(Staged::new(cuda.clone(), Arc::clone(host))),
        Transport::Nccl => {
            Arc::new(NcclComm::join(&cuda, Arc::clone(host), &SearchPath::from_environment())?)
        }
    };
    let (frozen, stored) = (FrozenModules::default(), Activations::Stored);
    let mut pipeline = join_job_over(comm, job, &cuda, frozen, stored, &Seed(1))?;
    let settings =
        JobOptimizerSettings::new(LearningRate { peak: 1e-2, warmup_steps: 0, decay: Decay::Constant });
    let stages: Vec<_> = pipeline.stages().map(|(_, stage)| stage).collect();
    let mut optimizer =
        JobOptimizer::new(settings, pipeline.comm(), stages)?.exchange_over(pipeline.tensors());
    let rounds = MICROBATCHES * job.modules()[0].dp_size;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let microbatches = vec![MicrobatchPlan { tokens: TOKENS as usize, media: Vec::new() }; rounds];
        let targets = u64::from(TOKENS - 1) * rounds as u64;
        let plan = Arc::new(PipelineStepPlan::new(job, step, targets, microbatches)?);
        let mut contexts = BTreeMap::new();
        for role in pipeline.roles() {
            for own in plan.replica_microbatches(job, role.module, role.replica) {
                let words = (0..TOKENS).map(|place| i64::from((own * 31 + place * 7) % 64));
                let words: Vec<i64> = words.collect();
                let positions: Vec<i64> = (0..i64::from(TOKENS)).collect();
                let batch = TextBatch {
                    input_ids: &words,
                    labels: &words,
                    positions: &positions,
                    cu_seqlens: &[0, TOKENS as i32],
                    media_places: &[],
                    loss_scale: plan.loss_scale(),
                };
                let context = job.model().llm.context(&cuda, &batch)?;
                contexts.insert((role.module, own), Arc::new(context));
            }
        }
        let pending = pipeline.start(&RankStep { plan, contexts })?;
        losses.push(optimizer.update_step(&pending, pipeline.stages_mut())?.0.loss);
    }
    // ranks end together, because communicators need all ranks to end
    host.barrier(StepContext::step(STEPS, "end"))?;
    Ok(losses)
}
