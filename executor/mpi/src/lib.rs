//! Messages between job ranks over MPI: an optional transport in addition to threads and TCP.
//!
//! [`world`] joins the ranks that `mpirun` has started, and returns a [`Comm`](dflop_comm::Comm) whose
//! collectives are MPI collectives.
//!
//! **Guarantees** ([`PROMISES`]). Messages carry step, microbatch and shape, which the receiver checks; ranks
//! compare the same properties for collectives before MPI runs them. Messages with different tags may be
//! received in any order. Sums have an order that MPI chooses: equal on all ranks, but neither the order used
//! by other transports nor the same for all lengths. The first failure reaches all ranks on a separate
//! channel, no matter what they wait for, and every wait has a time limit.

mod channels;
mod collective;
mod comm;
mod engine;
mod header;
mod mailbox;
mod raw;
mod shared;

pub use comm::{MpiComm, world};

use dflop_comm::conformance::Promises;

/// Promises made by this transport beyond the [`Comm`](dflop_comm::Comm) contract.
pub const PROMISES: Promises = Promises { has_ring_order: false, has_tags: true, has_headers: true };
