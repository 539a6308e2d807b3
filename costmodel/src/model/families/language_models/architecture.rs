//! Reads an architecture's fields, with defaults, and the widths of multi-head latent attention.

use super::experts::ExpertFields;
use super::windows::WindowFields;
use crate::error::Result;
use crate::model::config::ConfigFields;
use crate::model::{AttentionBias, LatentAttention, LlmDetails, LlmSpec};

/// Fields and defaults for an architecture.
pub(super) struct Architecture {
    /// Architecture's `model_type`.
    pub(super) name: &'static str,
    pub(super) vocab: u32,
    pub(super) hidden: u32,
    /// MLP width field.
    pub(super) ffn_field: &'static str,
    pub(super) ffn: u32,
    pub(super) layers: u32,
    pub(super) heads: u32,
    /// Number of key and value heads; `None` for as many as query heads.
    pub(super) kv_heads: Option<u32>,
    /// Head width; `None` for the hidden width divided by the heads.
    pub(super) head_dim: Option<u32>,
    pub(super) bias: Bias,
    /// Whether the field `mlp_bias` gives the MLP biases.
    pub(super) reads_mlp_bias: bool,
    /// Whether the field `use_qk_norm` gives queries and keys a norm.
    pub(super) reads_qk_norm: bool,
    /// Details that no field changes, and whether embeddings are tied if no field states it.
    pub(super) details: LlmDetails,
    pub(super) windows: WindowFields,
    pub(super) experts: Option<ExpertFields>,
    pub(super) latent: Option<LatentDefaults>,
    /// Fields that change the cost and are not modeled: they must be missing, `null`, false or this value.
    pub(super) refused: &'static [&'static str],
}

/// Attention biases.
#[derive(Clone, Copy)]
pub(super) enum Bias {
    /// These, always.
    Always(AttentionBias),
    /// These, if a field is true; with the field's default.
    Field(&'static str, bool, AttentionBias),
}

impl Architecture {
    /// Reads a language model's sizes.
    pub(super) fn read(&self, fields: &ConfigFields<'_>) -> Result<LlmSpec> {
        for field in self.refused {
            if fields.value(field).is_some_and(|value| value != false && value != 0) {
                return Err(fields.invalid(field, "must be false or missing, its cost is not modeled"));
            }
        }
        let layers = fields.count("num_hidden_layers", self.layers)?;
        let hidden = fields.count("hidden_size", self.hidden)?;
        let heads = fields.count("num_attention_heads", self.heads)?;
        let latent = self.latent.map(|defaults| defaults.read(fields)).transpose()?;
        let experts = match &self.experts {
            Some(experts) => experts.read(fields, layers)?,
            None => None,
        };
        let [kv_heads, head_dim] = match latent {
            Some(latent) => [heads, latent.plain_dim.saturating_add(latent.rotated_dim)],
            None => self.read_heads(fields, hidden, heads)?,
        };
        Ok(LlmSpec {
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            ffn: fields.count(self.ffn_field, self.ffn)?,
            vocab: fields.count("vocab_size", self.vocab)?,
            details: self.read_details(fields)?,
            experts,
            windows: self.windows.read(fields, layers)?,
            latent,
            counts: None,
        })
    }

    /// Reads the key and value heads and the head width.
    fn read_heads(&self, fields: &ConfigFields<'_>, hidden: u32, heads: u32) -> Result<[u32; 2]> {
        let kv_heads = match self.kv_heads {
            // `null` means as many as query heads, a missing field the family default.
            Some(default) if !fields.is_null("num_key_value_heads") => default,
            _ => heads,
        };
        let kv_heads = fields.count("num_key_value_heads", kv_heads)?;
        fields.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
        let head_dim = fields.optional_count("head_dim")?.or(self.head_dim);
        if head_dim.is_none() {
            fields.require_multiple("hidden_size", hidden, "num_attention_heads", heads)?;
        }
        Ok([kv_heads, head_dim.unwrap_or(hidden / heads)])
    }

    fn read_details(&self, fields: &ConfigFields<'_>) -> Result<LlmDetails> {
        let attention_bias = match self.bias {
            Bias::Always(bias) => bias,
            Bias::Field(key, default, bias) if fields.flag(key, default)? => bias,
            Bias::Field(..) => AttentionBias::None,
        };
        let has_tied_embeddings = fields.flag("tie_word_embeddings", self.details.has_tied_embeddings)?;
        Ok(LlmDetails {
            attention_bias,
            has_mlp_bias: self.reads_mlp_bias && fields.flag("mlp_bias", false)?,
            has_qk_norm: self.details.has_qk_norm
                || self.reads_qk_norm && fields.flag("use_qk_norm", false)?,
            has_tied_embeddings,
            ..self.details
        })
    }
}

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
