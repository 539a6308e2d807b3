//! Messages between ranks: one trait, [`Comm`], over threads and TCP.
//!
//! - [`threads::world`] makes all ranks of a job in one process; [`tcp::connect`] joins the ranks that a
//!   launcher started ([`crate::launch`]).
//! - Both share everything but the wire: matching by tag, headers that the receiver checks, collectives
//!   with a fixed order of sums. So they give the same bits.
//! - No wait is without a time limit ([`Settings`]), and a job fails as a whole: the first [`Failure`]
//!   reaches all ranks, names the rank to blame and what it was doing, and every later call returns it.
//!
//! # Examples
//! ```
//! use dflop_executor::comm::{At, Comm, Settings, threads};
//!
//! let ranks = threads::world(2, Settings::default())?;
//! let sums = std::thread::scope(|scope| {
//!     let sum = |comm: threads::ThreadComm| {
//!         let mut values = [comm.rank() as f32 + 1.0, 10.0];
//!         comm.all_reduce(At::step(0, "gradients"), values.as_mut_slice().into()).map(|()| values)
//!     };
//!     let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || sum(comm))).collect();
//!     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>, _>>()
//! })?;
//! assert_eq!(sums, [[3.0, 20.0], [3.0, 20.0]]);
//! # Ok::<(), dflop_executor::comm::Error>(())
//! ```

mod api;
mod at;
mod collective;
mod communicator;
mod error;
mod fabric;
mod handle;
mod hang;
mod mailbox;
mod message;
mod overlap;
mod parts;
mod payload;
mod recycled;
mod rendezvous;
mod settings;
mod slice;
pub mod tcp;
pub mod threads;

pub use api::{Comm, Exchange};
pub use at::{ActionName, At};
pub use communicator::Communicator;
pub use error::{Cause, Error, Failure, Result};
pub use handle::{Completion, Handle};
pub use parts::even_parts;
pub use payload::{Buffer, Dtype, Payload, Shape};
pub use rendezvous::{Host, Store, Token};
pub use settings::Settings;
pub use slice::Slice;
