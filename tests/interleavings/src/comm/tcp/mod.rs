//! Connections between ranks, on sockets in memory.

#[path = "../../../../../executor/src/comm/tcp/control.rs"]
mod control;
#[path = "../../../../../executor/src/comm/tcp/control_line.rs"]
mod control_line;
#[path = "../../../../../executor/src/comm/tcp/frame.rs"]
mod frame;
#[path = "../../../../../executor/src/comm/tcp/inbox.rs"]
mod inbox;
#[path = "../../../../../executor/src/comm/tcp/links.rs"]
mod links;
#[path = "../../../../../executor/src/comm/tcp/outbox.rs"]
mod outbox;
mod socket;
#[path = "../../../../../executor/src/comm/tcp/tcp_transport.rs"]
mod tcp_transport;

pub(super) mod models;
