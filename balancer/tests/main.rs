//! Tests the balancer's public claims: one module per kind.

mod context;
mod context_pipeline;
mod families;
mod oracle;
mod own_strategy;
mod partition;
mod pipeline;
mod pipeline_memory;
mod schedules;
mod step_passes;
mod targets;
