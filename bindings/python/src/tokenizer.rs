//! Opens tokenizers from files, the Hugging Face cache, or `tokenizers` and `transformers` objects.

use std::path::PathBuf;
use std::sync::Arc;

use dflop_costmodel::ModelSpec;
use dflop_loader::index::TokenCounts;
use dflop_loader::model::{checkpoint_path, spec_from_names};
use dflop_loader::processors::{PlainText, Preparer, PreparerBuilder, Tokenizer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBool;

use super::convert::Names;
use crate::error::DflopError;

/// Tokenizer, chat template and caption prompt.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenizerSettings {
    tokenizer: Option<Tokenizer>,
    /// Whether the user disabled the tokenizer.
    is_refused: bool,
    chat_template: Option<String>,
    caption_prompt: Option<String>,
}

impl TokenizerSettings {
    /// # Errors
    /// `ConfigError` if the tokenizer does not exist or is invalid.
    pub(crate) fn new(
        tokenizer: Option<&Bound<'_, PyAny>>,
        chat_template: Option<String>,
        caption_prompt: Option<String>,
    ) -> PyResult<Self> {
        let is_refused = tokenizer.is_some_and(|tokenizer| tokenizer.is(PyBool::new(tokenizer.py(), false)));
        let tokenizer = tokenizer.filter(|_| !is_refused).map(parse_tokenizer).transpose()?;
        Ok(Self { tokenizer, is_refused, chat_template, caption_prompt })
    }

    /// Returns whether the user has named a tokenizer.
    pub(crate) fn is_given(&self) -> bool {
        self.tokenizer.is_some()
    }

    /// Returns whether the user disabled the tokenizer: ``tokenizer=False``.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// Uses the tokenizer in a model's directory if none was given.
    pub(crate) fn or_from_model(mut self, names: &[String]) -> Result<Self, DflopError> {
        for name in names.iter().filter(|_| self.tokenizer.is_none() && !self.is_refused) {
            let Some(path) = checkpoint_path(name) else { continue };
            let directory = if path.is_dir() { path } else { path.with_file_name("") };
            if directory.join("tokenizer.json").is_file() {
                self.tokenizer = Some(Tokenizer::open(directory)?);
                break;
            }
        }
        Ok(self)
    }

    /// Returns a preparer builder; `None` without a tokenizer.
    ///
    /// # Errors
    /// `ConfigError` for a template or a caption prompt without a tokenizer.
    pub(crate) fn preparer(self, model: &ModelSpec) -> Result<Option<PreparerBuilder>, DflopError> {
        let Some(tokenizer) = self.tokenizer else {
            return match (self.chat_template, self.caption_prompt) {
                (None, None) => Ok(None),
                _ => Err(DflopError::config("chat_template", "needs a tokenizer")),
            };
        };
        let mut builder = Preparer::builder(model).tokenizer(tokenizer);
        if let Some(source) = self.chat_template {
            builder = builder.chat_template(source);
        }
        if let Some(question) = self.caption_prompt {
            builder = builder.plain_text(PlainText::Answer { question });
        }
        Ok(Some(builder))
    }
}

/// Returns the text token counter for reading an index.
///
/// - `model`: counts texts in this model's chat format; `None` counts the bare text
pub(crate) fn token_counts(settings: TokenizerSettings, model: Option<&[String]>) -> PyResult<TokenCounts> {
    let Some(model) = model else {
        let Some(tokenizer) = settings.tokenizer else { return Ok(TokenCounts::Estimated) };
        return Ok(TokenCounts::Of(Arc::new(tokenizer.text_counter())));
    };
    let spec = spec_from_names(model).map_err(DflopError::from)?;
    let Some(builder) = settings.or_from_model(model)?.preparer(&spec)? else {
        let reason = "needs a tokenizer: the model's chat format is counted by it";
        return Err(DflopError::config("tokenizer", reason).into());
    };
    Ok(TokenCounts::Of(Arc::new(builder.build().map_err(DflopError::from)?.text_counter())))
}

/// Converts the user's tokenizer argument.
fn parse_tokenizer(value: &Bound<'_, PyAny>) -> PyResult<Tokenizer> {
    if let Ok(Names(names)) = value.extract::<Names>()
        && let [name] = &names[..]
    {
        let path = checkpoint_path(name).unwrap_or_else(|| PathBuf::from(name));
        return Ok(Tokenizer::open(path).map_err(DflopError::from)?);
    }
    // Fast tokenizers in `transformers` wrap a tokenizer from `tokenizers`.
    let backend = value.getattr("backend_tokenizer").unwrap_or_else(|_| value.clone());
    let Ok(text) = backend.call_method0("to_str") else {
        let kind = value.get_type().name()?;
        let message = format!(
            "expected a path, a name, a `tokenizers.Tokenizer` or a fast tokenizer of `transformers`, found {kind}"
        );
        return Err(PyTypeError::new_err(message));
    };
    let mut tokenizer =
        Tokenizer::from_json(text.extract::<String>()?.as_bytes()).map_err(DflopError::from)?;
    // `transformers` keeps special tokens and the chat template outside the backend tokenizer.
    if let Ok(special) = value.getattr("special_tokens_map") {
        for item in special.call_method0("items")?.try_iter()? {
            let (name, token): (String, Bound<'_, PyAny>) = item?.extract()?;
            tokenizer = tokenizer.special_token(&name, &token.str()?.extract::<String>()?);
        }
    }
    match value.getattr("chat_template").ok().and_then(|source| source.extract::<String>().ok()) {
        Some(source) => Ok(tokenizer.chat_template_source(source)),
        None => Ok(tokenizer),
    }
}
