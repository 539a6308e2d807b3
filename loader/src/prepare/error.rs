//! Why a sample cannot be prepared.

use crate::error::BoxError;
use crate::sample::document::MediaFault;
use crate::sample::text::MediumSlot;

/// Why a sample cannot be turned into what a model takes; the sample is skipped and accounted for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum PrepareError {
    /// The turns cannot be read, or placeholders and media do not match.
    #[error("{reason}")]
    Conversation { field: Option<String>, reason: String },
    /// The chat template refuses the turns.
    #[error("the chat template refuses the sample: {reason}")]
    ChatTemplate { reason: String },
    /// The tokenizer refuses the text.
    #[error("the tokenizer refuses the text: {reason}")]
    Tokenizer { reason: String },
    /// The ids have more or fewer places for media than there are media.
    #[error("{found} times `{token}` in the text for {media} {}", slot.plural())]
    MediaTokens { token: String, slot: MediumSlot, found: usize, media: usize },
    /// The processor of images, clips or videos refuses one.
    #[error("could not make model inputs of it")]
    Medium { field: String, source: BoxError },
    /// The sample is longer than the budget of a microbatch.
    #[error("{tokens} tokens, over the limit of {tokens_max}{note}")]
    TooLong { tokens: usize, tokens_max: usize, note: &'static str, is_dropped: bool },
}

impl PrepareError {
    /// Returns the field at fault, if it is one.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Conversation { field, .. } => field.as_deref(),
            Self::Medium { field, .. } => Some(field),
            _ => None,
        }
    }

    /// Whether the sample was left out because a setting asks for it, which is no fault of the sample.
    #[must_use]
    pub fn is_dropped(&self) -> bool {
        matches!(self, Self::TooLong { is_dropped: true, .. })
    }

    pub(super) fn conversation(field: Option<&str>, reason: impl Into<String>) -> Self {
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
