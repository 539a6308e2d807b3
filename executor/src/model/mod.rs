//! Models as runs of blocks.
//!
//! A module (encoder with its projector, or LLM) is a list of [`Block`]s: a first one that turns inputs into rows, transformer
//! layers, a last one that projects or computes the loss. A pipeline stage is a run of them ([`crate::stage`]). Layers
//! of all families are one block, [`layer::Layer`], with other norms, projections, names; families differ in their first
//! and last blocks.
//!
//! Forward and backward are written by hand. What backward needs is pushed on [`SavedActivations`] and popped in the opposite
//! order; a block keeps its input first, so that a stage that computes activations anew keeps that alone.

pub mod attention;
mod block;
mod config_fields;
pub mod context;
pub mod encoder;
pub mod layer;
pub mod linear;
pub mod llm;
pub mod mlp;
pub mod model_config;
pub mod norm;
pub mod parameters;
pub mod rope;
mod sharding_check;
mod stage_blocks;
pub mod tensor_parallel;

pub(crate) use block::expect_rows;
pub use block::{BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations};
pub use stage_blocks::StageBlocks;
