//! Runs encoder and LLM stages of multimodal training: forward, backward and optimizer.
//!
//! A [`Stage`](models::Stage) is a range of consecutive layers in one module: an image or audio encoder with
//! its projector, or the LLM. It is a trait; the built-in implementation is
//! [`BlockStage`](models::BlockStage). [`models`] holds stages, models and weights, [`device`] the operations
//! that they are written against, [`comm`] messages between ranks and the launcher; these are separate
//! crates.
//!
//! A [`pipeline::PipelineRank`] is one rank in a job: it runs the actions in a schedule over stages and
//! communicators. [`inputs`] prepares the microbatches from the balanced loader, [`optimizer`] turns
//! gradients into weights, [`checkpoint`] saves both, and [`train`] combines them in a training loop.
//! [`run`] runs a whole job from its configuration, with threads, processes or under a launcher.
//! [`profile`] times model stages on this device and writes a profile that the cost model predicts from.

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

pub mod checkpoint;
mod error;
pub mod inputs;
pub mod optimizer;
pub mod pipeline;
pub mod profile;
pub mod run;
pub mod step_record;
pub mod train;

pub use dflop_comm as comm;
pub use dflop_device as device;
pub use dflop_models as models;
pub use error::{Error, Named, Result};
