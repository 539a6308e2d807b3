//! Reads multi-head latent attention widths.

use crate::error::Result;
use crate::model::LatentAttention;
use crate::model::config::ConfigFields;

/// Default widths for an architecture.
#[derive(Clone, Copy)]
pub(super) struct LatentDefaults {
    pub(super) query_rank: u32,
    pub(super) kv_rank: u32,
    pub(super) plain_dim: u32,
    pub(super) rotated_dim: u32,
    pub(super) value_dim: u32,
}

impl LatentDefaults {
    /// Reads the widths; a `q_lora_rank` of `null` projects queries directly.
    pub(super) fn read(self, fields: &ConfigFields<'_>) -> Result<LatentAttention> {
        let query_rank = if fields.is_null("q_lora_rank") {
            None
        } else {
            Some(fields.count("q_lora_rank", self.query_rank)?)
        };
        Ok(LatentAttention {
            query_rank,
            kv_rank: fields.count("kv_lora_rank", self.kv_rank)?,
            plain_dim: fields.count("qk_nope_head_dim", self.plain_dim)?,
            rotated_dim: fields.count("qk_rope_head_dim", self.rotated_dim)?,
            value_dim: fields.count("v_head_dim", self.value_dim)?,
        })
    }
}
