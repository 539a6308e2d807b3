//! Loader handovers: the files in the loader module `flow` with exchanged tasks and channels.
#![allow(dead_code, unreachable_pub, reason = "a part of a room")]

#[path = "../../../../loader/src/flow/byte_budget.rs"]
mod byte_budget;
#[path = "../../../../loader/src/flow/job_queue.rs"]
mod job_queue;
#[path = "../../../../loader/src/flow/metrics.rs"]
mod metrics;
mod models;
#[path = "../../../../loader/src/flow/source_meter.rs"]
mod source_meter;
mod sync;

pub(crate) use models::models;
