//! Finds the fastest parallelism plan of a problem and reports it.

use super::explain::explain;
use super::parallelism_plan::ParallelismPlan;
use super::problem::PlanProblem;
use super::refine::refine;
use super::remedy::remedy;
use super::report::PlanReport;
use super::search::{Search, sweep};
use super::space::SearchSpaceOptions;
use crate::error::{Error, Result};

/// Finds the fastest plan.
///
/// # Errors
/// [`Error::NothingFits`] with the smallest change that would fit, [`Error::Config`] if the problem is
/// invalid, [`Error::Overflow`] if the sum of all times does not fit 63 bits.
pub fn plan(problem: &PlanProblem<'_>) -> Result<PlanReport> {
    let space = problem.space()?;
    let mut search = Search::run(&space)?;
    if problem.options.has_selective_recomputation {
        // Most plans of the larger space are alike: those of the smaller one may fall out of the search.
        let options = SearchSpaceOptions { has_selective_recomputation: false, ..problem.options };
        let smaller = PlanProblem { options, ..problem.clone() }.space()?;
        let found = Search::run(&smaller)?;
        let best = refine(&smaller, &found)?;
        search.add(&space, &found, best, &smaller);
    }
    let finals = refine(&space, &search)?;
    let Some(best) = finals.first() else {
        return Err(Error::NothingFits { reason: remedy(problem, &space) });
    };
    let mean_ns = best.score.mean_ns();
    Ok(PlanReport {
        plan: ParallelismPlan::new(&space, &best.candidate),
        step_seconds: mean_ns / 1e9,
        step_seconds_p95: best.score.p95_ns() as f64 / 1e9,
        lower_bound_seconds: sweep::least_bound_ns(&space, mean_ns) / 1e9,
        plans_bounded: search.bounded,
        plans_simulated: search.simulated,
        is_exhaustive: search.is_exhaustive,
        batches: best.score.makespans_ns.len(),
        explanation: explain(&space, &finals),
    })
}
