//! Describes a planning problem: modules, workload, cluster and options.
//!
//! Parallelism plan: degrees, stages and microbatches for all modules.

use super::cluster::{Cluster, Placement};
use super::costs::ModuleCosts;
use super::space::joint::JointShape;
use super::space::shape::StageShape;
use super::space::{
    Candidate, EncoderPart, EncoderParts, EncoderSplit, Family, SearchSpace, SearchSpaceOptions,
};
use super::workload::{ENCODERS_MAX, Workload, too_many_encoders};
use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Error, Result};
use dflop_costmodel::memory::{Trainer, split_layers};

/// Planning problem: modules, workload, cluster and options.
#[derive(Clone)]
pub struct PlanProblem<'a> {
    /// Encoder costs, in tiles, or patches for native-resolution media; sample sizes have the same order.
    pub encoders: Vec<&'a dyn ModuleCosts>,
    /// LLM costs, in tokens.
    pub llm: &'a dyn ModuleCosts,
    /// Batches for judging plans.
    pub workload: &'a Workload,
    /// GPUs and links.
    pub cluster: Cluster,
    /// Kinds of plans to search.
    pub options: SearchSpaceOptions,
    /// How encoder ranks split the media in a slot.
    pub encoder_split: EncoderSplit,
    /// Allocated memory divided by counted memory, at least 1: fragmentation, communication buffers.
    pub memory_margin: f64,
}

impl<'a> PlanProblem<'a> {
    /// Lists the encoder names used in reports: `encoder` if there is a single encoder, except in plans for
    /// PyTorch, whose pipeline knows modules by name.
    #[must_use]
    pub fn encoder_names(&self) -> Vec<&'static str> {
        match self.encoders[..] {
            [_] if self.options.trainer == Trainer::Dflop => vec!["encoder"],
            _ => self.encoders.iter().map(|encoder| encoder.name()).collect(),
        }
    }

    /// Describes the searched plans, which lower bounds are about.
    #[must_use]
    pub fn searched(&self) -> String {
        let shared =
            if self.encoders.len() > 1 { ", GPUs shared so that the slowest encoder is fastest" } else { "" };
        format!("{}{shared}", self.options)
    }

    /// Calls a function with the problem at an expert-parallel degree.
    ///
    /// # Errors
    /// [`Error::Config`] if the LLM does not support the degree.
    pub(super) fn with_expert_parallel<T>(
        &self,
        degree: u32,
        call: impl FnOnce(&PlanProblem<'_>) -> T,
    ) -> Result<T> {
        let llm = self.llm_at(degree)?;
        let llm = llm.as_deref().unwrap_or(self.llm);
        Ok(call(&PlanProblem { llm, encoders: self.encoders.clone(), ..*self }))
    }

    /// Returns the costs of the LLM at an expert-parallel degree; `None` if the problem has that degree.
    ///
    /// # Errors
    /// [`Error::Config`] if the LLM does not support the degree.
    pub(super) fn llm_at(&self, degree: u32) -> Result<Option<Box<dyn ModuleCosts>>> {
        if degree == self.llm.expert_parallel() {
            return Ok(None);
        }
        self.llm.at_expert_parallel(degree).map(Some).ok_or_else(|| {
            let reason = format!("expert parallelism of {degree} is not one of the language model's degrees");
            Error::Config { setting: "ep", reason }
        })
    }

    /// Builds the space with all plans that a search covers.
    ///
    /// # Errors
    /// [`Error::Config`] if the problem is invalid.
    pub(super) fn space(&self) -> Result<SearchSpace<'a>> {
        self.check()?;
        let space = SearchSpace::new(&self.encoders, self.llm, self.workload, self.cluster, self.options);
        let mut space = self.with_limits(space);
        space.share_gpus();
        Ok(space)
    }

    /// Builds the space without any plan.
    ///
    /// # Errors
    /// [`Error::Config`] if the problem is invalid.
    pub(super) fn space_without_shapes(&self) -> Result<SearchSpace<'a>> {
        self.check()?;
        let Self { encoders, llm, workload, .. } = self;
        let space = SearchSpace::without_shapes(encoders, *llm, workload, self.cluster, self.options);
        Ok(self.with_limits(space))
    }

    fn with_limits(&self, mut space: SearchSpace<'a>) -> SearchSpace<'a> {
        space.encoder_split = self.encoder_split;
        space.budget_bytes = self.cluster.memory_bytes as f64 / self.memory_margin;
        space
    }

    pub(super) fn check(&self) -> Result<()> {
        self.cluster.check()?;
        check_schedule(&self.options)?;
        if self.encoders.is_empty() || self.encoders.len() > ENCODERS_MAX {
            return Err(too_many_encoders(self.encoders.len()));
        }
        if self.encoders.iter().any(|encoder| encoder.layers() == 0) || self.llm.layers() == 0 {
            return Err(Error::Config { setting: "layers", reason: "a module has at least one".to_owned() });
        }
        if !(self.memory_margin >= 1.0 && self.memory_margin.is_finite()) {
            let reason = format!("must be a finite number of at least 1, got {}", self.memory_margin);
            return Err(Error::Config { setting: "memory_margin", reason });
        }
        if self.encoder_split == EncoderSplit::Tile && !self.options.trainer.divides_media() {
            let trainer = self.options.trainer.name();
            let reason = format!("trainer `{trainer}` shares whole media, not tiles, between ranks");
            return Err(Error::Config { setting: "encoder_split", reason });
        }
        if self.workload.is_native() && self.encoder_split == EncoderSplit::Tile {
            let reason = "media in native resolution have no tiles: encoder ranks share whole samples";
            return Err(Error::Config { setting: "encoder_split", reason: reason.to_owned() });
        }
        Ok(())
    }
}

/// Checks that the executor can run the schedule in all placements.
fn check_schedule(options: &SearchSpaceOptions) -> Result<()> {
    let kind = options.schedule;
    if matches!(kind, ScheduleKind::Interleaved { .. }) && (options.is_disaggregated || options.is_joint) {
        let reason = format!(
            "{kind} is for encoders that are colocated with the language model, on the same GPUs before and \
             after it; other placements run under gpipe, 1f1b, 1f1b-ahead and zb-h1"
        );
        return Err(Error::Config { setting: "schedule", reason });
    }
    if kind.chunks() == 0 {
        let reason = format!("{kind} needs at least one stage per rank");
        return Err(Error::Config { setting: "schedule", reason });
    }
    Ok(())
}

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
    /// Layers per stage. With joint placement, stages may be empty. An LLM under `interleaved` has several
    /// stages per rank: rank `r` holds the stages `r`, `r + pp`, …
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
    /// Schedule that runs the microbatches.
    pub schedule: ScheduleKind,
}

impl ModulePlan {
    /// Plans a module whose layers are split as equally as possible, larger shares first, and kept in memory.
    ///
    /// # Panics
    /// If there are fewer layers than stages.
    #[must_use]
    pub fn even(layers: u32, degrees: Degrees) -> Self {
        Self::in_chunks(layers, degrees, 1)
    }

    /// Plans a module with this many stages per rank, whose layers are split as equally as possible, larger
    /// shares first, and kept in memory.
    ///
    /// # Panics
    /// If there are fewer layers than stages.
    #[must_use]
    pub fn in_chunks(layers: u32, degrees: Degrees, chunks: u32) -> Self {
        let stages = degrees.pp.saturating_mul(chunks);
        assert!(layers >= stages, "{layers} layers do not make {stages} stages");
        Self { degrees, layers: split_layers(layers, stages), is_recomputed: false }
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
            schedule: family.schedule,
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
        let family = Family { placement, encoders, llm, llm_dp, schedule: self.schedule };
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
