//! A plan, and what is said of it.

use super::cluster::Placement;
use super::explain::Explanation;
use super::space::{Candidate, Family, Space};

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

/// Who runs what.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Of the encoder.
    pub encoder: Degrees,
    /// Of the LLM.
    pub llm: Degrees,
    /// Of each LLM DP rank in a step.
    pub microbatches: u32,
    /// Whether the modules share their GPUs.
    pub placement: Placement,
    /// Layers of each encoder stage.
    pub encoder_layers: Vec<u32>,
    /// Layers of each LLM stage.
    pub llm_layers: Vec<u32>,
    /// Whether the encoder computes its layers again in the backward pass.
    pub is_encoder_recomputed: bool,
    /// Whether the LLM does.
    pub is_llm_recomputed: bool,
}

impl Plan {
    /// Returns the GPUs that the plan takes.
    #[must_use]
    pub const fn gpus(&self) -> u32 {
        match self.placement {
            Placement::Disaggregated => self.encoder.gpus() + self.llm.gpus(),
            Placement::Colocated => self.llm.gpus(),
        }
    }
}

/// The planner's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanReport {
    /// The plan.
    pub plan: Plan,
    /// Mean makespan of the sampled batches.
    pub step_seconds: f64,
    /// Its 95th percentile.
    pub step_seconds_p95: f64,
    /// What no plan of the space can beat on these batches, whatever the balancing.
    pub lower_bound_seconds: f64,
    /// Plans that were bounded, each by itself or with its neighbors.
    pub plans_bounded: u64,
    /// Plans that were simulated.
    pub plans_simulated: u64,
    /// Whether every plan that was not simulated is proven no better on these batches.
    pub is_exhaustive: bool,
    /// Batches that the plan was scored on.
    pub batches: usize,
    /// Why this plan.
    pub explanation: Explanation,
}

impl Space<'_> {
    /// The plan that a candidate stands for.
    pub(super) fn plan(&self, candidate: &Candidate) -> Plan {
        let Family { placement, encoder, encoder_dp, llm, llm_dp } = candidate.family;
        let (encoder, llm) = (&self.encoder_shapes[encoder], &self.llm_shapes[llm]);
        Plan {
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

    /// The candidate that stands for a plan; `None` if the space has no such shapes.
    pub(super) fn candidate(&self, plan: &Plan) -> Option<Candidate> {
        let find = |shapes: &[super::shape::StageShape], degrees: Degrees, layers: &[u32], again: bool| {
            shapes.iter().position(|shape| {
                (shape.tp, shape.pp) == (degrees.tp, degrees.pp)
                    && shape.layers == layers
                    && shape.is_recomputed == again
            })
        };
        let family = Family {
            placement: plan.placement,
            encoder: find(
                &self.encoder_shapes,
                plan.encoder,
                &plan.encoder_layers,
                plan.is_encoder_recomputed,
            )?,
            encoder_dp: plan.encoder.dp,
            llm: find(&self.llm_shapes, plan.llm, &plan.llm_layers, plan.is_llm_recomputed)?,
            llm_dp: plan.llm.dp,
        };
        Some(Candidate { family, microbatches: plan.microbatches })
    }
}
