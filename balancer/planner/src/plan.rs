//! Finds the fastest parallelism plan for a problem and reports it.

use super::explain::explain;
use super::problem::{ParallelismPlan, PlanProblem};
use super::refine::refine;
use super::report::{PlanReport, RunnerUp};
use super::score::Score;
use super::search::{self, Search, Start};
use super::space::SearchSpace;
use super::suggestion::suggestion;
use dflop_balancer::{Error, Result};
use rayon::prelude::*;

/// Finds the fastest plan.
///
/// Each placement is searched alone, as is each expert-parallel degree of a model with experts. Parts whose
/// plans are far behind on the first batches are given up, so that with few, very unequal samples the plan
/// may be slower than that of a part alone, by a few percent.
///
/// # Errors
/// [`Error::NothingFits`] with the smallest change that would fit, [`Error::Config`] if the problem is
/// invalid, [`Error::Overflow`] if the sum of all times does not fit 63 bits.
pub fn plan(problem: &PlanProblem<'_>) -> Result<PlanReport> {
    let mut degrees = problem.llm.expert_parallel_degrees(problem.cluster.gpus);
    degrees.retain(|degree| *degree <= problem.options.trainer.expert_parallel_max());
    let llms = degrees.iter().map(|&degree| problem.llm_at(degree)).collect::<Result<Vec<_>>>()?;
    let problems: Vec<PlanProblem<'_>> = llms
        .iter()
        .map(|llm| PlanProblem { llm: llm.as_deref().unwrap_or(problem.llm), ..problem.clone() })
        .collect();
    let parts = Part::search_all(&problems)?;
    let promised_ns = parts.iter().filter_map(Part::promised_ns).fold(f64::INFINITY, f64::min);
    // The best first, whose time rules out the others early; those that fit only as planned by other methods
    // come last.
    let mut hopeful: Vec<&Part<'_>> = parts.iter().filter(|part| !part.search.is_hopeless).collect();
    let promise = |part: &&Part<'_>| part.promised_ns().unwrap_or(f64::INFINITY);
    hopeful.sort_by(|one, other| promise(one).total_cmp(&promise(other)));
    let mut best: Option<(PlanReport, Score)> = None;
    for part in hopeful {
        if best.as_ref().is_some_and(|(best, _)| best.outruns(part, promised_ns)) {
            continue;
        }
        match (part.report(best.as_ref().map(|(_, score)| score))?, &mut best) {
            (Some((found, found_score)), Some((best, score))) => {
                if found.step_seconds < best.step_seconds {
                    *score = found_score;
                }
                best.join(found);
            }
            (Some(found), None) => best = Some(found),
            (None, _) => {}
        }
    }
    let Some((mut best, _)) = best else {
        // The first degree has the most plans, so its suggestion is the nearest.
        let Some(first) = problems.first() else {
            let reason = "there is no degree to plan with".to_owned();
            return Err(Error::Config { setting: "ep", reason });
        };
        return Err(Error::NothingFits { reason: suggestion(first, &first.space()?) });
    };
    best.count(&parts);
    Ok(best)
}

/// Search of one placement at one expert-parallel degree.
struct Part<'a> {
    problem: PlanProblem<'a>,
    space: SearchSpace<'a>,
    search: Search,
}

impl<'a> Part<'a> {
    /// Searches each placement of each problem; the problems differ in the expert-parallel degree.
    fn search_all(problems: &[PlanProblem<'a>]) -> Result<Vec<Self>> {
        let Some((first, others)) = problems.split_first() else { return Ok(Vec::new()) };
        let space = first.space()?;
        let others = others.iter().map(|problem| (problem, space.with_expert_parallel(problem.llm)));
        let spaces: Vec<_> = others.chain([(first, space.clone())]).collect();
        let alone = spaces.into_iter().flat_map(|(problem, space)| {
            let alone = move |options| (PlanProblem { options, ..problem.clone() }, space.only(options));
            problem.options.each_placement().map(alone).collect::<Vec<_>>()
        });
        let alone: Vec<_> = alone.collect();
        let start = |(problem, space)| {
            let start = Start::new(&space);
            (problem, space, start)
        };
        // The most promising first, whose time rules out the others early.
        let mut starts: Vec<_> = alone.into_par_iter().map(start).collect();
        starts.sort_by(|(.., one), (.., other)| one.least_ns.total_cmp(&other.least_ns));
        let mut parts: Vec<Self> = Vec::with_capacity(starts.len());
        let mut rival: Option<Score> = None;
        for (problem, space, start) in starts {
            let search = Search::run(&space, start, rival.as_ref())?;
            let found = search.finals.first().map(|plan| &plan.score);
            if let Some(found) = found
                && rival.as_ref().is_none_or(|rival| found.mean_ns() < rival.mean_ns())
            {
                rival = Some(found.clone());
            }
            parts.push(Self { problem, space, search });
        }
        Ok(parts)
    }

    /// Returns the shortest time that the search found, in nanoseconds.
    fn promised_ns(&self) -> Option<f64> {
        self.search.finals.first().map(|plan| plan.score.mean_ns())
    }

    /// Balances the most promising plans as in a run, and reports the fastest with its score; `None` if none
    /// fits.
    ///
    /// - `rival`: score of another part's plan; a plan that is clearly slower is scored only on the first
    ///   batches
    fn report(&self, rival: Option<&Score>) -> Result<Option<(PlanReport, Score)>> {
        let Self { problem, space, search } = self;
        let finals = refine(space, search, rival)?;
        let Some(best) = finals.first() else { return Ok(None) };
        // On the batches scored for both plans, scaled to all batches.
        let batches = 0..best.score.makespans_ns.len();
        let scale =
            rival.map_or(1.0, |rival| rival.mean_ns() / rival.range(batches.clone()).mean_ns().max(1.0));
        let is_whole = batches.end == problem.workload.batches().len();
        let mean_ns = best.score.mean_ns() * if is_whole { 1.0 } else { scale };
        let slots = f64::from(best.candidate.family.llm_dp) * f64::from(best.candidate.microbatches);
        let mean_tokens = problem.workload.batch_tokens / slots;
        let report = PlanReport {
            plan: ParallelismPlan::new(space, &best.candidate),
            step_seconds: mean_ns / 1e9,
            step_seconds_p95: best.score.p95_ns() as f64 / 1e9,
            lower_bound_seconds: mean_ns / 1e9,
            plans_bounded: 0,
            plans_simulated: 0,
            is_exhaustive: true,
            batches: best.score.makespans_ns.len(),
            explanation: explain(space, &finals),
            expert_loads: problem.llm.expert_loads(mean_tokens as u64),
        };
        Ok(Some((report, best.score.clone())))
    }
}

impl PlanReport {
    /// Whether neither the plan nor the runner-up can be in a part: it promises far less, and less than the
    /// runner-up.
    fn outruns(&self, part: &Part<'_>, promised_ns: f64) -> bool {
        let Some(ns) = part.promised_ns() else { return false };
        let is_behind_runner_up = |next: &RunnerUp| next.step_seconds * 1e9 <= ns;
        ns > part.space.workload.worth_refining(part.search.is_tight) * promised_ns
            && self.explanation.runner_up.as_ref().is_some_and(is_behind_runner_up)
    }

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
    }

    /// Sets the bound and the counts of the whole space.
    fn count(&mut self, parts: &[Part<'_>]) {
        // The bounds of plans that the sweeps found rule out most others.
        let found_ns = parts.iter().map(|part| part.search.least_bound_ns);
        let found_ns = found_ns.fold(self.step_seconds * 1e9, f64::min);
        let least = parts.par_iter().map(|part| search::least_bound_ns(&part.space, found_ns));
        let least_ns = least.reduce(|| found_ns, f64::min);
        for Part { space, search, .. } in parts {
            self.plans_bounded += search.bounded;
            self.plans_simulated += search.simulated;
            // Only the fastest plans are tried under other schedules.
            self.is_exhaustive &= search.is_exhaustive && !space.options.has_other_schedules;
        }
        self.lower_bound_seconds = least_ns / 1e9;
    }
}
