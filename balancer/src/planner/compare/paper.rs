//! The paper's planning: the least makespan of a batch whose microbatches all equal the mean.

use crate::planner::cluster::Placement;
use crate::planner::costs::StageBytes;
use crate::planner::memory::in_flight;
use crate::planner::space::shape::{StageShape, TpTimes};
use crate::planner::space::{Candidate, Family, SearchSpace};

/// Finds the plans of Algorithm 1: with every possible number of microbatches, and with the one number that
/// the authors' implementation tries for each configuration.
///
/// For every split of the GPUs and all degrees, `T = (m + E_pp + L_pp - 1) * max(E_dur, L_dur)` at the mean
/// shapes of `m` microbatches, if these fit into memory. The mean ignores uneven batches, so the first plan
/// may have as many microbatches as samples; the second has the fewest whose mean is no larger than the
/// largest sample.
///
/// # Source
/// An et al., "DFLOP", PACMMOD 2026, arXiv:2603.25120, section 3.3. Times are interpolated here, not rates.
pub(in crate::planner) fn plans(space: &SearchSpace<'_>) -> Vec<Candidate> {
    let mut best: [Option<(f64, Candidate)>; 2] = [None, None];
    space.visit(|family| {
        // Algorithm 1 splits the GPUs between the modules.
        if family.placement == Placement::Colocated {
            return;
        }
        let fewest = fewest(space, family);
        for microbatches in 1..=space.workload.global_batch() / family.llm_dp {
            let candidate = Candidate { family: *family, microbatches };
            let ns = makespan_ns(space, &candidate);
            let rules = [true, Some(microbatches) == fewest];
            for (best, _) in best.iter_mut().zip(rules).filter(|(_, is_tried)| *is_tried) {
                if best.as_ref().is_none_or(|(least, _)| ns < *least) && fits(space, &candidate) {
                    *best = Some((ns, candidate));
                }
            }
        }
    });
    best.into_iter().flatten().map(|(_, candidate)| candidate).collect()
}

/// Returns the fewest microbatches whose mean has at least a sample for every rank, and is no larger than the
/// largest sample.
fn fewest(space: &SearchSpace<'_>, family: &Family) -> Option<u32> {
    let samples = f64::from(space.workload.global_batch());
    let (tiles_max, tokens_max) = (space.workload.tiles_max as f64, space.workload.tokens_max as f64);
    (1..=space.workload.global_batch()).find(|&microbatches| {
        let [tiles, tokens] = means(space, &Candidate { family: *family, microbatches });
        let ranks = f64::from(family.encoder_dp.max(family.llm_dp));
        tiles <= tiles_max && tokens <= tokens_max && samples >= f64::from(microbatches) * ranks
    })
}

/// Computes `T` at the mean microbatch.
pub(super) fn makespan_ns(space: &SearchSpace<'_>, candidate: &Candidate) -> f64 {
    let Family { encoder, llm, llm_dp, .. } = candidate.family;
    let (encoder, llm) = (&space.encoder.shapes[encoder], &space.llm.shapes[llm]);
    let [tiles, tokens] = means(space, candidate);
    let of_samples = space.llm.times[llm.times].samples_ns / f64::from(llm_dp * candidate.microbatches);
    let encoder_ns = stage_ns(encoder, &space.encoder.times[encoder.times], tiles, 0.0);
    let llm_ns = stage_ns(llm, &space.llm.times[llm.times], tokens, of_samples);
    f64::from(candidate.microbatches + encoder.pp + llm.pp - 1) * encoder_ns.max(llm_ns)
}

/// Returns tiles and tokens of the mean microbatch of an encoder rank and of an LLM rank.
fn means(space: &SearchSpace<'_>, candidate: &Candidate) -> [f64; 2] {
    let Family { encoder_dp, llm_dp, .. } = candidate.family;
    let microbatches = f64::from(candidate.microbatches);
    let tiles = space.workload.batch_tiles / (microbatches * f64::from(encoder_dp));
    [tiles, space.workload.batch_tokens / (microbatches * f64::from(llm_dp))]
}

/// Returns a stage's time with all work divided evenly: `E_FLOP / (E_thr E_tp E_pp)`.
fn stage_ns(shape: &StageShape, times: &TpTimes, units: f64, samples_ns: f64) -> f64 {
    (shape.all * (times.layer.at(units) + samples_ns) + times.outside.at(units)) / f64::from(shape.pp)
}

/// Whether the mean microbatch fits, times the number of microbatches in flight.
pub(super) fn fits(space: &SearchSpace<'_>, candidate: &Candidate) -> bool {
    let Family { encoder, llm, .. } = candidate.family;
    let (encoder, llm) = (&space.encoder.shapes[encoder], &space.llm.shapes[llm]);
    let [tiles, tokens] = means(space, candidate);
    let fullest = |shape: &StageShape, stages: u32, units: f64| {
        let of = |(stage, bytes): &(u32, StageBytes)| {
            bytes.at(f64::from(in_flight(stages, *stage, candidate.microbatches)) * units, units)
        };
        shape.memory.iter().map(of).fold(0.0, f64::max)
    };
    let of_encoder = fullest(encoder, encoder.pp + llm.pp, tiles);
    of_encoder.max(fullest(llm, llm.pp, tokens)) <= space.budget_bytes
}
