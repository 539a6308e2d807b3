//! Reads a decoder from a `config.json` and declares its blocks.

use std::ops::Range;

use dflop_costmodel::config::{Documents, PartialModelSpec};
use dflop_costmodel::model::{AttentionBias, LlmSpec};
use serde_json::Value;

use super::vocabulary::Vocabulary;
use super::{Embedding, Head};
use crate::attention::{AttentionMask, AttentionSpec, QkvNames};
use crate::block::Block;
use crate::config_fields::ConfigFields;
use crate::error::{Error, Result};
use crate::layer::{Layer, LayerSpec};
use crate::mlp::{MlpNames, MlpSpec};
use crate::norm::NormKind;
use crate::parameters::Declaration;
use crate::rope::Rope;
use crate::sharding_check::{self, DimensionFields};
use crate::weights::Init;
use dflop_device::Device;

/// Dimensions, names and rotation of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct LlmConfig {
    /// Dimensions.
    pub spec: LlmSpec,
    /// Rotation.
    pub rope: Rope,
    epsilon: f64,
    /// Prefix of `embed_tokens`, `layers` and `norm`.
    prefix: &'static str,
    /// Name of the LM head's weight.
    head: &'static str,
    init: Init,
    /// Configuration fields of heads, MLP and vocabulary, for errors.
    fields: (&'static DimensionFields, &'static str),
}

/// Fields of dimensions in the configuration of a language model, and inside a multimodal one.
const FIELDS: [(&DimensionFields, &str); 2] = [
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

/// Supported values of `model_type`, of whole models and of language models.
const KNOWN: [&str; 7] =
    ["llama", "qwen2", "qwen2_vl", "qwen2_5_vl", "llava_onevision", "internvl", "qwen2_audio"];
const KNOWN_TEXT: [&str; 4] = ["llama", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text"];

/// Refuses models that the cost model knows, but whose checkpoints have other tensor names.
fn refuse_other_names(top: &ConfigFields<'_>, text: &ConfigFields<'_>) -> Result<()> {
    let known = |object: &ConfigFields<'_>, known: &[&str]| match object.text("model_type")? {
        Some(found) if !known.contains(&found) => {
            let problem = format!("= \"{found}\" is not supported, known are {}", known.join(", "));
            Err(object.refused("model_type", problem))
        }
        _ => Ok(()),
    };
    known(top, &KNOWN)?;
    if top.has("text_config") { known(text, &KNOWN_TEXT) } else { Ok(()) }
}

impl LlmConfig {
    /// Reads the decoder from the `config.json` of a checkpoint.
    ///
    /// # Errors
    /// [`Error::CostModel`] or [`Error::ModelConfig`] if a field is invalid or not supported.
    pub fn from_config(document: &Value) -> Result<Self> {
        let documents = Documents { config: document.clone(), ..Documents::default() };
        let top = ConfigFields::new(document);
        let model_type = top.text("model_type")?.unwrap_or_default();
        let Some(mut spec) = PartialModelSpec::from_hugging_face(&documents)?.llm else {
            return Err(top.refused("model_type", format!("= \"{model_type}\" is not a language model")));
        };
        let text = if top.has("text_config") { top.child("text_config") } else { top.clone() };
        refuse_other_names(&top, &text)?;
        if !spec.head_dim.is_multiple_of(2) {
            let problem = format!("must give heads an even width to rotate, found {}", spec.head_dim);
            return Err(text.refused("num_attention_heads", problem));
        }
        let act = text.activation("hidden_act", dflop_device::ops::activation::Activation::Silu)?;
        if act != dflop_device::ops::activation::Activation::Silu {
            return Err(text.refused("hidden_act", "must be \"silu\" in a gated MLP"));
        }
        // the outer field counts in multimodal configurations, as in transformers
        spec.details.has_tied_embeddings = if top.has("tie_word_embeddings") {
            top.flag("tie_word_embeddings", false)?
        } else {
            text.flag("tie_word_embeddings", false)?
        };
        let is_qwen_vl = model_type.starts_with("qwen2_vl") || model_type.starts_with("qwen2_5_vl");
        // checkpoints of these models have no `language_model.` prefix
        let is_alone = matches!(model_type, "llama" | "qwen2") || is_qwen_vl;
        let (prefix, head) = if is_alone {
            ("model.", "lm_head.weight")
        } else {
            ("language_model.model.", "language_model.lm_head.weight")
        };
        Ok(Self {
            rope: Rope::read(&text, spec.head_dim as usize, if is_qwen_vl { 1e6 } else { 1e4 })?,
            epsilon: text.number("rms_norm_eps", if is_qwen_vl { 1e-5 } else { 1e-6 })?,
            init: Init::Normal(text.number("initializer_range", 0.02)?),
            spec,
            prefix,
            head,
            fields: FIELDS[usize::from(top.has("text_config"))],
        })
    }

    /// Checkpoint tensors that the decoder does not use: the second copy of a tied embedding.
    #[must_use]
    pub fn ignored(&self) -> Vec<String> {
        if self.spec.details.has_tied_embeddings {
            vec![self.head.to_owned(), "lm_head.weight".to_owned()]
        } else {
            Vec::new()
        }
    }

    /// Number of transformer layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.spec.layers as usize
    }

    /// Width of a row.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.spec.hidden as usize
    }

    /// Checks that a tensor-parallel group of this degree can share the decoder.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the mismatched field.
    pub fn check_tensor_parallel(&self, degree: usize) -> Result<()> {
        let (fields, vocabulary) = self.fields;
        let layer = self.layer(0);
        sharding_check::check_heads(fields, &layer.attention, degree)?;
        sharding_check::check_size(fields.mlp, layer.mlp.middle, degree)?;
        sharding_check::check_size(vocabulary, self.spec.vocab as usize, degree)
    }

    /// Declares the parameters of some layers and returns their blocks, with the embedding before the first
    /// layer, and LM head and loss after the last.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there are no such layers, or ranks cannot share them.
    pub fn blocks<D: Device>(
        &self,
        layers: Range<usize>,
        declaration: &mut Declaration,
    ) -> Result<Vec<Box<dyn Block<D>>>> {
        if layers.start > layers.end || layers.end > self.layers() {
            let problem = format!("= {}, but layers {layers:?} were requested", self.layers());
            return Err(Error::ModelConfig { field: "num_hidden_layers".to_owned(), problem });
        }
        self.check_tensor_parallel(declaration.tp_rank().size)?;
        let (vocabulary, hidden) = (self.spec.vocab as usize, self.hidden());
        let embedding = format!("{}embed_tokens.weight", self.prefix);
        let mut blocks: Vec<Box<dyn Block<D>>> = Vec::new();
        if layers.start == 0 {
            blocks.push(Box::new(Embedding::declare(
                declaration,
                &embedding,
                [vocabulary, hidden],
                self.init,
            )));
        }
        for layer in layers.clone() {
            blocks.push(Box::new(Layer::declare(declaration, &self.layer(layer))));
        }
        if layers.end == self.layers() {
            let norm = format!("{}norm", self.prefix);
            let (shape, cut) =
                ([vocabulary, hidden], (0, &Vocabulary::parts(vocabulary, declaration.tp_rank())));
            let head = if self.spec.details.has_tied_embeddings {
                declaration.add_shared(&embedding, &shape, self.init, cut)
            } else {
                declaration.add_cut(self.head, &shape, self.init, cut)
            };
            blocks.push(Box::new(Head::declare(
                declaration,
                &norm,
                head,
                [vocabulary, hidden],
                self.epsilon,
            )));
        }
        Ok(blocks)
    }

    /// Specification of a layer.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerSpec {
        let name = |rest: &str| format!("{}layers.{layer}.{rest}", self.prefix);
        let (spec, hidden, init) = (&self.spec, self.hidden(), self.init);
        let bias = spec.details.attention_bias;
        let projection = |rest: &str| (name(rest), bias != AttentionBias::None);
        LayerSpec {
            norm: NormKind::Rms,
            epsilon: self.epsilon,
            norm_names: [name("input_layernorm"), name("post_attention_layernorm")],
            attention: AttentionSpec {
                hidden,
                heads: spec.heads as usize,
                kv_heads: spec.kv_heads as usize,
                head_dim: spec.head_dim as usize,
                qkv: QkvNames::Separate(
                    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(projection),
                ),
                output: (name("self_attn.o_proj"), bias == AttentionBias::All),
                mask: AttentionMask::Causal,
                is_rotated: true,
                init,
            },
            mlp: MlpSpec {
                inputs: hidden,
                middle: spec.ffn as usize,
                outputs: hidden,
                names: MlpNames::Gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].map(name)),
                has_bias: spec.details.has_mlp_bias,
                init,
            },
            scales: None,
        }
    }
}
