//! TCP transport: one process per rank, connections between every two of them.
//!
//! Two ranks share two connections: one for messages, in order, and one for control messages, which must
//! never wait for data: the end of the job, and status requests. A small message is written by the sending
//! thread, as far as the socket accepts it without blocking; the remainder, and every large message, is
//! written by a thread of the connection. Each connection is read continuously, so two ranks that send large
//! messages to each other at the same time do not deadlock.
//!
//! A rank that is dropped sends a farewell. A connection that ends without one means that its process died,
//! which every other rank notices immediately.

mod connect;
mod control;
mod control_line;
mod frame;
#[cfg(feature = "fuzz")]
pub(super) mod fuzz;
mod inbox;
mod links;
mod outbox;
mod socket;
mod tcp_transport;

pub use connect::{Session, connect};
