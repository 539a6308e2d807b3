//! Simulates a method's step on one batch, pass by pass.

use super::data_blind::{alone, run_pipelines};
use super::{Assigned, Method, MethodScore, assign, given};
use crate::cluster::Placement;
use crate::problem::PlanProblem;
use crate::score::makespan_ns;
use crate::score::slot_assignment::SlotAssignment;
use crate::score::step_timeline::{self, LanePass};
use crate::space::{Candidate, SearchSpace};
use dflop_balancer::{Error, Result, split_time};

/// Pass through a stage on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MethodPass {
    /// Module index: encoders in model order, then the LLM, which stands for all modules in joint stages.
    pub module: usize,
    /// Stage index in the module.
    pub stage: usize,
    /// LLM DP rank; 0 for an encoder whose ranks share the media of all LLM ranks.
    pub rank: usize,
    /// Microbatch index on the rank; 0 for a colocated encoder, which encodes the whole batch at once.
    pub microbatch: u32,
    /// Whether the pass is a forward pass.
    pub is_forward: bool,
    /// Start time, nanoseconds after the step begins.
    pub start_ns: u64,
    /// End time, nanoseconds after the step begins.
    pub end_ns: u64,
}

/// Simulated step under a method.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MethodStep {
    /// Simulated method.
    pub method: Method,
    /// End time of the step, gradient sums included, in nanoseconds.
    pub makespan_ns: u64,
    /// Passes, in order on each rank and stage.
    pub passes: Vec<MethodPass>,
}

/// Simulates a compared method's step on a batch of the problem.
///
/// - `batch`: index in [`Workload::batches`](crate::Workload::batches)
///
/// # Errors
/// [`Error::Config`] if there is no such batch, or the score is from another problem.
pub fn method_step(problem: &PlanProblem<'_>, score: &MethodScore, batch: usize) -> Result<MethodStep> {
    problem
        .with_expert_parallel(score.plan.expert_parallel, |problem| step_at_degree(problem, score, batch))?
}

fn step_at_degree(problem: &PlanProblem<'_>, score: &MethodScore, batch: usize) -> Result<MethodStep> {
    let (space, candidate) = given::space_with(problem, &score.plan)?;
    let Some(items) = space.workload.batches().get(batch) else {
        let reason = format!("there are {} batches, found {batch}", space.workload.batches().len());
        return Err(Error::Config { setting: "batch", reason });
    };
    let (makespan_ns, passes) = match assign(&space, score.method, &candidate, items)? {
        Assigned::Job(assignment) => {
            (makespan_ns(&space, &candidate, &assignment), job_passes(&space, &candidate, &assignment, 0))
        }
        Assigned::Pipelines(pipelines) => {
            let outcome = run_pipelines(&space, &candidate, &pipelines);
            let alone = alone(&candidate);
            let of_rank =
                |(rank, assignment): (usize, &SlotAssignment)| job_passes(&space, &alone, assignment, rank);
            (outcome.makespan_ns, pipelines.iter().enumerate().flat_map(of_rank).collect())
        }
    };
    Ok(MethodStep { method: score.method, makespan_ns, passes })
}

/// Lists a job's passes, without those that take no time.
///
/// - `first_rank`: number of the job's first rank
fn job_passes(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    assignment: &SlotAssignment,
    first_rank: usize,
) -> Vec<MethodPass> {
    let (step, encoders) = (assignment.times(space, candidate), candidate.family.encoders.len());
    let chains = step.encoders.iter().enumerate().chain([(encoders, &step.llm)]);
    let places: Vec<(usize, usize)> = chains
        .flat_map(|(module, chain)| (0..chain.stages.len()).map(move |stage| (module, stage)))
        .collect();
    // Colocated encoders run before and after the pipeline.
    let phases_ns: Vec<(u64, u64)> = match candidate.family.placement {
        Placement::Colocated => {
            (0..encoders).map(|encoder| split_time(assignment.phase_ns(space, candidate, encoder))).collect()
        }
        Placement::Disaggregated | Placement::Joint => Vec::new(),
    };
    let phase = |module: usize, is_forward: bool, start_ns: u64| {
        let (forward_ns, backward_ns) = phases_ns[module];
        let end_ns = start_ns + if is_forward { forward_ns } else { backward_ns };
        MethodPass { module, stage: 0, rank: first_rank, microbatch: 0, is_forward, start_ns, end_ns }
    };
    let (mut passes, mut now_ns) = (Vec::new(), 0);
    for module in 0..phases_ns.len() {
        let pass = phase(module, true, now_ns);
        now_ns = pass.end_ns;
        passes.push(pass);
    }
    let before_ns = now_ns;
    for LanePass { stage, slot, lane, is_forward, start_ns, end_ns } in step_timeline::passes(&step) {
        let (module, stage) = places[stage];
        let (rank, microbatch) = (first_rank + lane, slot as u32);
        let (start_ns, end_ns) = (before_ns + start_ns, before_ns + end_ns);
        now_ns = now_ns.max(end_ns);
        passes.push(MethodPass { module, stage, rank, microbatch, is_forward, start_ns, end_ns });
    }
    for module in (0..phases_ns.len()).rev() {
        let pass = phase(module, false, now_ns);
        now_ns = pass.end_ns;
        passes.push(pass);
    }
    passes.retain(|pass| pass.start_ns < pass.end_ns);
    passes
}
