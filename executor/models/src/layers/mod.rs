//! Transformer layer of all families: norms, attention, rotation, and the MLP or experts.
//!
//! [`DimensionFields`] names the configuration fields of the dimensions that tensor-parallel ranks share.

mod attention;
mod experts;
mod latent;
mod layer;
mod linear;
mod mlp;
mod norm;
mod rope;

use crate::error::{Error, Result};

pub use attention::{Attention, AttentionMask, AttentionSpec, HeadRotation, QkvNames};
pub use experts::{
    ExpertGate, ExpertGroups, ExpertNames, Experts, ExpertsSpec, RouterRule, SharedExpertsSpec,
};
pub use latent::{LatentNames, LatentQueries, LatentSpec};
pub use layer::{FeedForwardSpec, Layer, LayerSpec};
pub use linear::Linear;
pub use mlp::{Mlp, MlpNames, MlpSpec};
pub use norm::{Norm, NormKind, QkNorm, QkNormSpec};
pub use rope::Rope;

/// Configuration field names, for errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DimensionFields {
    /// Query heads field.
    pub heads: &'static str,
    /// Key and value heads field.
    pub kv_heads: &'static str,
    /// MLP width field.
    pub mlp: &'static str,
}

/// Fails if attention heads cannot be divided among ranks.
pub(crate) fn check_heads(fields: &DimensionFields, spec: &AttentionSpec, degree: usize) -> Result<()> {
    if !spec.heads.is_multiple_of(degree) {
        return refuse(fields.heads, spec.heads, degree, "is not a multiple of");
    }
    // a fused projection cannot repeat its keys on several ranks
    let is_replicated = degree > spec.kv_heads && !matches!(spec.qkv, QkvNames::Fused(_));
    let fits = if is_replicated { degree % spec.kv_heads } else { spec.kv_heads % degree };
    if fits == 0 {
        Ok(())
    } else {
        refuse(fields.kv_heads, spec.kv_heads, degree, "is neither a multiple nor a divisor of")
    }
}

/// Fails if there are fewer elements than ranks.
pub(crate) fn check_size(field: &'static str, found: usize, degree: usize) -> Result<()> {
    if found < degree { refuse(field, found, degree, "is less than") } else { Ok(()) }
}

fn refuse(field: &'static str, found: usize, degree: usize, problem: &'static str) -> Result<()> {
    let problem = format!("= {found} {problem} the tensor-parallel degree {degree}");
    Err(Error::ModelConfig { field: field.to_owned(), problem })
}
