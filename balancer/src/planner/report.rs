//! Plan report: the plan with its score, limits and runner-up.

use super::costs::ExpertLoads;
use super::parallelism_plan::ParallelismPlan;

/// Answer of the planner.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanReport {
    /// The plan.
    pub plan: ParallelismPlan,
    /// Mean makespan of the sampled batches.
    pub step_seconds: f64,
    /// 95th percentile of the makespans.
    pub step_seconds_p95: f64,
    /// Lower bound on the mean makespan of every plan of the space on these batches, for any balancing.
    pub lower_bound_seconds: f64,
    /// Plans that were bounded, by themselves or together with their neighbors.
    pub plans_bounded: u64,
    /// Plans that were simulated.
    pub plans_simulated: u64,
    /// Whether every plan that was not simulated is proven no better on these batches.
    pub is_exhaustive: bool,
    /// Batches that the plan was scored on.
    pub batches: usize,
    /// Reasons for this plan.
    pub explanation: Explanation,
    /// Load imbalance of ranks that share experts, for a mean microbatch; `None` without experts.
    pub expert_loads: Option<ExpertLoads>,
}

/// Stage that limits the step.
#[derive(Debug, Clone, PartialEq)]
pub struct Bottleneck {
    /// `llm`, `encoder`, or the name of one of several encoders.
    pub module: &'static str,
    /// Index of its stage.
    pub stage: usize,
    /// Stages of the module.
    pub stages: usize,
    /// Share of the step in which the stage's busiest rank computes, in `0..=1`.
    pub busy_fraction: f64,
    /// Share of the step in which the busiest stage of the other modules computes.
    pub other_busy_fraction: f64,
}

/// Memory of one module's fullest GPU over all batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModuleBytes {
    /// Memory in use.
    pub bytes: u64,
    /// Memory left.
    pub headroom_bytes: i64,
}

/// Best plan with other degrees.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerUp {
    /// The plan.
    pub plan: ParallelismPlan,
    /// Its mean makespan.
    pub step_seconds: f64,
    /// Reason why it is slower.
    pub reason: String,
}

/// Reasons for a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// Stage that limits the step.
    pub bottleneck: Bottleneck,
    /// Memory of each encoder's fullest GPU; of the LLM's where they are colocated.
    pub encoder_memory: Vec<ModuleBytes>,
    /// Memory of the LLM's fullest GPU.
    pub llm_memory: ModuleBytes,
    /// The next plan, if another one with other degrees was scored.
    pub runner_up: Option<RunnerUp>,
}
