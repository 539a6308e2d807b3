//! How ranks of several processes find one another: a small key-value store over TCP.
//!
//! Rank 0, or the launcher, [hosts](RendezvousServer) it; every rank is a client ([`RendezvousClient`]) and leaves its address there.
//! Every connection of a job begins with a handshake in which both sides prove that they know the job's
//! [`JobToken`], without sending it.

mod address;
mod client;
mod handshake;
mod protocol;
mod server;
mod token;

pub(super) use address::{Deadline, accept_until, dial, resolve};
pub use client::RendezvousClient;
pub(super) use handshake::{Hello, Purpose, accept_handshake};
pub use server::RendezvousServer;
pub use token::JobToken;
