//! `dflop plan`: finds a parallelism plan for a model, the shapes of a dataset and a cluster.

mod layouts;
mod report;
pub(crate) mod samples;
pub(crate) mod shapes;
mod trainer;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::memory::{ReplicaMemory, Trainer};
use dflop_costmodel::profile::Profile;
use dflop_costmodel::{CostModel, DevicePreset, ExpertImbalance, LaunchLimit, ModelSpec, ProfileOptions};
use dflop_planner::{
    Cluster, EncoderSplit, ExpertParallel, Links, ModelCostsBuilder, PlanProblem, PlannedModel,
    SearchSpaceOptions, Workload, data_parallel, plan,
};

use crate::args::ReportArgs;
use crate::args::model::{TrainerArgs, profile_and_spec};
use crate::args::set::{Accepted, SetArgs, accepted};
use crate::args::step_plan::check_pipeline;
use crate::failure::Failure;
use crate::output::layouts::BYTES_PER_GIB;
use crate::output::{Output, write_json};
use crate::report::write_report;
use dflop_loader::settings::{EncoderShare, Settings, SpaceSettings, machine_device};
use layouts::{LayoutsJson, with_layout};
use report::PlanJson;
pub(crate) use report::{DegreesJson, ModuleMemoryJson};
use samples::{SampleArgs, Samples};
use trainer::{ScriptInputs, TrainerJson};

/// Memory per GPU in GiB for a profile, and for devices without a fixed size.
const MEMORY_GIB: f64 = 80.0;

/// Find the fastest parallelism: encoder and LLM degrees, GPU split, number of microbatches.
///
/// Each plan is simulated with balanced global batches that are drawn from the samples in a dataset, or from
/// a shape table. Models have an LLM and one or several parallel encoders. The lower bound covers the
/// searched plans, which are printed with it. DDP, ZeRO-1, ZeRO-2, FSDP and HSDP are balanced on the same
/// batches, with as few microbatches as fit; if one of them is faster than every plan, it is printed first.
///
/// With `--trainer torch`, plans are those that `dflop.torch.Pipeline` runs, with the memory of eager PyTorch
/// modules, and the answer names what to pass to it.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Measured profile: a directory with CSV files, or a single file. The reference's files name their
    /// model; other files need `--model`.
    #[arg(long, value_name = "DIR", required_unless_present = "model")]
    profile: Option<PathBuf>,
    /// Model preset or checkpoint directory; several are joined.
    #[arg(long, value_name = "NAME|DIR")]
    model: Vec<String>,
    /// Device preset in place of a profile: a stated FLOP rate, not a measurement [default: `DFLOP_DEVICE`,
    /// else h100].
    #[arg(long, value_name = "NAME", conflicts_with = "profile")]
    device: Option<String>,
    /// Number of GPUs in the cluster.
    #[arg(long, value_name = "N")]
    gpus: u32,
    /// GPUs per node; tensor-parallel groups stay within a node.
    #[arg(long, value_name = "G", default_value_t = 8)]
    gpus_per_node: u32,
    /// Memory per GPU in GiB [default: from the device preset; 80 with a profile].
    #[arg(long, value_name = "M")]
    memory_gib: Option<f64>,
    /// Number of samples in a global batch, over all DP ranks.
    #[arg(long, value_name = "B")]
    global_batch_size: u32,
    /// Number of global batches that the finalists are judged on [default: 50, fewer for more than 2,048
    /// samples in a batch].
    #[arg(long, value_name = "K")]
    batches: Option<usize>,
    /// Seed for the drawn batches.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    trainer: TrainerArgs,
    #[command(flatten)]
    set: SetArgs<PlanAccepted>,
    /// Bandwidth and latency for links inside and between nodes, JSON or CSV [default: from the device
    /// preset; free with a profile or in the basic space].
    #[arg(long, value_name = "FILE")]
    links: Option<PathBuf>,
    #[command(flatten)]
    report: ReportArgs,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    samples: SampleArgs,
}

accepted!(PlanAccepted: "space", "plan.schedule", "cost.freeze", "cost.profile_check", "processor.chat_template",
    "processor.caption_prompt", "index", "store");

pub(crate) fn run(args: &PlanArgs, out: &mut Output) -> Result<(), Failure> {
    let settings = args.set.settings()?;
    let space = &settings.space;
    let (profile, spec) = profile_and_spec(&args.model, args.profile.as_deref(), &settings)?;
    let encoder_split = encoder_split(space, &spec)?;
    let is_full = space.is_full(profile.is_some());
    check_pipeline(&args.set, &settings)?;
    args.trainer.check(&args.set, &settings)?;
    let trainer = args.trainer.trainer();
    let schedule = settings.plan.pipeline_schedule();
    check_space(&args.set, is_full, schedule)?;
    let device = profile.is_none().then(|| DevicePreset::named(&args.device())).transpose()?;
    let preset = device.filter(|_| is_full);
    let memory_gib = memory_gib(args.memory_gib, device)?;
    let cluster = cluster([args.gpus, args.gpus_per_node], memory_gib, args.links.as_deref(), preset)?;
    let model = costs(&spec, &settings, &cluster, (profile.as_ref(), device), trainer)?;
    let Samples { sizes, account } = args.samples.read(&spec, &args.set)?;
    let batches = args.batches.unwrap_or(Workload::enough_batches(args.global_batch_size));
    let workload = Workload::draw(&sizes, args.global_batch_size, batches, args.seed)?;
    let problem = PlanProblem {
        encoders: model.encoder_costs(),
        llm: &model.llm,
        workload: &workload,
        cluster,
        options: search_space(&args.set, &settings, is_full, (trainer, profile.as_ref())),
        encoder_split,
        memory_margin: space.memory_margin,
    };
    let started = Instant::now();
    let memory = ReplicaMemory::new(&spec).frozen(settings.cost.frozen()).trainer(trainer);
    let found = plan(&problem).map_err(|error| with_layout(error, &problem, &memory))?;
    let search_seconds = started.elapsed().as_secs_f64();
    let launch_limits = profile.as_ref().map_or_else(Vec::new, |profile| launch_limits(&spec, profile));
    let mut report = PlanJson::new(&spec, &problem, &found, account, args.times_from(), search_seconds);
    report.launch_limits = launch_limits;
    report.layouts = LayoutsJson::new(&problem, &found, data_parallel(&problem, &memory));
    let inputs = ScriptInputs {
        models: &args.model,
        shards: args.samples.shards(),
        frozen: settings.cost.freeze,
        is_measured: profile.is_some(),
        global_batch_size: args.global_batch_size,
    };
    report.trainer = TrainerJson::new(&problem, &found, &inputs);
    if let Some(path) = args.report.path() {
        write_report(path, &report.to_report())?;
    }
    if args.json { write_json(out, &report) } else { report.print(out) }
}

/// Returns the limits by launches without tensor parallelism; none where the profile lacks it.
fn launch_limits(spec: &ModelSpec, profile: &Profile) -> Vec<LaunchLimit> {
    let options = ProfileOptions::default().unchecked();
    CostModel::from_profile(spec.clone(), profile, options)
        .map_or_else(|_| Vec::new(), |model| model.launch_limits())
}

impl PlanArgs {
    fn device(&self) -> String {
        self.device.clone().unwrap_or_else(machine_device)
    }

    /// Describes the time source, for people.
    fn times_from(&self) -> String {
        match &self.profile {
            Some(path) => path.display().to_string(),
            None => format!("{} (a stated rate)", self.device()),
        }
    }
}

/// Returns the plan kinds that are searched. A schedule that is given is the only schedule. PyTorch times
/// that were measured with recomputation allow plans with and without it.
pub(super) fn search_space<A: Accepted>(
    set: &SetArgs<A>,
    settings: &Settings,
    is_full: bool,
    (trainer, profile): (Trainer, Option<&Profile>),
) -> SearchSpaceOptions {
    let is_recomputed = trainer == Trainer::Torch && profile.is_some_and(Profile::recomputes_layers);
    let (space, schedule) = (&settings.space, settings.plan.pipeline_schedule());
    let [is_disaggregated, is_colocated, is_joint] = space.placement.into();
    let has_all = is_full && !set.is_given("plan.schedule");
    // Other schedules have no rounds ahead.
    let is_plain = schedule == ScheduleKind::OneForwardOneBackward;
    SearchSpaceOptions {
        is_disaggregated,
        is_colocated,
        is_joint,
        has_uneven_layers: is_full || space.uneven_layers,
        has_recomputation: is_full || space.recompute || is_recomputed,
        has_encoder_ahead: is_plain && (has_all || space.encoder_ahead),
        has_other_schedules: has_all,
        has_sharded_optimizer: space.zero1,
        schedule,
        trainer,
    }
}

/// Rejects settings of plan kinds that have no effect: encoders that run ahead with a schedule other than
/// 1F1B, and kinds that the full space always has.
///
/// # Errors
/// [`Failure::Misuse`] with the first such setting.
pub(super) fn check_space<A: Accepted>(
    set: &SetArgs<A>,
    is_full: bool,
    schedule: ScheduleKind,
) -> Result<(), Failure> {
    if schedule != ScheduleKind::OneForwardOneBackward {
        let reason = format!("has no effect with `plan.schedule={schedule}`; leave it out");
        set.refuse(&["space.encoder_ahead"], &reason)?;
    }
    if is_full {
        let reason = "has no effect in the full space, which has all of these plans; leave it out, or give \
                      `space.kinds=basic`";
        set.refuse(&["space.uneven_layers", "space.recompute", "space.encoder_ahead"], reason)?;
    }
    Ok(())
}

fn parse_imbalance(space: &SpaceSettings) -> Result<ExpertImbalance, Failure> {
    let refused = |reason| Failure::Misuse(format!("invalid `space.expert_imbalance`: {reason}"));
    space.expert_imbalance.parse().map_err(refused)
}

/// Returns the unit in which ranks share media.
///
/// # Errors
/// [`Failure::Misuse`] if tiles are requested for a model without tiles.
pub(super) fn encoder_split(space: &SpaceSettings, spec: &ModelSpec) -> Result<EncoderSplit, Failure> {
    let is_native = spec.encoders().any(|(module, ..)| spec.is_native(module));
    match space.encoder_share {
        EncoderShare::Medium => Ok(EncoderSplit::Medium),
        EncoderShare::Sample => Ok(EncoderSplit::Sample),
        EncoderShare::Tile if !is_native => Ok(EncoderSplit::Tile),
        EncoderShare::Tile => Err(Failure::Misuse(format!(
            "invalid `space.encoder_share`: `{}` sees images in their own resolution, without tiles; give \
             `medium` or `sample`",
            spec.name
        ))),
    }
}

/// Returns the memory per GPU in GiB: as given, else the device's.
pub(super) fn memory_gib(given: Option<f64>, device: Option<DevicePreset>) -> Result<f64, Failure> {
    let of_device = device.and_then(|device| device.memory_gib());
    let gib = given.or(of_device).unwrap_or(MEMORY_GIB);
    if !(gib > 0.0 && gib.is_finite()) {
        return Err(Failure::Misuse("invalid `memory-gib`: must be above 0".into()));
    }
    Ok(gib)
}

/// Builds a cluster from the total GPU count, the GPUs per node, the memory per GPU, and a link file or the
/// device's links.
pub(super) fn cluster(
    [gpus, gpus_per_node]: [u32; 2],
    memory_gib: f64,
    links: Option<&Path>,
    device: Option<DevicePreset>,
) -> Result<Cluster, Failure> {
    Ok(Cluster {
        gpus,
        gpus_per_node,
        memory_bytes: (memory_gib * BYTES_PER_GIB) as u64,
        links: match links {
            Some(path) => Some(samples::read(path)?),
            None => device.and_then(|device| device.links()).map(Links::from),
        },
    })
}

/// Builds the costs of encoders and LLM from a measured profile or a device.
pub(super) fn costs(
    spec: &ModelSpec,
    settings: &Settings,
    cluster: &Cluster,
    (profile, device): (Option<&Profile>, Option<DevicePreset>),
    trainer: Trainer,
) -> Result<PlannedModel, Failure> {
    let space = &settings.space;
    let is_full = space.is_full(profile.is_some());
    let builder = ModelCostsBuilder::new(spec).frozen(settings.cost.frozen());
    let builder = builder.trainer(trainer).state(trainer.state(space.zero1));
    let builder = builder.sequence_parallel(space.sequence_parallel).expert_parallel(ExpertParallel {
        degree: space.expert_parallel,
        imbalance: parse_imbalance(space)?,
        links: cluster.links,
        gpus_per_node: cluster.gpus_per_node,
    });
    // A profile's times include the tensor-parallel collectives; a stated rate's times do not.
    let builder = builder.tensor_parallel_link(cluster.links.map(|links| links.nvlink));
    let builder = match (profile, device) {
        (Some(profile), _) => builder.profile(profile),
        (None, Some(device)) if is_full => builder.device(device),
        (None, Some(device)) => builder.rate(*device.rate()),
        (None, None) => builder,
    };
    Ok(builder.build()?)
}
