//! Entry points for fuzz targets: parsers for bytes from other processes. Not a public interface.

pub use super::rendezvous::fuzz::{greeting, requests};
pub use super::tcp::fuzz::{controls, messages};
