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

mod block;
pub mod encoder;
mod error;
pub mod families;
mod layers;
mod llm;
mod parameters;
mod stage;

pub use block::{
    BackwardPass, Block, BlockOutput, EncoderInputs, ForwardPass, KeptRows, LayerContext, MicrobatchContext,
    ModuleInputs, PassParameters, SavedActivations, StageBlocks, TensorParallel, TensorPass, TextInputs,
};
pub use error::{Error, Result};
pub use families::{
    BlockFamilies, BlockSource, FamilyBlocks, FrozenModules, ModelConfig, ModuleKind, StageRange,
};
pub use layers::{
    Attention, AttentionMask, AttentionSpec, DimensionFields, ExpertGate, ExpertGroups, ExpertNames, Experts,
    ExpertsSpec, FeedForwardSpec, HeadRotation, LatentNames, LatentQueries, LatentSpec, Layer, LayerSpec,
    Linear, Mlp, MlpNames, MlpSpec, Norm, NormKind, QkNorm, QkNormSpec, QkvNames, Rope, RouterRule,
    SharedExpertsSpec,
};
pub use llm::{
    DecoderForm, Embedding, Head, IGNORED, LlmConfig, LlmExpertNames, LlmExperts, LlmLatent, LlmNames,
    MatrixNames, QueryTemperature, TextBatch,
};
pub use parameters::{
    BUCKET_ELEMENTS, Declaration, GatherTimes, LayerWeights, ParameterBucket, Parameters, PendingWeights,
    WeightGradients, WeightMatrix, weights,
};
pub use stage::{Activations, BlockStage, GradientsDone, Stage, StageOptions, StageSettings, assemble};
