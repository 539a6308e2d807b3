//! Adds link times to a step: messages between stages and gradient all-reduces at the end.
//!
//! Activations go forward and gradients with the same size go back. A message from the encoder to the LLM has
//! at most the fullest rank's whole sequence, text included: the planner does not know which tokens are
//! media. Messages travel while stages compute, sequentially within a lane; a pass waits for its whole
//! message. Gradients are summed layer by layer, while earlier layers run the last microbatch's backward
//! pass. Ranks that share optimizer state each sum their own part, which is half an all-reduce; the second
//! half gathers the updated weights, layer by layer before the next step's first forward pass.
//! Tensor-parallel all-reduces are part of the layer time.

use super::encoder_shares::LargestShares;
use super::step_timeline::StepTimes;
use crate::cluster::{Link, Links, Placement};
use crate::space::{Candidate, EncoderPart, Family, ModuleSpace, SearchSpace};
use dflop_costmodel::memory::Trainer;
use std::ops::AddAssign;

/// Adds hops and all-reduces to a step, if links are given.
///
/// - `tokens`: of each cell
/// - `shares`: largest shares of the ranks of each encoder
pub(super) fn add_links(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    tokens: &[u64],
    shares: &[LargestShares],
    step: &mut StepTimes,
) {
    let Some(links) = &space.cluster.links else { return };
    add_hops_and_sums(space, links, candidate, (tokens, shares), step);
    if !space.options.trainer.overlaps_sums() {
        step.layers.fill(1);
    }
}

fn add_hops_and_sums(
    space: &SearchSpace<'_>,
    links: &Links,
    candidate: &Candidate,
    (tokens, shares): (&[u64], &[LargestShares]),
    step: &mut StepTimes,
) {
    let family = &candidate.family;
    let llm = space.llm_shape(family);
    let node = space.cluster.gpus_per_node;
    let send = |link: &Link, units: u64, bytes: f64| link.send_ns(units as f64 * bytes).ceil() as u64;
    // Ranks that share experts are adjacent in a stage, so stages are further apart.
    let llm_link = links.spanning(llm.gpus() * space.expert_parallel, node);
    let llm_bytes = space.llm.border_bytes;
    step.llm.hop_ns = tokens.iter().map(|tokens| send(llm_link, *tokens, llm_bytes)).collect();
    match family.placement {
        Placement::Joint => {
            step.reduce_ns = vec![0; llm.layers.len()];
            step.layers.clone_from(&llm.layers);
            let gradients = &space.joint[family.llm].gradient_bytes;
            for (encoder, shape) in space.encoder_shapes(family).enumerate() {
                gather_rows(space, links, family, encoder, &shares[encoder].tiles, step);
                // Every GPU of a tensor-parallel group has the encoder's gradients, and takes part in their
                // sum.
                let own = reduce_ns(space, links, shape.pp, family.encoders[encoder].dp, &gradients[encoder]);
                add(&mut step.reduce_ns, &own);
                add(&mut step.layers, &shape.layers);
            }
            let of_llm = &gradients[family.encoders.len()];
            add(&mut step.reduce_ns, &reduce_ns(space, links, llm.gpus(), family.llm_dp, of_llm));
            share_sums(space, step);
            return;
        }
        Placement::Disaggregated => {
            // Encoders and LLM may be anywhere in the plan's GPUs, so their link may span all GPUs.
            let widest = links.spanning(space.gpus(family), node);
            let fullest = |of_lane: &[u64]| of_lane.iter().copied().max().unwrap_or(0);
            for (encoder, part) in family.encoders.iter().enumerate() {
                let (module, shape) = (&space.encoders[encoder], space.encoder_shape(family, encoder));
                let link = links.spanning(shape.gpus(), node);
                let tiles = &shares[encoder].tiles;
                let chain = &mut step.encoders[encoder];
                chain.hop_ns = tiles.iter().map(|tiles| send(link, *tiles, module.border_bytes)).collect();
                let sent = tokens.chunks(step.ranks / chain.lanes).map(fullest);
                chain.out_hop_ns = sent.map(|tokens| send(widest, tokens, llm_bytes)).collect();
                let gradients = &module.gradient_bytes[part.shape as usize];
                step.reduce_ns.extend(reduce_ns(space, links, shape.gpus(), part.dp, gradients));
                step.layers.extend(&shape.layers);
            }
        }
        Placement::Colocated => {}
    }
    let gradients = &space.llm.gradient_bytes[family.llm];
    let mut of_llm = reduce_ns(space, links, llm.gpus(), family.llm_dp, gradients);
    // Only ranks with the same experts sum expert gradients.
    let (of_experts, ep) = (&space.llm.expert_gradient_bytes[family.llm], space.expert_parallel);
    add(&mut of_llm, &reduce_ns(space, links, llm.gpus() * ep, family.llm_dp / ep, of_experts));
    step.reduce_ns.extend(of_llm);
    step.layers.extend(&llm.layers);
    share_sums(space, step);
}

/// Replaces all-reduces by reduce-scatters and gathers, if ranks share optimizer state. In PyTorch, gradients
/// are scattered in 32 bits, which takes as long as an all-reduce in 16 bits.
fn share_sums(space: &SearchSpace<'_>, step: &mut StepTimes) {
    if space.options.has_sharded_optimizer {
        step.gather_ns = step.reduce_ns.iter().map(|ns| ns / 2).collect();
        if space.options.trainer == Trainer::Dflop {
            step.reduce_ns.iter_mut().for_each(|ns| *ns -= *ns / 2);
        }
    }
}

/// Adds stage values element by element.
fn add<T: Copy + AddAssign>(all: &mut [T], own: &[T]) {
    all.iter_mut().zip(own).for_each(|(all, own)| *all += *own);
}

/// Adds the time in which a tensor-parallel group's GPUs exchange rows for their media shares, after the
/// encoder forward and before the encoder backward.
fn gather_rows(
    space: &SearchSpace<'_>,
    links: &Links,
    family: &Family,
    encoder: usize,
    share_tiles: &[u64],
    step: &mut StepTimes,
) {
    let llm = space.llm_shape(family);
    if llm.tp < 2 {
        return;
    }
    let row = step.llm.stages[space.encoder_shape(family, encoder).end()];
    // A stage in which a module ends has a separate row.
    for pass_ns in &mut step.llm.rows_ns[row] {
        for (ns, tiles) in pass_ns.iter_mut().zip(share_tiles) {
            let bytes = *tiles as f64 * space.encoders[encoder].border_bytes;
            *ns += (f64::from(llm.tp - 1) * links.nvlink.send_ns(bytes)).ceil() as u64;
        }
    }
}

/// Returns the gradient all-reduce time for colocated encoders, nanoseconds.
pub(super) fn phase_reduce_ns(space: &SearchSpace<'_>, candidate: &Candidate) -> u64 {
    let Some(links) = &space.cluster.links else { return 0 };
    let of = |(module, part): (&ModuleSpace, &EncoderPart)| {
        let gradients = &module.gradient_bytes[part.shape as usize];
        let gpus = module.shapes[part.shape as usize].gpus();
        reduce_ns(space, links, gpus, part.dp, gradients).into_iter().max().unwrap_or(0)
    };
    space.encoders.iter().zip(candidate.family.encoders.iter()).map(of).sum()
}

/// Returns each stage's gradient all-reduce time over ranks with the given number of GPUs each, nanoseconds.
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
