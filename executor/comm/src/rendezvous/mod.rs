//! Rendezvous for ranks in several processes: a small key-value store over TCP.
//!
//! Rank 0, or the launcher, hosts the [`RendezvousServer`]; every rank publishes an address there as a
//! [`RendezvousClient`]. Every job connection starts with a handshake in which both sides prove that they
//! know the [`JobToken`] without sending it. Strangers that connect cost little and delay no rank.

mod accept;
mod client;
pub(super) mod fuzz;
mod handshake;
mod protocol;
mod refusals;
mod server;
mod values;

pub(super) use accept::{Host, accept_callers};
pub use client::RendezvousClient;
pub(super) use client::{Deadline, call, dial, resolve};
pub(super) use handshake::{Hello, Purpose, Rejection};
pub use handshake::{JobToken, RankIdentity, RendezvousConfig};
pub(super) use refusals::{Refusal, Refusals};
pub use server::RendezvousServer;
