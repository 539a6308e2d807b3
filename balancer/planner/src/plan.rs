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
/// Each placement is searched alone, as is each expert-parallel degree of a model with experts, so that a
/// larger space never has a slower plan than one of its parts. Ties go to the lowest degree, and to the
/// placement that is first in [`Placement`].
///
/// # Errors
/// [`Error::NothingFits`] with the smallest change that would fit, [`Error::Config`] if the problem is
/// invalid, [`Error::Overflow`] if the sum of all times does not fit 63 bits.
pub fn plan(problem: &PlanProblem<'_>) -> Result<PlanReport> {
    let mut best: Option<PlanReport> = None;
    let degrees = problem.llm.expert_parallel_degrees(problem.cluster.gpus);
    for &degree in &degrees {
        for options in problem.options.each_placement() {
            let part = PlanProblem { options, ..problem.clone() };
            match (part.with_expert_parallel(degree, plan_part)??, &mut best) {
                (Some(found), Some(best)) => best.join(found),
                (Some(found), None) => best = Some(found),
                (None, _) => {}
            }
        }
    }
    if let Some(best) = best {
        return Ok(best);
    }
    // The first degree has the most plans, so its suggestion is the nearest.
    let Some(&degree) = degrees.first() else {
        let reason = "there is no degree to plan with".to_owned();
        return Err(Error::Config { setting: "ep", reason });
    };
    let reason =
        problem.with_expert_parallel(degree, |problem| Ok(suggestion(problem, &problem.space()?)))??;
    Err(Error::NothingFits { reason })
}

impl PlanReport {
    /// Adds the plans from a different part of the space: a placement, an expert-parallel degree.
    fn join(&mut self, mut other: Self) {
        if other.step_seconds < self.step_seconds {
            std::mem::swap(self, &mut other);
        }
        let next_seconds =
            |next: &Option<RunnerUp>| next.as_ref().map_or(f64::INFINITY, |next| next.step_seconds);
        if other.step_seconds < next_seconds(&self.explanation.runner_up) {
            let slower = (other.step_seconds / self.step_seconds - 1.0) * 100.0;
            let reason = if other.plan.placement == self.plan.placement {
                let degrees = [other.plan.expert_parallel, self.plan.expert_parallel];
                format!(
                    "{slower:.2} % slower: expert parallelism of {} instead of {}",
                    degrees[0], degrees[1]
                )
            } else {
                format!("{slower:.2} % slower: the fastest {} plan", other.plan.placement.name())
            };
            let (plan, step_seconds) = (other.plan, other.step_seconds);
            self.explanation.runner_up = Some(RunnerUp { plan, step_seconds, reason });
        }
        self.lower_bound_seconds = self.lower_bound_seconds.min(other.lower_bound_seconds);
        self.plans_bounded += other.plans_bounded;
        self.plans_simulated += other.plans_simulated;
        self.is_exhaustive &= other.is_exhaustive;
    }
}

/// Finds the fastest plan with one placement and expert-parallel degree; `None` if no plan fits.
fn plan_part(problem: &PlanProblem<'_>) -> Result<Option<PlanReport>> {
    let space = problem.space()?;
    let search = Search::run(&space)?;
    let finals = refine(&space, &search)?;
    let Some(best) = finals.first() else { return Ok(None) };
    let mean_ns = best.score.mean_ns();
    let slots = f64::from(best.candidate.family.llm_dp) * f64::from(best.candidate.microbatches);
    let mean_tokens = problem.workload.batch_tokens / slots;
    Ok(Some(PlanReport {
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
    }))
}
