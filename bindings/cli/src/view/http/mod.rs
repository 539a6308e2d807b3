//! Answers requests over HTTP/1.1 on the loopback interface.

mod response;
mod server;

pub(super) use response::{
    Body, ByteRange, Refusal, Reply, Route, attachment, byte_range, bytes, json, refusal, text,
};
pub(crate) use server::Server;
