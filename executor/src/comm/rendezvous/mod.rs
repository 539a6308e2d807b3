//! Rendezvous of ranks in several processes: a small key-value store over TCP.
//!
//! Rank 0, or the launcher, hosts the [`RendezvousServer`]; every rank publishes its address there as a
//! [`RendezvousClient`]. Every connection of a job starts with a handshake in which both sides prove that
//! they know the [`JobToken`] without sending it.

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
