//! Sample conversations as text: turns, the chat template, the training targets, the tokenizer.

mod chat_template;
mod conversation;
mod labels;
mod marks;
mod tokenizer;

pub use self::chat_template::ChatTemplate;
pub use self::conversation::{Conversation, SampleConversation, read_conversation};
pub(crate) use self::labels::{Labeler, MarkedText, target_tokens};
pub use self::tokenizer::{Encoded, Tokenizer};

#[cfg(test)]
mod tests;
