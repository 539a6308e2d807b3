//! Cuts global batches into balanced microbatches and data-parallel ranks, with a certificate.

mod assignment;
mod balance;
mod bound;
mod budget;
mod constraint;
mod digest;
mod error;
mod instance;
mod partition;
mod problem;
mod rng;
pub mod schedule;
mod strategy;

pub use assignment::Assignment;
pub use balance::balance;
pub use bound::{BoundKind, LowerBound, lower_bound};
pub use budget::Budget;
pub use constraint::Caps;
pub use digest::PlanDigest;
pub use error::{Error, Result};
pub use instance::Instance;
pub use strategy::Strategy;
