//! Finds the fastest parallelism plan for a problem and reports it.

use super::explain::explain;
use super::problem::{ParallelismPlan, PlanProblem};
use super::refine::refine;
use super::report::{PlanReport, RunnerUp};
use super::search;
use super::search::Search;
use super::suggestion::suggestion;
use dflop_balancer::{Error, Result};

/// Finds the fastest plan.
///
/// A model with experts is planned with each expert-parallel degree; ties go to the lowest degree.
///
/// # Errors
/// [`Error::NothingFits`] with the smallest change that would fit, [`Error::Config`] if the problem is
/// invalid, [`Error::Overflow`] if the sum of all times does not fit 63 bits.
pub fn plan(problem: &PlanProblem<'_>) -> Result<PlanReport> {
    let mut best: Option<PlanReport> = None;
    let mut refused = None;
    for degree in problem.llm.expert_parallel_degrees(problem.cluster.gpus) {
        let found = problem.with_expert_parallel(degree, plan_of_degree)?;
        match (found, &mut best) {
            (Ok(found), Some(best)) => best.join(found),
            (Ok(found), None) => best = Some(found),
            // The first degree has the most plans, so its suggestion is the nearest.
            (Err(error @ Error::NothingFits { .. }), _) => refused = refused.or(Some(error)),
            (Err(error), _) => return Err(error),
        }
    }
    match (best, refused) {
        (Some(best), _) => Ok(best),
        (None, Some(error)) => Err(error),
        (None, None) => {
            Err(Error::Config { setting: "ep", reason: "there is no degree to plan with".to_owned() })
        }
    }
}

impl PlanReport {
    /// Adds the plans from a different expert-parallel degree.
    fn join(&mut self, mut other: Self) {
        if other.step_seconds < self.step_seconds {
            std::mem::swap(self, &mut other);
        }
        let next_seconds =
            |next: &Option<RunnerUp>| next.as_ref().map_or(f64::INFINITY, |next| next.step_seconds);
        if other.step_seconds < next_seconds(&self.explanation.runner_up) {
            let reason = format!(
                "expert parallelism of {} instead of {} makes the step {:.1} % slower",
                other.plan.expert_parallel,
                self.plan.expert_parallel,
                (other.step_seconds / self.step_seconds - 1.0) * 100.0
            );
            let (plan, step_seconds) = (other.plan, other.step_seconds);
            self.explanation.runner_up = Some(RunnerUp { plan, step_seconds, reason });
        }
        self.lower_bound_seconds = self.lower_bound_seconds.min(other.lower_bound_seconds);
        self.plans_bounded += other.plans_bounded;
        self.plans_simulated += other.plans_simulated;
        self.is_exhaustive &= other.is_exhaustive;
    }
}

/// Finds the fastest plan with the LLM's expert-parallel degree.
fn plan_of_degree(problem: &PlanProblem<'_>) -> Result<PlanReport> {
    let space = problem.space()?;
    let search = Search::run(&space)?;
    let finals = refine(&space, &search)?;
    let Some(best) = finals.first() else {
        return Err(Error::NothingFits { reason: suggestion(problem, &space) });
    };
    let mean_ns = best.score.mean_ns();
    let slots = f64::from(best.candidate.family.llm_dp) * f64::from(best.candidate.microbatches);
    let mean_tokens = problem.workload.batch_tokens / slots;
    Ok(PlanReport {
        plan: ParallelismPlan::new(&space, &best.candidate),
        step_seconds: mean_ns / 1e9,
        step_seconds_p95: best.score.p95_ns() as f64 / 1e9,
        lower_bound_seconds: search::least_bound_ns(&space, mean_ns) / 1e9,
        plans_bounded: search.bounded,
        plans_simulated: search.simulated,
        is_exhaustive: search.is_exhaustive,
        batches: best.score.makespans_ns.len(),
        explanation: explain(&space, &finals),
        expert_loads: problem.llm.expert_loads(mean_tokens as u64),
    })
}
