//! Messages between ranks: one trait, [`Comm`], over threads and TCP.
//!
//! - [`threads::world`] creates all job ranks in one process; [`tcp::connect`] joins ranks that a launcher
//!   started ([`launch`]).
//! - Both share everything but the transport: matching by tag, headers that the receiver checks, and
//!   collectives with a fixed summation order. Both therefore compute the same bits.
//! - Every wait has a time limit ([`Settings`]), and a job fails as a whole: the first [`Failure`] reaches
//!   all ranks, names the rank that caused it and the rank activity, and is returned by every later call.
//!
//! # Examples
//! ```
//! use dflop_comm::{Comm, Settings, StepContext, threads};
//!
//! let ranks = threads::world(2, Settings::default())?;
//! let sums = std::thread::scope(|scope| {
//!     let sum = |comm: threads::ThreadComm| {
//!         let mut values = [comm.rank() as f32 + 1.0, 10.0];
//!         comm.all_reduce(StepContext::step(0, "gradients"), values.as_mut_slice().into()).map(|()| values)
//!     };
//!     let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || sum(comm))).collect();
//!     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>, _>>()
//! })?;
//! assert_eq!(sums, [[3.0, 20.0], [3.0, 20.0]]);
//! # Ok::<(), dflop_comm::Error>(())
//! ```

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

mod api;
mod communicator;
pub mod conformance;
mod dtype;
mod endpoint;
mod error;
#[doc(hidden)]
pub mod fuzz;
pub mod launch;
mod message;
mod rendezvous;
mod sync;
pub mod tcp;
pub mod threads;

pub use api::{Comm, Completion, Handle, Limits, P2pOp, Settings, WaitRecord};
pub use communicator::Communicator;
pub use dtype::Dtype;
pub use error::{ActionName, Cause, EXIT_SECONDARY, Error, Failure, Result, StepContext};
pub use message::{Buffer, Payload, PayloadShape, Slice, even_parts};
pub use rendezvous::{JobToken, RankIdentity, RendezvousClient, RendezvousConfig, RendezvousServer};
