//! HTTP requests: by bucket clients, which are observed, and by URL.
//!
//! [`client`] wraps the requests from stores with buckets; [`listing`] corrects their listings. [`server`]
//! requests objects by literal URLs, which the HTTP client in `object_store` would decode and encode again;
//! [`headers`] reads the responses from such servers.

mod client;
mod server;

pub(super) use self::client::Connector;
pub(super) use self::server::HttpServer;
