//! Finds a checkpoint's fields in its files.

use serde_json::Value;

use super::{
    CONFIG_FILE, ConfigFields, DESCRIBED, Documents, PREPROCESSOR_FILE, PROCESSOR_FILE,
    VIDEO_PREPROCESSOR_FILE,
};
use crate::error::Result;

/// Fields in a checkpoint's files, from which a family is read.
#[derive(Debug, Clone)]
pub struct CheckpointFields<'a> {
    /// `config.json`.
    pub config: ConfigFields<'a>,
    /// Image processor or feature extractor; `None` if no file has it.
    pub preprocessor: Option<ConfigFields<'a>>,
    /// Video processor; `None` if no file has it.
    pub video_preprocessor: Option<ConfigFields<'a>>,
    /// `processor_config.json`; empty if there is no such file.
    pub processor: ConfigFields<'a>,
}

impl<'a> CheckpointFields<'a> {
    /// Collects the fields from a checkpoint's files.
    ///
    /// # Errors
    /// [`Error::Configuration`](crate::Error::Configuration) if a file or a nested processor is not an
    /// object.
    pub fn new(documents: &'a Documents) -> Result<Self> {
        let document = |file, document: &'a Option<Value>| match document {
            None => Ok(None),
            Some(document) => ConfigFields::new(file, document).map(Some),
        };
        let processor = document(PROCESSOR_FILE, &documents.processor)?;
        let processor = processor.unwrap_or_else(|| ConfigFields::empty(PROCESSOR_FILE));
        let or_nested = |own: Option<ConfigFields<'a>>, key: &str| match own {
            Some(own) => Ok(Some(own)),
            None => processor.child(key),
        };
        let own = document(PREPROCESSOR_FILE, &documents.preprocessor)?;
        let preprocessor = or_nested(own, "image_processor")?;
        let preprocessor = or_nested(preprocessor, "feature_extractor")?;
        let own = document(VIDEO_PREPROCESSOR_FILE, &documents.video_preprocessor)?;
        // Older checkpoints have a single file for images and videos; transformers reads it for both.
        let video_preprocessor = or_nested(own, "video_processor")?.or_else(|| preprocessor.clone());
        let is_described = documents.config.get("model_type").is_some_and(|found| found == DESCRIBED);
        let file = if is_described { "the description" } else { CONFIG_FILE };
        let config = ConfigFields::new(file, &documents.config)?;
        Ok(Self { config, preprocessor, video_preprocessor, processor })
    }

    /// Returns the image processor's fields; empty if there is no such file.
    #[must_use]
    pub fn image(&self) -> ConfigFields<'a> {
        self.preprocessor.clone().unwrap_or_else(|| ConfigFields::empty(PREPROCESSOR_FILE))
    }

    /// Returns the number of frames that a video is sampled down to: the video processor's setting, otherwise
    /// the family's.
    ///
    /// # Errors
    /// [`Error::Configuration`](crate::Error::Configuration) if the setting is invalid.
    pub fn frames_max(&self, default: u32) -> Result<u32> {
        match &self.video_preprocessor {
            Some(video) if video.flag("do_sample_frames", false)? => video.count("num_frames", default),
            _ => Ok(default),
        }
    }
}
