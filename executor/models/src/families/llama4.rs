//! Llama 4 decoder: layers without rotation, key chunks, experts that read weighted inputs.
//!
//! Layers with rotation attend within chunks, and normalize rotated queries and keys without weights. Layers
//! without rotation attend to all earlier tokens, with queries scaled by position.
//!
//! # Source
//! `modeling_llama4.py` of transformers 5.24.0.

use dflop_costmodel::FamilyId;
use dflop_costmodel::model::LayerSet;

use super::language_models::{DecoderDefaults, FIELDS, decoder};
use super::{BlockSource, FamilyBlocks, routing};
use crate::error::Result;
use crate::layers::DimensionFields;
use crate::llm::{DecoderForm, LlmConfig, LlmNames, QueryTemperature};

/// Decoder `model_type`.
const TEXT: &str = "llama4_text";

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&Llama4Text];

/// Llama 4 decoder without encoders.
#[derive(Debug)]
struct Llama4Text;

impl FamilyBlocks for Llama4Text {
    fn id(&self) -> FamilyId {
        FamilyId::new(TEXT)
    }

    fn model_types(&self) -> &[&str] {
        &[TEXT]
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        let defaults = DecoderDefaults { epsilon: 1e-5, theta: 5e5, ..DecoderDefaults::ALONE };
        let llm = decoder(source, &defaults)?;
        let text = source.fields();
        let rotated = LayerSet::rotated(&text, llm.spec.layers)?;
        let temperature = QueryTemperature {
            scale: text.number("attn_scale", 0.1)?,
            floor: text.count("floor_scale", 8192)?,
        };
        let form = DecoderForm {
            is_interleaved: true,
            unrotated: (0..llm.spec.layers).filter(|layer| !rotated.contains(*layer)).collect(),
            temperature: text.flag("attn_temperature_tuning", true)?.then_some(temperature),
            has_plain_qk_norm: text.flag("use_qk_norm", true)?,
            ..llm.form
        };
        let names = LlmNames { mlp: "feed_forward", fields: &NAMES, vocabulary: FIELDS[0].1, ..llm.names };
        let experts = routing::read(&text, Some(TEXT), &llm.spec)?;
        Ok(LlmConfig { form, names, experts, ..llm })
    }
}

/// Dimension fields.
const NAMES: DimensionFields = DimensionFields { mlp: "intermediate_size_mlp", ..*FIELDS[0].0 };
