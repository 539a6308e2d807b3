//! Towers that take squares: CLIP, SigLIP, `InternViT`; alone, in LLaVA-OneVision and in InternVL.

use dflop_costmodel::config::{Documents, ModelPart};
use dflop_costmodel::model::EncoderSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::any_res::AnyRes;
use serde_json::Value;

use super::super::attention::{AttentionSpec, QkvNames, AttentionMask};
use super::super::config::ConfigFields;
use super::super::layer::LayerSpec;
use super::super::mlp::{MlpNames, MlpSpec};
use super::super::norm::NormKind;
use super::super::tensor_parallel::DimensionFields;
use super::any_res;
use super::input::{HostContext, refuse};
use super::projector::{ProjectorMap, ProjectorSpec};
use super::stem::PatchStemSpec;
use super::tail::TailSpec;
use super::{Arrangement, EncoderConfig, INIT, TiledMedium, Stem};
use crate::error::{Error, Result};
use crate::ops::activation::Activation;
use crate::row_mix::SparseRows;

/// Epsilon of PyTorch's layer norm where no configuration says one.
const LAYER_NORM_EPSILON: f64 = 1e-5;

const FIELDS: DimensionFields = DimensionFields {
    heads: "vision_config.num_attention_heads",
    kv_heads: "vision_config.num_attention_heads",
    mlp: "vision_config.intermediate_size",
};
const FIELDS_ALONE: DimensionFields =
    DimensionFields { heads: "num_attention_heads", kv_heads: "num_attention_heads", mlp: "intermediate_size" };

/// How squares become rows, and which rows are taken.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tiles {
    channels: usize,
    /// Pixels along a side.
    side: usize,
    /// Pixels along the side of a patch.
    patch: usize,
    has_class: bool,
    rule: TileRule,
}

#[derive(Debug, Clone, PartialEq)]
enum TileRule {
    /// All rows: an encoder alone.
    All,
    /// Patches, then as the rule says.
    AnyRes(AnyRes),
    /// Patches, so many along both sides of a block beside each other.
    Shuffled(usize),
}

/// A tower, read.
struct Tower {
    spec: EncoderSpec,
    tiles: Tiles,
    stem: PatchStemSpec,
    layers: Vec<LayerSpec>,
    /// Of the norm behind the layers.
    last_norm: Option<(String, f64)>,
    ignored: Vec<String>,
    /// Whether the configuration is that of the tower.
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

fn vision_spec(document: &Value) -> Result<(ModelPart, EncoderSpec)> {
    let documents = Documents { config: document.clone(), ..Documents::default() };
    let part = ModelPart::from_hugging_face(&documents)?;
    let Some(vision) = part.vision else {
        let problem = "has no encoder of images".to_owned();
        return Err(Error::Config { field: "model_type".to_owned(), problem });
    };
    Ok((part, vision.encoder))
}

/// CLIP or SigLIP alone: its last hidden state.
pub(super) fn alone(document: &Value) -> Result<EncoderConfig> {
    let (_, spec) = vision_spec(document)?;
    let is_clip = ConfigFields::of(document).text("model_type")? == Some("clip_vision_model");
    let tower = square_tower(&ConfigFields::of(document), spec, is_clip, "", TileRule::All)?;
    // The norm behind CLIP's layers is that of the pooled row alone.
    let tail = tower.last_norm.clone().filter(|_| !is_clip);
    let tail = tail.map(|norm| TailSpec { before: Some(norm), behind: None });
    Ok(tower.joined(tail, None))
}

/// LLaVA-OneVision.
pub(super) fn llava_onevision(document: &Value) -> Result<EncoderConfig> {
    let (part, spec) = vision_spec(document)?;
    let top = ConfigFields::of(document);
    let Some(VisionRule::AnyRes(rule)) = part.vision.map(|vision| vision.rule) else {
        return Err(top.refused("model_type", "has no rule of tiles"));
    };
    if spec.projector.input != spec.hidden {
        return Err(top.refused("vision_feature_layer", "names several layers, which is not supported"));
    }
    let vision = top.child("vision_config");
    let is_clip = vision.text("model_type")? == Some("clip_vision_model");
    let mut tower = square_tower(&vision, spec, is_clip, "vision_tower.", TileRule::AnyRes(rule))?;
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

/// InternVL in the form of transformers.
pub(super) fn intern_vl(document: &Value) -> Result<EncoderConfig> {
    let (part, spec) = vision_spec(document)?;
    let top = ConfigFields::of(document);
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
    let tail = TailSpec { before: tower.last_norm.clone(), behind: None };
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
    ignored.push(name("embeddings.mask_token"));
    let has_last_norm = !fields.flag("use_mean_pooling", true)?;
    let last = name("layernorm");
    if used < spec.layers {
        ignored.push(format!("{last}."));
    }
    let last_norm = (has_last_norm && used == spec.layers).then_some((last, epsilon));
    Ok(Tower { spec, tiles, stem, layers, last_norm, ignored, is_alone: false })
}

/// Attention of an encoder in which all rows of an image or clip see each other.
pub(super) fn full_attention(spec: &EncoderSpec, qkv: QkvNames, output: String) -> AttentionSpec {
    let (hidden, heads) = (spec.hidden as usize, spec.heads as usize);
    AttentionSpec {
        hidden,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        qkv,
        output: (output, true),
        mask: AttentionMask::Full,
        is_rotated: false,
        init: INIT,
    }
}

/// MLP of two matrices with biases.
pub(super) fn plain_mlp(spec: &EncoderSpec, names: [String; 2], activation: Activation) -> MlpSpec {
    MlpSpec {
        inputs: spec.hidden as usize,
        middle: spec.ffn as usize,
        outputs: spec.hidden as usize,
        names: MlpNames::Plain(names, activation),
        has_bias: true,
        init: INIT,
    }
}

impl Tiles {
    /// Numbers of a tile's pixels.
    pub(super) fn elements(&self) -> usize {
        self.channels * self.side * self.side
    }

    fn patches_per_side(&self) -> usize {
        self.side / self.patch
    }

    fn patches(&self) -> usize {
        self.patches_per_side().pow(2)
    }

    /// Rows of one tile.
    fn rows(&self) -> usize {
        self.patches() + usize::from(self.has_class)
    }

    pub(super) fn plan(&self, pixels: &[f32], shown: &[TiledMedium]) -> Result<HostContext> {
        let of_tile = self.elements();
        let tiles = shown.iter().map(TiledMedium::tiles).sum::<usize>();
        if pixels.len() != tiles * of_tile {
            let problem = format!("has {} elements for {tiles} tiles of {of_tile}", pixels.len());
            return refuse("pixel_values", problem);
        }
        if let Some(index) = shown.iter().position(|shown| shown.tiles() == 0) {
            return refuse("shown", format!("medium {index} has no tile"));
        }
        let rows = self.rows();
        // Row of a tile to its patch; the class token is the first.
        let patch = |row: usize| {
            let (tile, row) = (row / rows, row % rows);
            let patch = (row + 1).checked_sub(1 + usize::from(self.has_class))?;
            Some((tile * self.patches() + patch) as u32)
        };
        let all = 0..tiles * rows;
        let (taken, projected_rows) = self.taken(tiles);
        let (arranged, newlines) = match &self.rule {
            TileRule::AnyRes(rule) => Some(any_res::arrange(rule, shown)?).unzip(),
            _ => (None, None),
        };
        Ok(HostContext {
            medium: pixels.chunks(of_tile).flat_map(|tile| self.patches_of(tile)).collect(),
            medium_rows: tiles * self.patches(),
            stem: if self.has_class { vec![SparseRows::gather(all.clone().map(patch))] } else { Vec::new() },
            class: self
                .has_class
                .then(|| SparseRows::gather(all.clone().map(|row| row.is_multiple_of(rows).then_some(0)))),
            positions: Some(SparseRows::gather(all.map(|row| Some((row % rows) as u32)))),
            segments: (0..=tiles).map(|tile| (tile * rows) as u32).collect(),
            taken,
            projected_rows,
            arranged,
            newlines,
            ..HostContext::default()
        })
    }

    /// Rows of the last layer that are taken, and how many rows the projector makes of them.
    fn taken(&self, tiles: usize) -> (Option<SparseRows>, usize) {
        let (side, class) = (self.patches_per_side(), usize::from(self.has_class));
        let place = |tile: usize, patch: usize| Some((tile * self.rows() + class + patch) as u32);
        let patches = 0..tiles * self.patches();
        match self.rule {
            TileRule::All => (None, tiles * self.rows()),
            TileRule::AnyRes(_) if !self.has_class => (None, patches.end),
            TileRule::AnyRes(_) => {
                let place = |patch| place(patch / self.patches(), patch % self.patches());
                (Some(SparseRows::gather(patches.clone().map(place))), patches.end)
            }
            TileRule::Shuffled(block) => {
                let per_side = side / block;
                let shuffled = patches.clone().map(|index| {
                    let (tile, index) = (index / self.patches(), index % self.patches());
                    let (merged, inside) = (index / (block * block), index % (block * block));
                    let row = merged / per_side * block + inside / block;
                    let column = merged % per_side * block + inside % block;
                    place(tile, row * side + column)
                });
                (Some(SparseRows::gather(shuffled)), patches.end / (block * block))
            }
        }
    }

    /// Pixels of a tile, patch by patch: channels, rows, columns.
    fn patches_of<'a>(&self, tile: &'a [f32]) -> impl Iterator<Item = f32> + use<'a> {
        let (side, patch, channels, across) = (self.side, self.patch, self.channels, self.patches_per_side());
        (0..across * across).flat_map(move |index| {
            let (top, left) = (index / across * patch, index % across * patch);
            (0..channels).flat_map(move |channel| {
                (0..patch).flat_map(move |row| {
                    let start = (channel * side + top + row) * side + left;
                    tile[start..start + patch].iter().copied()
                })
            })
        })
    }
}
