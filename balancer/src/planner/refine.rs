//! Scores the finalists of a search with the best balancing, and the plans of other methods beside them.

use super::compare::paper;
use super::score::step_timeline::StepTimeline;
use super::score::{ScoredPlan, refined};
use super::space::{Candidate, SearchSpace};
use crate::error::Result;

/// Most finalists that are scored.
const FINALISTS: usize = 64;
/// Factor to the best finalist's time up to which better balancing may change the order.
const NEAR: f64 = 1.1;
/// Batches on which a plan has to keep up with the best one to be scored on all.
const TRIAL_BATCHES: usize = 4;
/// Factor to the best plan's time up to which a plan keeps up.
const KEEPS_UP: f64 = 1.02;

/// Scores finalists again, and the plans of the paper's method, with the balancing that a run has; returns
/// them with the other finalists, the best first.
///
/// # Errors
/// [`crate::Error`] if times overflow.
pub(super) fn refine(space: &SearchSpace<'_>, finals: Vec<ScoredPlan>) -> Result<Vec<ScoredPlan>> {
    let mut timeline = StepTimeline::default();
    let batches = space.workload.batches().len();
    let trial = TRIAL_BATCHES.min(batches);
    let best_ns = finals.first().map_or(0.0, |best| best.score.mean_ns());
    let near = finals.iter().take_while(|plan| plan.score.mean_ns() <= NEAR * best_ns);
    let mut seeds: Vec<Candidate> = near.take(FINALISTS).map(|plan| plan.candidate).collect();
    for candidate in paper::plans(space).into_iter().filter(|candidate| space.contains(candidate)) {
        if !seeds.contains(&candidate) {
            seeds.push(candidate);
        }
    }
    let mut scored: Vec<ScoredPlan> = Vec::new();
    for candidate in seeds {
        let mut score = refined(space, &candidate, 0..trial, &mut timeline)?;
        let best = scored.first().map(|best| best.score.range(0..trial).mean_ns());
        if best.is_some_and(|best_ns| score.mean_ns() > KEEPS_UP * best_ns) {
            continue;
        }
        score.append(refined(space, &candidate, trial..batches, &mut timeline)?);
        if score.requirement().most() <= space.budget_bytes {
            scored.push(ScoredPlan { candidate, score });
            scored.sort_by(|one, other| one.score.mean_ns().total_cmp(&other.score.mean_ns()));
        }
    }
    let others = finals.into_iter().filter(|plan| scored.iter().all(|own| own.candidate != plan.candidate));
    let others: Vec<ScoredPlan> = others.collect();
    scored.extend(others);
    Ok(scored)
}
