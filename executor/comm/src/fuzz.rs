//! Doors for fuzz targets: the parsers of bytes that other processes send. No part of the interface.

pub use super::rendezvous::fuzz::{greeting, requests};
pub use super::tcp::fuzz::{controls, messages};
