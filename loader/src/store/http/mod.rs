//! Requests over HTTP: by the clients of buckets, which are watched, and by URL.
//!
//! [`client`] wraps the requests of stores with buckets; [`listing`] corrects their listings. [`server`]
//! requests objects by their URLs exactly as given, which the stores' own client for HTTP would decode and
//! encode again; [`headers`] reads what such servers answer.

mod client;
mod headers;
mod listing;
mod server;

pub(super) use self::client::Connector;
pub(super) use self::server::HttpServer;
