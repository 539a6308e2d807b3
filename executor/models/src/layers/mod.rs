//! Transformer layer of all families: norms, attention, rotation, and the MLP or experts.

mod attention;
mod experts;
mod feed_forward;
mod latent;
mod layer;
mod linear;
mod mlp;
mod norm;
mod rope;
pub(crate) mod sharding_check;

pub use attention::{Attention, AttentionMask, AttentionSpec, HeadRotation, QkvNames};
pub use experts::{
    ExpertGate, ExpertGroups, ExpertNames, Experts, ExpertsSpec, RouterRule, SharedExpertsSpec,
};
pub use feed_forward::FeedForwardSpec;
pub use latent::{LatentNames, LatentQueries, LatentSpec};
pub use layer::{Layer, LayerSpec};
pub use linear::Linear;
pub use mlp::{Mlp, MlpNames, MlpSpec};
pub use norm::{Norm, NormKind, QkNorm, QkNormSpec};
pub use rope::Rope;
pub use sharding_check::DimensionFields;
