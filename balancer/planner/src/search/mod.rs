//! Searches the space: a sweep by branch and bound on estimates, then simulations for the promising plans.
//!
//! Successive halving: simulates many plans on few batches, few plans on many.
//!
//! Every family's microbatch range is halved as long as it may hold a plan for the list: a range's estimate
//! is at most the estimate of any contained plan, so a single check can discard a whole family.
//!
//! A plan is discarded if the lower bound is not below the best score, and by rank if too many plans are
//! left: the best plan on the first batches need not be the best on all. Neighbors that the estimate may have
//! misjudged are tried around the best plans. The finalists are scored on every batch, with the better
//! balancing.
//!
//! # Source
//! Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", 2016.

mod sweep;

pub(super) use sweep::{Start, least_bound_ns};

use super::cluster::Placement;
use super::score;
use super::score::{Score, ScoredPlan};
use super::space::{Candidate, EncoderParts, Family, SearchSpace, bound, memory};
use dflop_balancer::Result;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use sweep::sweep_with_slack;

/// Memory slack for microbatches above the mean, tried in sequence.
const SLACKS: [f64; 4] = [1.0, 1.15, 1.35, 1.7];

/// Search outcome.
pub(super) struct Search {
    pub(super) finals: Vec<ScoredPlan>,
    /// Best plan with other degrees than the first finalist, as far as it was scored.
    pub(super) other: Option<ScoredPlan>,
    pub(super) bounded: u64,
    pub(super) simulated: u64,
    pub(super) is_exhaustive: bool,
    /// Whether most promising plans do not fit into memory.
    pub(super) is_tight: bool,
    /// Whether the search ended early because all plans are far slower than the rival.
    pub(super) is_hopeless: bool,
    /// Least lower bound of the swept plans, nanoseconds; infinite if there is none.
    pub(super) least_bound_ns: f64,
}

impl Search {
    /// Sweeps and halves; repeats with more memory slack while most plans turn out not to fit.
    ///
    /// - `rival`: score of a plan outside the space; the search ends early if its plans are far slower
    pub(super) fn run(space: &SearchSpace<'_>, start: Start, rival: Option<&Score>) -> Result<Self> {
        let limit_ns =
            rival.map_or(f64::INFINITY, |rival| space.workload.worth_refining(true) * rival.mean_ns());
        let Start { swept, least_ns } = start;
        let bounds_ns = swept.candidates.iter().map(|plan| bound::lower_bound_ns(space, plan));
        let least_bound_ns = bounds_ns.fold(f64::INFINITY, f64::min);
        let mut start = Some(swept);
        let mut halving = Halving::new(space, rival);
        let mut search = Self {
            finals: Vec::new(),
            other: None,
            bounded: 0,
            simulated: 0,
            is_exhaustive: false,
            is_tight: true,
            is_hopeless: false,
            least_bound_ns,
        };
        for (at, slack) in SLACKS.into_iter().enumerate() {
            let swept = start.take().unwrap_or_else(|| sweep_with_slack(space, slack));
            search.bounded = swept.plans;
            // Several encoders have more GPU shares than the search covers.
            search.is_exhaustive = swept.is_all && space.encoders.len() == 1;
            search.is_hopeless = !swept.is_all && !swept.candidates.is_empty() && least_ns > limit_ns;
            if search.is_hopeless {
                break;
            }
            if swept.is_all {
                search.finals = halving.run_all(swept.candidates, limit_ns)?;
                break;
            }
            let is_last = at + 1 == SLACKS.len();
            let has_room = halving.run(swept.candidates, is_last, &mut search.finals)?;
            if halving.is_outrun {
                search.is_hopeless = search.finals.is_empty();
                break;
            }
            if has_room && !search.finals.is_empty() {
                search.is_tight = slack > SLACKS[0];
                break;
            }
        }
        search.simulated = halving.simulated();
        search.other = search.finals.first().and_then(|best| halving.best_other(&best.candidate.family));
        Ok(search)
    }
}

/// Number of batches in each round, and of plans that enter the next round.
const ROUNDS: [(usize, usize); 3] = [(1, 32), (4, 10), (12, 3)];

/// Number of batches in the first round with the better balancing, and number of finalists.
const FINAL_ROUND: (usize, usize) = (12, 2);

/// Number of batches that finalists are sorted by; the plan that is chosen among them is scored on all.
const JUDGED_BATCHES: usize = 16;

/// Minimum number of plans that are probed for memory before all are scored, and the distance of the probes.
const PROBED_MIN: usize = 32;
const PROBE_STEP: usize = 4;
/// Number of plans that are probed together.
const PROBED_AT_ONCE: usize = 8;
/// Number of plans that are compared with a rival before all are scored, and the factor to its time from
/// which all are given up.
const PROBED_FOR_RIVAL: usize = 12;
const NO_CHANCE: f64 = 1.4;
/// Noise of a comparison above which plans are not given up after so few.
const NOISE_MAX: f64 = 0.5;

/// Number of plans around which neighbors are tried.
const CENTERS: usize = 4;
/// Maximum number of moves from the best plans to neighbors.
const WALKS: usize = 5;

/// Search by successive halving, with all plan scores so far.
struct Halving<'a> {
    space: &'a SearchSpace<'a>,
    /// Score of a plan outside the space.
    rival: Option<&'a Score>,
    /// Whether a run ended because the rival is far faster.
    is_outrun: bool,
    /// Simulated plans with quick scores on the first batches; `None` if a plan is far from fitting.
    seen: BTreeMap<Candidate, Option<Score>>,
    /// Finalist scores with the better balancing.
    improved: BTreeMap<Candidate, Score>,
}

impl<'a> Halving<'a> {
    fn new(space: &'a SearchSpace<'a>, rival: Option<&'a Score>) -> Self {
        let (seen, improved) = (BTreeMap::new(), BTreeMap::new());
        Self { space, rival, is_outrun: false, seen, improved }
    }

    /// Whether a rival plan is far faster on the batches of the best score.
    fn is_far_slower(&self, scored: &[ScoredPlan]) -> bool {
        let best = scored.iter().find(|plan| self.fits(&plan.score)).or(scored.first());
        best.zip(self.rival).is_some_and(|(best, rival)| {
            let rival = rival.range(0..best.score.makespans_ns.len());
            best.score.mean_ns() > self.space.workload.worth_refining(true) * rival.mean_ns()
        })
    }

    /// Returns the number of simulated plans.
    fn simulated(&self) -> u64 {
        self.seen.len() as u64
    }

    /// Returns the best simulated plan that fits and has other degrees than a family.
    fn best_other(&self, family: &Family) -> Option<ScoredPlan> {
        let fitting = self.seen.iter().filter_map(|(candidate, score)| {
            let score = score.as_ref().filter(|score| self.fits(score))?;
            self.space.has_other_degrees(&candidate.family, family).then_some((candidate, score))
        });
        let best = fitting.min_by(|one, other| one.1.mean_ns().total_cmp(&other.1.mean_ns()));
        best.map(|(candidate, score)| ScoredPlan { candidate: *candidate, score: score.clone() })
    }

    /// Adds the finalists, the best first; none if no plan fits, or a rival is far faster than all. Returns
    /// whether most plans fit.
    ///
    /// - `is_last`: whether no run with more memory slack follows
    fn run(
        &mut self,
        candidates: Vec<Candidate>,
        is_last: bool,
        finals: &mut Vec<ScoredPlan>,
    ) -> Result<bool> {
        if self.has_no_chance(&candidates) {
            self.is_outrun = true;
            return Ok(true);
        }
        let mut left = self.variants(candidates);
        let mut has_room = true;
        // A run with more slack meets plans from an earlier run again.
        left.retain(|plan| finals.iter().all(|known| known.candidate != *plan));
        if !is_last && !self.may_have_room(&left) {
            return Ok(false);
        }
        for (round, (count, keep)) in ROUNDS.into_iter().enumerate() {
            let count = self.space.workload.batches_like(count);
            let mut scored = self.score_all(&left, count);
            let fits = |plan: &&ScoredPlan| self.fits(&plan.score);
            let fitting = scored.iter().filter(fits).count();
            has_room &= left.is_empty() || fitting * 2 > left.len();
            // Neighbors of plans that do not fit are of no interest while there may be better plans.
            self.is_outrun |= self.is_far_slower(&scored);
            if self.is_outrun || fitting == 0 && !is_last {
                return Ok(has_room);
            }
            if round == 1 {
                scored = self.walk(scored, count);
            }
            if round == 2 {
                scored = self.recount(scored, count);
            }
            left = self.best(&scored, keep);
        }
        let (count, keep) = FINAL_ROUND;
        let scored = self.finals(&left, self.space.workload.batches_like(count))?;
        left = self.best(&scored, keep);
        let judged = self.space.workload.batches_like(JUDGED_BATCHES);
        for plan in self.finals(&left, judged)? {
            if finals.iter().all(|known| known.candidate != plan.candidate) {
                finals.push(plan);
            }
        }
        self.sort(finals, judged);
        Ok(has_room)
    }

    /// Whether a rival plan is so much faster on the first batch than the plans with the best estimates that
    /// none is likely to be worth refining.
    fn has_no_chance(&mut self, candidates: &[Candidate]) -> bool {
        let Some(rival) = self.rival.map(|rival| rival.range(0..1).mean_ns()) else { return false };
        // Estimates say little about few samples.
        if candidates.len() < PROBED_MIN || self.space.workload.noise() > NOISE_MAX {
            return false;
        }
        self.score_first_batch(&candidates[..PROBED_FOR_RIVAL]);
        let probed = candidates[..PROBED_FOR_RIVAL].iter();
        let scores: Vec<Score> = probed.filter_map(|candidate| self.quick(*candidate, 1)).collect();
        // Where memory is scarce, plans with worse estimates may be faster.
        let fitting = scores.iter().filter(|score| self.fits(score)).count();
        let least_ns = scores.iter().map(Score::mean_ns).fold(f64::INFINITY, f64::min);
        2 * fitting > PROBED_FOR_RIVAL && least_ns > NO_CHANCE * rival
    }

    /// Whether a plan fits on the first batch, among some of many plans.
    fn may_have_room(&mut self, candidates: &[Candidate]) -> bool {
        if candidates.len() < PROBED_MIN {
            return true;
        }
        let probes: Vec<Candidate> = candidates.iter().copied().step_by(PROBE_STEP).collect();
        probes.chunks(PROBED_AT_ONCE).any(|probes| {
            self.score_first_batch(probes);
            let fits = |candidate: &Candidate| {
                self.seen[candidate].as_ref().is_some_and(|score| self.fits(&score.range(0..1)))
            };
            probes.iter().any(fits)
        })
    }

    /// Lists the first plans, and the first with other degrees than the best: the runner-up.
    fn best(&self, scored: &[ScoredPlan], keep: usize) -> Vec<Candidate> {
        let (first, rest) = scored.split_at(keep.min(scored.len()));
        let is_other = |plan: &&ScoredPlan| {
            scored.first().is_some_and(|best| {
                self.space.has_other_degrees(&plan.candidate.family, &best.candidate.family)
            })
        };
        let other = if first.iter().any(|plan| is_other(&plan)) { None } else { rest.iter().find(is_other) };
        first.iter().chain(other).map(|plan| plan.candidate).collect()
    }

    /// Scores plans on all batches in ascending order by bound, until no bound is below the best score or the
    /// limit.
    fn run_all(&mut self, candidates: Vec<Candidate>, limit_ns: f64) -> Result<Vec<ScoredPlan>> {
        let batches = self.space.workload.batches().len();
        let mut by_bound: Vec<(u64, Candidate)> = candidates
            .into_iter()
            .map(|plan| (bound::lower_bound_ns(self.space, &plan) as u64, plan))
            .collect();
        by_bound.sort_unstable();
        let mut finals: Vec<ScoredPlan> = Vec::new();
        for (bound_ns, candidate) in by_bound {
            let best_ns = finals.first().map_or(f64::INFINITY, |best| best.score.mean_ns());
            if bound_ns as f64 > best_ns.min(limit_ns) {
                break;
            }
            finals.extend(self.finals(&[candidate], batches)?);
            self.sort(&mut finals, batches);
        }
        Ok(finals)
    }

    /// Scores plans on the first batches with the better balancing, the best first.
    fn finals(&mut self, candidates: &[Candidate], batches: usize) -> Result<Vec<ScoredPlan>> {
        let mut finals: Vec<ScoredPlan> = Vec::new();
        let mut best: Option<Score> = None;
        for &candidate in candidates {
            let first = self.improved(candidate, 1)?;
            // A single batch is enough to discard a plan that is far slower.
            let is_behind = |first: &Score| best.as_ref().is_some_and(|best| first.is_far_behind(best));
            if first.is_none_or(|first| is_behind(&first)) {
                continue;
            }
            let Some(score) = self.improved(candidate, batches)? else { continue };
            if best.as_ref().is_none_or(|best| score.mean_ns() < best.mean_ns()) {
                best = Some(score.clone());
            }
            finals.push(ScoredPlan { candidate, score });
        }
        self.sort(&mut finals, batches);
        Ok(finals)
    }

    /// Returns the score on the first batches with the better balancing, resuming from an earlier round.
    fn improved(&mut self, candidate: Candidate, batches: usize) -> Result<Option<Score>> {
        let Some(quick) = self.quick(candidate, batches) else { return Ok(None) };
        let score = self.improved.entry(candidate).or_default();
        let done = score.makespans_ns.len();
        // A finalist from an earlier run has more batches than an early round in a later run requires.
        if done < batches {
            score.append(quick.range(done..batches));
            score::improve(self.space, &candidate, done..batches, score)?;
        }
        let score = score.range(0..batches);
        Ok(self.fits(&score).then_some(score))
    }

    fn fits(&self, score: &Score) -> bool {
        score.requirement().most() <= self.space.budget_bytes
    }

    /// Scores plans on the first batches, the best first. A plan far slower than the best is discarded early,
    /// with the score so far.
    fn score_all(&mut self, candidates: &[Candidate], batches: usize) -> Vec<ScoredPlan> {
        self.score_first_batch(candidates);
        let mut scored = Vec::new();
        let mut best: Option<Score> = None;
        for &candidate in candidates {
            // A single batch is enough to discard a plan that is far slower.
            let score = self.quick(candidate, 1).and_then(|first| {
                let is_behind = best.as_ref().is_some_and(|best| first.is_far_behind(best));
                if is_behind { Some(first) } else { self.quick(candidate, batches) }
            });
            let Some(score) = score else { continue };
            if best.as_ref().is_none_or(|best| score.mean_ns() < best.mean_ns()) {
                best = Some(score.clone());
            }
            scored.push(ScoredPlan { candidate, score });
        }
        self.sort(&mut scored, batches);
        scored
    }

    /// Scores plans that are not known yet on the first batch, on all threads.
    fn score_first_batch(&mut self, candidates: &[Candidate]) {
        let fresh = candidates.iter().copied().filter(|candidate| !self.seen.contains_key(candidate));
        let fresh: BTreeSet<Candidate> = fresh.collect();
        let score = |candidate: Candidate| (candidate, score::score(self.space, &candidate, 0..1));
        let scored: Vec<_> = fresh.into_par_iter().map(score).collect();
        self.seen.extend(scored);
    }

    /// Returns the quick score on at least the first batches, resuming from an earlier round.
    fn quick(&mut self, candidate: Candidate, batches: usize) -> Option<Score> {
        let known = self.seen.entry(candidate).or_insert_with(|| Some(Score::default()));
        let score = known.as_mut()?;
        let done = score.makespans_ns.len();
        if done < batches {
            match score::score(self.space, &candidate, done..batches) {
                Some(more) => score.append(more),
                // A plan with a batch that does not fit is never scored again.
                None => *known = None,
            }
        }
        known.clone()
    }

    /// Sorts plans: complete scores first, then by mean; ties go to fewer GPUs, then to the lower plan.
    fn sort(&self, scored: &mut [ScoredPlan], batches: usize) {
        scored.sort_by(|one, other| {
            let left_early = |plan: &ScoredPlan| plan.score.makespans_ns.len() < batches;
            let key = |plan: &ScoredPlan| (self.space.gpus(&plan.candidate.family), plan.candidate);
            let means = one.score.mean_ns().total_cmp(&other.score.mean_ns());
            let order = left_early(one).cmp(&left_early(other)).then(means);
            order.then_with(|| key(one).cmp(&key(other)))
        });
    }

    /// Moves from the best plans to better neighbors, a few times.
    fn walk(&mut self, mut scored: Vec<ScoredPlan>, batches: usize) -> Vec<ScoredPlan> {
        for _ in 0..WALKS {
            let mut fresh = BTreeSet::new();
            for center in scored.iter().take(CENTERS) {
                let known = |plan: &Candidate| !scored.iter().any(|old| old.candidate == *plan);
                fresh.extend(self.neighbors(&center.candidate).into_iter().filter(known));
            }
            // Plans that cannot beat the best are not simulated.
            let best_ns = scored.first().map_or(f64::INFINITY, |best| best.score.mean_ns());
            let fresh: Vec<Candidate> =
                fresh.into_iter().filter(|plan| bound::lower_bound_ns(self.space, plan) <= best_ns).collect();
            let before = scored.first().map(|best| best.candidate);
            scored.extend(self.score_all(&fresh, batches));
            self.sort(&mut scored, batches);
            if scored.first().map(|best| best.candidate) == before {
                break;
            }
        }
        scored
    }

    /// Tries other numbers of microbatches for the best plan: the makespan depends little on the number, and
    /// the best number so far is noisy.
    fn recount(&mut self, mut scored: Vec<ScoredPlan>, batches: usize) -> Vec<ScoredPlan> {
        let Some(best) = scored.first().map(|best| best.candidate) else { return scored };
        let step = (best.microbatches / 8).max(1);
        let counts = (1..=2).flat_map(|steps| {
            [best.microbatches.saturating_sub(steps * step), best.microbatches + steps * step]
        });
        let known = |plan: &Candidate| scored.iter().any(|old| old.candidate == *plan);
        let fresh = counts.map(|microbatches| Candidate { microbatches, ..best });
        let fresh: Vec<Candidate> = fresh.filter(|plan| self.is_possible(plan) && !known(plan)).collect();
        scored.extend(self.score_all(&fresh, batches));
        self.sort(&mut scored, batches);
        scored
    }

    /// Adds plans with fewer microbatches: small microbatches vary more than the estimate assumes.
    fn variants(&self, candidates: Vec<Candidate>) -> Vec<Candidate> {
        let mut all = BTreeSet::new();
        for plan in candidates {
            let count = plan.microbatches;
            for microbatches in [count, count / 2 + 1, count / 4 + 1] {
                let variant = Candidate { microbatches, ..plan };
                if self.is_possible(&variant) {
                    all.insert(variant);
                }
            }
        }
        all.into_iter().collect()
    }

    fn neighbors(&self, plan: &Candidate) -> Vec<Candidate> {
        let Candidate { family, microbatches } = *plan;
        let step = (microbatches / 8).max(2);
        let counts = [
            microbatches.saturating_sub(step),
            microbatches.saturating_sub(1),
            microbatches + 1,
            microbatches + step,
        ];
        let mut around: Vec<Candidate> =
            counts.into_iter().map(|microbatches| Candidate { family, microbatches }).collect();
        if family.placement == Placement::Joint {
            // Every joint shape is in the sweep, so only numbers of microbatches are left to try.
            around.retain(|plan| self.is_possible(plan));
            return around;
        }
        let mut shapes = Vec::new();
        for other in [family.llm.wrapping_sub(1), family.llm + 1] {
            shapes.push(Family { llm: other, ..family });
        }
        if let [part] = family.encoders[..] {
            for shape in [part.shape.wrapping_sub(1), part.shape + 1] {
                shapes.push(Family { encoders: EncoderParts::one(shape as usize, part.dp), ..family });
            }
        }
        let ep = self.space.expert_parallel;
        for llm_dp in [family.llm_dp.saturating_sub(ep), family.llm_dp, family.llm_dp + ep] {
            shapes.push(Family { llm_dp, ..family });
        }
        for shape in shapes {
            if shape.llm >= self.space.llm.shapes.len() || shape.llm_dp == 0 {
                continue;
            }
            // As many microbatches per rank as before, and as many in total.
            let same = microbatches * family.llm_dp / shape.llm_dp;
            self.space.visit_encoders(shape.llm, shape.llm_dp, &mut |found| {
                let parts = found.encoders.iter().zip(shape.encoders.iter());
                let others = parts.filter(|(one, other)| one.shape != other.shape).count();
                // Of several encoders, the shape of one may change.
                if others < found.encoders.len().clamp(1, 2) && found.placement == shape.placement {
                    around.push(Candidate { family: *found, microbatches });
                    around.push(Candidate { family: *found, microbatches: same });
                }
            });
        }
        if family.placement == Placement::Disaggregated {
            let similar = self.space.similar_encoders(&family).into_iter();
            around.extend(
                similar.map(|encoders| Candidate { family: Family { encoders, ..family }, microbatches }),
            );
        }
        around.retain(|plan| self.is_possible(plan));
        around
    }

    fn is_possible(&self, plan: &Candidate) -> bool {
        self.space.contains(plan)
            && memory::may_fit(self.space, &plan.family, plan.microbatches, plan.microbatches)
    }
}
