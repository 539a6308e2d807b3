//! One process a rank, TCP between every two of them.
//!
//! Two ranks share two connections: one for messages, in order, and one for what must never wait behind
//! them: the news that the job is over, and questions what a rank is doing. A small message is written by the
//! thread that sends it, as far as the socket takes it at once; what remains, and every large one, by a thread
//! of the connection. A thread reads each connection all the time, so two ranks that send one another
//! large messages at once do not wait for each other.
//!
//! A rank that is dropped says farewell; a connection that ends without one means that its process died,
//! which every other rank sees at once.

mod connect;
mod control;
mod frame;
mod inbox;
mod links;
mod mesh;
mod outbox;

pub use connect::{Session, connect};
