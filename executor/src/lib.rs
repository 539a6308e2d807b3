//! Runs a training plan: pipeline stages, their devices and the messages between them.
//!
//! - between ranks: [`comm`], one trait over threads and TCP
//! - how ranks come to be: [`launch`]

pub mod comm;
pub mod launch;
