//! Tests step plans and parallelism plans.

mod context;
mod corrections;
mod cost_function;
mod data_parallel;
mod lockstep;
mod media_shares;
mod module_dp_sizes;
mod near_mean_cap;
mod own_strategy;
mod pad_to_tokens;
mod parallelism;
mod schedule;
mod stage_layers;
