//! TCP transport: one process per rank, for the ranks of one machine, or of a few.
//!
//! Control messages (the end of the job, farewells, digests) go over a tree of connections, so that a rank
//! has at most five of them however large the job is; they never wait for data. Status requests have
//! connections of their own: no rank in between can be silent.
//!
//! Messages go over data connections, one per direction, each made when a rank first sends to another. A
//! small message is written by the sending thread, as far as the socket accepts it without blocking; the
//! remainder, and every large message, is written by a thread of the connection. Each connection is read
//! continuously, so two ranks that send large messages to each other at the same time do not deadlock. A sum
//! over all ranks uses the connections of a ring; in the worst case a rank has two per peer, hence the bound
//! of [`RANKS_MAX`].
//!
//! A rank that is dropped sends a farewell. A control connection that ends without one means that its process
//! died, which the neighbors in the tree notice immediately and pass on.

mod connect;
mod control;
mod control_line;
mod dial;
mod dialer;
mod door;
mod frame;
pub(super) mod fuzz;
mod inbox;
mod inquiry;
#[cfg(test)]
mod large_jobs;
mod leaving;
mod links;
mod no_one;
mod outbox;
#[cfg(test)]
mod rank_resources;
mod socket;
mod tcp_transport;

pub use connect::{RANKS_MAX, Session, connect, connect_tree};
