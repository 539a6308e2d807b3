//! Reads encoders of square tiles: CLIP, SigLIP and `InternViT`, separate or in LLaVA-OneVision and InternVL.

use dflop_costmodel::config::{Documents, PartialModelSpec};
use dflop_costmodel::model::EncoderSpec;
use dflop_costmodel::tokens::VisionRule;
use serde_json::Value;

use super::{full_attention, plain_mlp};
use crate::attention::QkvNames;
use crate::config_fields::ConfigFields;
use crate::encoder::config::{Arrangement, EncoderConfig, Stem};
use crate::encoder::projector::{ProjectorMap, ProjectorSpec};
use crate::encoder::stem::PatchStemSpec;
use crate::encoder::tail::TailSpec;
use crate::encoder::tiles::{TileRule, Tiles};
use crate::error::{Error, Result};
use crate::layer::LayerSpec;
use crate::norm::NormKind;
use crate::sharding_check::DimensionFields;
use dflop_device::ops::activation::Activation;

/// Default epsilon of PyTorch's layer norm.
const LAYER_NORM_EPSILON: f64 = 1e-5;

const FIELDS: DimensionFields = DimensionFields {
    heads: "vision_config.num_attention_heads",
    kv_heads: "vision_config.num_attention_heads",
    mlp: "vision_config.intermediate_size",
};
const FIELDS_ALONE: DimensionFields = DimensionFields {
    heads: "num_attention_heads",
    kv_heads: "num_attention_heads",
    mlp: "intermediate_size",
};

/// Encoder without its projector, as read.
struct Tower {
    spec: EncoderSpec,
    tiles: Tiles,
    stem: PatchStemSpec,
    layers: Vec<LayerSpec>,
    /// Name and epsilon of the norm after the layers.
    last_norm: Option<(String, f64)>,
    ignored: Vec<String>,
    /// Whether the configuration describes only the encoder.
    is_alone: bool,
}

impl Tower {
    fn joined(self, tail: Option<TailSpec>, projector: Option<ProjectorSpec>) -> EncoderConfig {
        EncoderConfig {
            hidden: self.spec.hidden as usize,
            stem: Stem::Patches(self.stem),
            layers: self.layers,
            tail,
            projector,
            arrangement: Arrangement::Tiles(self.tiles),
            ignored: self.ignored,
            fields: if self.is_alone { &FIELDS_ALONE } else { &FIELDS },
        }
    }
}

fn vision_spec(document: &Value) -> Result<(PartialModelSpec, EncoderSpec)> {
    let documents = Documents { config: document.clone(), ..Documents::default() };
    let part = PartialModelSpec::from_hugging_face(&documents)?;
    let Some(vision) = part.vision else {
        let problem = "has no image encoder".to_owned();
        return Err(Error::ModelConfig { field: "model_type".to_owned(), problem });
    };
    Ok((part, vision.encoder))
}

/// Reads a separate CLIP or SigLIP, whose output is the last hidden state.
pub(super) fn alone(document: &Value) -> Result<EncoderConfig> {
    let (_, spec) = vision_spec(document)?;
    let is_clip = ConfigFields::new(document).text("model_type")? == Some("clip_vision_model");
    let tower = square_tower(&ConfigFields::new(document), spec, is_clip, "", TileRule::All)?;
    // CLIP's norm after the layers applies to the pooled row only.
    let tail = tower.last_norm.clone().filter(|_| !is_clip);
    let tail = tail.map(|norm| TailSpec { before: Some(norm), after: None });
    Ok(tower.joined(tail, None))
}

/// Reads LLaVA-OneVision.
pub(super) fn llava_onevision(document: &Value) -> Result<EncoderConfig> {
    let (part, spec) = vision_spec(document)?;
    let top = ConfigFields::new(document);
    let Some(VisionRule::AnyRes(rule)) = part.vision.map(|vision| vision.rule) else {
        return Err(top.refused("model_type", "has no tiling rule"));
    };
    if spec.projector.input != spec.hidden {
        return Err(top.refused("vision_feature_layer", "must name one layer, several are not supported"));
    }
    let vision = top.child("vision_config");
    let is_clip = vision.text("model_type")? == Some("clip_vision_model");
    let mut tower = square_tower(&vision, spec, is_clip, "vision_tower.", TileRule::AnyRes(rule))?;
    // LLaVA-OneVision takes the rows before the last norm
    tower.ignored.push("vision_tower.post_layernorm.".to_owned());
    let outputs = part.llm.map_or(0, |llm| llm.hidden as usize);
    let names = ["multi_modal_projector.linear_1", "multi_modal_projector.linear_2"].map(str::to_owned);
    let activation = top.activation("projector_hidden_act", Activation::GeluExact)?;
    let projector = ProjectorSpec {
        merged: 1,
        hidden: spec.hidden as usize,
        norm: None,
        map: ProjectorMap::Mlp(names, outputs, activation, top.flag("multimodal_projector_bias", true)?),
        outputs,
        newline: Some("image_newline".to_owned()),
    };
    Ok(tower.joined(Some(TailSpec::default()), Some(projector)))
}

/// Reads InternVL in the format of transformers.
pub(super) fn intern_vl(document: &Value) -> Result<EncoderConfig> {
    let (part, spec) = vision_spec(document)?;
    let top = ConfigFields::new(document);
    let merged = spec.projector.merged_tokens.get() as usize;
    let tower = intern_vit(&top.child("vision_config"), spec, TileRule::Shuffled(merged.isqrt()))?;
    let side = tower.tiles.patches_per_side();
    if !side.is_multiple_of(merged.isqrt()) {
        let problem = format!("merges {merged} of {side} x {side} patches");
        return Err(top.refused("downsample_ratio", problem));
    }
    let outputs = part.llm.map_or(0, |llm| llm.hidden as usize);
    let hidden = spec.hidden as usize;
    let name = |rest: &str| format!("multi_modal_projector.{rest}");
    let activation = top.activation("projector_hidden_act", Activation::GeluExact)?;
    let projector = ProjectorSpec {
        merged,
        hidden,
        norm: Some((NormKind::Layer, name("layer_norm"), LAYER_NORM_EPSILON, merged * hidden)),
        map: ProjectorMap::Mlp(["linear_1", "linear_2"].map(name), outputs, activation, true),
        outputs,
        newline: None,
    };
    let tail = TailSpec { before: tower.last_norm.clone(), after: None };
    Ok(tower.joined(Some(tail), Some(projector)))
}

fn tiles(fields: &ConfigFields<'_>, defaults: [usize; 2], has_class: bool, rule: TileRule) -> Result<Tiles> {
    Ok(Tiles {
        channels: fields.count("num_channels")?.unwrap_or(3),
        side: fields.side("image_size", defaults[0])?,
        patch: fields.side("patch_size", defaults[1])?,
        has_class,
        rule,
    })
}

fn square_tower(
    fields: &ConfigFields<'_>,
    spec: EncoderSpec,
    is_clip: bool,
    prefix: &str,
    rule: TileRule,
) -> Result<Tower> {
    let name = |rest: &str| format!("{prefix}{rest}");
    let epsilon = fields.number("layer_norm_eps", if is_clip { 1e-5 } else { 1e-6 })?;
    let default = if is_clip { Activation::GeluQuick } else { Activation::GeluTanh };
    let activation = fields.activation("hidden_act", default)?;
    let tiles = tiles(fields, [224, if is_clip { 32 } else { 16 }], is_clip, rule)?;
    let hidden = spec.hidden as usize;
    let positions = tiles.patches() + usize::from(is_clip);
    let stem = PatchStemSpec {
        name: name("embeddings.patch_embedding"),
        kernel: vec![tiles.channels, tiles.patch, tiles.patch],
        has_bias: !is_clip,
        class: is_clip.then(|| (name("embeddings.class_embedding"), vec![hidden])),
        positions: Some((name("embeddings.position_embedding.weight"), vec![positions, hidden])),
        // the misspelled name is the one in the checkpoints
        norm: is_clip.then(|| (name("pre_layrnorm"), epsilon)),
    };
    let layers = (0..spec.layers - spec.details.unused_layers).map(|layer| {
        let name = |rest: &str| format!("{prefix}encoder.layers.{layer}.{rest}");
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(|rest| (name(rest), true));
        LayerSpec {
            norm: NormKind::Layer,
            epsilon,
            norm_names: [name("layer_norm1"), name("layer_norm2")],
            attention: full_attention(&spec, QkvNames::Separate(qkv), name("self_attn.out_proj")),
            mlp: plain_mlp(&spec, ["mlp.fc1", "mlp.fc2"].map(name), activation),
            scales: None,
        }
    });
    let layers: Vec<LayerSpec> = layers.collect();
    let unused = (layers.len()..spec.layers as usize).map(|layer| name(&format!("encoder.layers.{layer}.")));
    let mut ignored: Vec<String> = unused.collect();
    // SigLIP's pooling head
    ignored.push(name("head."));
    let last = name("post_layernorm");
    if is_clip {
        ignored.push(format!("{last}."));
    }
    let is_alone = prefix.is_empty();
    Ok(Tower { last_norm: Some((last, epsilon)), spec, tiles, stem, layers, ignored, is_alone })
}

fn intern_vit(fields: &ConfigFields<'_>, spec: EncoderSpec, rule: TileRule) -> Result<Tower> {
    let prefix = "vision_tower.";
    let name = |rest: &str| format!("{prefix}{rest}");
    if fields.flag("use_qk_norm", false)? {
        return Err(fields.refused("use_qk_norm", "= true is not supported"));
    }
    let epsilon = fields.number("layer_norm_eps", 1e-6)?;
    let activation = fields.activation("hidden_act", Activation::GeluExact)?;
    let has_bias = fields.flag("attention_bias", false)?;
    let scale = fields.number("layer_scale_init_value", 0.1)?;
    let norm = match fields.text("norm_type")? {
        None | Some("layer_norm") => NormKind::Layer,
        Some("rms_norm") => NormKind::Rms,
        Some(other) => return Err(fields.refused("norm_type", format!("= \"{other}\" is unknown"))),
    };
    let tiles = tiles(fields, [448, 14], true, rule)?;
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
    let used = spec.layers - spec.details.unused_layers;
    let layers = (0..used).map(|layer| {
        let name = |rest: &str| format!("{prefix}encoder.layer.{layer}.{rest}");
        let qkv =
            ["attention.q_proj", "attention.k_proj", "attention.v_proj"].map(|rest| (name(rest), has_bias));
        LayerSpec {
            norm,
            epsilon,
            norm_names: [name("layernorm_before"), name("layernorm_after")],
            attention: full_attention(&spec, QkvNames::Separate(qkv), name("attention.projection_layer")),
            mlp: plain_mlp(&spec, ["mlp.fc1", "mlp.fc2"].map(name), activation),
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
