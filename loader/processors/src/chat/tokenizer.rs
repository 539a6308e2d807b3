//! Reads the model's tokenizer and companion files.
//!
//! In a Hugging Face repository `tokenizer.json` is the tokenizer itself, `tokenizer_config.json` names the
//! special tokens, and the chat template is in `chat_template.jinja`, `chat_template.json` or the
//! configuration, in this order of precedence. Nothing is downloaded.

use std::collections::BTreeMap;
use std::path::Path;

use dflop_costmodel::config::parse_json;
use dflop_samples::{Error, Result, file, guarded};
use serde_json::Value;

/// Maximum size of a file in bytes; tokenizers with 256,000 entries are about 35 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Tokenizer with special tokens and, if present in the files, a chat template.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special: BTreeMap<String, String>,
    chat_template: Option<String>,
}

/// Token ids for a text, with the byte range that each token covers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Vocabulary ids.
    pub ids: Vec<u32>,
    /// Start and end byte in the text; equal for tokens without text.
    pub offsets: Vec<(usize, usize)>,
}

impl Tokenizer {
    /// Reads a tokenizer from a model directory, or from a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be read, [`Error::Config`] if the content is invalid.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let mut tokenizer = Self::from_json(&read(&file)?).map_err(|error| in_file(&file, error))?;
        let beside = |name: &str| file.with_file_name(name);
        if let Some(config) = read_json(&beside("tokenizer_config.json"))? {
            tokenizer.special = special_tokens(&config);
            tokenizer.chat_template = configured_template(&config);
        }
        if let Some(json) = read_json(&beside("chat_template.json"))? {
            tokenizer.chat_template = configured_template(&json).or(tokenizer.chat_template);
        }
        let jinja = beside("chat_template.jinja");
        if jinja.is_file() {
            tokenizer.chat_template = Some(read_text(&jinja)?);
        }
        Ok(tokenizer)
    }

    /// Parses a `tokenizer.json` text, without special tokens or a chat template.
    ///
    /// Truncation and padding configured in the file are disabled.
    ///
    /// # Errors
    /// [`Error::Config`] if the JSON is not a tokenizer.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let invalid = |error: tokenizers::Error| config_error(error.to_string());
        let parsed = guarded(|| tokenizers::Tokenizer::from_bytes(json)).map_err(config_error)?;
        let mut inner = parsed.map_err(invalid)?;
        inner.with_truncation(None).map_err(invalid)?;
        inner.with_padding(None);
        Ok(Self { inner, special: BTreeMap::new(), chat_template: None })
    }

    /// Sets a special token such as `eos_token`, as in `tokenizer_config.json`.
    #[must_use]
    pub fn special_token(mut self, name: &str, token: &str) -> Self {
        self.special.insert(name.to_owned(), token.to_owned());
        self
    }

    /// Sets the chat template, as the companion files would.
    #[must_use]
    pub fn chat_template_source(mut self, source: impl Into<String>) -> Self {
        self.chat_template = Some(source.into());
        self
    }

    /// Returns the special tokens by name in `tokenizer_config.json`: `bos_token`, `eos_token`, …
    #[must_use]
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.special
    }

    /// Returns the chat template from the files.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Returns the token's id.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the number of entries, including added tokens.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the padding id: the id of `pad_token`, else of `eos_token`, else 0, which the attention mask
    /// hides.
    #[must_use]
    pub fn pad_id(&self) -> u32 {
        let mut names = ["pad_token", "eos_token"].into_iter();
        names.find_map(|name| self.id(self.special.get(name)?)).unwrap_or(0)
    }

    /// Returns the tokens that match as a whole and do not represent words, longest first.
    #[must_use]
    pub fn control_tokens(&self) -> Vec<String> {
        let added = self.inner.get_added_tokens_decoder();
        let mut tokens: Vec<_> =
            added.into_values().filter(|token| token.special).map(|token| token.content).collect();
        tokens.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        tokens
    }

    /// Returns the whole tokenizer as JSON, which identifies the tokenizer.
    pub(crate) fn serialized(&self) -> String {
        // A tokenizer that was parsed can be serialized, so the default is unreachable.
        self.inner.to_string(false).unwrap_or_default()
    }

    /// Encodes a text; with `has_special`, adds the tokens that the tokenizer puts around every text, such as
    /// a beginning-of-sequence token.
    ///
    /// # Errors
    /// The tokenizer's error message.
    pub fn encode(&self, text: &str, has_special: bool) -> Result<Encoded, String> {
        let encoding =
            guarded(|| self.inner.encode(text, has_special))?.map_err(|error| error.to_string())?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    /// Decodes ids to text, including special tokens.
    ///
    /// # Errors
    /// The tokenizer's error message.
    pub fn decode(&self, ids: &[u32]) -> Result<String, String> {
        guarded(|| self.inner.decode(ids, false))?.map_err(|error| error.to_string())
    }
}

fn config_error(reason: String) -> Error {
    Error::Config { setting: "tokenizer", reason }
}

fn in_file(path: &Path, error: Error) -> Error {
    match error {
        Error::Config { setting, reason } => {
            Error::Config { setting, reason: format!("`{}`: {reason}", path.display()) }
        }
        other => other,
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let failed = |source| Error::File { path: path.display().to_string(), source };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        let reason = format!("`{}` has {bytes} bytes, expected at most {FILE_BYTES_MAX}", path.display());
        return Err(config_error(reason));
    }
    file::read(path).map_err(failed)
}

/// Reads a text file, such as a chat template.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let not_text = |_| config_error(format!("`{}` is not UTF-8", path.display()));
    String::from_utf8(read(path)?).map_err(not_text)
}

fn read_json(path: &Path) -> Result<Option<Value>> {
    if !path.is_file() {
        return Ok(None);
    }
    let invalid = |error: serde_json::Error| config_error(format!("`{}`: {error}", path.display()));
    parse_json(&read_text(path)?).map(Some).map_err(invalid)
}

/// Returns every `*_token` in the configuration: a string, or an object's `content`.
fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    let entries = config.as_object().into_iter().flatten();
    let token = |(name, value): (&String, &Value)| {
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        name.ends_with("_token").then(|| (name.clone(), text.to_owned()))
    };
    entries.filter_map(token).collect()
}

/// Returns the template, or the template named `default` in a list.
fn configured_template(config: &Value) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(template) => Some(template.clone()),
        Value::Array(templates) => {
            let default = templates.iter().find(|template| template["name"] == "default")?;
            Some(default["template"].as_str()?.to_owned())
        }
        _ => None,
    }
}
