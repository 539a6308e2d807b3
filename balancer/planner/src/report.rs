//! Plan report: the plan with score, limits and runner-up.

use super::cluster::Cluster;
use super::costs::ExpertLoads;
use super::problem::ParallelismPlan;

/// Planner result.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanReport {
    /// Fastest plan found.
    pub plan: ParallelismPlan,
    /// Mean makespan over the sampled batches, in seconds.
    pub step_seconds: f64,
    /// 95th percentile of the makespans, in seconds.
    pub step_seconds_p95: f64,
    /// Lower bound on the mean makespan for every plan in the space on these batches, for any balancing, in
    /// seconds.
    pub lower_bound_seconds: f64,
    /// Number of bounded plans, individually or together with their neighbors.
    pub plans_bounded: u64,
    /// Number of simulated plans.
    pub plans_simulated: u64,
    /// Whether every plan that was not simulated is proven no better on these batches.
    pub is_exhaustive: bool,
    /// Number of batches that the plan was scored on.
    pub batches: usize,
    /// Explanation for this plan.
    pub explanation: Explanation,
    /// Load imbalance between ranks that share experts, for a mean microbatch; `None` without experts.
    pub expert_loads: Option<ExpertLoads>,
}

/// Stage that limits the step.
#[derive(Debug, Clone, PartialEq)]
pub struct Bottleneck {
    /// `llm`, `encoder`, or the encoder name if there are several encoders.
    pub module: &'static str,
    /// Stage index in the module.
    pub stage: usize,
    /// Number of stages in the module.
    pub stages: usize,
    /// Share of the step during which the stage's busiest rank computes, in `0..=1`.
    pub busy_fraction: f64,
    /// Share of the step during which the busiest stage in the other modules computes.
    pub other_busy_fraction: f64,
}

/// Memory on a module's fullest GPU over all batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModuleBytes {
    /// Used memory in bytes.
    pub bytes: u64,
    /// Remaining memory in bytes, negative if the plan does not fit.
    pub headroom_bytes: i64,
}

impl ModuleBytes {
    /// Compares used memory with the memory per GPU.
    pub(super) fn new(bytes: f64, cluster: &Cluster) -> Self {
        Self { bytes: bytes as u64, headroom_bytes: (cluster.memory_bytes as f64 - bytes) as i64 }
    }
}

/// Best plan that differs in placement or degrees.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerUp {
    /// Runner-up plan.
    pub plan: ParallelismPlan,
    /// Runner-up's mean makespan, in seconds.
    pub step_seconds: f64,
    /// Why the runner-up is slower.
    pub reason: String,
}

/// Explanation for a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// Stage that limits the step.
    pub bottleneck: Bottleneck,
    /// Memory on each encoder's fullest GPU; on the LLM's fullest GPU if they are colocated.
    pub encoder_memory: Vec<ModuleBytes>,
    /// Memory on the LLM's fullest GPU.
    pub llm_memory: ModuleBytes,
    /// Next plan, if one with another placement or other degrees was scored.
    pub runner_up: Option<RunnerUp>,
}
