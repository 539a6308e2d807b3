//! Runs encoder and LLM stages of multimodal training: forward, backward and optimizer.
//!
//! A [`stage::Stage`] is a run of consecutive layers of one module: encoder of images or audio with its
//! projector, or LLM. It takes a microbatch's activations from the stage before it, keeps what backward
//! needs, and turns output gradients into input gradients, adding up those of its parameters. Models are
//! written against [`device::Device`], whose CPU version [`device::Cpu`] is in [`ops`], one operation a file.
//! Every backward is written by hand: there is no tape and no graph. Weights have the names and shapes of
//! Hugging Face checkpoints ([`weights`]).
//!
//! Between ranks stands [`comm`], one trait over threads and TCP; [`launch`] says how ranks come to be. A
//! [`pipeline::Pipeline`] is one rank of a job: it runs a schedule's actions over its stages and
//! communicators. [`feed`] brings it what the balanced loader reads, [`training`] turns gradients into better
//! weights, saves them, and says what the time went into. [`measure`] times stages of a model on this device,
//! into the profile that the cost model predicts from.

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

pub mod comm;
pub mod device;
pub mod error;
pub mod feed;
pub mod launch;
pub mod measure;
pub mod model;
pub mod ops;
pub mod pipeline;
pub mod run;
pub mod stage;
pub mod training;
pub mod weights;

pub use error::{Error, Result};
