//! Builds the space that holds a single given plan, after checks against model, cluster and placement.
//!
//! A search lists the plans that may be the fastest. A given plan may leave GPUs free, use fewer encoder
//! ranks, or cut layers in any way; it only has to be one that can run.

use crate::cluster::Placement;
use crate::costs::ModuleCosts;
use crate::problem::{Degrees, ModulePlan, ParallelismPlan, PlanProblem};
use crate::space::joint::ChainLayers;
use crate::space::{Candidate, ModuleSpace, SearchSpace, SearchSpaceOptions};
use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Error, Result};

/// Builds the space with the plan's shapes, and finds the plan in it.
///
/// # Errors
/// [`Error::Config`] with the part of the plan that the model, the cluster or the placement do not allow.
pub(super) fn space_with<'a>(
    problem: &PlanProblem<'a>,
    plan: &ParallelismPlan,
) -> Result<(SearchSpace<'a>, Candidate)> {
    let options = SearchSpaceOptions {
        is_disaggregated: plan.placement == Placement::Disaggregated,
        is_colocated: plan.placement == Placement::Colocated,
        is_joint: plan.placement == Placement::Joint,
        has_encoder_ahead: false,
        has_other_schedules: false,
        schedule: plan.schedule,
        ..problem.options
    };
    check_schedule(plan)?;
    check_trainer(problem, plan)?;
    let problem = PlanProblem { options, ..problem.clone() };
    let mut space = problem.space_without_shapes()?;
    check_modules(&problem, &space, plan)?;
    check_batches(&problem, plan)?;
    match plan.placement {
        Placement::Disaggregated => {}
        Placement::Colocated => check_colocated(&space, plan)?,
        Placement::Joint => check_joint(&space, plan)?,
    }
    let (gpus, available) = (gpus(plan), problem.cluster.gpus);
    if gpus > u64::from(available) {
        return refuse(format!("it uses {gpus} GPUs, and the cluster has {available}"));
    }
    add_shapes(&problem, &mut space, plan);
    let node = problem.cluster.gpus_per_node;
    let no_room = || format!("its tensor-parallel groups do not fit into nodes of {node} GPUs");
    let candidate = plan.candidate(&space).filter(|candidate| space.contains(candidate));
    Ok((space, candidate.ok_or_else(|| invalid(no_room()))?))
}

fn invalid(reason: String) -> Error {
    Error::Config { setting: "plan", reason }
}

fn refuse<T>(reason: String) -> Result<T> {
    Err(invalid(reason))
}

/// Multiplies degrees, saturating.
fn product(degrees: &[u32]) -> u64 {
    degrees.iter().fold(1, |all: u64, degree| all.saturating_mul(u64::from(*degree)))
}

/// Returns the number of GPUs that a plan uses, saturating.
fn gpus(plan: &ParallelismPlan) -> u64 {
    let module = |module: &ModulePlan| {
        let Degrees { tp, pp, dp } = module.degrees;
        product(&[tp, pp, dp])
    };
    let encoders = plan.encoders.iter().map(module);
    match plan.placement {
        Placement::Disaggregated => encoders.fold(module(&plan.llm), u64::saturating_add),
        Placement::Colocated | Placement::Joint => module(&plan.llm),
    }
}

/// Checks degrees and layers of each module.
fn check_modules(problem: &PlanProblem<'_>, space: &SearchSpace<'_>, plan: &ParallelismPlan) -> Result<()> {
    let [own, expected] = [plan.encoders.len(), problem.encoders.len()];
    if own != expected {
        return refuse(format!("it has {own} encoders, and the model {expected}"));
    }
    let spaces = space.encoders.iter().chain([&space.llm]);
    let costs = problem.encoders.iter().copied().chain([problem.llm]);
    let modules = plan.encoders.iter().map(|encoder| (encoder, 1));
    let modules = modules.chain([(&plan.llm, plan.schedule.chunks())]);
    for ((space, costs), module) in spaces.zip(costs).zip(modules) {
        check_module(space, costs, module, plan.placement)?;
    }
    let (ep, dp) = (plan.expert_parallel, plan.llm.degrees.dp);
    if !dp.is_multiple_of(ep) {
        return refuse(format!("`llm` has {dp} DP ranks, which {ep} expert-parallel ranks do not divide"));
    }
    Ok(())
}

fn check_module(
    space: &ModuleSpace,
    costs: &dyn ModuleCosts,
    (module, chunks): (&ModulePlan, usize),
    placement: Placement,
) -> Result<()> {
    let (name, Degrees { tp, pp, dp }) = (space.name, module.degrees);
    if pp == 0 || dp == 0 {
        return refuse(format!("`{name}` has a degree of 0"));
    }
    if !space.tp_degrees().any(|degree| degree == tp) {
        let degrees: Vec<String> = space.tp_degrees().map(|degree| degree.to_string()).collect();
        let degrees = if degrees.is_empty() { "none".to_owned() } else { degrees.join(", ") };
        return refuse(format!("`{name}` has a TP degree of {tp}; heads, costs and nodes allow: {degrees}"));
    }
    let (layers, stages) = (&module.layers, module.layers.len());
    let expected = (pp as usize).saturating_mul(chunks);
    if stages != expected {
        return refuse(format!("`{name}` has {expected} stages, with layers for {stages}"));
    }
    let (found, expected) = (layers.iter().fold(0, |all: u32, own| all.saturating_add(*own)), costs.layers());
    if found != expected {
        return refuse(format!("`{name}` has {found} layers, and the model's has {expected}"));
    }
    if placement != Placement::Joint && layers.contains(&0) {
        return refuse(format!("`{name}` has a stage without layers, which only joint placement allows"));
    }
    Ok(())
}

/// Checks that the executor runs the schedule in the plan's placement, with the plan's recomputation.
fn check_schedule(plan: &ParallelismPlan) -> Result<()> {
    let (schedule, placement) = (plan.schedule, plan.placement);
    let suitable = match schedule {
        ScheduleKind::EncoderAhead { .. } => Placement::Disaggregated,
        ScheduleKind::Interleaved { .. } => Placement::Colocated,
        _ => placement,
    };
    if placement != suitable {
        let [found, suitable] = [placement, suitable].map(Placement::name);
        return refuse(format!("{schedule} is for {suitable} placement, and the plan's is {found}"));
    }
    let mut modules = plan.encoders.iter().chain([&plan.llm]);
    if schedule == ScheduleKind::ZeroBubble && modules.any(|module| module.is_recomputed) {
        return refuse(
            "zb-h1 keeps the rows of all layers for weight gradients, so that recomputing layers saves no \
             memory: leave one of the two out"
                .to_owned(),
        );
    }
    Ok(())
}

/// Checks that the trainer runs the plan's degrees.
fn check_trainer(problem: &PlanProblem<'_>, plan: &ParallelismPlan) -> Result<()> {
    let trainer = problem.options.trainer;
    let name = trainer.name();
    let encoders = plan.encoders.iter().zip(problem.encoder_names());
    for (ModulePlan { degrees, .. }, module) in encoders.chain([(&plan.llm, "llm")]) {
        if degrees.tp > trainer.tp_max() {
            return refuse(format!(
                "`{module}` has a TP degree of {}; trainer `{name}` runs stages on one rank each: plan with \
                 `--trainer {name}`, or shard over `mesh[\"tp\"]` in stages of your own",
                degrees.tp
            ));
        }
    }
    if plan.expert_parallel > trainer.expert_parallel_max() {
        return refuse(format!(
            "`llm` divides experts over {} ranks; trainer `{name}` keeps all experts of a layer on a rank: \
             plan with `--trainer {name}`",
            plan.expert_parallel
        ));
    }
    Ok(())
}

/// Checks that microbatches have samples.
fn check_batches(problem: &PlanProblem<'_>, plan: &ParallelismPlan) -> Result<()> {
    let (microbatches, dp) = (plan.microbatches, plan.llm.degrees.dp);
    if microbatches == 0 {
        return refuse("it has no microbatches".to_owned());
    }
    let (groups, samples) = (product(&[microbatches, dp]), problem.workload.global_batch());
    if groups > u64::from(samples) {
        return refuse(format!(
            "{microbatches} microbatches on each of {dp} DP ranks need {groups} samples, and a global batch has \
             {samples}"
        ));
    }
    Ok(())
}

/// Checks that each encoder uses the LLM's GPUs in a single stage.
fn check_colocated(space: &SearchSpace<'_>, plan: &ParallelismPlan) -> Result<()> {
    let gpus = gpus(plan);
    for (space, encoder) in space.encoders.iter().zip(&plan.encoders) {
        let (name, Degrees { tp, pp, dp }) = (space.name, encoder.degrees);
        if pp != 1 {
            return refuse(format!(
                "`{name}` has {pp} stages; a colocated encoder is simulated with a single stage"
            ));
        }
        let own = product(&[tp, dp]);
        if own != gpus {
            return refuse(format!(
                "`{name}` uses {own} GPUs; a colocated encoder uses the LLM's, which are {gpus}"
            ));
        }
    }
    Ok(())
}

/// Checks that encoders and LLM form a chain of stages, in which each GPU holds whole encoder layers.
fn check_joint(space: &SearchSpace<'_>, plan: &ParallelismPlan) -> Result<()> {
    if plan.expert_parallel > 1 {
        let reason = "joint placement is simulated without expert parallelism";
        return refuse(reason.to_owned());
    }
    let Degrees { tp, pp, dp } = plan.llm.degrees;
    let replicas = product(&[tp, dp]);
    let first = plan.llm.layers.iter().position(|layers| *layers > 0).unwrap_or(0);
    for (space, encoder) in space.encoders.iter().zip(&plan.encoders) {
        let (name, own) = (space.name, encoder.degrees);
        if (own.tp, own.pp, u64::from(own.dp)) != (1, pp, replicas) {
            return refuse(format!(
                "`{name}` has tp{},pp{},dp{}; with joint placement each GPU holds whole encoder layers: \
                 tp1,pp{pp},dp{replicas}",
                own.tp, own.pp, own.dp
            ));
        }
        let last = encoder.layers.iter().rposition(|layers| *layers > 0).unwrap_or(0);
        if last > first {
            return refuse(format!(
                "`{name}` ends in stage {}, after the LLM's first stage, {}",
                last + 1,
                first + 1
            ));
        }
    }
    let modules = || plan.encoders.iter().chain([&plan.llm]);
    match (0..pp as usize).find(|stage| modules().all(|module| module.layers[*stage] == 0)) {
        Some(stage) => refuse(format!("stage {} has no layers", stage + 1)),
        None => Ok(()),
    }
}

fn add_shapes(problem: &PlanProblem<'_>, space: &mut SearchSpace<'_>, plan: &ParallelismPlan) {
    let chain = |module: &ModulePlan| ChainLayers {
        layers: module.layers.clone(),
        is_recomputed: module.is_recomputed,
    };
    let modules = plan.encoders.iter().chain([&plan.llm]);
    if plan.placement == Placement::Joint {
        let modules = modules.map(chain).collect();
        space.add_joint(&problem.encoders, problem.llm, plan.llm.degrees.tp, modules);
    } else {
        let modules = modules.map(|module| (module.degrees.tp, chain(module))).collect();
        space.add_separate(&problem.encoders, problem.llm, modules);
    }
}
