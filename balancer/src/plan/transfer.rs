//! What links add to a step: messages between stages, and the all-reduce of gradients at its end.
//!
//! Activations go forward and their gradients back, as many bytes. From the encoder to the LLM goes at most the whole
//! sequence of the fullest rank, text included: which of its tokens are media is not known here. Messages travel
//! while stages compute; what waits for one waits for all of it. Tensor-parallel all-reduces are part of a layer's time.

use super::cluster::{Link, Links};
use super::shape::StageShape;
use super::space::{Candidate, Space};
use super::step::Cells;
use super::timeline::StepTimes;

/// Bytes that the modules of a space send, precomputed.
#[derive(Debug, Clone, Default, PartialEq)]
#[expect(clippy::struct_field_names, reason = "units end the names")]
pub(super) struct Traffic {
    pub(super) encoder_border_bytes: f64,
    pub(super) llm_border_bytes: f64,
    /// By shape and stage.
    pub(super) encoder_gradient_bytes: Vec<Vec<f64>>,
    pub(super) llm_gradient_bytes: Vec<Vec<f64>>,
}

impl Space<'_> {
    /// Adds hops and all-reduces to a step, if links are given.
    pub(super) fn add_links(&self, candidate: &Candidate, cells: &Cells, step: &mut StepTimes) {
        let Some(links) = &self.cluster.links else { return };
        let family = &candidate.family;
        let (encoder, llm) = (&self.encoder_shapes[family.encoder], &self.llm_shapes[family.llm]);
        let send = |link: &Link, units: u64, bytes: f64| link.send_ns(units as f64 * bytes).ceil() as u64;
        let llm_link = links.spanning(llm.gpus(), self.cluster.gpus_per_node);
        let llm_bytes = self.traffic.llm_border_bytes;
        step.llm_hop_ns = cells.tokens.iter().map(|tokens| send(llm_link, *tokens, llm_bytes)).collect();
        step.reduce_ns = Vec::new();
        if !step.encoder_stages.is_empty() {
            let link = links.spanning(encoder.gpus(), self.cluster.gpus_per_node);
            let bytes = self.traffic.encoder_border_bytes;
            step.encoder_hop_ns = cells.share_tiles.iter().map(|tiles| send(link, *tiles, bytes)).collect();
            let widest = links.spanning(self.gpus(family), self.cluster.gpus_per_node);
            let between = |slot: usize| send(widest, cells.slot_tokens_max(slot), llm_bytes);
            step.between_hop_ns = (0..cells.slots).map(between).collect();
            let gradients = &self.traffic.encoder_gradient_bytes[family.encoder];
            step.reduce_ns = self.reduce_ns(links, encoder, family.encoder_dp, gradients);
        }
        let gradients = &self.traffic.llm_gradient_bytes[family.llm];
        step.reduce_ns.extend(self.reduce_ns(links, llm, family.llm_dp, gradients));
    }

    /// All-reduce of a colocated encoder's gradients, nanoseconds.
    pub(super) fn phase_reduce_ns(&self, candidate: &Candidate) -> u64 {
        let Some(links) = &self.cluster.links else { return 0 };
        let family = &candidate.family;
        let gradients = &self.traffic.encoder_gradient_bytes[family.encoder];
        let shape = &self.encoder_shapes[family.encoder];
        self.reduce_ns(links, shape, family.encoder_dp, gradients).into_iter().max().unwrap_or(0)
    }

    /// Of each stage.
    fn reduce_ns(&self, links: &Links, shape: &StageShape, ranks: u32, gradients: &[f64]) -> Vec<u64> {
        let gpus = shape.gpus().saturating_mul(ranks);
        let link = links.spanning(gpus, self.cluster.gpus_per_node);
        gradients.iter().map(|bytes| link.all_reduce_ns(*bytes, ranks).ceil() as u64).collect()
    }
}
