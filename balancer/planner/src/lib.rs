//! Plans parallelism: finds degrees, GPU split and number of microbatches for a fast step.
//!
//! [`plan`] requires module costs ([`ModuleCosts`]: at least one encoder and an LLM), the dataset's samples
//! and a [`Cluster`]. It covers every plan that node size, heads, layers and the global batch allow, bounds
//! all plans from mean times, simulates the promising plans on sampled and balanced global batches, few plans
//! on many batches, and explains its choice. Equal arguments give equal results on every machine.
//!
//! - problem: [`PlanProblem`], [`Cluster`], [`SearchSpaceOptions`], [`ItemSize`], [`ModuleCosts`],
//!   [`ModelCosts`], [`PlannedModel`]
//! - answer: [`PlanReport`], [`ParallelismPlan`], [`Explanation`]; [`evaluate`] scores any plan in the search
//!   space in the same way, [`data_parallel`] scores DDP, `ZeRO` stages, FSDP and HSDP on the same batches,
//!   [`compare`] compares with other planning and balancing methods, [`compare_plan`] compares balancing
//!   methods on a plan from anywhere, [`method_step`] lists the passes in a compared step
//! - inside: `space` (all plans; bounds and memory without simulation), `score` (a plan on sampled batches),
//!   `search` (branch and bound, then successive halving), `explain` and `suggestion` (reasons)
//!
//! # Source
//! The problem: An et al., "DFLOP", PACMMOD 2026, arXiv:2603.25120, section 3.3; there plans are compared by
//! the mean batch's makespan, here by the mean makespan over batches.

#![forbid(unsafe_code)]

mod cluster;
mod compare;
mod costs;
mod data_parallel;
mod explain;
mod plan;
mod problem;
mod refine;
mod report;
mod score;
mod search;
mod space;
mod suggestion;
mod workload;

pub use cluster::{Cluster, Link, Links, Placement};
pub use compare::{
    IdleBreakdown, Method, MethodComparison, MethodPass, MethodScore, MethodStep, compare, compare_plan,
    method_step,
};
pub use costs::{
    ExpertLoads, ExpertParallel, ModelCosts, ModelCostsBuilder, ModuleCosts, PlannedModel, StageBytes,
    StagePart,
};
pub use data_parallel::{DataParallelPlan, data_parallel};
pub use plan::plan;
pub use problem::{Degrees, ModulePlan, ParallelismPlan, PlanProblem};
pub use refine::{Evaluation, evaluate};
pub use report::{Bottleneck, Explanation, ModuleBytes, PlanReport, RunnerUp};
pub use space::{EncoderSplit, SearchSpaceOptions};
pub use workload::{ItemSize, Workload};
