//! Scores a given parallelism plan in the same way as planned ones.

use super::parallelism_plan::ParallelismPlan;
use super::problem::PlanProblem;
use super::score;
use super::score::step_timeline::StepTimeline;
use super::space::bound;
use super::space::memory::MemoryRequirement;
use dflop_balancer::{Error, Result};

/// Score for a given plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// Makespan per batch, nanoseconds.
    pub makespans_ns: Vec<u64>,
    /// Memory on each encoder's fullest GPU over all batches, bytes.
    pub encoder_bytes: Vec<u64>,
    /// Memory on the LLM's fullest GPU over all batches, bytes.
    pub llm_bytes: u64,
    /// Lower bound on the plan's makespan on these batches, nanoseconds.
    pub lower_bound_ns: f64,
}

impl Evaluation {
    /// Returns the mean makespan in seconds.
    #[must_use]
    pub fn mean_seconds(&self) -> f64 {
        self.makespans_ns.iter().map(|ns| *ns as f64).sum::<f64>() / self.makespans_ns.len() as f64 / 1e9
    }
}

/// Scores a given plan on a problem's batches, balanced as for finalists.
///
/// Memory is reported; batches for a plan that does not fit are balanced as if memory were unlimited.
///
/// # Errors
/// [`Error::Config`] if the plan is outside the problem's search space.
pub fn evaluate(problem: &PlanProblem<'_>, plan: &ParallelismPlan) -> Result<Evaluation> {
    problem.with_expert_parallel(plan.expert_parallel, |problem| evaluate_at_degree(problem, plan))?
}

fn evaluate_at_degree(problem: &PlanProblem<'_>, plan: &ParallelismPlan) -> Result<Evaluation> {
    let (space, mut timeline) = (problem.space()?, StepTimeline::default());
    let outside =
        || Error::Config { setting: "plan", reason: format!("{plan:?} is outside the search space") };
    let candidate = plan.candidate(&space).ok_or_else(outside)?;
    if !space.contains(&candidate) {
        return Err(outside());
    }
    let all = 0..space.workload.batches().len();
    let score = score::refined(&space, &candidate, all, &mut timeline)?;
    let MemoryRequirement { encoder_bytes, llm_bytes } = score.requirement();
    Ok(Evaluation {
        makespans_ns: score.makespans_ns,
        encoder_bytes: encoder_bytes[..problem.encoders.len()].iter().map(|bytes| *bytes as u64).collect(),
        llm_bytes: llm_bytes as u64,
        lower_bound_ns: bound::lower_bound_ns(&space, &candidate),
    })
}
