//! Partitions global batches into balanced microbatches and data-parallel ranks, with a certificate.
//!
//! An [`Instance`] holds every *item*'s (global-batch sample's) cost in every *module* (encoder, LLM), in
//! integer nanoseconds. [`balance`] partitions the items into *groups* so that the *makespan*, the largest
//! module sum in any group, is small; [`balance_pipeline`] also assigns the groups to DP ranks and orders
//! them, judged by a simulated 1F1B pipeline. Every result includes a [`LowerBound`], and with it the largest
//! possible remaining gain.
//!
//! The crate is pure: no files, no clocks, no threads. Decisive comparisons use integers, or sums and
//! quotients that IEEE 754 rounds identically everywhere; ties go to the lower index, random numbers are
//! seeded from the instance, and search effort is counted in work units ([`Budget`]). So every rank computes
//! the same plan without communication; a [`PlanDigest`] lets ranks verify it.
//!
//! - problem: [`Instance`], [`Caps`], [`Budget`], [`Strategy`], or your own [`Partitioner`]
//! - answers: [`Assignment`], [`PipelineAssignment`], [`LowerBound`], [`PlanDigest`]
//! - items split over ranks: [`ContextProblem`], [`balance_context`]
//! - pipelines: [`schedule`](mod@schedule), [`simulate`], [`CompiledSchedule`], [`assign_ranks`],
//!   [`peak_order`]
//!
//! # Examples
//! ```
//! use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};
//!
//! // six samples for two microbatches: nanoseconds in the encoder and in the LLM
//! let times_ns = vec![80, 40, 0, 10, 0, 30, 40, 20, 40, 30, 0, 30];
//! let instance = Instance::new(2, 2, times_ns)?;
//! let blind = balance(&instance, Strategy::ROUND_ROBIN, &Caps::default(), &mut Budget::work(0))?;
//! let found = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(20_000))?;
//! assert_eq!((blind.makespan_ns, found.makespan_ns), (120, 80));
//! assert!(found.is_optimal());
//! # Ok::<(), dflop_balancer::Error>(())
//! ```

#![forbid(unsafe_code)]

mod budget;
mod context;
mod digest;
mod error;
mod instance;
mod partition;
mod pipeline;
pub mod schedule;
mod simulate;

pub use budget::Budget;
pub use context::{
    ContextAssignment, ContextItem, ContextPlace, ContextProblem, ContextSlice, balance_context,
    context_pipeline_ns, context_step_ns,
};
pub use digest::PlanDigest;
pub use error::{Error, Result};
pub use instance::{Caps, Instance};
pub use partition::{
    Assignment, BoundKind, LowerBound, Partitioner, Problem, Solution, Strategy, balance, lower_bound,
};
pub use pipeline::{
    PipelineAssignment, PipelineConfig, PipelineMemoryLimits, PipelineObjective, RankStep, StageMemoryLimit,
    assign_ranks, balance_lockstep, balance_pipeline, balance_shard_groups, lockstep_ns, peak_order,
    rank_step, search_pipeline, shard_groups_ns,
};
pub use simulate::{
    Activity, Communication, CompiledSchedule, CriticalStep, Event, Simulation, StageTimes, simulate,
    split_time,
};
