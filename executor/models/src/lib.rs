//! Models as block lists.
//!
//! A module (encoder with projector, or LLM) is a list of [`Block`]s: a first block that turns inputs into
//! rows, transformer layers, and a last block that projects or computes the loss. A pipeline runs any
//! [`Stage`]; a [`BlockStage`] runs a block range. All families share one layer block, [`Layer`], with
//! different norms, projections and names; families differ in their first and last blocks. Each file in
//! [`families`] contains one family.
//!
//! Forward and backward are written by hand. A forward pushes the buffers that the backward needs on
//! [`SavedActivations`], and backward pops them in reverse order; a block saves its input first, so that a
//! stage that recomputes activations can keep only the input.

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

mod attention;
mod block;
mod context;
mod declaration;
pub mod encoder;
mod error;
mod experts;
pub mod families;
mod feed_forward;
mod latent;
mod layer;
mod linear;
mod llm;
mod mlp;
mod model_config;
mod norm;
mod parameters;
mod qk_norm;
mod rope;
mod sharding_check;
mod stage;
mod stage_blocks;
mod tensor_parallel;
mod weight_gradients;
pub mod weights;

pub use attention::{Attention, AttentionMask, AttentionSpec, HeadRotation, QkvNames};
pub(crate) use block::expect_rows;
pub use block::{BackwardPass, Block, BlockOutput, ForwardPass, KeptRows, PassParameters, SavedActivations};
pub use context::{EncoderInputs, LayerContext, MicrobatchContext, ModuleInputs, TextInputs};
pub use declaration::Declaration;
pub use error::{Error, Result};
pub use experts::{
    ExpertGate, ExpertGroups, ExpertNames, Experts, ExpertsSpec, RouterRule, SharedExpertsSpec,
};
pub use families::{BlockFamilies, BlockSource, FamilyBlocks};
pub use feed_forward::FeedForwardSpec;
pub use latent::{LatentNames, LatentQueries, LatentSpec};
pub use layer::{Layer, LayerSpec};
pub use linear::Linear;
pub use llm::{
    DecoderForm, Embedding, Head, IGNORED, LlmConfig, LlmExpertNames, LlmExperts, LlmLatent, LlmNames,
    MatrixNames, QueryTemperature, TextBatch,
};
pub use mlp::{Mlp, MlpNames, MlpSpec};
pub use model_config::{FrozenModules, ModelConfig, ModuleKind, StageRange};
pub use norm::{Norm, NormKind};
pub use parameters::{BUCKET_ELEMENTS, GatherTimes, GradientPair, ParameterBucket, Parameters};
pub use qk_norm::{QkNorm, QkNormSpec};
pub use rope::Rope;
pub use sharding_check::DimensionFields;
pub use stage::{Activations, BlockStage, GradientsDone, Stage, StageOptions, StageSettings, assemble};
pub use stage_blocks::StageBlocks;
pub use tensor_parallel::{TensorParallel, TensorPass};
pub use weight_gradients::{LayerWeights, PendingWeights, WeightGradients, WeightMatrix};
