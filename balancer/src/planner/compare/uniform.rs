//! Finds the best plan with one TP and one DP degree for all modules, like trainers made for one model.
//!
//! Every DP rank is a pipeline by itself, encoder stages first. The promising plans, by the mean microbatch,
//! are simulated on the data-blind batches themselves, like a plan tuned by hand would be.

use super::{joint, paper};
use crate::planner::cluster::Placement;
use crate::planner::space::shape::StageShape;
use crate::planner::space::{Candidate, EncoderPart, EncoderParts, Family, RecomputedLayers, SearchSpace};

/// Plans that are simulated.
const TRIED: usize = 48;

/// Finds the plan, preferring plans that fit into memory; `None` if the space has none.
pub(super) fn best(space: &SearchSpace<'_>) -> Option<Candidate> {
    joint::fastest(space, promising(space).into_iter())
}

/// Lists the plans whose mean microbatch fits, shortest first.
pub(in crate::planner) fn promising(space: &SearchSpace<'_>) -> Vec<Candidate> {
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    for encoders in encoders_of_one_degree(space) {
        let placement = Placement::Disaggregated;
        let mut family = Family { placement, encoders, llm: 0, llm_dp: 1, ahead: 0 };
        let gpus: u32 = space.encoder_shapes(&family).map(StageShape::gpus).sum();
        let of_encoder = space.encoder_shape(&family, 0).clone();
        for (llm, of_llm) in space.llm.shapes.iter().enumerate().filter(|(_, llm)| llm.tp == of_encoder.tp) {
            let ranks = (space.cluster.gpus / (gpus + of_llm.gpus())).min(space.workload.global_batch());
            if ranks == 0 || of_encoder.recomputed != of_llm.recomputed {
                continue;
            }
            (family.llm, family.llm_dp) = (llm, ranks);
            family.encoders.iter_mut().for_each(|part| part.dp = ranks);
            for microbatches in joint::counts(space.workload.global_batch() / ranks) {
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

/// Lists the shapes of all encoders with the same degree and recomputation; of several encoders, those with
/// numbers of stages that are powers of two.
fn encoders_of_one_degree(space: &SearchSpace<'_>) -> Vec<EncoderParts> {
    let is_only = space.encoders.len() == 1;
    let key = |shape: &StageShape| (shape.tp, shape.recomputed);
    let mut all: Vec<(Option<(u32, RecomputedLayers)>, EncoderParts)> = vec![(None, EncoderParts::default())];
    for module in &space.encoders {
        let tried =
            module.shapes.iter().enumerate().filter(|(_, shape)| is_only || shape.pp.is_power_of_two());
        let tried: Vec<(usize, &StageShape)> = tried.collect();
        let with = |(of_first, before): (Option<(u32, RecomputedLayers)>, EncoderParts)| {
            let alike =
                tried.iter().filter(move |(_, shape)| of_first.is_none_or(|first| first == key(shape)));
            alike.map(move |(index, shape)| {
                let part = EncoderPart { shape: *index as u32, dp: 1 };
                (Some(key(shape)), before.iter().copied().chain([part]).collect())
            })
        };
        all = all.into_iter().flat_map(with).collect();
    }
    all.into_iter().map(|(_, encoders)| encoders).collect()
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
