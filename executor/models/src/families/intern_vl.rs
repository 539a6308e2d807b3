//! InternVL in transformers format: `InternViT` on tiles, pixel shuffle, an MLP.

use dflop_costmodel::FamilyId;
use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;

use super::fixed_resolution::{Tower, tiles};
use super::language_models::{DecoderDefaults, decoder};
use super::{BlockSource, FamilyBlocks, activation, full_attention, plain_mlp};
use crate::encoder::{EncoderConfig, PatchStemSpec, ProjectorMap, ProjectorSpec, TailSpec, TileRule, Tiles};
use crate::error::Result;
use crate::layers::{LayerSpec, NormKind, QkvNames};
use crate::llm::LlmConfig;
use dflop_device::ops::activation::Activation;

/// Default epsilon for PyTorch layer norms.
const LAYER_NORM_EPSILON: f64 = 1e-5;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&InternVl];

/// InternVL.
#[derive(Debug)]
struct InternVl;

impl FamilyBlocks for InternVl {
    fn id(&self) -> FamilyId {
        FamilyId::new("internvl")
    }

    fn model_types(&self) -> &[&str] {
        &["internvl"]
    }

    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let (vision, top) = (source.vision()?, source.fields());
        let merged = vision.encoder.projector.merged_tokens.get() as usize;
        let fields = top.child_or_empty("vision_config")?;
        let tower = intern_vit(&fields, &vision, TileRule::Shuffled(merged.isqrt()))?;
        let side = tower.tiles.patches_per_side();
        if !side.is_multiple_of(merged.isqrt()) {
            let problem = format!("merges {merged} of {side} x {side} patches");
            return Err(top.invalid("downsample_ratio", problem).into());
        }
        let outputs = source.spec.llm.map_or(0, |llm| llm.hidden as usize);
        let hidden = vision.encoder.hidden as usize;
        let name = |rest: &str| format!("multi_modal_projector.{rest}");
        let act = activation(&top, "projector_hidden_act", Activation::GeluExact)?;
        let projector = ProjectorSpec {
            merged,
            hidden,
            norm: Some((NormKind::Layer, name("layer_norm"), LAYER_NORM_EPSILON, merged * hidden)),
            map: ProjectorMap::Mlp(["linear_1", "linear_2"].map(name), outputs, act, true),
            outputs,
            newline: None,
        };
        let tail = TailSpec { before: tower.last_norm.clone(), after: None };
        Ok(tower.joined(Some(tail), Some(projector)))
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        decoder(source, &DecoderDefaults::NESTED)
    }
}

fn intern_vit(fields: &ConfigFields<'_>, vision: &VisionSpec, rule: TileRule) -> Result<Tower> {
    let spec = vision.encoder;
    let prefix = "vision_tower.";
    let name = |rest: &str| format!("{prefix}{rest}");
    if fields.flag("use_qk_norm", false)? {
        return Err(fields.invalid("use_qk_norm", "= true is not supported").into());
    }
    let epsilon = fields.number("layer_norm_eps", 1e-6)?;
    let act = activation(fields, "hidden_act", Activation::GeluExact)?;
    let has_bias = fields.flag("attention_bias", false)?;
    let scale = fields.number("layer_scale_init_value", 0.1)?;
    let norm = match fields.text("norm_type")? {
        None | Some("layer_norm") => NormKind::Layer,
        Some("rms_norm") => NormKind::Rms,
        Some(other) => return Err(fields.invalid("norm_type", format!("= \"{other}\" is unknown")).into()),
    };
    // the class row precedes the patches, regardless of whether the sizes include it
    let tiles = Tiles { has_class: true, ..tiles(fields, vision, rule)? };
    let hidden = spec.hidden as usize;
    let positions = vec![1, tiles.patches() + 1, hidden];
    let has_positions = fields.flag("use_absolute_position_embeddings", true)?;
    let stem = PatchStemSpec {
        name: name("embeddings.patch_embeddings.projection"),
        kernel: vec![tiles.channels, tiles.patch, tiles.patch],
        has_bias: true,
        class: Some((name("embeddings.cls_token"), vec![1, 1, hidden])),
        positions: has_positions.then(|| (name("embeddings.position_embeddings"), positions)),
        norm: None,
    };
    let used = spec.layers.saturating_sub(spec.details.unused_layers);
    let layers = (0..used).map(|layer| {
        let name = |rest: &str| format!("{prefix}encoder.layer.{layer}.{rest}");
        let qkv =
            ["attention.q_proj", "attention.k_proj", "attention.v_proj"].map(|rest| (name(rest), has_bias));
        LayerSpec {
            norm,
            epsilon,
            norm_names: [name("layernorm_before"), name("layernorm_after")],
            post_norm_names: None,
            attention: full_attention(&spec, QkvNames::Separate(qkv), name("attention.projection_layer")),
            mlp: plain_mlp(&spec, ["mlp.fc1", "mlp.fc2"].map(name), act),
            scales: Some((["lambda_1", "lambda_2"].map(name), scale)),
        }
    });
    let layers = layers.collect();
    let mut ignored: Vec<String> =
        (used..spec.layers).map(|layer| name(&format!("encoder.layer.{layer}."))).collect();
    // only used in pretraining with masked patches
    ignored.push(name("embeddings.mask_token"));
    let has_last_norm = !fields.flag("use_mean_pooling", true)?;
    let last = name("layernorm");
    if used < spec.layers {
        ignored.push(format!("{last}."));
    }
    let last_norm = (has_last_norm && used == spec.layers).then_some((last, epsilon));
    Ok(Tower { spec, tiles, stem, layers, last_norm, ignored, is_alone: false })
}
