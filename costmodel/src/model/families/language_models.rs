//! Llama, Qwen2 and Qwen2.5, Qwen3, and `InternLM2`, alone or as `text_config`.

use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{AttentionBias, FamilyId, LlmDetails, LlmSpec, ModelFamily};

/// Language model without encoders, of the architecture with this name.
#[derive(Debug)]
pub(super) struct LanguageModel(pub(super) [&'static str; 1]);

impl ModelFamily for LanguageModel {
    fn id(&self) -> FamilyId {
        FamilyId::new(self.0[0])
    }

    fn model_types(&self) -> &[&str] {
        &self.0
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        let llm = text_config(&files.config, "")?;
        Ok(PartialModelSpec { family: self.id(), llm: Some(llm), ..PartialModelSpec::default() })
    }
}

/// Qwen2.5-7B; Qwen2-7B has the same sizes.
pub(super) const QWEN2_5_7B: LlmSpec = qwen2(28, 3584, [28, 4, 128], 18_944, 152_064);
pub(super) const QWEN2_5_32B: LlmSpec = qwen2(64, 5120, [40, 8, 128], 27_648, 152_064);
pub(super) const QWEN2_5_72B: LlmSpec = qwen2(80, 8192, [64, 8, 128], 29_568, 152_064);
pub(super) const LLAMA3_8B: LlmSpec = llama(32, 4096, [32, 8, 128], 14_336, 128_256);
pub(super) const LLAMA3_70B: LlmSpec = llama(80, 8192, [64, 8, 128], 28_672, 128_256);
/// The LLM of Qwen2-Audio.
pub(super) const QWEN_7B: LlmSpec = qwen2(32, 4096, [32, 32, 128], 11_008, 156_032);
pub(super) const TINY_LLM: LlmSpec = llama(4, 256, [4, 2, 64], 1024, 4096);

/// Makes a Llama; `heads` are query heads, key and value heads, and the width of one head.
const fn llama(layers: u32, hidden: u32, heads: [u32; 3], ffn: u32, vocab: u32) -> LlmSpec {
    let [heads, kv_heads, head_dim] = heads;
    let details = LlmDetails {
        attention_bias: AttentionBias::None,
        has_mlp_bias: false,
        has_qk_norm: false,
        has_tied_embeddings: false,
        has_post_norms: false,
        has_sinks: false,
    };
    let (experts, windows, latent) = (None, None, None);
    LlmSpec { layers, hidden, heads, kv_heads, head_dim, ffn, vocab, details, experts, windows, latent }
}

const fn qwen2(layers: u32, hidden: u32, heads: [u32; 3], ffn: u32, vocab: u32) -> LlmSpec {
    let mut spec = llama(layers, hidden, heads, ffn, vocab);
    spec.details.attention_bias = AttentionBias::Qkv;
    spec
}

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
const ARCHITECTURES: [Architecture; 7] = [
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
    Architecture {
        name: "qwen3_vl_text",
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

impl LlmSpec {
    /// Reads a language model from its own `config.json` or from a `text_config`, as a family does for the
    /// decoder inside its checkpoints; a missing `model_type` is `default_type`, such as `"qwen2"`.
    ///
    /// # Errors
    /// [`Error::Configuration`](crate::Error::Configuration) if a field is invalid or the `model_type` is not
    /// a known language model.
    pub fn from_fields(fields: &ConfigFields<'_>, default_type: &str) -> Result<Self> {
        text_config(fields, default_type)
    }
}

/// Reads a language model from some fields; `model_type` defaults to `default_type`.
pub(super) fn text_config(fields: &ConfigFields<'_>, default_type: &str) -> Result<LlmSpec> {
    let model_type = fields.text("model_type")?.unwrap_or(default_type);
    let Some(architecture) = ARCHITECTURES.iter().find(|known| known.name == model_type) else {
        let known = ARCHITECTURES.map(|known| known.name).join(", ");
        let problem = format!("= \"{model_type}\" is not a known language model, known are {known}");
        return Err(fields.invalid("model_type", problem));
    };
    architecture.read(fields)
}

/// Reads the language model of Qwen2-VL and Qwen2.5-VL, whose fields are at the top in older files.
pub(super) fn qwen_vl(config: &ConfigFields<'_>, text_type: &'static str) -> Result<LlmSpec> {
    match config.child("text_config")? {
        Some(text) => text_config(&text, text_type),
        None => Architecture { name: text_type, ..QWEN2_VL }.read(config),
    }
}

impl Architecture {
    fn read(&self, fields: &ConfigFields<'_>) -> Result<LlmSpec> {
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
                ..LlmDetails::default()
            },
            experts: None,
            windows: None,
            latent: None,
        })
    }
}

/// Checks that attention is full, since sliding windows are not modeled.
fn check_full_attention(fields: &ConfigFields<'_>) -> Result<()> {
    if fields.flag("use_sliding_window", false)? {
        return Err(fields.invalid("use_sliding_window", "must be false, sliding windows are not supported"));
    }
    let has_windows = |kinds: &Vec<serde_json::Value>| kinds.iter().any(|kind| kind == "sliding_attention");
    if fields.value("layer_types").and_then(serde_json::Value::as_array).is_some_and(has_windows) {
        return Err(fields.invalid("layer_types", "has `sliding_attention`, attention must be full"));
    }
    Ok(())
}
