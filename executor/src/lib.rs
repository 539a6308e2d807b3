//! Runs encoder and LLM stages of multimodal training: forward, backward and optimizer.
//!
//! A [`stage::Stage`] is a range of consecutive layers of one module: an image or audio encoder with its
//! projector, or the LLM. It takes the activations of a microbatch from the previous stage, saves what
//! backward needs, and turns output gradients into input gradients while it accumulates those of its
//! parameters. Models are written against [`device::Device`]; its CPU version [`device::Cpu`] uses [`ops`],
//! one operation per file. Every backward is written by hand: there is no tape and no graph. Weights have the
//! names and shapes of Hugging Face checkpoints ([`weights`]).
//!
//! Ranks exchange messages through [`comm`], one trait over threads and TCP; [`launch`] starts them. A
//! [`pipeline::PipelineRank`] is one rank of a job: it runs a schedule's actions over its stages and
//! communicators. [`inputs`] prepares its microbatches from the balanced loader, [`optimizer`] turns
//! gradients into weights, [`checkpoint`] saves both, and [`train`] joins these to a training loop.
//! [`profile`] times stages of a model on this device, as a profile that the cost model predicts from.

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

pub mod checkpoint;
pub mod comm;
pub mod device;
pub mod error;
pub mod inputs;
pub mod launch;
pub mod model;
pub mod ops;
pub mod optimizer;
pub mod pipeline;
pub mod profile;
pub mod stage;
pub mod train;
pub mod weights;

pub use error::{Error, Result};
