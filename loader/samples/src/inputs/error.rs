//! Defines errors that occur while preparing a sample.

use crate::error::BoxError;
use crate::media::Modality;
use crate::sample::document::MediaFault;

/// Reason why a sample cannot be converted to model inputs; the sample is skipped and recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum PrepareError {
    /// The turns cannot be read, or placeholders and media do not match.
    #[error("{reason}")]
    Conversation { field: Option<String>, reason: String },
    /// The chat template rejects the turns.
    #[error("the chat template rejects the sample: {reason}")]
    ChatTemplate { reason: String },
    /// The tokenizer rejects the text.
    #[error("the tokenizer rejects the text: {reason}")]
    Tokenizer { reason: String },
    /// The number of placeholder tokens in the text differs from the number of media.
    #[error("the text has {found} `{token}` tokens for {media} {}", modality.plural())]
    MediaTokens { token: String, modality: Modality, found: usize, media: usize },
    /// The modality's processor rejects a medium.
    #[error("could not convert the medium to model inputs")]
    Medium { field: String, source: BoxError },
    /// The sample has more tokens than the limit.
    #[error("{tokens} tokens exceed the limit of {tokens_max}{note}")]
    TooLong { tokens: usize, tokens_max: usize, note: &'static str, is_dropped: bool },
}

impl PrepareError {
    /// Returns the field that caused the error, if a single field did.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Conversation { field, .. } => field.as_deref(),
            Self::Medium { field, .. } => Some(field),
            _ => None,
        }
    }

    /// Returns whether a setting excluded the sample, rather than a fault in the sample.
    #[must_use]
    pub fn is_dropped(&self) -> bool {
        matches!(self, Self::TooLong { is_dropped: true, .. })
    }

    /// Creates the error for turns that cannot be read, at a field or at the sample.
    pub fn conversation(field: Option<&str>, reason: impl Into<String>) -> Self {
        Self::Conversation { field: field.map(str::to_owned), reason: reason.into() }
    }
}

impl From<MediaFault> for PrepareError {
    fn from(fault: MediaFault) -> Self {
        Self::Conversation {
            field: Some(fault.field).filter(|field| !field.is_empty()),
            reason: fault.reason,
        }
    }
}
