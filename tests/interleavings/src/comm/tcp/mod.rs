//! Connections between ranks, on sockets in memory.

#[path = "../../../../../executor/comm/src/tcp/inbox.rs"]
mod inbox;
#[path = "../../../../../executor/comm/src/tcp/links.rs"]
mod links;
#[path = "../../../../../executor/comm/src/tcp/outbox.rs"]
mod outbox;
mod socket;
#[path = "../../../../../executor/comm/src/tcp/tcp_transport.rs"]
mod tcp_transport;
#[path = "../../../../../executor/comm/src/tcp/wire.rs"]
mod wire;

pub(super) mod models;
