//! LLaVA-OneVision-1.5: the image encoder RICE in native resolution, and the Qwen3 LLM.
//!
//! Every video frame is a separate layer of patches.

use super::fixed_resolution::{TowerSize, patch_inputs, product};
use super::language_models;
use super::qwen_vl::{Patches, qwen2_vl, require_width, vision};
use crate::error::Result;
use crate::model::config::{CheckpointFields, PartialModelSpec};
use crate::model::{FamilyId, ModelFamily};

const FAMILY: FamilyId = FamilyId::new("llava_onevision_1_5");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&LlavaOneVision15];

/// LLaVA-OneVision-1.5.
#[derive(Debug)]
struct LlavaOneVision15;

impl ModelFamily for LlavaOneVision15 {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["llavaonevision1_5"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read(files)
    }
}

/// Reads the model. The token that the encoder adds to every image counts among the parameters, but not among
/// the FLOPs: it is only one among hundreds.
///
/// # Source
/// An et al., "LLaVA-OneVision-1.5", 2025, arXiv:2509.23661, section 2; the classes shipped with its
/// checkpoints, which transformers does not have.
fn read(files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let text = files.config.child_or_empty("text_config")?;
    let llm = language_models::qwen3_named(&text, "LLaVAOneVision1_5_text")?;
    let fields = files.config.child_or_empty("vision_config")?;
    let (hidden, heads) = (fields.count("hidden_size", 1024)?, fields.count("num_heads", 16)?);
    fields.require_multiple("hidden_size", hidden, "num_heads", heads)?;
    let (layers, ffn) = (fields.count("depth", 24)?, fields.count("intermediate_size", 4096)?);
    let size = TowerSize { layers, hidden, heads, ffn };
    let (pixels, frames) = (fields.count("patch_size", 14)?, fields.count("temporal_patch_size", 1)?);
    let inputs = patch_inputs(&fields, fields.count("in_channels", 3)?, pixels, frames)?;
    let patches = Patches { pixels, merge: fields.count("spatial_merge_size", 2)?, frames, inputs };
    let width = fields.count("text_hidden_size", llm.hidden)?;
    require_width(&fields, "text_hidden_size", width, &llm)?;
    let mut tower = qwen2_vl(size, inputs);
    // the norm before the layers, and the class token with the angles of its rotation
    let angles = u64::from(size.hidden / size.heads / 2);
    tower.details.outside_parameters =
        tower.details.outside_parameters.saturating_add(product(3, size.hidden)).saturating_add(angles);
    let vision = Some(vision(files, (FAMILY, tower), &patches, 2, &llm, None)?);
    Ok(PartialModelSpec { family: FAMILY, vision, audio: None, llm: Some(llm) })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::model::config::Documents;
    use crate::{ImageSize, VideoShape};
    use crate::{ModelSpec, Result};

    fn read(config: Value, preprocessor: Option<Value>) -> Result<ModelSpec> {
        let documents = Documents { config, preprocessor, ..Documents::default() };
        ModelSpec::from_hugging_face("recorded", &documents)
    }

    fn config() -> Value {
        json!({
            "model_type": "llavaonevision1_5",
            "text_config": {
                "model_type": "LLaVAOneVision1_5_text", "hidden_size": 4096, "intermediate_size": 12_288,
                "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                "head_dim": 128, "vocab_size": 151_936, "attention_bias": false
            },
            "vision_config": {
                "depth": 24, "embed_dim": 1024, "hidden_size": 1024, "intermediate_size": 4096,
                "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 1,
                "text_hidden_size": 4096
            }
        })
    }

    /// By hand from the tensor shapes: stem 3 * 14² * 1024, class token 1024 and 32 angles, norm 2 * 1024,
    /// layers with 4 * 1024² + 2 * 1024 * 4096 + 9 * 1024 + 4096; projector with a norm, 4096² + 4096 and
    /// 4096 * 4096 + 4096.
    #[test]
    fn parameters_are_those_of_the_tensors() {
        let spec = read(config(), None).unwrap();
        let (_, parameters) = spec.encoder_parameters()[0];
        let layer = 4 * 1024 * 1024 + 2 * 1024 * 4096 + 9 * 1024 + 4096;
        assert_eq!(parameters.layer, layer);
        assert_eq!(parameters.tower(), 24 * layer + 588 * 1024 + 1024 + 32 + 2048);
        assert_eq!(parameters.projector, 2 * 1024 + 2 * (4096 * 4096 + 4096));
        // Qwen3-8B
        assert_eq!(spec.llm_parameters().total(), 8_190_735_360);
    }

    #[test]
    fn images_are_patches_and_every_frame_is_a_layer() {
        let files = json!({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14,
            "temporal_patch_size": 1, "merge_size": 2, "min_pixels": 3136, "max_pixels": 3_240_000});
        let spec = read(config(), Some(files)).unwrap();
        let rule = spec.vision.unwrap().rule;
        // 644 x 476 pixels: 46 x 34 patches
        let image = rule.images(&[ImageSize { width: 640, height: 480 }]).unwrap();
        assert_eq!((image.encoder_tokens, image.tokens), (1564, 391 + 2));
        // 448 x 280 pixel frames: 32 x 20 patches, each with a separate attention pass
        let video = rule.video(VideoShape { frames: 5, width: 448, height: 280 }).unwrap();
        assert_eq!((video.encoder_tokens, video.tokens), (5 * 640, 5 * 160 + 2));
        assert_eq!(video.attention_pairs, 5 * 640 * 640);
    }

    #[test]
    fn invalid_fields_are_named() {
        let with = |section: &str, key: &str, value: Value| {
            let mut config = config();
            config[section][key] = value;
            config
        };
        for (config, problem) in [
            (
                with("vision_config", "text_hidden_size", json!(2560)),
                "`vision_config.text_hidden_size` = 2560, but the language model is 4096 wide",
            ),
            (
                with("text_config", "model_type", json!("qwen2")),
                "`text_config.model_type` must be \"LLaVAOneVision1_5_text\" or \"qwen3\", found \"qwen2\"",
            ),
            (with("vision_config", "num_heads", json!(15)), "`vision_config.hidden_size` = 1024 must be a"),
        ] {
            let error = read(config, None).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
        let files = json!({"temporal_patch_size": 2, "patch_size": 14});
        let error = read(config(), Some(files)).unwrap_err().to_string();
        assert!(error.contains("`temporal_patch_size` = 2, but the vision tower takes 1"), "{error}");
    }
}
