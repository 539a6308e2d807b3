//! Reads a [`ModelSpec`] from a checkpoint's `config.json` and processor files.
//!
//! [`Documents`] are the parsed files in a directory as downloaded from Hugging Face; the caller reads them
//! from disk. A [`ModelFamily`](crate::model::ModelFamily) reads them, in both old forms, with the LLM fields
//! at the top, and new forms, with `text_config` and `vision_config`, as well as in the original
//! repositories' `internvl_chat` form. A missing field has the default in transformers 4.57.1; if the
//! processor files are missing altogether, token rules are the family's published rules. Nothing is guessed:
//! an invalid or unsupported field is an [`Error::Configuration`](crate::Error::Configuration) that names
//! file, field and value.
//!
//! CLIP, SigLIP and Whisper checkpoints are encoders only. [`ModelSpec::compose`] joins them with a language
//! model.
//!
//! # Examples
//! ```
//! use dflop_costmodel::ModelSpec;
//! use dflop_costmodel::config::Documents;
//!
//! # fn main() -> dflop_costmodel::Result<()> {
//! let config = serde_json::json!({
//!     "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
//!     "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": true,
//! });
//! let model = ModelSpec::from_hugging_face("my-qwen3", &Documents { config, ..Documents::default() })?;
//! assert_eq!(model.parameters(), 596_049_920);
//! # Ok(())
//! # }
//! ```

mod config_fields;

use std::num::NonZeroU32;

use serde_json::Value;

use crate::error::Result;
use crate::model::{AudioSpec, FamilyId, LlmSpec, ModelSpec, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::fixed_tile::FixedTile;
use crate::tokens::pan_and_scan::{AspectRatio, PanAndScan};

pub(crate) use self::config_fields::excerpt;
pub use self::config_fields::{CheckpointFields, ConfigFields};

/// `model_type` of a description, and the family of its model.
pub const DESCRIBED: &str = "described";
/// Name of the file that describes a model.
pub const CONFIG_FILE: &str = "config.json";
/// File name of the image processor or feature extractor.
pub const PREPROCESSOR_FILE: &str = "preprocessor_config.json";
/// File name of the video processor.
pub const VIDEO_PREPROCESSOR_FILE: &str = "video_preprocessor_config.json";
/// File name of the processor that joins them.
pub const PROCESSOR_FILE: &str = "processor_config.json";

/// Parsed files in a checkpoint directory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Documents {
    /// `config.json`.
    pub config: Value,
    /// `preprocessor_config.json`.
    pub preprocessor: Option<Value>,
    /// `video_preprocessor_config.json`.
    pub video_preprocessor: Option<Value>,
    /// `processor_config.json`; its `image_processor` and `video_processor` replace missing files.
    pub processor: Option<Value>,
}

/// Modules in a checkpoint: a whole model, a language model, or an encoder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartialModelSpec {
    /// Checkpoint family.
    pub family: FamilyId,
    /// Image and video encoder.
    pub vision: Option<VisionSpec>,
    /// Audio encoder.
    pub audio: Option<AudioSpec>,
    /// Language model. Without it, projectors are added by [`ModelSpec::compose`].
    pub llm: Option<LlmSpec>,
}

impl From<ModelSpec> for PartialModelSpec {
    fn from(spec: ModelSpec) -> Self {
        Self { family: spec.family, vision: spec.vision, audio: spec.audio, llm: Some(spec.llm) }
    }
}

/// Parses a checkpoint's JSON document.
///
/// Python's `json` module writes non-finite numbers as words. `NaN` is read as `null`, and so as a missing
/// field; infinities as the largest and the smallest `f64`, which a whole number is limited to. Words inside
/// strings stay.
///
/// # Errors
/// The `serde_json` error at the first fault; columns count the replaced words.
pub fn parse_json(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).or_else(|error| match with_finite_numbers(text) {
        Some(text) => serde_json::from_str(&text),
        None => Err(error),
    })
}

/// Replaces Python words outside strings; `None` if there are none.
fn with_finite_numbers(text: &str) -> Option<String> {
    const WORDS: [(&str, &str); 2] = [("NaN", "null"), ("Infinity", "1.7976931348623157e308")];
    let mut made = String::new();
    let (mut rest, mut is_quoted) = (text, false);
    while let Some(first) = rest.chars().next() {
        let word = WORDS.iter().find(|(word, _)| !is_quoted && rest.starts_with(word));
        let taken = match (first, word) {
            (_, Some((word, number))) => {
                made.push_str(number);
                rest = &rest[word.len()..];
                continue;
            }
            // The letter after a backslash ends no string.
            ('\\', None) if is_quoted => rest.char_indices().nth(2).map_or(rest.len(), |(at, _)| at),
            (letter, None) => {
                is_quoted ^= letter == '"';
                letter.len_utf8()
            }
        };
        made.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    (made != text).then_some(made)
}

/// Reads the rule for an image processor that may cut images into crops; `tile` is the square that an image
/// or a crop becomes. Missing settings have the processor's defaults.
///
/// # Errors
/// [`Error::Configuration`](crate::Error::Configuration) that names the field.
///
/// # Source
/// `Gemma3Processor` in transformers 5.24.0. There the setting in the file does not count: only the argument
/// `do_pan_and_scan` in a processor call cuts images.
pub fn pan_and_scan(fields: &ConfigFields<'_>, tile: FixedTile) -> Result<VisionRule> {
    if !fields.flag("do_pan_and_scan", false)? {
        return Ok(VisionRule::Fixed(tile));
    }
    let count = |key, default: NonZeroU32| {
        fields.count(key, default.get()).map(|count| NonZeroU32::new(count).unwrap_or(default))
    };
    let key = "pan_and_scan_min_ratio_to_activate";
    let aspect = fields.number(key, PanAndScan::ASPECT_MIN.get())?;
    Ok(VisionRule::PanAndScan(PanAndScan {
        tile,
        crop_pixels_min: count("pan_and_scan_min_crop_size", PanAndScan::CROP_PIXELS_MIN)?,
        crops_max: count("pan_and_scan_max_num_crops", PanAndScan::CROPS_MAX)?,
        aspect_min: AspectRatio::new(aspect).unwrap_or(PanAndScan::ASPECT_MIN),
    }))
}

#[cfg(test)]
mod tests;
