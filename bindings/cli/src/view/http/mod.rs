//! Answers requests over HTTP/1.1 on the loopback interface.

mod range;
mod request;
mod response;
mod server;

pub(super) use range::{ByteRange, byte_range};
pub(super) use request::{Refusal, Route};
pub(super) use response::{Body, Reply, attachment, bytes, json, refusal, text};
pub(crate) use server::Server;
