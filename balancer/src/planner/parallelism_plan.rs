//! Parallelism plan: degrees, stages and microbatches of both modules.

use super::cluster::Placement;
use super::space::shape::StageShape;
use super::space::{Candidate, Family, SearchSpace};

/// Degrees of parallelism of one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the field's names are their meaning")]
pub struct Degrees {
    pub tp: u32,
    pub pp: u32,
    pub dp: u32,
}

impl Degrees {
    /// Returns the GPUs that the module takes.
    #[must_use]
    pub const fn gpus(&self) -> u32 {
        self.tp * self.pp * self.dp
    }
}

/// Degrees, stages, placement and microbatches of both modules.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ParallelismPlan {
    /// Degrees of the encoder. If placement is joint: every GPU of a stage is a data-parallel rank of its
    /// own.
    pub encoder: Degrees,
    /// Degrees of the LLM.
    pub llm: Degrees,
    /// Microbatches of each LLM DP rank per step.
    pub microbatches: u32,
    /// Placement of the encoder relative to the LLM.
    pub placement: Placement,
    /// Layers of each encoder stage; of each stage if placement is joint, some of which may have none.
    pub encoder_layers: Vec<u32>,
    /// Layers of each LLM stage.
    pub llm_layers: Vec<u32>,
    /// Whether the encoder recomputes its layers in the backward pass.
    pub is_encoder_recomputed: bool,
    /// Whether the LLM recomputes its layers in the backward pass.
    pub is_llm_recomputed: bool,
    /// Rounds that the encoder runs ahead of the schedule.
    pub rounds_ahead: u16,
}

impl ParallelismPlan {
    /// Describes a candidate of the space.
    pub(super) fn new(space: &SearchSpace<'_>, candidate: &Candidate) -> Self {
        let Family { placement, encoder_dp, llm_dp, ahead, .. } = candidate.family;
        let [encoder, llm] = space.shapes(&candidate.family);
        Self {
            encoder: Degrees { tp: encoder.tp, pp: encoder.pp, dp: encoder_dp },
            llm: Degrees { tp: llm.tp, pp: llm.pp, dp: llm_dp },
            microbatches: candidate.microbatches,
            placement,
            encoder_layers: encoder.layers.clone(),
            llm_layers: llm.layers.clone(),
            is_encoder_recomputed: encoder.is_recomputed,
            is_llm_recomputed: llm.is_recomputed,
            rounds_ahead: ahead,
        }
    }

    /// Finds the candidate of a plan; `None` if the space does not have its shapes.
    pub(super) fn candidate(&self, space: &SearchSpace<'_>) -> Option<Candidate> {
        let is_shape = |shape: &StageShape, degrees: Degrees, layers: &[u32], again: bool| {
            (shape.tp, shape.pp) == (degrees.tp, degrees.pp)
                // The same degrees may exist with even and with uneven layers.
                && shape.layers == layers
                && shape.is_recomputed == again
        };
        let is_encoder = |shape: &StageShape| {
            is_shape(shape, self.encoder, &self.encoder_layers, self.is_encoder_recomputed)
        };
        let is_llm = |shape: &StageShape| is_shape(shape, self.llm, &self.llm_layers, self.is_llm_recomputed);
        let (encoder, llm) = if self.placement == Placement::Joint {
            let found =
                space.joint.iter().position(|shape| is_encoder(&shape.encoder) && is_llm(&shape.llm))?;
            (found, found)
        } else {
            (space.encoder.shapes.iter().position(is_encoder)?, space.llm.shapes.iter().position(is_llm)?)
        };
        let family = Family {
            placement: self.placement,
            encoder,
            encoder_dp: self.encoder.dp,
            llm,
            llm_dp: self.llm.dp,
            ahead: self.rounds_ahead,
        };
        Some(Candidate { family, microbatches: self.microbatches })
    }

    /// Returns the GPUs that the plan takes.
    #[must_use]
    pub const fn gpus(&self) -> u32 {
        match self.placement {
            Placement::Disaggregated => self.encoder.gpus() + self.llm.gpus(),
            Placement::Colocated | Placement::Joint => self.llm.gpus(),
        }
    }
}
