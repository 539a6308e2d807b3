//! TCP transport: one process per rank, for ranks on one machine or a few machines.
//!
//! Control messages (job end, farewells, digests) use a tree of connections, so that a rank has at most five
//! of them for any job size; they never wait for data. Status requests have separate connections: no rank in
//! between can be silent.
//!
//! Messages use data connections, one per direction, each created when a rank first sends to another rank. A
//! small message is written by the sending thread, as far as the socket accepts it without blocking; the
//! remainder, and every large message, is written by a connection thread. Each connection is read
//! continuously, so two ranks that send large messages to each other at the same time do not deadlock. A sum
//! over all ranks uses ring connections; in the worst case a rank has two per peer, hence the limit
//! [`RANKS_MAX`].
//!
//! A rank that is dropped sends a farewell. A control connection that ends without a farewell means that the
//! peer process died, which the tree neighbors notice immediately and pass on.

pub(super) mod fuzz;
mod inbox;
#[cfg(test)]
mod large_jobs;
mod links;
mod listener;
mod outbox;
#[cfg(test)]
mod rank_resources;
mod socket;
mod tcp_transport;
mod wire;

pub use listener::{RANKS_MAX, Session, connect, connect_tree};
