//! Finds the best plan with equal TP and DP degrees for all modules, like trainers made for a single model.
//!
//! Every DP rank is a separate pipeline, encoder stages first. The most promising plans, by the mean
//! microbatch, are simulated on the data-blind batches, as in tuning by hand.

use super::{joint, paper};
use crate::cluster::Placement;
use crate::space::shape::StageShape;
use crate::space::{Candidate, EncoderPart, EncoderParts, Family, SearchSpace};

/// Number of simulated plans.
const TRIED: usize = 48;

/// Finds the plan. Plans that fit into memory are preferred. Returns `None` if the space has no plan.
pub(super) fn best(space: &SearchSpace<'_>) -> Option<Candidate> {
    joint::fastest(space, promising(space).into_iter())
}

/// Lists the plans whose mean microbatch fits, shortest first.
pub(crate) fn promising(space: &SearchSpace<'_>) -> Vec<Candidate> {
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    for encoders in encoders_of_one_degree(space) {
        let placement = Placement::Disaggregated;
        let schedule = space.options.schedule;
        let mut family = Family { placement, encoders, llm: 0, llm_dp: 1, schedule };
        let gpus: u32 = space.encoder_shapes(&family).map(StageShape::gpus).sum();
        let of_encoder = space.encoder_shape(&family, 0).clone();
        let suits = |llm: &StageShape| llm.tp == of_encoder.tp && llm.chunks == 1;
        for (llm, of_llm) in space.llm.shapes.iter().enumerate().filter(|(_, llm)| suits(llm)) {
            let ranks = (space.cluster.gpus / (gpus + of_llm.gpus())).min(space.workload.global_batch());
            if ranks == 0 || of_encoder.is_recomputed != of_llm.is_recomputed {
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

/// Lists the shapes for all encoders with the same degree and recomputation; with several encoders, only
/// power-of-two stage numbers.
fn encoders_of_one_degree(space: &SearchSpace<'_>) -> Vec<EncoderParts> {
    let is_only = space.encoders.len() == 1;
    let key = |shape: &StageShape| (shape.tp, shape.is_recomputed);
    let mut all: Vec<(Option<(u32, bool)>, EncoderParts)> = vec![(None, EncoderParts::default())];
    for module in &space.encoders {
        let tried =
            module.shapes.iter().enumerate().filter(|(_, shape)| is_only || shape.pp.is_power_of_two());
        let tried: Vec<(usize, &StageShape)> = tried.collect();
        let with = |(of_first, before): (Option<(u32, bool)>, EncoderParts)| {
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
    use crate::compare::joint::counts;

    #[test]
    fn counts_end_with_the_most() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(6), [1, 2, 4, 6]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
    }
}
