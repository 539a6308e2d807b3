//! Reads a [`ModelSpec`] from the `config.json` of a checkpoint and the files of its processor.
//!
//! [`Documents`] are the parsed files of a directory as it is downloaded from Hugging Face; the caller reads
//! them from disk. One file here reads one family, in both old forms, with the fields of the LLM at the top,
//! and new ones, with `text_config` and `vision_config`, as well as in the `internvl_chat` form of the
//! original repositories. A missing field has the default of transformers 4.57.1; where the processor's files
//! are missing altogether, token rules are the published ones of the family. Nothing is guessed: a field that
//! is invalid or not supported is an [`Error::Configuration`] that names file, field and value.
//!
//! CLIP, SigLIP and Whisper alone are encoders. [`ModelSpec::compose`] joins them with a language model.
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

mod audio;
mod fields;
mod intern_vl;
mod intern_vl_chat;
mod llava_onevision;
mod llm;
mod qwen_vl;
mod vision;

use serde_json::Value;

use self::fields::{Fields, excerpt};
use crate::error::{Error, Result};
use crate::model::towers;
use crate::model::{AudioSpec, LlmSpec, ModelSpec, VisionSpec};

/// Name of the file that describes a model.
pub const CONFIG_FILE: &str = "config.json";
/// Name of the file of the image processor or feature extractor.
pub const PREPROCESSOR_FILE: &str = "preprocessor_config.json";
/// Name of the file of the video processor.
pub const VIDEO_PREPROCESSOR_FILE: &str = "video_preprocessor_config.json";
/// Name of the file of the processor that joins them.
pub const PROCESSOR_FILE: &str = "processor_config.json";

/// Frames that a video is sampled down to, if neither a file nor the family sets another number.
const FRAMES_MAX: u32 = 32;

/// Parsed files of a checkpoint's directory.
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

/// Modules of one checkpoint: a whole model, a language model, or an encoder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartialModelSpec {
    /// Encoder of images and videos.
    pub vision: Option<VisionSpec>,
    /// Encoder of audio.
    pub audio: Option<AudioSpec>,
    /// Language model. Without one, projectors are added by [`ModelSpec::compose`].
    pub llm: Option<LlmSpec>,
}

impl From<ModelSpec> for PartialModelSpec {
    fn from(spec: ModelSpec) -> Self {
        Self { vision: spec.vision, audio: spec.audio, llm: Some(spec.llm) }
    }
}

/// Fields of a checkpoint's files, from which a family is read.
struct CheckpointFields<'a> {
    config: Fields<'a>,
    /// Fields of the image processor or feature extractor; `None` if no file has any.
    preprocessor: Option<Fields<'a>>,
    video_preprocessor: Option<Fields<'a>>,
    processor: Fields<'a>,
}

type Reader = fn(&CheckpointFields<'_>) -> Result<PartialModelSpec>;

/// Readers of all families, by `model_type`.
const READERS: [(&str, Reader); 16] = [
    ("clip", vision::clip),
    ("clip_vision_model", vision::clip),
    ("internlm2", llm::read),
    ("internvl", intern_vl::read),
    ("internvl_chat", intern_vl_chat::read),
    ("llama", llm::read),
    ("llava_onevision", llava_onevision::read),
    ("qwen2", llm::read),
    ("qwen2_5_vl", qwen_vl::read_2_5),
    ("qwen2_audio", audio::qwen2_audio),
    ("qwen2_audio_encoder", audio::whisper),
    ("qwen2_vl", qwen_vl::read_2),
    ("qwen3", llm::read),
    ("siglip", vision::siglip),
    ("siglip_vision_model", vision::siglip),
    ("whisper", audio::whisper),
];

impl PartialModelSpec {
    /// Reads the modules of a checkpoint.
    ///
    /// # Errors
    /// [`Error::Configuration`] if a field is invalid or the `model_type` is unknown.
    pub fn from_hugging_face(documents: &Documents) -> Result<Self> {
        let source = CheckpointFields::new(documents)?;
        let Some(model_type) = source.config.text("model_type")? else {
            return Err(source.config.invalid("model_type", format!("is missing, {}", known())));
        };
        match READERS.iter().find(|(name, _)| *name == model_type) {
            Some((_, read)) => read(&source),
            None => Err(source
                .config
                .invalid("model_type", format!("= \"{model_type}\" is unknown, {}", known()))),
        }
    }
}

fn known() -> String {
    format!("known are {}", READERS.map(|(name, _)| name).join(", "))
}

impl ModelSpec {
    /// Reads a model from the files of its checkpoint; a language model without encoders is a model of text.
    ///
    /// # Errors
    /// [`Error::Configuration`] if a field is invalid or the `model_type` is unknown, [`Error::Composition`]
    /// if the checkpoint is an encoder only.
    pub fn from_hugging_face(name: &str, documents: &Documents) -> Result<Self> {
        Self::compose(name, &[PartialModelSpec::from_hugging_face(documents)?])
    }

    /// Joins modules to a model: one language model, at most one encoder per modality.
    ///
    /// A vision encoder without a language model gets the projector of LLaVA (two matrices, as wide as the
    /// LLM), an audio encoder the projector of Qwen2-Audio (pooling by 2, one matrix).
    ///
    /// # Errors
    /// [`Error::Composition`] if there is no language model, or two modules of a kind.
    pub fn compose(name: &str, parts: &[PartialModelSpec]) -> Result<Self> {
        let invalid =
            |problem: &str| Error::Composition { name: name.to_owned(), problem: problem.to_owned() };
        let only = |found: Vec<usize>, kind: &str| match found[..] {
            [] => Ok(None),
            [only] => Ok(Some(parts[only])),
            _ => Err(invalid(&format!("it has {} {kind}", found.len()))),
        };
        let having =
            |has: fn(&PartialModelSpec) -> bool| (0..parts.len()).filter(|&at| has(&parts[at])).collect();
        let llm = only(having(|part| part.llm.is_some()), "language models")?.and_then(|part| part.llm);
        let Some(llm) = llm else {
            return Err(invalid("it is an encoder; join it with a language model"));
        };
        let vision = only(having(|part| part.vision.is_some()), "encoders of images")?;
        let audio = only(having(|part| part.audio.is_some()), "encoders of audio")?;
        let vision = vision.and_then(|part| part.vision.map(|vision| (vision, part.llm.is_some())));
        let audio = audio.and_then(|part| part.audio.map(|audio| (audio, part.llm.is_some())));
        Ok(Self {
            name: name.to_owned(),
            vision: vision.map(|(mut vision, has_projector)| {
                if !has_projector {
                    let hidden = vision.encoder.hidden;
                    vision.encoder.projector = towers::llava_projector(hidden, llm.hidden, true);
                }
                vision
            }),
            audio: audio.map(|(mut audio, has_projector)| {
                if !has_projector {
                    let hidden = audio.encoder.hidden;
                    audio.encoder.projector = towers::qwen2_audio_projector(hidden, llm.hidden);
                }
                audio
            }),
            llm,
        })
    }
}

impl<'a> CheckpointFields<'a> {
    fn new(documents: &'a Documents) -> Result<Self> {
        let document = |file, document: &'a Option<Value>| match document {
            None => Ok(None),
            Some(document) => Fields::of(file, document).map(Some),
        };
        let processor = document(PROCESSOR_FILE, &documents.processor)?;
        let processor = processor.unwrap_or_else(|| Fields::empty(PROCESSOR_FILE));
        let or_nested = |own: Option<Fields<'a>>, key: &str| match own {
            Some(own) => Ok(Some(own)),
            None => processor.child(key),
        };
        let own = document(PREPROCESSOR_FILE, &documents.preprocessor)?;
        let preprocessor = or_nested(own, "image_processor")?;
        let preprocessor = or_nested(preprocessor, "feature_extractor")?;
        let own = document(VIDEO_PREPROCESSOR_FILE, &documents.video_preprocessor)?;
        // Older checkpoints have one file for images and videos; transformers reads it for both.
        let video_preprocessor = or_nested(own, "video_processor")?.or_else(|| preprocessor.clone());
        let config = Fields::of(CONFIG_FILE, &documents.config)?;
        Ok(Self { config, preprocessor, video_preprocessor, processor })
    }

    /// Returns the fields of the image processor; empty if there is no such file.
    fn image(&self) -> Fields<'a> {
        self.preprocessor.clone().unwrap_or_else(|| Fields::empty(PREPROCESSOR_FILE))
    }

    /// Returns the frames that a video is sampled down to: the video processor's setting, or else the
    /// family's.
    fn frames_max(&self, default: u32) -> Result<u32> {
        match &self.video_preprocessor {
            Some(video) if video.flag("do_sample_frames", false)? => video.count("num_frames", default),
            _ => Ok(default),
        }
    }
}

#[cfg(test)]
mod tests;
