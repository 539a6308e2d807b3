//! A plan, and what is said of it.

use super::parallelism_plan::ParallelismPlan;

/// The planner's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanReport {
    /// The plan.
    pub plan: ParallelismPlan,
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

/// What bounds the step.
#[derive(Debug, Clone, PartialEq)]
pub struct Bottleneck {
    /// `encoder` or `llm`.
    pub module: &'static str,
    /// Index of its stage.
    pub stage: usize,
    /// Stages of the module.
    pub stages: usize,
    /// Share of the step in which the stage's busiest rank computes, in `0..=1`.
    pub busy_fraction: f64,
    /// Share of the step in which the other module's busiest stage computes.
    pub other_busy_fraction: f64,
}

/// Memory of one module's fullest GPU over all batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModuleBytes {
    /// What it takes.
    pub bytes: u64,
    /// What is left.
    pub headroom_bytes: i64,
}

/// The best plan with other degrees.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerUp {
    /// The plan.
    pub plan: ParallelismPlan,
    /// Its mean makespan.
    pub step_seconds: f64,
    /// What it loses by.
    pub reason: String,
}

/// Why a plan was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// What bounds the step.
    pub bottleneck: Bottleneck,
    /// Of the encoder's fullest GPU; of the same GPU as the LLM's where they are colocated.
    pub encoder_memory: ModuleBytes,
    /// Of the LLM's fullest GPU.
    pub llm_memory: ModuleBytes,
    /// The next plan, if another one with other degrees was scored.
    pub runner_up: Option<RunnerUp>,
}
