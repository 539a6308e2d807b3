//! Plans parallelism: finds the degrees, the split of the GPUs and the number of microbatches of a fast step.
//!
//! [`plan`] takes the costs of modules ([`ModuleCosts`]: one or more encoders and an LLM), the samples of the
//! dataset and a [`Cluster`]. It covers every plan that node size, heads, layers and the global batch allow,
//! bounds all of them from mean times, simulates the promising ones on sampled and balanced global batches,
//! few plans on many batches, and explains its choice. The same arguments give the same answer on every
//! machine.
//!
//! - problem: [`PlanProblem`], [`Cluster`], [`SearchSpaceOptions`], [`ItemSize`], [`ModuleCosts`],
//!   [`ModelCosts`], [`PlannedModel`]
//! - answer: [`PlanReport`], [`ParallelismPlan`], [`Explanation`]; [`evaluate`] scores any plan in the same
//!   way, [`compare`] compares with other planning and balancing methods
//! - inside: `space` (all plans), `bound` and `memory` (estimates without simulation), `score` (one plan on
//!   sampled batches), `search` (branch and bound, then successive halving), `explain` and `remedy` (reasons)
//!
//! # Source
//! The problem: An et al., "DFLOP", PACMMOD 2026, arXiv:2603.25120, section 3.3; there plans are compared by
//! the makespan of the mean batch, here by the mean makespan of batches.

mod bound;
mod cluster;
mod compare;
mod costs;
mod evaluate;
mod explain;
mod item_size;
mod memory;
mod parallelism_plan;
mod plan;
mod problem;
mod refine;
mod remedy;
mod report;
mod score;
mod search;
mod space;
mod workload;

pub use cluster::{Cluster, Link, Links, Placement};
pub use compare::{Method, MethodComparison, MethodScore, StepWaits, compare};
pub use costs::{
    ExpertLoads, ExpertParallel, ModelCosts, ModelCostsBuilder, ModuleCosts, PlannedModel, StageBytes,
    StagePart,
};
pub use evaluate::{Evaluation, evaluate};
pub use parallelism_plan::{Degrees, ModulePlan, ParallelismPlan};
pub use plan::plan;
pub use problem::PlanProblem;
pub use report::{Bottleneck, Explanation, ModuleBytes, PlanReport, RunnerUp};
pub use space::{EncoderSplit, RecomputedLayers, SearchSpaceOptions};
pub use workload::{ItemSize, Workload};
