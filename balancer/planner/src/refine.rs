//! Scores a given plan, and the search's finalists with the best balancing, together with plans from other
//! methods.

use super::cluster::Placement;
use super::compare::{joint, paper, uniform};
use super::problem::{ParallelismPlan, PlanProblem};
use super::score;
use super::score::{FAR_BEHIND, Score, ScoredPlan, refined};
use super::search::Search;
use super::space::memory::MemoryRequirement;
use super::space::shape::StageShape;
use super::space::{Candidate, Family, SearchSpace, bound, memory};
use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Error, Result};
use rayon::prelude::*;

/// Maximum number of scored finalists.
const FINALISTS: usize = 64;
/// Factor to the best finalist's time up to which better balancing may change the order.
const NEAR: f64 = 1.1;
/// The same if the space is so small that all its plans were scored.
const NEAR_IF_FEW: f64 = 2.0;
/// The same for plans of other methods if most plans do not fit into memory.
const NEAR_IF_TIGHT: f64 = 1.3;
/// Number of trial batches on which a plan has to keep up with the best plan to be scored on all batches.
const TRIAL_BATCHES: usize = 4;
/// Factor to the best plan's time up to which a plan keeps up.
const KEEPS_UP: f64 = 1.005;
/// Factor to a rival's time on the first batch above which a plan is not scored on more batches.
const OUTRUN: f64 = 1.3;
/// Shares by which a rival must be faster on the trial batches, and on those of the leaders, times the noise.
const OUTRUN_IN_TRIALS: [f64; 2] = [0.15, 0.03];
/// Maximum number of plans compared on more batches.
const LEADERS: usize = 3;
/// Number of batches for that comparison; only the winner is scored on all batches.
const LEADER_BATCHES: usize = 16;
/// Factor to a plan's time on the trial batches, above which its time on all batches is compared with those
/// of the next plans: where memory is scarce, a batch may fit only with a far worse balance.
const SLIPS: f64 = 1.02;
/// Maximum number of plans with other degrees that are balanced as in a run to find a runner-up.
const RUNNERS_UP_TRIED: usize = 4;

/// Range of microbatch numbers tried below and above the best plan's number.
const COUNTS_AROUND: u32 = 2;
/// Number of plans whose neighbors are tried if batches have few samples.
const COUNTED_IF_FEW: usize = 4;

/// Numbers of rounds that an encoder may run ahead.
const AHEAD: [u16; 4] = [1, 2, 4, 8];
/// Number of plans tried with encoders that run ahead.
const AHEAD_PLANS: usize = 6;
/// Number of plans tried under other schedules.
const OTHER_SCHEDULE_PLANS: usize = 2;

/// Rescores finalists and other methods' plans with the balancing used in a run. Returns the best plan, then
/// plans that are as fast on the first batches, then the best plan with other degrees; all but the best may
/// be scored only on the first batches.
///
/// - `rival`: score of a plan outside the space; if all plans are clearly slower on the first batches, only
///   the best of them is returned, scored on these
///
/// # Errors
/// [`dflop_balancer::Error`] if times overflow.
pub(super) fn refine(
    space: &SearchSpace<'_>,
    search: &Search,
    rival: Option<&Score>,
) -> Result<Vec<ScoredPlan>> {
    let finals = &search.finals;
    let trial = space.workload.batches_like(TRIAL_BATCHES);
    let best_ns = finals.first().map_or(0.0, |best| best.score.mean_ns());
    // Of a small space, all plans are scored, greedily, which says little about few samples.
    let near = if search.is_exhaustive { NEAR_IF_FEW } else { NEAR };
    let near = finals.iter().take_while(|plan| plan.score.mean_ns() <= near * best_ns);
    let mut seeds: Vec<Candidate> = near.take(FINALISTS).map(|plan| plan.candidate).collect();
    // No method of the comparison may have a better plan.
    let mut others = Vec::new();
    if space.options.is_disaggregated {
        others.extend(paper::plans(space));
        others.extend(uniform::promising(space));
    }
    others.extend(joint::promising(space));
    others.extend(joint::by_hand(space));
    let others = others.into_iter().filter(|candidate| space.contains(candidate));
    // If few plans fit, the search knows least about those of other methods, and greedy balancing as well.
    let near = if search.is_tight { NEAR_IF_TIGHT } else { NEAR };
    let worth = space.workload.worth_refining(search.is_tight);
    for candidate in promising(space, others, (best_ns, near, worth), (trial, rival)) {
        if !seeds.contains(&candidate) {
            seeds.push(candidate);
        }
    }
    let mut trials = Trials { space, batches: trial, rival, done: Vec::with_capacity(seeds.len()) };
    trials.add_all(&seeds)?;
    let mut more = ahead(space, &trials.sorted());
    more.extend(other_schedules(space, &trials.sorted()));
    if space.workload.has_few_samples() {
        more.extend(other_counts(space, &trials.sorted(), COUNTED_IF_FEW));
    } else if search.is_tight {
        more.extend(other_counts(space, &trials.sorted(), 1));
    }
    trials.add_all(&more)?;
    trials.settle()?;
    let sorted = trials.sorted();
    if let Some((score, candidate)) = sorted.first()
        && is_outrun(score, rival, 1.0 + OUTRUN_IN_TRIALS[0] * space.workload.noise())
    {
        return Ok(vec![ScoredPlan { candidate: *candidate, score: score.clone() }]);
    }
    let mut scored = choose(space, &sorted, rival)?;
    let mut untried = finals.iter().chain(&search.other).map(|plan| plan.candidate).take(RUNNERS_UP_TRIED);
    while let Some(best) = scored.first() {
        let is_other =
            |candidate: &Candidate| space.has_other_degrees(&candidate.family, &best.candidate.family);
        if scored.iter().any(|plan| is_other(&plan.candidate)) {
            break;
        }
        // A plan that is faster on the first batches was not chosen because it does not fit on others.
        let is_slower =
            |score: &Score| score.mean_ns() >= best.score.range(0..score.makespans_ns.len()).mean_ns();
        let sorted = trials.sorted();
        if let Some((score, candidate)) =
            sorted.iter().find(|(score, candidate)| is_other(candidate) && is_slower(score))
        {
            // Its score on the first batches is enough to explain why it is slower.
            scored.push(ScoredPlan { candidate: *candidate, score: score.clone() });
            break;
        }
        // The search scored its plans with less balancing, so that one may turn out to be faster.
        let Some(candidate) = untried.find(|candidate| is_other(candidate) && !trials.has(candidate)) else {
            break;
        };
        trials.add_all(&[candidate])?;
        trials.settle()?;
        let sorted = trials.sorted();
        if sorted.first().is_some_and(|(_, first)| *first == candidate) {
            scored = choose(space, &sorted, rival)?;
        }
    }
    Ok(scored)
}

/// Lists plans of other methods that may be near the best, by greedy balancing on the first batches, shortest
/// first.
fn promising(
    space: &SearchSpace<'_>,
    candidates: impl Iterator<Item = Candidate>,
    (best_ns, near, worth): (f64, f64, f64),
    (batches, rival): (usize, Option<&Score>),
) -> Vec<Candidate> {
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    let mut least = Score::default();
    let first = |candidate: Candidate| (candidate, score::score(space, &candidate, 0..1));
    let candidates: Vec<Candidate> = candidates.collect();
    let candidates: Vec<_> = candidates.into_par_iter().map(first).collect();
    for (candidate, first) in candidates {
        let first = first.filter(|first| !is_outrun(first, rival, near * worth));
        // A single batch is enough to discard a plan that is far slower.
        let Some(first) = first.filter(|first| !first.is_slower_by(near * FAR_BEHIND, &least)) else {
            continue;
        };
        let score = score::score(space, &candidate, 0..batches);
        let score = score.filter(|score| !is_outrun(score, rival, worth));
        found.extend(score.map(|score| (score.mean_ns(), candidate)));
        if least.makespans_ns.is_empty() || first.mean_ns() < least.mean_ns() {
            least = first;
        }
    }
    found.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let least_ns = found.first().map_or(f64::INFINITY, |(ns, _)| *ns);
    let least_ns = if best_ns > 0.0 { least_ns.min(best_ns) } else { least_ns };
    found.into_iter().take_while(|(ns, _)| *ns <= near * least_ns).map(|(_, candidate)| candidate).collect()
}

/// Whether a rival is faster by a factor on the batches of a score.
fn is_outrun(score: &Score, rival: Option<&Score>, factor: f64) -> bool {
    rival.is_some_and(|rival| score.mean_ns() > factor * rival.range(0..score.makespans_ns.len()).mean_ns())
}

/// Plans balanced as in a run on the first batches.
struct Trials<'a> {
    space: &'a SearchSpace<'a>,
    /// Number of batches.
    batches: usize,
    rival: Option<&'a Score>,
    done: Vec<(Score, Candidate)>,
}

impl Trials<'_> {
    /// Scores plans; only on the first batch if that is far slower than another plan.
    fn add_all(&mut self, candidates: &[Candidate]) -> Result<()> {
        let first = candidates.par_iter().map(|candidate| refined(self.space, candidate, 0..1));
        let first: Vec<Score> = first.collect::<Result<_>>()?;
        candidates.iter().zip(first).try_for_each(|(candidate, first)| self.add(*candidate, first))
    }

    fn add(&mut self, candidate: Candidate, mut score: Score) -> Result<()> {
        let fits = |score: &Score| score.requirement().most() <= self.space.budget_bytes;
        let is_behind = |(other, _): &(Score, Candidate)| fits(other) && score.is_far_behind(other);
        if !is_outrun(&score, self.rival, OUTRUN) && !self.done.iter().any(is_behind) {
            score.append(refined(self.space, &candidate, 1..self.batches)?);
        }
        self.done.push((score, candidate));
        Ok(())
    }

    fn has(&self, candidate: &Candidate) -> bool {
        self.done.iter().any(|(_, known)| known == candidate)
    }

    /// Scores plans on all trial batches that were left early for a plan that does not fit on a later batch.
    fn settle(&mut self) -> Result<()> {
        loop {
            let sorted = self.sorted();
            let is_left = |(score, _): &&(Score, Candidate)| score.makespans_ns.len() < self.batches;
            let best = sorted.first().filter(|best| !is_left(best));
            let is_near = |(score, _): &&(Score, Candidate)| {
                best.is_none_or(|(best, _)| !score.is_far_behind(best))
                    && !is_outrun(score, self.rival, OUTRUN)
            };
            let Some((_, candidate)) = sorted.iter().filter(is_left).find(is_near) else { return Ok(()) };
            let candidate = *candidate;
            let more = refined(self.space, &candidate, 1..self.batches)?;
            let batches = self.batches;
            let is_it = |(score, known): &&mut (Score, Candidate)| {
                *known == candidate && score.makespans_ns.len() < batches
            };
            let Some((score, _)) = self.done.iter_mut().find(is_it) else { return Ok(()) };
            score.append(more);
        }
    }

    /// Lists the plans that fit, by time; those scored on the first batch alone come last.
    fn sorted(&self) -> Vec<(Score, Candidate)> {
        let fits = |score: &Score| score.requirement().most() <= self.space.budget_bytes;
        let mut plans: Vec<_> = self.done.iter().filter(|(score, _)| fits(score)).cloned().collect();
        let is_partial = |score: &Score| score.makespans_ns.len() < self.batches;
        plans.sort_by(|(one, _), (other, _)| {
            is_partial(one).cmp(&is_partial(other)).then(one.mean_ns().total_cmp(&other.mean_ns()))
        });
        plans
    }
}

/// Scores the best of these plans on all batches, shortest on the first batches first. Equally fast plans
/// follow it; none if no plan fits.
fn choose(
    space: &SearchSpace<'_>,
    trials: &[(Score, Candidate)],
    rival: Option<&Score>,
) -> Result<Vec<ScoredPlan>> {
    let batches = space.workload.batches().len();
    let fits = |plan: &ScoredPlan| plan.score.requirement().most() <= space.budget_bytes;
    let more = |plan: &mut ScoredPlan, batches: usize| -> Result<()> {
        let done = plan.score.makespans_ns.len();
        plan.score.append(refined(space, &plan.candidate, done..batches)?);
        Ok(())
    };
    let plan =
        |(score, candidate): &(Score, Candidate)| ScoredPlan { candidate: *candidate, score: score.clone() };
    let keeps_up_ns = trials.first().map_or(0.0, |(best, _)| KEEPS_UP * best.mean_ns());
    let margin = 1.0 + OUTRUN_IN_TRIALS[1] * space.workload.noise();
    let mut leaders: Vec<ScoredPlan> = Vec::new();
    for trial in trials.iter().take_while(|(score, _)| score.mean_ns() <= keeps_up_ns) {
        let mut plan = plan(trial);
        let tried = trial.0.makespans_ns.len();
        more(&mut plan, space.workload.batches_like(LEADER_BATCHES).max(tried))?;
        leaders.extend(Some(plan).filter(fits));
        // The others are as fast, so that they need not be scored if the rival is faster.
        let is_behind = |best: &ScoredPlan| is_outrun(&best.score, rival, margin + KEEPS_UP - 1.0);
        if leaders.len() == LEADERS || leaders.first().is_some_and(is_behind) {
            break;
        }
    }
    // Leaders differ by less than time uncertainty: the plan with the lower upper end is the safer choice.
    leaders.sort_by(|one, other| upper_ns(space, one).total_cmp(&upper_ns(space, other)));
    if let Some(best) = leaders.first().filter(|best| is_outrun(&best.score, rival, margin)) {
        return Ok(vec![best.clone()]);
    }
    while let Some(best) = leaders.first_mut() {
        more(best, batches)?;
        if !fits(best) {
            leaders.remove(0);
            continue;
        }
        let (best, tried) = (best.clone(), trials.first().map_or(0, |(score, _)| score.makespans_ns.len()));
        if best.score.mean_ns() > SLIPS * best.score.range(0..tried).mean_ns() {
            let may_be_faster = |(score, candidate): &&(Score, Candidate)| {
                score.makespans_ns.len() == tried
                    && score.mean_ns() < best.score.mean_ns()
                    && leaders.iter().all(|known| known.candidate != *candidate)
            };
            for trial in trials.iter().filter(may_be_faster).take(LEADERS).collect::<Vec<_>>() {
                let mut plan = plan(trial);
                more(&mut plan, batches)?;
                if fits(&plan) && plan.score.mean_ns() < leaders[0].score.mean_ns() {
                    leaders.insert(0, plan);
                }
            }
        }
        return Ok(leaders);
    }
    // Plans that do not fit on all batches are replaced by the next plans.
    for trial in trials {
        let mut plan = plan(trial);
        more(&mut plan, batches)?;
        if fits(&plan) {
            return Ok(vec![plan]);
        }
    }
    Ok(Vec::new())
}

/// Returns the mean step time at the upper end of the 90 % interval for the module with the largest
/// uncertainty.
fn upper_ns(space: &SearchSpace<'_>, plan: &ScoredPlan) -> f64 {
    let (family, workload) = (&plan.candidate.family, space.workload);
    let mean = |units: f64, dp: u32| units / (f64::from(plan.candidate.microbatches) * f64::from(dp));
    let mut half_width = space.llm_times(family).half_width(mean(workload.batch_tokens, family.llm_dp));
    for (encoder, part) in family.encoders.iter().enumerate() {
        let units = mean(workload.media(encoder).batch_units, part.dp);
        half_width = half_width.max(space.encoder_times(family, encoder).half_width(units));
    }
    plan.score.mean_ns() * (1.0 + half_width)
}

/// Lists the best plans with other numbers of microbatches: if memory is tight or samples are few, estimates
/// are unreliable for them.
fn other_counts(space: &SearchSpace<'_>, trials: &[(Score, Candidate)], plans: usize) -> Vec<Candidate> {
    let around = |plan: &Candidate| {
        let plan = *plan;
        let counts = (1..=COUNTS_AROUND)
            .flat_map(move |step| [plan.microbatches.saturating_sub(step), plan.microbatches + step]);
        counts.map(move |microbatches| Candidate { microbatches, ..plan })
    };
    let mut found: Vec<Candidate> = trials.iter().take(plans).flat_map(|(_, plan)| around(plan)).collect();
    found.sort_unstable();
    found.dedup();
    found.retain(|plan| trials.iter().all(|(_, known)| known != plan) && is_possible(space, plan));
    found
}

/// Lists the best plans with encoders that run ahead, if the search covers that.
fn ahead(space: &SearchSpace<'_>, trials: &[(Score, Candidate)]) -> Vec<Candidate> {
    let best = trials.iter().map(|(_, candidate)| candidate);
    // Without gradients to wait for, an encoder is as far ahead as it can be.
    let waits = |plan: &&Candidate| space.encoder_shapes(&plan.family).any(StageShape::has_backward);
    let disaggregated = best.filter(waits).filter(|plan| plan.family.placement == Placement::Disaggregated);
    let with = |plan: &Candidate| {
        let plan = *plan;
        let under = |rounds| Family { schedule: ScheduleKind::EncoderAhead { rounds }, ..plan.family };
        AHEAD.map(|rounds| (rounds, Candidate { family: under(rounds), ..plan }))
    };
    let plans = disaggregated.take(AHEAD_PLANS).flat_map(with);
    // Rounds beyond the number of microbatches have no effect.
    let plans = plans.filter(|(rounds, plan)| u32::from(*rounds) < plan.microbatches);
    plans.map(|(_, plan)| plan).filter(|plan| is_possible(space, plan)).collect()
}

/// Lists the best plans under schedules that shorten the bubble, if the search covers them: with split
/// backward passes, and with the layers of each LLM rank in several chunks.
fn other_schedules(space: &SearchSpace<'_>, trials: &[(Score, Candidate)]) -> Vec<Candidate> {
    if !space.options.has_other_schedules {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (_, plan) in trials.iter().take(OTHER_SCHEDULE_PLANS) {
        let llm = space.llm_shape(&plan.family);
        let is_recomputed = space.encoder_shapes(&plan.family).chain([llm]).any(|shape| shape.is_recomputed);
        if !is_recomputed && space.step_shape(&plan.family, 1).stages > 1 {
            let family = Family { schedule: ScheduleKind::ZeroBubble, ..plan.family };
            found.push(Candidate { family, ..*plan });
        }
        // Chunks cut the same number of ranks; only a colocated space has such shapes.
        let is_same = |shape: &StageShape| {
            shape.chunks > 1
                && (shape.tp, shape.pp, shape.is_recomputed) == (llm.tp, llm.pp, llm.is_recomputed)
        };
        for (index, shape) in space.llm.shapes.iter().enumerate().filter(|(_, shape)| is_same(shape)) {
            let schedule = ScheduleKind::Interleaved { chunks: shape.chunks as u16 };
            let candidate = Candidate { family: Family { llm: index, schedule, ..plan.family }, ..*plan };
            if !found.contains(&candidate) {
                found.push(candidate);
            }
        }
    }
    found.retain(|plan| is_possible(space, plan));
    found
}

/// Whether a plan composed here belongs to the space and may fit into memory.
fn is_possible(space: &SearchSpace<'_>, plan: &Candidate) -> bool {
    space.contains(plan) && memory::may_fit(space, &plan.family, plan.microbatches, plan.microbatches)
}

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
    let space = problem.space()?;
    let outside =
        || Error::Config { setting: "plan", reason: format!("{plan:?} is outside the search space") };
    let candidate = plan.candidate(&space).ok_or_else(outside)?;
    if !space.contains(&candidate) {
        return Err(outside());
    }
    let all = 0..space.workload.batches().len();
    let score = score::refined(&space, &candidate, all)?;
    let MemoryRequirement { encoder_bytes, llm_bytes } = score.requirement();
    Ok(Evaluation {
        makespans_ns: score.makespans_ns,
        encoder_bytes: encoder_bytes[..problem.encoders.len()].iter().map(|bytes| *bytes as u64).collect(),
        llm_bytes: llm_bytes as u64,
        lower_bound_ns: bound::lower_bound_ns(&space, &candidate),
    })
}
