//! How ranks of several processes find one another: a small key-value store over TCP.
//!
//! Rank 0, or the launcher, [hosts](Host) it; every rank is a client ([`Store`]) and leaves its address there.
//! Every connection of a job begins with a handshake in which both sides prove that they know the job's
//! [`Token`], without sending it.

mod address;
mod client;
mod handshake;
mod host;
mod protocol;
mod token;

pub(super) use address::{Deadline, accept_until, dial, resolve};
pub use client::Store;
pub(super) use handshake::{Hello, Purpose, greet};
pub use host::Host;
pub use token::Token;
