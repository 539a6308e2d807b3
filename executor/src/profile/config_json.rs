//! Writes a `config.json` with the sizes of a model spec, so that a preset can run.
//!
//! It has only the fields that times depend on. All others, such as epsilons, have the defaults of the
//! model's family.

use dflop_costmodel::ModelSpec;
use dflop_costmodel::model::{AttentionBias, LlmSpec};
use dflop_costmodel::tokens::VisionRule;
use serde_json::{Value, json};

/// Color channels of a pixel.
const COLORS: u32 = 3;

/// Returns a document whose vision encoder has the sizes of the model's; `None` if the model has none.
pub(super) fn vision(spec: &ModelSpec) -> Option<Value> {
    let vision = spec.vision.as_ref()?;
    let encoder = &vision.encoder;
    let text = llm(&spec.llm);
    let mut fields = json!({
        "hidden_size": encoder.hidden, "num_hidden_layers": encoder.layers - encoder.details.unused_layers.min(encoder.layers),
        "num_attention_heads": encoder.heads, "intermediate_size": encoder.ffn,
    });
    // Stem inputs are colors × frames × side².
    let patch = |frames: u32| (encoder.stem_inputs / (COLORS * frames)).isqrt().max(1);
    let squares = |fields: &mut Value, kind: &str, pixels: u32| {
        fields["model_type"] = json!(kind);
        fields["image_size"] = json!(pixels);
        fields["patch_size"] = json!(patch(1));
    };
    match vision.rule {
        VisionRule::AnyRes(rule) => {
            let tile = u32::from(rule.tile_pixels);
            // A patch that does not divide the tile leaves a margin: 27 patches of 14 pixels on 384.
            squares(&mut fields, "siglip_vision_model", tile);
            fields["vision_use_head"] = json!(false);
            let pins: Vec<[u32; 2]> = (1..=u32::from(rule.grid_side_max))
                .flat_map(|rows| {
                    (1..=u32::from(rule.grid_side_max)).map(move |columns| [rows * tile, columns * tile])
                })
                .collect();
            Some(json!({
                "model_type": "llava_onevision", "vision_config": fields, "text_config": text,
                "image_grid_pinpoints": pins, "vision_feature_select_strategy": "full", "vision_feature_layer": -1,
                "vision_aspect_ratio": format!("anyres_max_{}", rule.feature_tiles_max),
            }))
        }
        VisionRule::DynamicTiles(rule) => {
            squares(&mut fields, "internvl_vision", u32::from(rule.tile_pixels));
            let merged = encoder.projector.merged_tokens.get().isqrt();
            Some(json!({
                "model_type": "internvl", "vision_config": fields, "text_config": text,
                "downsample_ratio": 1.0 / f64::from(merged),
            }))
        }
        VisionRule::Native(rule) => {
            let frames = u32::from(rule.frames_per_patch.get());
            fields["depth"] = fields["num_hidden_layers"].take();
            fields["num_heads"] = fields["num_attention_heads"].take();
            fields["patch_size"] = json!(rule.patch_pixels.get());
            fields["spatial_merge_size"] = json!(rule.merge.get());
            fields["temporal_patch_size"] = json!(frames);
            let Some(window) = rule.window_patches else {
                fields["embed_dim"] = json!(encoder.hidden);
                fields["mlp_ratio"] = json!(encoder.ffn / encoder.hidden.max(1));
                fields["hidden_size"] = json!(spec.llm.hidden);
                return Some(json!({"model_type": "qwen2_vl", "vision_config": fields, "text_config": text}));
            };
            fields["window_size"] = json!(window.get() * rule.patch_pixels.get());
            fields["out_hidden_size"] = json!(spec.llm.hidden);
            fields["fullatt_block_indexes"] = json!(full_layers(encoder.layers, encoder.windowed_layers));
            Some(json!({"model_type": "qwen2_5_vl", "vision_config": fields, "text_config": text}))
        }
        VisionRule::Fixed(rule) => {
            let is_clip = encoder.details.class_tokens > 0;
            let kind = if is_clip { "clip_vision_model" } else { "siglip_vision_model" };
            squares(&mut fields, kind, u32::from(rule.tile_pixels));
            Some(fields)
        }
    }
}

/// Returns a document whose audio encoder has the sizes of the model's; `None` if the model has none.
pub(super) fn audio(spec: &ModelSpec) -> Option<Value> {
    let audio = spec.audio.as_ref()?;
    let encoder = &audio.encoder;
    // The stem reads six frames of mel bins per token, and three rows of its own output.
    let mels = encoder.stem_inputs.saturating_sub(3 * encoder.hidden) / 6;
    Some(json!({
        "model_type": "qwen2_audio",
        "audio_config": {
            "model_type": "qwen2_audio_encoder", "d_model": encoder.hidden, "encoder_layers": encoder.layers,
            "encoder_attention_heads": encoder.heads, "encoder_ffn_dim": encoder.ffn, "num_mel_bins": mels,
            "max_source_positions": audio.rule.window_tokens,
        },
        "text_config": llm(&spec.llm),
    }))
}

/// Returns a document with the sizes of a language model.
pub(super) fn llm(spec: &LlmSpec) -> Value {
    let kind = if spec.details.attention_bias == AttentionBias::Qkv { "qwen2" } else { "llama" };
    json!({
        "model_type": kind, "hidden_size": spec.hidden, "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers, "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim, "vocab_size": spec.vocab,
        "attention_bias": spec.details.attention_bias == AttentionBias::All,
        "mlp_bias": spec.details.has_mlp_bias, "tie_word_embeddings": spec.details.has_tied_embeddings,
    })
}

/// Returns the layers with full attention, each the last of an equally long run of windowed layers.
fn full_layers(layers: u32, windowed: u32) -> Vec<u32> {
    let full = layers - windowed.min(layers);
    (1..=full).map(|layer| layer * layers / full - 1).collect()
}

#[cfg(test)]
mod tests {
    use super::super::MeasuredModel;
    use super::*;

    #[test]
    fn every_preset_runs_with_its_dimensions() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            let model =
                MeasuredModel::from_spec(spec.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(model.config.llm.spec.layers, spec.llm.layers, "{name}");
            assert_eq!(model.config.llm.spec.head_dim, spec.llm.head_dim, "{name}");
            assert_eq!(model.config.llm.spec.details, spec.llm.details, "{name}");
            let windowed = |spec: &ModelSpec| spec.vision.map_or(0, |vision| vision.encoder.windowed_layers);
            let layers =
                model.config.vision.iter().flat_map(dflop_models::encoder::EncoderConfig::layer_specs);
            let found =
                layers.filter(|layer| layer.attention.mask == dflop_models::attention::AttentionMask::Window);
            assert_eq!(found.count(), windowed(&spec) as usize, "{name}");
        }
    }
}
