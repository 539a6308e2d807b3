//! Checks that tensor-parallel ranks can share model dimensions.

use super::attention::{AttentionSpec, QkvNames};
use crate::error::{Error, Result};

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
