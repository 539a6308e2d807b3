//! Adds the time of links to a step: messages between stages, all-reduces of gradients at its end.
//!
//! Activations go forward and gradients of the same size back. From the encoder to the LLM goes at most the
//! whole sequence of the fullest rank, text included: the planner does not know which of its tokens are
//! media. Messages travel while stages compute; a pass waits for its whole message. Gradients are summed
//! layer by layer, while earlier layers of the last microbatch run backward. Tensor-parallel all-reduces are
//! part of a layer's time.

use super::slot_assignment::SlotAssignment;
use super::step_timeline::StepTimes;
use crate::planner::cluster::{Link, Links, Placement};
use crate::planner::space::{Candidate, Family, SearchSpace};

/// Adds hops and all-reduces to a step, if links are given.
pub(super) fn add_links(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    assignment: &SlotAssignment,
    step: &mut StepTimes,
) {
    let Some(links) = &space.cluster.links else { return };
    let family = &candidate.family;
    let [encoder, llm] = space.shapes(family);
    let (tokens, share_tiles) = (&assignment.tokens, &assignment.share_tiles);
    let send = |link: &Link, units: u64, bytes: f64| link.send_ns(units as f64 * bytes).ceil() as u64;
    let llm_link = links.spanning(llm.gpus(), space.cluster.gpus_per_node);
    let llm_bytes = space.llm.border_bytes;
    step.llm.hop_ns = tokens.iter().map(|tokens| send(llm_link, *tokens, llm_bytes)).collect();
    match family.placement {
        Placement::Joint => {
            gather_rows(space, links, family, share_tiles, step);
            let [of_encoder, of_llm] = &space.joint[family.llm].gradient_bytes;
            // Every GPU of a tensor-parallel group has the encoder's gradients, and takes part in their sum.
            let of_encoder = reduce_ns(space, links, encoder.pp, family.encoder_dp, of_encoder);
            let of_llm = reduce_ns(space, links, llm.gpus(), family.llm_dp, of_llm);
            step.reduce_ns = of_encoder.iter().zip(of_llm).map(|(encoder, llm)| encoder + llm).collect();
            step.layers =
                encoder.layers.iter().zip(&llm.layers).map(|(encoder, llm)| encoder + llm).collect();
            return;
        }
        Placement::Disaggregated => {
            let link = links.spanning(encoder.gpus(), space.cluster.gpus_per_node);
            let bytes = space.encoder.border_bytes;
            // Encoder and LLM lie anywhere in the plan's GPUs, so that their link may span all of them.
            let widest = links.spanning(space.gpus(family), space.cluster.gpus_per_node);
            let chain = &mut step.encoders[0];
            chain.hop_ns = share_tiles.iter().map(|tiles| send(link, *tiles, bytes)).collect();
            let fullest = |of_lane: &[u64]| of_lane.iter().copied().max().unwrap_or(0);
            let sent = tokens.chunks(step.ranks / chain.lanes).map(fullest);
            chain.out_hop_ns = sent.map(|tokens| send(widest, tokens, llm_bytes)).collect();
            let gradients = &space.encoder.gradient_bytes[family.encoder];
            step.reduce_ns = reduce_ns(space, links, encoder.gpus(), family.encoder_dp, gradients);
            step.layers.clone_from(&encoder.layers);
        }
        Placement::Colocated => {}
    }
    let gradients = &space.llm.gradient_bytes[family.llm];
    step.reduce_ns.extend(reduce_ns(space, links, llm.gpus(), family.llm_dp, gradients));
    step.layers.extend(&llm.layers);
}

/// Adds the time in which the GPUs of a tensor-parallel group exchange the rows of their shares of the media,
/// after the encoder forward and before it backward.
fn gather_rows(
    space: &SearchSpace<'_>,
    links: &Links,
    family: &Family,
    share_tiles: &[u64],
    step: &mut StepTimes,
) {
    let [encoder, llm] = space.shapes(family);
    if llm.tp < 2 {
        return;
    }
    let row = step.llm.stages[encoder.end()];
    // A stage in which a module ends has a row of its own.
    for pass_ns in &mut step.llm.rows_ns[row] {
        for (ns, tiles) in pass_ns.iter_mut().zip(share_tiles) {
            let bytes = *tiles as f64 * space.encoder.border_bytes;
            *ns += (f64::from(llm.tp - 1) * links.nvlink.send_ns(bytes)).ceil() as u64;
        }
    }
}

/// Returns the all-reduce of a colocated encoder's gradients, nanoseconds.
pub(super) fn phase_reduce_ns(space: &SearchSpace<'_>, candidate: &Candidate) -> u64 {
    let Some(links) = &space.cluster.links else { return 0 };
    let family = &candidate.family;
    let gradients = &space.encoder.gradient_bytes[family.encoder];
    let gpus = space.encoder.shapes[family.encoder].gpus();
    reduce_ns(space, links, gpus, family.encoder_dp, gradients).into_iter().max().unwrap_or(0)
}

/// Returns the all-reduce of each stage's gradients over ranks of some GPUs each, nanoseconds.
fn reduce_ns(
    space: &SearchSpace<'_>,
    links: &Links,
    gpus_per_rank: u32,
    ranks: u32,
    gradients: &[f64],
) -> Vec<u64> {
    let node = space.cluster.gpus_per_node;
    let of = |bytes: &f64| links.all_reduce_ns(*bytes, ranks, gpus_per_rank, node).ceil() as u64;
    gradients.iter().map(of).collect()
}
