//! Arguments for counting text tokens with the model's own tokenizer and chat template.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use dflop_costmodel::ModelSpec;
use dflop_loader::index::TokenCounts;
use dflop_loader::processors::{PlainText, Preparer, PreparerBuilder, Tokenizer};

use crate::failure::Failure;
use dflop_loader::store::file;

/// Text token counting [default: estimates].
#[derive(Debug, Args)]
pub(crate) struct TokenizerArgs {
    /// Count text tokens exactly, as prepared for the model: `tokenizer.json`, or the directory that holds
    /// it. The counts are kept in the index [default: estimates].
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    template: TemplateArgs,
}

/// Conversion from texts to conversations.
#[derive(Debug, Args)]
pub(crate) struct TemplateArgs {
    /// Chat template, a Jinja file [default: the template next to the tokenizer, else the published template
    /// for the model family].
    #[arg(long, value_name = "FILE", requires = "tokenizer")]
    chat_template: Option<PathBuf>,
    /// Prompt that captions answer [default: captions are trained on without a chat template].
    #[arg(long, value_name = "TEXT", requires = "tokenizer")]
    question: Option<String>,
}

impl TokenizerArgs {
    /// Returns the text token counter that the index is read with.
    ///
    /// - `model`: writes conversations in the chat format of this model; `None` counts the bare text
    pub(crate) fn token_counts(&self, model: Option<&ModelSpec>) -> Result<TokenCounts, Failure> {
        let Some(file) = &self.tokenizer else { return Ok(TokenCounts::Estimated) };
        let Some(model) = model else {
            return Ok(TokenCounts::Of(Arc::new(Tokenizer::open(file)?.text_counter())));
        };
        let preparer = self.template.preparer(model, file)?.build()?;
        Ok(TokenCounts::Of(Arc::new(preparer.text_counter())))
    }
}

impl TemplateArgs {
    /// Returns a preparer builder for the model with a tokenizer and a template.
    pub(crate) fn preparer(&self, model: &ModelSpec, tokenizer: &Path) -> Result<PreparerBuilder, Failure> {
        let mut builder = Preparer::builder(model).tokenizer(Tokenizer::open(tokenizer)?);
        if let Some(path) = &self.chat_template {
            let source = file::read_named_text(path);
            builder = builder.chat_template(source.map_err(|error| Failure::from(error).in_file(path))?);
        }
        if let Some(question) = &self.question {
            builder = builder.plain_text(PlainText::Answer { question: question.clone() });
        }
        Ok(builder)
    }
}
