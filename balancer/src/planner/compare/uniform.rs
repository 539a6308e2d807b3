//! Finds the best plan with one TP and one DP degree for both modules, like trainers made for one model.
//!
//! Every DP rank is a pipeline by itself, encoder stages first. The promising plans, by the mean microbatch,
//! are simulated on the data-blind batches themselves, like a plan tuned by hand would be.

use super::{joint, paper};
use crate::planner::cluster::Placement;
use crate::planner::space::{Candidate, Family, SearchSpace};

/// Plans that are simulated.
const TRIED: usize = 48;

/// Finds the plan, preferring plans that fit into memory; `None` if the space has none.
pub(super) fn best(space: &SearchSpace<'_>) -> Option<Candidate> {
    joint::fastest(space, promising(space).into_iter())
}

/// Lists the plans whose mean microbatch fits, shortest first.
pub(in crate::planner) fn promising(space: &SearchSpace<'_>) -> Vec<Candidate> {
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    for (encoder, of_encoder) in space.encoder.shapes.iter().enumerate() {
        for (llm, of_llm) in space.llm.shapes.iter().enumerate().filter(|(_, llm)| llm.tp == of_encoder.tp) {
            let ranks = space.cluster.gpus / (of_encoder.gpus() + of_llm.gpus());
            let ranks = ranks.min(space.workload.global_batch());
            if ranks == 0 || of_encoder.is_recomputed != of_llm.is_recomputed {
                continue;
            }
            let placement = Placement::Disaggregated;
            let family = Family { placement, encoder, encoder_dp: ranks, llm, llm_dp: ranks, ahead: 0 };
            for microbatches in counts(space.workload.global_batch() / ranks) {
                let candidate = Candidate { family, microbatches };
                if paper::fits(space, &candidate) {
                    found.push((paper::makespan_ns(space, &candidate), candidate));
                }
            }
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    found.into_iter().take(TRIED).map(|(_, candidate)| candidate).collect()
}

/// Lists the powers of two up to the most, and the most.
pub(super) fn counts(most: u32) -> Vec<u32> {
    let mut counts: Vec<u32> = (0..31).map(|power| 1 << power).take_while(|count| *count < most).collect();
    counts.push(most);
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_end_with_the_most() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(6), [1, 2, 4, 6]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
    }
}
