//! Reads Llama, Qwen2 and Qwen2.5, Qwen3, and `InternLM2`, alone or as `text_config`.

use super::{CheckpointFields, Fields, PartialModelSpec};
use crate::error::Result;
use crate::model::{AttentionBias, LlmDetails, LlmSpec};

/// Defaults of an architecture.
struct Architecture {
    name: &'static str,
    vocab: u32,
    hidden: u32,
    ffn: u32,
    layers: u32,
    heads: u32,
    /// Key and value heads; `None` for as many as query heads.
    kv_heads: Option<u32>,
    /// Width of a head; `None` for the hidden width over the heads.
    head_dim: Option<u32>,
    bias: Bias,
    has_qk_norm: bool,
}

#[derive(Clone, Copy)]
enum Bias {
    /// Biases of queries, keys and values, always.
    Qkv,
    /// Biases of all projections of the attention, if this field is true; with its default.
    Field(&'static str, bool),
}

/// # Source
/// `LlamaConfig`, `Qwen2Config`, `Qwen3Config`, `Qwen2VLTextConfig` and `Qwen2_5_VLTextConfig` of
/// transformers 4.57.1; `InternLM2Config` as published with it.
const ARCHITECTURES: [Architecture; 6] = [
    Architecture {
        name: "llama",
        vocab: 32_000,
        hidden: 4096,
        ffn: 11_008,
        layers: 32,
        heads: 32,
        kv_heads: None,
        head_dim: None,
        bias: Bias::Field("attention_bias", false),
        has_qk_norm: false,
    },
    Architecture {
        name: "internlm2",
        vocab: 103_168,
        hidden: 4096,
        ffn: 11_008,
        layers: 32,
        heads: 32,
        kv_heads: None,
        head_dim: None,
        bias: Bias::Field("bias", true),
        has_qk_norm: false,
    },
    Architecture { name: "qwen2", ..QWEN2 },
    Architecture {
        name: "qwen3",
        head_dim: Some(128),
        bias: Bias::Field("attention_bias", false),
        has_qk_norm: true,
        ..QWEN2
    },
    Architecture { name: "qwen2_vl_text", ..QWEN2_VL },
    Architecture { name: "qwen2_5_vl_text", ..QWEN2_VL },
];

const QWEN2: Architecture = Architecture {
    name: "qwen2",
    vocab: 151_936,
    hidden: 4096,
    ffn: 22_016,
    layers: 32,
    heads: 32,
    kv_heads: Some(32),
    head_dim: None,
    bias: Bias::Qkv,
    has_qk_norm: false,
};

const QWEN2_VL: Architecture = Architecture {
    vocab: 152_064,
    hidden: 8192,
    ffn: 29_568,
    layers: 80,
    heads: 64,
    kv_heads: Some(8),
    ..QWEN2
};

/// Reads a language model without encoders.
pub(super) fn read(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let llm = text_config(&source.config, "")?;
    Ok(PartialModelSpec { llm: Some(llm), ..PartialModelSpec::default() })
}

/// Reads a language model from some fields; `model_type` defaults to `default_type`.
pub(super) fn text_config(fields: &Fields<'_>, default_type: &str) -> Result<LlmSpec> {
    let model_type = fields.text("model_type")?.unwrap_or(default_type);
    let Some(architecture) = ARCHITECTURES.iter().find(|known| known.name == model_type) else {
        let known = ARCHITECTURES.map(|known| known.name).join(", ");
        let problem = format!("= \"{model_type}\" is not a known language model, known are {known}");
        return Err(fields.invalid("model_type", problem));
    };
    architecture.read(fields)
}

/// Reads the language model of Qwen2-VL and Qwen2.5-VL, whose fields are at the top in older files.
pub(super) fn qwen_vl(config: &Fields<'_>, text_type: &'static str) -> Result<LlmSpec> {
    match config.child("text_config")? {
        Some(text) => text_config(&text, text_type),
        None => Architecture { name: text_type, ..QWEN2_VL }.read(config),
    }
}

impl Architecture {
    fn read(&self, fields: &Fields<'_>) -> Result<LlmSpec> {
        check_full_attention(fields)?;
        let hidden = fields.count("hidden_size", self.hidden)?;
        let heads = fields.count("num_attention_heads", self.heads)?;
        let kv_heads = match self.kv_heads {
            // `null` means as many as query heads, a missing field the default of the family.
            Some(default) if !fields.is_null("num_key_value_heads") => default,
            _ => heads,
        };
        let kv_heads = fields.count("num_key_value_heads", kv_heads)?;
        fields.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
        let head_dim = fields.optional_count("head_dim")?.or(self.head_dim);
        if head_dim.is_none() {
            fields.require_multiple("hidden_size", hidden, "num_attention_heads", heads)?;
        }
        let attention_bias = match self.bias {
            Bias::Qkv => AttentionBias::Qkv,
            Bias::Field(key, default) if fields.flag(key, default)? => AttentionBias::All,
            Bias::Field(..) => AttentionBias::None,
        };
        Ok(LlmSpec {
            layers: fields.count("num_hidden_layers", self.layers)?,
            hidden,
            heads,
            kv_heads,
            head_dim: head_dim.unwrap_or(hidden / heads),
            ffn: fields.count("intermediate_size", self.ffn)?,
            vocab: fields.count("vocab_size", self.vocab)?,
            details: LlmDetails {
                attention_bias,
                has_mlp_bias: self.name == "llama" && fields.flag("mlp_bias", false)?,
                has_qk_norm: self.has_qk_norm,
                has_tied_embeddings: fields.flag("tie_word_embeddings", false)?,
            },
        })
    }
}

/// Checks that attention is full, since sliding windows are not modeled.
fn check_full_attention(fields: &Fields<'_>) -> Result<()> {
    if fields.flag("use_sliding_window", false)? {
        return Err(fields.invalid("use_sliding_window", "must be false, sliding windows are not supported"));
    }
    let has_windows = |kinds: &Vec<serde_json::Value>| kinds.iter().any(|kind| kind == "sliding_attention");
    if fields.value("layer_types").and_then(serde_json::Value::as_array).is_some_and(has_windows) {
        return Err(fields.invalid("layer_types", "has `sliding_attention`, attention must be full"));
    }
    Ok(())
}
