//! Assigns items to a pipeline's DP ranks, in ordered microbatches, judged by the simulated makespan.
//!
//! The model's modules form a single chain of stages in module order, encoder first, or parallel encoders
//! feed the last module. Every DP rank has such stages, or shares a module's stages with the other ranks, and
//! runs `groups / dp_size` microbatches per step on them. The makespan is the slowest rank's. An item's time
//! in a module is the time for **one stage** in that module, forward and backward together; the forward pass
//! takes a third ([`split_time`](crate::split_time)).
//!
//! Cost-based strategies take three steps: partition into microbatches, assign these to ranks, put them in
//! peak order. [`Strategy::SEARCH`](crate::Strategy::SEARCH) then continues in `search`, with the simulated
//! makespan itself as the objective, from that result or from the `relaxation_start` result.

mod balance;
mod bound;
mod config;
mod lockstep;
mod memory_start;
mod order;
mod pass_graph;
mod relaxation;
mod search;
mod shard_groups;
mod timeline;

pub use balance::{PipelineAssignment, balance_pipeline, search_pipeline};
pub use config::{PipelineConfig, PipelineMemoryLimits, PipelineObjective, StageMemoryLimit};
pub use lockstep::{balance_lockstep, lockstep_ns};
pub use order::{assign_ranks, peak_order};
pub(crate) use pass_graph::{Pass, PassGraph, PassShape};
pub use shard_groups::{RankStep, balance_shard_groups, rank_step, shard_groups_ns};
