//! Cuts global batches into balanced microbatches and data-parallel ranks, with a certificate.

mod assignment;
mod balance;
mod bound;
mod budget;
mod constraint;
mod digest;
mod error;
mod instance;
mod makespan;
mod order;
mod partition;
mod pipeline;
mod pipeline_search;
mod problem;
mod rng;
pub mod schedule;
mod simulate;
mod strategy;

pub use assignment::Assignment;
pub use balance::balance;
pub use bound::{BoundKind, LowerBound, lower_bound};
pub use budget::Budget;
pub use constraint::Caps;
pub use digest::PlanDigest;
pub use error::{Error, Result};
pub use instance::Instance;
pub use makespan::CompiledSchedule;
pub use order::{assign_ranks, small_ends};
pub use pipeline::{PipelineAssignment, PipelineConfig, balance_pipeline};
pub use simulate::{Event, Simulation, StageTimes, simulate, split_time};
pub use strategy::Strategy;
