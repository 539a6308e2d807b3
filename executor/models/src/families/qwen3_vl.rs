//! Qwen3-VL: images and videos at native resolution, learned positions stretched over each image, and
//! projectors for earlier layers whose rows the first decoder layers add.
//!
//! # Source
//! Qwen Team: "Qwen3-VL Technical Report", 2025, arXiv:2511.21631, section 2.

use dflop_costmodel::FamilyId;
use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::{EncoderSpec, deepstack_layers};
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::native::NativeResolution as Rule;

use super::language_models::{DecoderDefaults, decoder};
use super::{BlockSource, FamilyBlocks, activation, full_attention, plain_mlp};
use crate::encoder::{
    Arrangement, EncoderConfig, NativeResolution, PatchStemSpec, ProjectorMap, ProjectorSpec, Stem,
};
use crate::error::Result;
use crate::layers::{AttentionSpec, DimensionFields, HeadRotation, LayerSpec, NormKind, QkvNames, Rope};
use crate::llm::LlmConfig;
use dflop_device::ops::activation::Activation;

/// Epsilon for all encoder norms, which is not part of the configuration.
const EPSILON: f64 = 1e-6;
/// Default base for the encoder rotation frequencies.
const THETA: f64 = 10_000.0;
/// Default number of column pairs that rotate by layer, row and column.
const SECTIONS: [u32; 3] = [24, 20, 20];
/// Position table rows, if the configuration has none.
const POSITIONS: u32 = 2304;

const FIELDS: DimensionFields = DimensionFields {
    heads: "vision_config.num_heads",
    kv_heads: "vision_config.num_heads",
    mlp: "vision_config.intermediate_size",
};

/// Decoder names and defaults.
const DECODER: DecoderDefaults = DecoderDefaults {
    prefix: "model.language_model.",
    head: "lm_head.weight",
    epsilon: 1e-6,
    theta: 500_000.0,
    rotated_part: None,
};

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&Qwen3Vl::DENSE, &Qwen3Vl::MOE];

/// Qwen3-VL, dense or with experts.
#[derive(Debug)]
struct Qwen3Vl {
    model_types: [&'static str; 1],
}

impl Qwen3Vl {
    const DENSE: Self = Self { model_types: ["qwen3_vl"] };
    const MOE: Self = Self { model_types: ["qwen3_vl_moe"] };
}

impl FamilyBlocks for Qwen3Vl {
    fn id(&self) -> FamilyId {
        FamilyId::new(self.model_types[0])
    }

    fn model_types(&self) -> &[&str] {
        &self.model_types
    }

    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let fields = source.fields().child_or_empty("vision_config")?;
        let vision = source.vision()?;
        let VisionRule::Native(rule) = vision.rule else {
            return Err(fields.invalid("patch_size", "must be that of images of their own size").into());
        };
        encoder(source, &fields, &vision.encoder, &rule)
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        let mut llm = decoder(source, &DECODER)?;
        let text = source.fields().child_or_empty("text_config")?;
        llm.rope = rope(&text, llm.spec.head_dim as usize)?;
        if let Some(vision) = &source.spec.vision {
            llm.deepstack = vision.encoder.projector.deepstack as usize;
        }
        Ok(llm)
    }
}

/// Reads the rotation; sections are interleaved in all checkpoints.
fn rope(text: &ConfigFields<'_>, head_dim: usize) -> Result<Rope> {
    let rope = Rope::read(text, head_dim, DECODER.theta)?;
    if rope.axes() == 3 {
        return Ok(rope.interleaved());
    }
    let pairs = SECTIONS.map(|pairs| pairs as usize).iter().sum::<usize>();
    if head_dim / 2 == pairs {
        return Ok(rope.with_sections(SECTIONS).interleaved());
    }
    let problem = format!("is missing, and heads of {head_dim} columns do not have the default {SECTIONS:?}");
    Err(text.invalid("rope_parameters.mrope_section", problem).into())
}

fn encoder(
    source: &BlockSource<'_>,
    fields: &ConfigFields<'_>,
    spec: &EncoderSpec,
    rule: &Rule,
) -> Result<EncoderConfig> {
    let (hidden, heads) = (spec.hidden as usize, spec.heads as usize);
    // half of the column pairs rotate by row, half by column
    if !(hidden / heads).is_multiple_of(4) {
        let problem =
            format!("must give heads a width that is a multiple of 4 to rotate, found {}", hidden / heads);
        return Err(fields.invalid("num_heads", problem).into());
    }
    let llm = source.llm()?;
    let channels = fields.count("in_channels", 3)? as usize;
    let [frames, patch, merge] =
        [rule.frames_per_patch, rule.patch_pixels, rule.merge].map(|size| usize::from(size.get()));
    let positions = fields.count("num_position_embeddings", POSITIONS)? as usize;
    let stem = PatchStemSpec {
        name: "model.visual.patch_embed.proj".to_owned(),
        kernel: vec![channels, frames, patch, patch],
        has_bias: true,
        class: None,
        positions: Some(("model.visual.pos_embed.weight".to_owned(), vec![positions, hidden])),
        norm: None,
    };
    let deepstack = match &source.config {
        Some(_) => deepstack_layers(fields, spec.layers, llm.layers)?,
        None => evenly_spread(spec.layers, spec.projector.deepstack),
    };
    let projector = |name: &str, norm_width: usize| {
        let full = |rest: &str| format!("model.visual.{name}.{rest}");
        let names = ["linear_fc1", "linear_fc2"].map(full);
        let merged = merge * merge;
        ProjectorSpec {
            merged,
            hidden,
            norm: Some((NormKind::Layer, full("norm"), EPSILON, norm_width)),
            map: ProjectorMap::Mlp(names, merged * hidden, Activation::GeluExact, true),
            outputs: llm.hidden as usize,
            newline: None,
        }
    };
    let of_layer = |(at, layer): (usize, u32)| {
        let name = format!("deepstack_merger_list.{at}");
        (layer as usize, projector(&name, merge * merge * hidden))
    };
    let theta = fields.child_or_empty("rope_parameters")?.number("rope_theta", THETA)?;
    let arrangement = Arrangement::Native(NativeResolution {
        patch_inputs: stem.patch_inputs(),
        merge,
        window: None,
        rope: Rope::for_images(theta, hidden / heads),
        table_side: Some(positions.isqrt()),
    });
    let act = activation(fields, "hidden_act", Activation::GeluTanh)?;
    Ok(EncoderConfig {
        hidden,
        stem: Stem::Patches(stem),
        layers: (0..spec.layers as usize).map(|layer| self::layer(spec, layer, act)).collect(),
        tail: None,
        projector: Some(projector("merger", hidden)),
        deepstack: deepstack.into_iter().enumerate().map(of_layer).collect(),
        arrangement,
        ignored: Vec::new(),
        fields: &FIELDS,
    })
}

fn layer(spec: &EncoderSpec, layer: usize, activation: Activation) -> LayerSpec {
    let name = |rest: &str| format!("model.visual.blocks.{layer}.{rest}");
    let full = full_attention(spec, QkvNames::Fused(name("attn.qkv")), name("attn.proj"));
    LayerSpec {
        norm: NormKind::Layer,
        epsilon: EPSILON,
        norm_names: ["norm1", "norm2"].map(name),
        post_norm_names: None,
        attention: AttentionSpec { rotation: Some(HeadRotation::halves(full.head_dim)), ..full },
        mlp: plain_mlp(spec, ["mlp.linear_fc1", "mlp.linear_fc2"].map(name), activation),
        scales: None,
    }
}

/// Returns the layers with a projector for a model with only a known layer count.
fn evenly_spread(layers: u32, count: u32) -> Vec<u32> {
    (1..=count).map(|at| at * layers / (count + 1)).collect()
}
