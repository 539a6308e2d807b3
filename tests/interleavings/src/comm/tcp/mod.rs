//! Connections between ranks, on sockets in memory.

#[path = "../../../../../executor/comm/src/tcp/control.rs"]
mod control;
#[path = "../../../../../executor/comm/src/tcp/control_line.rs"]
mod control_line;
#[path = "../../../../../executor/comm/src/tcp/dial.rs"]
mod dial;
#[path = "../../../../../executor/comm/src/tcp/frame.rs"]
mod frame;
#[path = "../../../../../executor/comm/src/tcp/inbox.rs"]
mod inbox;
#[path = "../../../../../executor/comm/src/tcp/inquiry.rs"]
mod inquiry;
#[path = "../../../../../executor/comm/src/tcp/leaving.rs"]
mod leaving;
#[path = "../../../../../executor/comm/src/tcp/links.rs"]
mod links;
#[path = "../../../../../executor/comm/src/tcp/outbox.rs"]
mod outbox;
mod socket;
#[path = "../../../../../executor/comm/src/tcp/tcp_transport.rs"]
mod tcp_transport;

pub(super) mod models;
