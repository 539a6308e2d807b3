//! Gemma 3: SigLIP on one square per image and crop, patches pooled to 256 tokens, windows in most LLM
//! layers.
//!
//! # Source
//! Gemma Team: "Gemma 3 Technical Report", 2025, arXiv:2503.19786, section 2; `Gemma3Config`,
//! `Gemma3ImageProcessor` and `Gemma3Processor` in transformers 5.24.0.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use super::clip_siglip::{siglip_encoder, tower};
use super::fixed_resolution::{PATCH_INPUTS, SquareInput, SquareTower, TowerSize, check_processor_side};
use super::language_models;
use crate::error::Result;
use crate::model::config::{CheckpointFields, PartialModelSpec, pan_and_scan};
use crate::model::{
    EncoderSpec, FamilyId, LlmDetails, LlmSpec, ModelFamily, Preset, Projector, VisionSpec, Window,
    WindowedAttention,
};
use crate::tokens::VisionRule;
use crate::tokens::fixed_tile::FixedTile;

const FAMILY: FamilyId = FamilyId::new("gemma3");
/// Image begin and end markers.
const MARKER_TOKENS: u8 = 2;
/// Tokens per image in the published checkpoints.
const IMAGE_TOKENS: u32 = 256;
/// Distance between layers with full attention.
const PERIOD: u32 = 6;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Gemma3];

/// Gemma 3.
#[derive(Debug)]
struct Gemma3;

impl ModelFamily for Gemma3 {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["gemma3"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        let config = &files.config;
        let llm = language_models::text_config(&config.child_or_empty("text_config")?, "gemma3_text")?;
        let tower = tower(&config.child_or_empty("vision_config")?)?;
        let pooled_patches = pooled_patches(files, &tower)?;
        let image = files.image();
        check_processor_side(&image, "size", tower.image_pixels)?;
        let rule = pan_and_scan(&image, tile(&tower, pooled_patches))?;
        let vision = vision(&tower, pooled_patches, rule);
        Ok(PartialModelSpec { family: FAMILY, vision: Some(vision), audio: None, llm: Some(llm) })
    }

    fn presets(&self) -> &[Preset] {
        static PRESETS: LazyLock<[Preset; 3]> = LazyLock::new(|| {
            [
                preset("gemma3-4b", [34, 2560, 10_240], [8, 4, 256]),
                preset("gemma3-12b", [48, 3840, 15_360], [16, 8, 256]),
                preset("gemma3-27b", [62, 5376, 21_504], [32, 16, 128]),
            ]
        });
        &*PRESETS
    }
}

/// Builds a published model: layers, width and MLP width; query heads, key and value heads and head width.
fn preset(name: &'static str, [layers, hidden, ffn]: [u32; 3], heads: [u32; 3]) -> Preset {
    let [heads, kv_heads, head_dim] = heads;
    let windows = WindowedAttention {
        layers: (0..layers).filter(|layer| (layer + 1) % PERIOD != 0).collect(),
        tokens: 1024,
        kind: Window::Sliding,
    };
    let llm = LlmSpec {
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab: 262_208,
        details: LlmDetails {
            has_qk_norm: true,
            has_post_norms: true,
            has_tied_embeddings: true,
            ..LlmDetails::default()
        },
        experts: None,
        windows: Some(windows),
        latent: None,
        counts: None,
    };
    let dimensions = TowerSize { layers: 27, hidden: 1152, heads: 16, ffn: 4304 };
    let square = SquareInput { patch_inputs: PATCH_INPUTS, patches: 4096 };
    let encoder = siglip_encoder(dimensions, square, false);
    let tower = SquareTower { encoder, image_pixels: 896, patches_per_side: 64 };
    let pooled = NonZeroU32::new(4096 / IMAGE_TOKENS).unwrap_or(NonZeroU32::MIN);
    let rule = VisionRule::Fixed(tile(&tower, pooled));
    Preset { name, vision: Some(vision(&tower, pooled, rule)), audio: None, llm }
}

/// Joins a tower with the projector, a norm and a single matrix without a bias.
fn vision(tower: &SquareTower, pooled_patches: NonZeroU32, rule: VisionRule) -> VisionSpec {
    let hidden = tower.encoder.hidden;
    let projector = Projector::new(pooled_patches.get(), hidden, None).vectors(u64::from(hidden));
    let encoder = EncoderSpec { projector, ..tower.encoder };
    VisionSpec { family: FAMILY, encoder, rule }
}

/// Returns the square that an image or a crop becomes.
fn tile(tower: &SquareTower, pooled_patches: NonZeroU32) -> FixedTile {
    FixedTile {
        tile_pixels: tower.image_pixels,
        tile_patches: tower.patches_per_side.saturating_mul(tower.patches_per_side),
        pooled_patches,
        marker_tokens: MARKER_TOKENS,
        is_cropped: false,
        frames_max: 0,
    }
}

/// Reads the number of patches that are averaged to one token, a square that divides the image.
fn pooled_patches(files: &CheckpointFields<'_>, tower: &SquareTower) -> Result<NonZeroU32> {
    let (config, key) = (&files.config, "mm_tokens_per_image");
    let tokens = config.count(key, IMAGE_TOKENS)?;
    let (side, patches) = (tokens.isqrt(), tower.patches_per_side);
    if side * side != tokens || !patches.is_multiple_of(side) {
        let problem = format!("= {tokens} does not pool {patches} x {patches} patches evenly");
        return Err(config.invalid(key, problem));
    }
    if let Some(written) = files.processor.optional_count("image_seq_length")?
        && written != tokens
    {
        let problem = format!("= {written}, but the model makes {tokens} tokens of an image");
        return Err(files.processor.invalid("image_seq_length", problem));
    }
    let along_side = patches / side;
    Ok(NonZeroU32::new(along_side * along_side).unwrap_or(NonZeroU32::MIN))
}
