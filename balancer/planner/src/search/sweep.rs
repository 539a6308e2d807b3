//! Lists the most promising plans by estimate, and bounds all plans, by branch and bound without simulation.

use crate::space::{Candidate, Family, SearchSpace, bound, memory};
use std::collections::BinaryHeap;

/// Maximum number of plans simulated in the first halving round.
const SWEEP_MAX: usize = 128;
/// Samples per GPU that the first round may simulate; large batches start with fewer plans.
const SWEEP_UNITS: u64 = 512;
/// Maximum number of samples, over all batches and plans, for which every plan is simulated.
const ALL_UNITS: u64 = 2_000_000;
/// Memory slack of the first sweep.
const NO_SLACK: f64 = 1.0;

/// Search that is about to begin.
pub(crate) struct Start {
    pub(super) swept: SweepResult,
    /// Lowest estimate, nanoseconds; infinite if there is no plan.
    pub(crate) least_ns: f64,
}

impl Start {
    /// Sweeps without memory slack.
    pub(crate) fn new(space: &SearchSpace<'_>) -> Self {
        let swept = sweep_with_slack(space, NO_SLACK);
        let estimate_ns = |plan: &Candidate| {
            bound::estimate(space, &plan.family, plan.microbatches, plan.microbatches).estimate_ns
        };
        let least_ns = swept.candidates.iter().map(estimate_ns).fold(f64::INFINITY, f64::min);
        Self { swept, least_ns }
    }
}

pub(super) fn sweep_with_slack(space: &SearchSpace<'_>, slack: f64) -> SweepResult {
    let items = u64::from(space.workload.global_batch());
    let batches = space.workload.batches().len() as u64;
    let gpus = u64::from(space.cluster.gpus.max(64));
    let length = (SWEEP_UNITS * gpus / items).clamp(16, SWEEP_MAX as u64) as usize;
    sweep(&space.with_slack(slack), length, (ALL_UNITS / (items * batches)) as usize)
}

/// Plans from a sweep, and the space size.
#[derive(Debug, Clone, Default)]
pub(super) struct SweepResult {
    /// Plans by estimate, the best first.
    pub(super) candidates: Vec<Candidate>,
    /// Number of bounded plans, individually or within a range.
    pub(super) plans: u64,
    /// Whether the candidates include all plans that may fit.
    pub(super) is_all: bool,
}

/// Plans by estimate, the worst on top of the heap.
struct Shortlist {
    heap: BinaryHeap<(u64, Candidate)>,
    length_max: usize,
    /// Estimate at which a plan no longer enters the list.
    limit_ns: f64,
}

impl Shortlist {
    fn new(length_max: usize, limit_ns: f64) -> Self {
        Self { heap: BinaryHeap::with_capacity(length_max + 1), length_max, limit_ns }
    }

    fn push(&mut self, estimate_ns: f64, candidate: Candidate) {
        self.heap.push((estimate_ns as u64, candidate));
        if self.heap.len() > self.length_max {
            self.heap.pop();
        }
        if let Some((last_ns, _)) = self.heap.peek().filter(|_| self.heap.len() == self.length_max) {
            // One nanosecond more, so that plans as good as the last are considered.
            self.limit_ns = self.limit_ns.min(*last_ns as f64 + 1.0);
        }
    }
}

/// Divisor for the first pass, which covers LLM rank counts that are multiples of an eighth of themselves,
/// rounded up.
const FIRST_LOOK: u32 = 8;

/// Lists the best plans by estimate, one per family, or all plans if there are at most `all_max`.
fn sweep(space: &SearchSpace<'_>, length_max: usize, all_max: usize) -> SweepResult {
    let plans = space.count_plans();
    if plans <= all_max as u64 {
        return SweepResult { candidates: all_that_may_fit(space), plans, is_all: true };
    }
    // A first pass over some families gives an early limit, which discards most others.
    let mut first = Shortlist::new(length_max, f64::INFINITY);
    fill(space, &mut first, |ranks| ranks.is_multiple_of(ranks.div_ceil(FIRST_LOOK)), |pp| pp == 1);
    let limit_ns = if first.heap.len() == length_max { first.limit_ns } else { f64::INFINITY };
    let mut shortlist = Shortlist::new(length_max, limit_ns);
    fill(space, &mut shortlist, |_| true, |_| true);
    let sorted = shortlist.heap.into_sorted_vec();
    SweepResult { candidates: sorted.into_iter().map(|(_, plan)| plan).collect(), plans, is_all: false }
}

/// Adds the families with accepted LLM ranks and encoder stages.
fn fill(
    space: &SearchSpace<'_>,
    shortlist: &mut Shortlist,
    ranks: impl Fn(u32) -> bool,
    stages: impl Fn(u32) -> bool,
) {
    space.visit_llms(|llm, llm_dp| {
        let many = space.workload.global_batch() / llm_dp;
        let estimate = bound::llm_estimate(space, llm, llm_dp, 1, many);
        let fits = memory::llm_bytes(space, llm, llm_dp, 1, many) <= space.budget_bytes;
        if !ranks(llm_dp) || !fits || estimate.least_ns() >= shortlist.limit_ns {
            return;
        }
        space.visit_encoders(llm, llm_dp, &mut |family| {
            if space.encoder_shapes(family).any(|shape| !stages(shape.pp)) {
                return;
            }
            if bound::least_with(space, &estimate, family).estimate_ns >= shortlist.limit_ns {
                return;
            }
            let estimate_ns = bound::estimate_with(space, &estimate, family, 1, many).estimate_ns;
            add_best(space, shortlist, family, estimate_ns);
        });
    });
    for family in space.joint_families() {
        if stages(space.llm_shape(&family).pp) {
            let many = space.microbatches_max(&family);
            let estimate_ns = bound::estimate(space, &family, 1, many).estimate_ns;
            add_best(space, shortlist, &family, estimate_ns);
        }
    }
}

/// Adds a family's plan with the best number of microbatches, if it is good enough.
fn add_best(space: &SearchSpace<'_>, shortlist: &mut Shortlist, family: &Family, estimate_ns: f64) {
    let mut best = (shortlist.limit_ns, None);
    least(space, family, (1, space.microbatches_max(family)), estimate_ns, &mut best);
    if let (estimate_ns, Some(microbatches)) = best {
        shortlist.push(estimate_ns, Candidate { family: *family, microbatches });
    }
}

/// Finds the number of microbatches in a range with the lowest estimate below `best`, given the range's own
/// estimate.
fn least(
    space: &SearchSpace<'_>,
    family: &Family,
    (few, many): (u32, u32),
    estimate_ns: f64,
    best: &mut (f64, Option<u32>),
) {
    if estimate_ns >= best.0 || !memory::may_fit(space, family, few, many) {
        return;
    }
    if few == many {
        *best = (estimate_ns, Some(few));
        return;
    }
    let middle = few + (many - few) / 2;
    let halves = [(few, middle), (middle + 1, many)];
    let estimates = halves.map(|(few, many)| bound::estimate(space, family, few, many).estimate_ns);
    // The better half first, so that its result may discard the second half.
    let order = if estimates[1] < estimates[0] { [1, 0] } else { [0, 1] };
    for half in order {
        least(space, family, halves[half], estimates[half], best);
    }
}

/// Returns the minimum bound over all plans that may fit: no plan in the space is faster.
pub(crate) fn least_bound_ns(space: &SearchSpace<'_>, start_ns: f64) -> f64 {
    let mut least_ns = start_ns;
    space.visit_llms(|llm, llm_dp| {
        let many = space.workload.global_batch() / llm_dp;
        let estimate = bound::llm_estimate(space, llm, llm_dp, 1, many);
        let fits = memory::llm_bytes(space, llm, llm_dp, 1, many) <= space.budget_bytes;
        if !fits || estimate.bound_ns() >= least_ns {
            return;
        }
        space.visit_encoders(llm, llm_dp, &mut |family| {
            if bound::least_with(space, &estimate, family).bound_ns >= least_ns {
                return;
            }
            let bound_ns = bound::estimate_with(space, &estimate, family, 1, many).bound_ns;
            lower(space, family, bound_ns, &mut least_ns);
        });
    });
    for family in space.joint_families() {
        let many = space.microbatches_max(&family);
        lower(space, &family, bound::estimate(space, &family, 1, many).bound_ns, &mut least_ns);
    }
    least_ns
}

/// Lowers a bound to that of the family's best plan that may fit.
fn lower(space: &SearchSpace<'_>, family: &Family, bound_ns: f64, least_ns: &mut f64) {
    let mut ranges = vec![(1, space.microbatches_max(family), bound_ns)];
    while let Some((few, many, bound_ns)) = ranges.pop() {
        if bound_ns >= *least_ns || !memory::may_fit(space, family, few, many) {
            continue;
        }
        if few == many {
            *least_ns = bound_ns;
            continue;
        }
        let middle = few + (many - few) / 2;
        for (few, many) in [(middle + 1, many), (few, middle)] {
            ranges.push((few, many, bound::estimate(space, family, few, many).bound_ns));
        }
    }
}

fn all_that_may_fit(space: &SearchSpace<'_>) -> Vec<Candidate> {
    let mut all = Vec::new();
    space.visit(|family| {
        for microbatches in 1..=space.microbatches_max(family) {
            if memory::may_fit(space, family, microbatches, microbatches) {
                all.push(Candidate { family: *family, microbatches });
            }
        }
    });
    all
}
