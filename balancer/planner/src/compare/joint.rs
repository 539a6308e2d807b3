//! Finds data-blind plans in which every rank holds the whole model, as trainers for one model do.

use super::data_blind;
use crate::space::{Candidate, SearchSpace};
use crate::space::{bound, memory};

/// Number of simulated plans.
const TRIED: usize = 48;
/// Number of batches in each simulation.
const BATCHES: usize = 8;

/// Finds the best joint-placement plan on dealt samples. Plans that fit into memory are preferred. Returns
/// `None` if there is no plan.
///
/// The most promising plans by estimated time are simulated on the data-blind batches, as in tuning by hand.
pub(super) fn best(space: &SearchSpace<'_>) -> Option<Candidate> {
    fastest(space, promising(space).into_iter())
}

/// Lists joint-placement plans that may fit, in ascending order by estimated time.
pub(crate) fn promising(space: &SearchSpace<'_>) -> Vec<Candidate> {
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    for family in space.joint_families() {
        for microbatches in counts(space.microbatches_max(&family)) {
            if memory::may_fit(space, &family, microbatches, microbatches) {
                let estimate = bound::estimate(space, &family, microbatches, microbatches);
                found.push((estimate.estimate_ns, Candidate { family, microbatches }));
            }
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    found.into_iter().take(TRIED).map(|(_, candidate)| candidate).collect()
}

/// Finds the plan that a person would choose: encoder before even LLM shares, minimum tensor-parallel degree,
/// then minimum number of stages that fits, one sample per microbatch.
///
/// # Source
/// Megatron-LM's guide: tensor parallelism within a node first, then pipeline parallelism, as little as
/// memory allows for both.
pub(crate) fn by_hand(space: &SearchSpace<'_>) -> Option<Candidate> {
    let by_hand = |candidate: &Candidate| space.joint[candidate.family.llm].is_by_hand;
    let plain = |candidate: &Candidate| {
        let joint = &space.joint[candidate.family.llm];
        !joint.encoders.iter().chain([&joint.llm]).any(|shape| shape.is_recomputed)
    };
    let plans = space
        .joint_families()
        .map(|family| Candidate { family, microbatches: space.microbatches_max(&family) });
    let mut plans: Vec<Candidate> = plans.filter(|plan| by_hand(plan) && plain(plan)).collect();
    plans.sort_by_key(|plan| {
        let llm = space.llm_shape(&plan.family);
        (llm.gpus(), llm.pp)
    });
    let fits = |plan: &&Candidate| {
        if !memory::may_fit(space, &plan.family, plan.microbatches, plan.microbatches) {
            return false;
        }
        let batches = space.workload.batches().iter().take(BATCHES);
        let mut bytes = batches.map(|batch| {
            let pipelines = data_blind::pipelines(space, plan, batch);
            data_blind::run_pipelines(space, plan, &pipelines).requirement.most()
        });
        bytes.all(|bytes| bytes <= space.budget_bytes)
    };
    plans.iter().find(fits).copied()
}

/// Returns the fastest plan on dealt samples that fits, or the fastest plan overall if none fits.
pub(super) fn fastest(
    space: &SearchSpace<'_>,
    candidates: impl Iterator<Item = Candidate>,
) -> Option<Candidate> {
    let mut best: Option<((bool, u128), Candidate)> = None;
    for candidate in candidates {
        let (mut sum_ns, mut bytes) = (0_u128, 0.0_f64);
        for batch in space.workload.batches().iter().take(BATCHES) {
            let pipelines = data_blind::pipelines(space, &candidate, batch);
            let outcome = data_blind::run_pipelines(space, &candidate, &pipelines);
            sum_ns += u128::from(outcome.makespan_ns);
            bytes = bytes.max(outcome.requirement.most());
        }
        let Candidate { family, microbatches } = candidate;
        // The longest sample overall may not be in the batches.
        let may_fit = memory::may_fit(space, &family, microbatches, microbatches);
        let rank = (!may_fit || bytes > space.budget_bytes, sum_ns);
        if best.as_ref().is_none_or(|(least, _)| rank < *least) {
            best = Some((rank, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Lists the powers of two up to the most, and the most.
pub(super) fn counts(most: u32) -> Vec<u32> {
    let mut counts: Vec<u32> = (0..31).map(|power| 1 << power).take_while(|count| *count < most).collect();
    counts.push(most);
    counts
}
