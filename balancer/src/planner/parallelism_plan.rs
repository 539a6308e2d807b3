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
    /// Degrees of the encoder.
    pub encoder: Degrees,
    /// Degrees of the LLM.
    pub llm: Degrees,
    /// Microbatches of each LLM DP rank per step.
    pub microbatches: u32,
    /// Placement of the encoder relative to the LLM.
    pub placement: Placement,
    /// Layers of each encoder stage.
    pub encoder_layers: Vec<u32>,
    /// Layers of each LLM stage.
    pub llm_layers: Vec<u32>,
    /// Whether the encoder recomputes its layers in the backward pass.
    pub is_encoder_recomputed: bool,
    /// Whether the LLM recomputes its layers in the backward pass.
    pub is_llm_recomputed: bool,
}

impl ParallelismPlan {
    /// Describes a candidate of the space.
    pub(super) fn new(space: &SearchSpace<'_>, candidate: &Candidate) -> Self {
        let Family { placement, encoder, encoder_dp, llm, llm_dp } = candidate.family;
        let (encoder, llm) = (&space.encoder.shapes[encoder], &space.llm.shapes[llm]);
        Self {
            encoder: Degrees { tp: encoder.tp, pp: encoder.pp, dp: encoder_dp },
            llm: Degrees { tp: llm.tp, pp: llm.pp, dp: llm_dp },
            microbatches: candidate.microbatches,
            placement,
            encoder_layers: encoder.layers.clone(),
            llm_layers: llm.layers.clone(),
            is_encoder_recomputed: encoder.is_recomputed,
            is_llm_recomputed: llm.is_recomputed,
        }
    }

    /// Finds the candidate of a plan; `None` if the space does not have its shapes.
    pub(super) fn candidate(&self, space: &SearchSpace<'_>) -> Option<Candidate> {
        let find = |shapes: &[StageShape], degrees: Degrees, layers: &[u32], again: bool| {
            shapes.iter().position(|shape| {
                (shape.tp, shape.pp) == (degrees.tp, degrees.pp)
                    // The same degrees may exist with even and with uneven layers.
                    && shape.layers == layers
                    && shape.is_recomputed == again
            })
        };
        let family = Family {
            placement: self.placement,
            encoder: find(
                &space.encoder.shapes,
                self.encoder,
                &self.encoder_layers,
                self.is_encoder_recomputed,
            )?,
            encoder_dp: self.encoder.dp,
            llm: find(&space.llm.shapes, self.llm, &self.llm_layers, self.is_llm_recomputed)?,
            llm_dp: self.llm.dp,
        };
        Some(Candidate { family, microbatches: self.microbatches })
    }

    /// Returns the GPUs that the plan takes.
    #[must_use]
    pub const fn gpus(&self) -> u32 {
        match self.placement {
            Placement::Disaggregated => self.encoder.gpus() + self.llm.gpus(),
            Placement::Colocated => self.llm.gpus(),
        }
    }
}
