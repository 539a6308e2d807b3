//! Gemma 3, without images and with SigLIP, whose patches are averaged to tokens.
//!
//! Queries and keys are normalized, attention and MLP have a norm before and after them, norm weights are
//! stored as `w - 1`. Layers with windows use a different rotation base; tokens in an image attend to each
//! other in both directions, also within windows.
//!
//! # Source
//! Gemma Team: "Gemma 3 Technical Report", 2025, arXiv:2503.19786, section 2; `modeling_gemma3.py` of
//! transformers 5.24.0.

use dflop_costmodel::FamilyId;
use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::LlmSpec;

use super::fixed_resolution::square_tower;
use super::language_models::FIELDS;
use super::{BlockSource, FamilyBlocks, activation};
use crate::encoder::{EncoderConfig, ProjectorMap, ProjectorSpec, TailSpec, TileRule};
use crate::error::Result;
use crate::layers::{NormKind, Rope};
use crate::llm::{DecoderForm, LlmConfig, LlmNames};
use crate::parameters::weights::Init;
use dflop_device::ops::activation::Activation;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&Gemma3, &Gemma3Text];

/// Gemma 3 with images.
#[derive(Debug)]
struct Gemma3;

/// Gemma 3 without images.
#[derive(Debug)]
struct Gemma3Text;

impl FamilyBlocks for Gemma3 {
    fn id(&self) -> FamilyId {
        FamilyId::new("gemma3")
    }

    fn model_types(&self) -> &[&str] {
        &["gemma3"]
    }

    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let (vision, top) = (source.vision()?, source.fields());
        let (spec, fields) = (vision.encoder, top.child_or_empty("vision_config")?);
        let pooled = spec.projector.merged_tokens.get() as usize;
        let tower = square_tower(&fields, &vision, TOWER, TileRule::Pooled(pooled.isqrt()))?;
        let tail = TailSpec { before: tower.last_norm.clone(), after: None };
        let epsilon = fields.number("layer_norm_eps", 1e-6)?;
        let hidden = spec.hidden as usize;
        let name = |rest: &str| format!("{PROJECTOR}{rest}");
        let projector = ProjectorSpec {
            merged: 1,
            hidden,
            norm: Some((NormKind::RmsRelative, name("mm_soft_emb_norm"), epsilon, hidden)),
            map: ProjectorMap::Matrix(name("mm_input_projection_weight")),
            outputs: source.spec.llm.map_or(0, |llm| llm.hidden as usize),
            newline: None,
        };
        Ok(tower.joined(Some(tail), Some(projector)))
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        let text = source.fields().child_or_empty("text_config")?;
        let (fields, vocabulary) = FIELDS[1];
        let names = LlmNames { prefix: PREFIX, head: HEAD, mlp: "mlp", fields, vocabulary };
        let mut llm = decoder(source, &text, names)?;
        llm.form.has_media_blocks = true;
        Ok(llm)
    }
}

impl FamilyBlocks for Gemma3Text {
    fn id(&self) -> FamilyId {
        FamilyId::new("gemma3_text")
    }

    fn model_types(&self) -> &[&str] {
        &["gemma3_text"]
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        let (fields, vocabulary) = FIELDS[0];
        let names = LlmNames { prefix: "model.", head: "lm_head.weight", mlp: "mlp", fields, vocabulary };
        decoder(source, &source.fields(), names)
    }
}

/// Names in checkpoints with images.
const TOWER: &str = "vision_tower.";
const PROJECTOR: &str = "multi_modal_projector.";
const PREFIX: &str = "language_model.model.";
const HEAD: &str = "language_model.lm_head.weight";

/// Rotation bases in layers with full attention and with windows.
const THETA: [f64; 2] = [1e6, 1e4];

fn decoder(source: &BlockSource<'_>, text: &ConfigFields<'_>, names: LlmNames) -> Result<LlmConfig> {
    let mut spec = source.llm()?;
    check_supported(text)?;
    // the outer field counts in a configuration with images, as in transformers
    let top = source.fields();
    let tied = if top.has("tie_word_embeddings") { &top } else { text };
    spec.details.has_tied_embeddings = tied.flag("tie_word_embeddings", true)?;
    let [rope, window_rope] = rotations(text, spec.head_dim as usize)?;
    let scalar = text.number("query_pre_attn_scalar", default_scalar(source, &spec))?;
    Ok(LlmConfig {
        experts: None,
        latent: None,
        rope,
        epsilon: text.number("rms_norm_eps", 1e-6)?,
        init: Init::Normal(text.number("initializer_range", 0.02)?),
        form: DecoderForm {
            norm: NormKind::RmsRelative,
            activation: Activation::GeluTanh,
            score_scale: Some(1.0 / scalar.sqrt()),
            embedding_scale: f64::from(spec.hidden).sqrt(),
            window_rope: Some(window_rope),
            ..DecoderForm::default()
        },
        spec,
        names,
        deepstack: 0,
    })
}

/// Returns the number whose inverse square root scales the scores, if no file sets it: 256, or the model
/// width divided by the head count in the largest published model, the only model with narrower heads.
fn default_scalar(source: &BlockSource<'_>, spec: &LlmSpec) -> f64 {
    if source.config.is_none() && spec.head_dim < 256 { f64::from(spec.hidden / spec.heads) } else { 256.0 }
}

/// Rejects settings that change results and are not implemented.
fn check_supported(text: &ConfigFields<'_>) -> Result<()> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if text.has(key) && !text.is_null(key) {
            return Err(text.invalid(key, "must be null, soft caps are not supported").into());
        }
    }
    if text.flag("use_bidirectional_attention", false)? {
        return Err(text.invalid("use_bidirectional_attention", "must be false").into());
    }
    let key = "hidden_activation";
    if activation(text, key, Activation::GeluTanh)? != Activation::GeluTanh {
        return Err(text.invalid(key, "must be \"gelu_pytorch_tanh\"").into());
    }
    Ok(())
}

/// Reads the rotations for layers with full attention and with windows.
fn rotations(text: &ConfigFields<'_>, head_dim: usize) -> Result<[Rope; 2]> {
    if text.has("rope_parameters") {
        let all = text.child_or_empty("rope_parameters")?;
        let read = |key: &str, theta: f64| {
            let of_layers = all.child_or_empty(key)?;
            Rope::of(&of_layers, head_dim, of_layers.number("rope_theta", theta)?)
        };
        return Ok([read("full_attention", THETA[0])?, read("sliding_attention", THETA[1])?]);
    }
    // published files have the fields for one rotation and the base for the second
    let full =
        Rope::of(&text.child_or_empty("rope_scaling")?, head_dim, text.number("rope_theta", THETA[0])?)?;
    let none = ConfigFields::empty("config.json");
    Ok([full, Rope::of(&none, head_dim, text.number("rope_local_base_freq", THETA[1])?)?])
}
