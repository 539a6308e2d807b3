//! Turns of a conversation, in the form that chat templates read.

use dflop_samples::media::Modality;

/// Turn in the form that a template reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Role of the speaker: `system`, `user`, `assistant` or another one that the template knows.
    pub role: String,
    /// Texts and media of the turn, in order.
    pub content: Vec<MessagePart>,
}

/// Part of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MessagePart {
    /// Text between media.
    Text(String),
    /// Position of a medium.
    Medium(Modality),
}
