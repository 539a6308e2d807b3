//! Finds or writes the files that a run reads: model, tokenizer and shards.

use std::path::PathBuf;

use tempfile::TempDir;

use super::cache_directory::CacheDirectory;
use super::config::RunConfig;
use super::inline::{self, MODEL};
use super::synthetic::{self, Generated};
use crate::Result;

/// Files that a run reads.
#[derive(Debug)]
pub(super) struct RunFiles {
    /// Directory with the model files, including weights if the model is pretrained.
    pub(super) model_directory: PathBuf,
    /// `tokenizer.json` or its directory.
    pub(super) tokenizer: PathBuf,
    /// Shard patterns; none if the shards were not generated yet.
    pub(super) shards: Vec<String>,
    /// Keeps the directory with the written files in use.
    _written: Option<Written>,
}

/// Directory with the files that the configuration describes.
#[expect(dead_code, reason = "held for what happens when they are dropped")]
#[derive(Debug)]
enum Written {
    Dataset(Generated),
    Model(CacheDirectory),
    Scratch(TempDir),
}

impl RunFiles {
    /// Generates the files that the configuration describes, in directories that are kept.
    pub(super) fn prepare(config: &RunConfig) -> Result<Self> {
        if let Some(table) = &config.data.generate {
            // A generated dataset comes with the model files.
            let generated = Generated::make(table, &config.model)?;
            let files = Self::at(config, generated.model(), vec![generated.shards()]);
            return Ok(Self { _written: Some(Written::Dataset(generated)), ..files });
        }
        if config.model.directory.is_some() {
            return Ok(Self::at(config, PathBuf::new(), config.data.shards.clone()));
        }
        let inline = inline::write(&config.model)?;
        let files = Self::at(config, inline.path.join(MODEL), config.data.shards.clone());
        Ok(Self { _written: Some(Written::Model(inline)), ..files })
    }

    /// Writes the files of a model that the configuration contains into a temporary directory, which is
    /// removed with the result; generates no shards.
    pub(super) fn without_dataset(config: &RunConfig) -> Result<Self> {
        let scratch = tempfile::tempdir()?;
        let model = scratch.path().join(MODEL);
        match &config.data.generate {
            Some(table) => synthetic::write_model(&model, table, &config.model)?,
            None => inline::write_files(&model, &config.model)?,
        }
        let files = Self::at(config, model, config.data.shards.clone());
        Ok(Self { _written: Some(Written::Scratch(scratch)), ..files })
    }

    /// - `written`: directory with the files that the configuration contains
    fn at(config: &RunConfig, written: PathBuf, shards: Vec<String>) -> Self {
        let model_directory = config.model.directory.clone().unwrap_or_else(|| written.clone());
        let is_generated = config.data.generate.is_some();
        let beside = if is_generated { written } else { model_directory.clone() };
        let tokenizer = config.data.tokenizer.clone().unwrap_or(beside);
        Self { model_directory, tokenizer, shards, _written: None }
    }
}
