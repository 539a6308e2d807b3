//! Parallelism plan: degrees, stages and microbatches for all modules.

use super::cluster::Placement;
use super::space::joint::JointShape;
use super::space::shape::StageShape;
use super::space::{Candidate, EncoderPart, EncoderParts, Family, SearchSpace};
use dflop_costmodel::memory::split_layers;

/// Parallelism degrees for one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the field's names are their meaning")]
pub struct Degrees {
    pub tp: u32,
    pub pp: u32,
    pub dp: u32,
}

impl Degrees {
    /// Returns the number of GPUs that the module uses.
    #[must_use]
    pub const fn gpus(&self) -> u32 {
        self.tp * self.pp * self.dp
    }
}

/// Degrees, layers and recomputation for one module.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModulePlan {
    /// Parallelism degrees. For an encoder with joint placement, every GPU in a stage is a separate
    /// data-parallel rank.
    pub degrees: Degrees,
    /// Layers per stage. With joint placement, stages may be empty.
    pub layers: Vec<u32>,
    /// Whether the backward pass recomputes the layers, which then keep their inputs alone.
    pub is_recomputed: bool,
}

/// Plans for all modules, with placement and microbatches.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ParallelismPlan {
    /// Encoders, in problem order.
    pub encoders: Vec<ModulePlan>,
    /// The LLM.
    pub llm: ModulePlan,
    /// Expert-parallel degree: number of LLM DP ranks that divide the experts.
    pub expert_parallel: u32,
    /// Microbatches per LLM DP rank and step.
    pub microbatches: u32,
    /// Encoder placement relative to the LLM.
    pub placement: Placement,
    /// Number of rounds that the encoders run ahead of the schedule.
    pub rounds_ahead: u16,
}

impl ModulePlan {
    /// Plans a module whose layers are split as equally as possible, larger shares first, and kept in memory.
    ///
    /// # Panics
    /// If there are fewer layers than stages.
    #[must_use]
    pub fn even(layers: u32, degrees: Degrees) -> Self {
        assert!(layers >= degrees.pp, "{layers} layers do not make {} stages", degrees.pp);
        Self { degrees, layers: split_layers(layers, degrees.pp), is_recomputed: false }
    }

    fn new(shape: &StageShape, dp: u32) -> Self {
        Self {
            degrees: Degrees { tp: shape.tp, pp: shape.pp, dp },
            layers: shape.layers.clone(),
            is_recomputed: shape.is_recomputed,
        }
    }

    /// Whether a shape belongs to this plan: the same degrees may exist with even and with uneven layers.
    fn has_shape(&self, shape: &StageShape) -> bool {
        (shape.tp, shape.pp) == (self.degrees.tp, self.degrees.pp)
            && shape.layers == self.layers
            && shape.is_recomputed == self.is_recomputed
    }
}

impl ParallelismPlan {
    /// Describes a candidate from the space.
    pub(super) fn new(space: &SearchSpace<'_>, candidate: &Candidate) -> Self {
        let family = &candidate.family;
        let encoders = space.encoder_shapes(family).zip(family.encoders.iter());
        Self {
            encoders: encoders.map(|(shape, part)| ModulePlan::new(shape, part.dp)).collect(),
            llm: ModulePlan::new(space.llm_shape(family), family.llm_dp),
            expert_parallel: space.expert_parallel,
            microbatches: candidate.microbatches,
            placement: family.placement,
            rounds_ahead: family.ahead,
        }
    }

    /// Finds the candidate for a plan; `None` if the space does not have its shapes.
    pub(super) fn candidate(&self, space: &SearchSpace<'_>) -> Option<Candidate> {
        if self.encoders.len() != space.encoders.len() || self.expert_parallel != space.expert_parallel {
            return None;
        }
        let dp = |encoder: usize| self.encoders[encoder].degrees.dp;
        let (encoders, llm) = if self.placement == Placement::Joint {
            let is_shape = |shape: &JointShape| {
                let encoders = self.encoders.iter().zip(&shape.encoders);
                encoders.clone().all(|(plan, shape)| plan.has_shape(shape)) && self.llm.has_shape(&shape.llm)
            };
            let found = space.joint.iter().position(is_shape)?;
            let part = |encoder| EncoderPart { shape: found as u32, dp: dp(encoder) };
            ((0..self.encoders.len()).map(part).collect(), found)
        } else {
            let part = |(encoder, plan): (usize, &ModulePlan)| {
                let shape = space.encoders[encoder].shapes.iter().position(|shape| plan.has_shape(shape))?;
                Some(EncoderPart { shape: shape as u32, dp: dp(encoder) })
            };
            let encoders = self.encoders.iter().enumerate().map(part).collect::<Option<EncoderParts>>()?;
            (encoders, space.llm.shapes.iter().position(|shape| self.llm.has_shape(shape))?)
        };
        let (placement, llm_dp) = (self.placement, self.llm.degrees.dp);
        let family = Family { placement, encoders, llm, llm_dp, ahead: self.rounds_ahead };
        Some(Candidate { family, microbatches: self.microbatches })
    }

    /// Returns the number of GPUs that the plan uses.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        let encoders = || self.encoders.iter().map(|encoder| encoder.degrees.gpus()).sum::<u32>();
        match self.placement {
            Placement::Disaggregated => encoders() + self.llm.degrees.gpus(),
            Placement::Colocated | Placement::Joint => self.llm.degrees.gpus(),
        }
    }
}
