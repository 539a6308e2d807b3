//! Models as lists of blocks.
//!
//! A module (encoder with its projector, or LLM) is a list of [`Block`]s: a first one that turns inputs into
//! rows, transformer layers, and a last one that projects or computes the loss. A pipeline stage is a range
//! of them ([`crate::stage`]). The layers of all families are one block, [`layer::Layer`], with different
//! norms, projections and names; families differ in their first and last blocks. One file of [`families`] has
//! one family.
//!
//! Forward and backward are written by hand. A forward pushes the buffers that its backward needs on
//! [`SavedActivations`], and backward pops them in reverse order; a block saves its input first, so that a
//! stage that recomputes activations can keep the input alone.

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

pub mod attention;
mod block;
pub mod context;
pub mod encoder;
pub mod error;
pub mod families;
pub mod layer;
pub mod linear;
pub mod llm;
pub mod mlp;
pub mod model_config;
pub mod norm;
pub mod parameters;
pub mod rope;
mod sharding_check;
pub mod stage;
mod stage_blocks;
pub mod tensor_parallel;
pub mod weights;

pub(crate) use block::expect_rows;
pub use block::{BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations};
pub use error::{Error, Result};
pub use families::{BlockFamilies, BlockSource, FamilyBlocks};
pub use sharding_check::DimensionFields;
pub use stage_blocks::StageBlocks;
