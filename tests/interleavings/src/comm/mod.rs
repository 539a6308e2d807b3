//! Messages between ranks: the files of the executor on other locks, threads and sockets.
#![allow(dead_code, unfulfilled_lint_expectations, unreachable_pub, reason = "a part of a room")]

#[path = "../../../../executor/src/comm/api.rs"]
mod api;
#[path = "../../../../executor/src/comm/async_collective.rs"]
mod async_collective;
#[path = "../../../../executor/src/comm/collective/mod.rs"]
mod collective;
#[path = "../../../../executor/src/comm/communicator.rs"]
mod communicator;
#[path = "../../../../executor/src/comm/dtype.rs"]
mod dtype;
#[path = "../../../../executor/src/comm/endpoint.rs"]
mod endpoint;
#[path = "../../../../executor/src/comm/error.rs"]
mod error;
#[path = "../../../../executor/src/comm/group.rs"]
mod group;
#[path = "../../../../executor/src/comm/handle.rs"]
mod handle;
#[path = "../../../../executor/src/comm/mailbox.rs"]
mod mailbox;
#[path = "../../../../executor/src/comm/message.rs"]
mod message;
#[path = "../../../../executor/src/comm/parts.rs"]
mod parts;
#[path = "../../../../executor/src/comm/payload.rs"]
mod payload;
#[path = "../../../../executor/src/comm/receive_buffers.rs"]
mod receive_buffers;
mod rendezvous;
#[path = "../../../../executor/src/comm/settings.rs"]
mod settings;
#[path = "../../../../executor/src/comm/slice.rs"]
mod slice;
#[path = "../../../../executor/src/comm/step_context.rs"]
mod step_context;
mod sync;
mod tcp;
#[path = "../../../../executor/src/comm/threads.rs"]
mod threads;
#[path = "../../../../executor/src/comm/timeout_report.rs"]
mod timeout_report;
#[path = "../../../../executor/src/comm/transport.rs"]
mod transport;

mod mailbox_models;
mod ranks_models;

use crate::model::Model;
use error::Error;

/// Returns the models of this room.
pub(crate) fn models() -> Vec<Model> {
    [mailbox_models::models(), ranks_models::models(), tcp::models::models(), rendezvous::models()].concat()
}
