//! Answers requests over HTTP/1.1 on the loopback interface.

mod range;
mod response;
mod server;

pub(super) use range::{ByteRange, byte_range};
pub(super) use response::{Body, Refusal, Reply, Route, attachment, bytes, json, refusal, text};
pub(crate) use server::Server;
