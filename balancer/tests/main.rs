//! Tests the balancer's public claims: one module per kind.

mod families;
mod native_resolution;
mod oracle;
mod own_strategy;
mod partition;
mod pipeline;
mod pipeline_memory;
mod planner;
mod schedules;
mod step_passes;
mod targets;
