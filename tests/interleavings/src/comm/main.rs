//! Message hand-overs between ranks: the `dflop-comm` files on other locks, threads and sockets.
#![allow(dead_code, unfulfilled_lint_expectations, unreachable_pub, reason = "a part of a crate")]

#[path = "../../../../executor/comm/src/api.rs"]
mod api;
#[path = "../../../../executor/comm/src/async_collective.rs"]
mod async_collective;
#[path = "../../../../executor/comm/src/collective/mod.rs"]
mod collective;
#[path = "../../../../executor/comm/src/communicator.rs"]
mod communicator;
#[path = "../../../../executor/comm/src/dtype.rs"]
mod dtype;
#[path = "../../../../executor/comm/src/endpoint.rs"]
mod endpoint;
#[path = "../../../../executor/comm/src/error.rs"]
mod error;
#[path = "../../../../executor/comm/src/group.rs"]
mod group;
#[path = "../../../../executor/comm/src/handle.rs"]
mod handle;
#[path = "../../../../executor/comm/src/mailbox.rs"]
mod mailbox;
#[path = "../../../../executor/comm/src/message.rs"]
mod message;
#[path = "../../../../executor/comm/src/parts.rs"]
mod parts;
#[path = "../../../../executor/comm/src/payload.rs"]
mod payload;
#[path = "../../../../executor/comm/src/receive_buffers.rs"]
mod receive_buffers;
mod rendezvous;
#[path = "../../../../executor/comm/src/settings.rs"]
mod settings;
#[path = "../../../../executor/comm/src/slice.rs"]
mod slice;
#[path = "../../../../executor/comm/src/step_context.rs"]
mod step_context;
mod sync;
mod tcp;
#[path = "../../../../executor/comm/src/threads.rs"]
mod threads;
#[path = "../../../../executor/comm/src/timeout_report.rs"]
mod timeout_report;
#[path = "../../../../executor/comm/src/transport.rs"]
mod transport;
#[path = "../../../../executor/comm/src/tree.rs"]
mod tree;
#[path = "../../../../executor/comm/src/wait_record.rs"]
mod wait_record;
#[path = "../../../../executor/comm/src/waits.rs"]
mod waits;

mod mailbox_models;
#[path = "../model.rs"]
mod model;
mod ranks_models;
#[path = "../runner.rs"]
mod runner;

use error::Error;

fn main() -> std::process::ExitCode {
    let models = [mailbox_models::models(), ranks_models::models(), tcp::models::models(), rendezvous::models()];
    runner::run(&models.concat())
}
