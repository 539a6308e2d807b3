//! Hand-overs of messages between ranks: the files of `dflop-comm` on other locks, threads and sockets.
#![allow(
    dead_code,
    unfulfilled_lint_expectations,
    unreachable_pub,
    unused_imports,
    reason = "a part of a crate"
)]

#[path = "../../../../executor/comm/src/api.rs"]
mod api;
#[path = "../../../../executor/comm/src/communicator/mod.rs"]
mod communicator;
#[path = "../../../../executor/comm/src/dtype.rs"]
mod dtype;
#[path = "../../../../executor/comm/src/endpoint/mod.rs"]
mod endpoint;
#[path = "../../../../executor/comm/src/error/mod.rs"]
mod error;
#[path = "../../../../executor/comm/src/message.rs"]
mod message;
mod rendezvous;
mod sync;
mod tcp;
#[path = "../../../../executor/comm/src/threads.rs"]
mod threads;

mod mailbox_models;
#[path = "../model.rs"]
mod model;
mod ranks_models;

fn main() -> std::process::ExitCode {
    let models =
        [mailbox_models::models(), ranks_models::models(), tcp::models::models(), rendezvous::models()];
    model::run(&models.concat())
}
