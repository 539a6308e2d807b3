//! Arguments for counting text tokens with the model's own tokenizer and chat template.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use dflop_costmodel::ModelSpec;
use dflop_loader::index::TokenCounts;
use dflop_loader::processors::{PlainText, Preparer, PreparerBuilder, Tokenizer};
use dflop_loader::settings::{ProcessorSettings, Settings};

use crate::failure::Failure;

/// Text token counting [default: estimates].
#[derive(Debug, Args)]
pub(crate) struct TokenizerArgs {
    /// Count text tokens exactly, as prepared for the model: `tokenizer.json`, or the directory that holds
    /// it. The counts are kept in the index [default: estimates].
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

impl TokenizerArgs {
    /// Returns the text token counter that the index is read with.
    ///
    /// - `model`: writes conversations in the chat format of this model; `None` counts the bare text
    pub(crate) fn token_counts(
        &self,
        model: Option<&ModelSpec>,
        settings: &Settings,
    ) -> Result<TokenCounts, Failure> {
        let Some(file) = &self.tokenizer else {
            let ProcessorSettings { chat_template, caption_prompt, .. } = &settings.processor;
            if chat_template.is_some() || caption_prompt.is_some() {
                let reason = "`processor.chat_template` and `processor.caption_prompt` need `--tokenizer`";
                return Err(Failure::Misuse(reason.into()));
            }
            return Ok(TokenCounts::Estimated);
        };
        let Some(model) = model else {
            return Ok(TokenCounts::Of(Arc::new(Tokenizer::open(file)?.text_counter())));
        };
        let preparer = preparer(model, file, settings)?.build()?;
        Ok(TokenCounts::Of(Arc::new(preparer.text_counter())))
    }
}

/// Returns a preparer builder for the model with a tokenizer and a template.
pub(crate) fn preparer(
    model: &ModelSpec,
    tokenizer: &Path,
    settings: &Settings,
) -> Result<PreparerBuilder, Failure> {
    let mut builder = Preparer::builder(model).tokenizer(Tokenizer::open(tokenizer)?);
    if let Some(source) = &settings.processor.chat_template {
        builder = builder.chat_template(source.clone());
    }
    if let Some(question) = &settings.processor.caption_prompt {
        builder = builder.plain_text(PlainText::Answer { question: question.clone() });
    }
    Ok(builder)
}
