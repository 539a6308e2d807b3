//! Decoders: Llama, Qwen2 and Qwen3, with or without encoders.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::LlmSpec;

use super::{BlockSource, activation, routing};
use crate::error::Result;
use crate::layers::{DimensionFields, Rope};
use crate::llm::{DecoderForm, LlmConfig, LlmLatent, LlmNames};
use crate::parameters::weights::Init;
use dflop_device::ops::activation::Activation;

/// Dimension fields in a language model configuration, and inside a multimodal configuration.
pub(super) const FIELDS: [(&DimensionFields, &str); 2] = [
    (
        &DimensionFields {
            heads: "num_attention_heads",
            kv_heads: "num_key_value_heads",
            mlp: "intermediate_size",
        },
        "vocab_size",
    ),
    (
        &DimensionFields {
            heads: "text_config.num_attention_heads",
            kv_heads: "text_config.num_key_value_heads",
            mlp: "text_config.intermediate_size",
        },
        "text_config.vocab_size",
    ),
];

/// Decoder architectures inside multimodal models that use these blocks.
const KNOWN_TEXT: [&str; 10] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen2_5_omni_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "gpt_oss",
];

/// Names and defaults that differ between decoder families.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecoderDefaults {
    /// Checkpoint prefix for `embed_tokens`, `layers` and `norm`.
    pub prefix: &'static str,
    /// LM head weight name.
    pub head: &'static str,
    /// Norm epsilon, if the configuration has none.
    pub epsilon: f64,
    /// Base for the rotation frequencies, if the configuration has none.
    pub theta: f64,
    /// Rotated fraction of a head, if the configuration has no `partial_rotary_factor`; `None` if complete
    /// heads rotate, regardless of the configuration.
    pub rotated_part: Option<f64>,
}

impl DecoderDefaults {
    /// A language model without encoders.
    pub const ALONE: Self =
        Self { prefix: "model.", head: "lm_head.weight", epsilon: 1e-6, theta: 1e4, rotated_part: None };
    /// A language model inside a multimodal transformers model.
    pub const NESTED: Self =
        Self { prefix: "language_model.model.", head: "language_model.lm_head.weight", ..Self::ALONE };
}

/// Builds a decoder with the names in language model checkpoints.
pub(super) fn alone(source: &BlockSource<'_>) -> Result<LlmConfig> {
    decoder(source, &DecoderDefaults::ALONE)
}

/// Builds a decoder from the fields in `text_config`, or in the document root if there is none.
///
/// # Errors
/// [`Error::CostModel`](crate::Error::CostModel) if a field is invalid or not supported.
pub fn decoder(source: &BlockSource<'_>, defaults: &DecoderDefaults) -> Result<LlmConfig> {
    let (mut spec, top) = (source.llm()?, source.fields());
    let is_nested = top.has("text_config");
    let text = if is_nested { top.child_or_empty("text_config")? } else { top.clone() };
    if let Some(found) = text.text("model_type")?.filter(|found| is_nested && !KNOWN_TEXT.contains(found)) {
        let problem = format!("= \"{found}\" is not supported, known are {}", KNOWN_TEXT.join(", "));
        return Err(text.invalid("model_type", problem).into());
    }
    check_plain(&spec, &text)?;
    let quantization = top.child_or_empty("quantization_config")?;
    if let Some(method) = quantization.text("quant_method")?.filter(|&method| method == "mxfp4") {
        let problem = format!("= \"{method}\" cannot be trained, convert the weights to bf16");
        return Err(quantization.invalid("quant_method", problem).into());
    }
    let rotated = rotated_columns(&text, &spec, defaults.rotated_part)?;
    if activation(&text, "hidden_act", Activation::Silu)? != Activation::Silu {
        return Err(text.invalid("hidden_act", "must be \"silu\" in a gated MLP").into());
    }
    // the outer field counts in multimodal configurations, as in transformers
    let tied = if top.has("tie_word_embeddings") { &top } else { &text };
    spec.details.has_tied_embeddings =
        tied.flag("tie_word_embeddings", source.config.is_none() && spec.details.has_tied_embeddings)?;
    let (fields, vocabulary) = FIELDS[usize::from(is_nested)];
    let model_type = match text.text("model_type")? {
        None if source.config.is_some() => Some(source.spec.family.as_str()),
        found => found,
    };
    let experts = routing::read(&text, model_type, &spec)?;
    let latent = match spec.latent {
        Some(_) => Some(LlmLatent {
            is_interleaved: text.flag("rope_interleave", true)?,
            scale: Rope::score_scale(&text)? / f64::from(spec.head_dim).sqrt(),
        }),
        None => None,
    };
    Ok(LlmConfig {
        experts,
        latent,
        rope: Rope::read(&text, rotated as usize, defaults.theta)?,
        epsilon: text.number("rms_norm_eps", defaults.epsilon)?,
        init: Init::Normal(text.number("initializer_range", 0.02)?),
        form: DecoderForm::default(),
        spec,
        names: LlmNames { prefix: defaults.prefix, head: defaults.head, mlp: "mlp", fields, vocabulary },
        deepstack: 0,
    })
}

/// Returns the number of rotated columns per head.
fn rotated_columns(text: &ConfigFields<'_>, spec: &LlmSpec, part: Option<f64>) -> Result<u32> {
    let mut rotated = spec.latent.map_or(spec.head_dim, |latent| latent.rotated_dim);
    if let Some(default) = part {
        let key = "partial_rotary_factor";
        let nested = text.child_or_empty("rope_parameters")?;
        let fields = if nested.has(key) { &nested } else { text };
        let part = fields.number(key, default)?;
        if part > 1.0 {
            return Err(fields.invalid(key, format!("= {part} must be at most 1")).into());
        }
        rotated = (f64::from(rotated) * part) as u32;
    }
    if !rotated.is_multiple_of(2) || rotated == 0 {
        let problem = format!("must give heads an even width to rotate, found {rotated}");
        return Err(text.invalid("num_attention_heads", problem).into());
    }
    Ok(rotated)
}

/// Rejects layer parts that are not trained yet.
fn check_plain(spec: &LlmSpec, text: &ConfigFields<'_>) -> Result<()> {
    let details = &spec.details;
    for (has_part, part) in [
        (details.has_post_norms, "norms after attention and MLP under other names"),
        (details.has_wide_qk_norm, "norms over all heads"),
    ] {
        if has_part {
            return Err(text.invalid("model_type", format!("has {part}, which are not trained yet")).into());
        }
    }
    Ok(())
}
