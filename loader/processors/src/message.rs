//! Conversation turns, in the form that chat templates read.

use dflop_samples::media::Modality;
use minijinja::Value;

/// Conversation in template form.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Dialogue {
    /// Turns, in order.
    pub messages: Vec<Message>,
    /// Template variables in addition to the messages: `tools`, `documents` and other variables from the
    /// sample.
    pub variables: Vec<(String, Value)>,
}

/// Turn in template form.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Speaker role: `system`, `user`, `assistant` or any other role that the template knows.
    pub role: String,
    /// Texts and media in the turn, in order.
    pub content: Vec<MessagePart>,
    /// Whether the content is a string in the sample, rather than a list of parts.
    pub is_string: bool,
    /// Whether the turn is a training target.
    pub is_target: bool,
    /// Keys other than role and content, such as `tool_calls`, in order.
    pub keys: Vec<(String, Value)>,
    /// Text form of a call, for a template that writes no calls.
    pub call_text: Option<String>,
}

/// Turn part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MessagePart {
    /// Text between media.
    Text(String),
    /// Position of a medium.
    Medium(Modality),
}

impl Dialogue {
    /// Creates a conversation from messages, without variables.
    #[must_use]
    pub fn new(messages: Vec<Message>) -> Self {
        Self { messages, variables: Vec::new() }
    }
}

impl Message {
    /// Creates a message with only content; it is a target if the role is the assistant's.
    #[must_use]
    pub fn new(role: &str, content: Vec<MessagePart>) -> Self {
        let is_target = role == ASSISTANT;
        Self { role: role.to_owned(), content, is_string: true, is_target, keys: Vec::new(), call_text: None }
    }

    /// Returns whether this is an assistant message.
    pub(crate) fn is_assistant(&self) -> bool {
        self.role == ASSISTANT
    }

    /// Returns whether the message has reasoning in addition to the content.
    pub(crate) fn has_reasoning(&self) -> bool {
        self.filled(REASONING).is_some()
    }

    /// Returns the value under a key, unless it is empty.
    pub(crate) fn filled(&self, name: &str) -> Option<&Value> {
        self.keys.iter().find(|(key, value)| key == name && value.is_true()).map(|(_, value)| value)
    }

    /// Returns whether the message calls tools.
    pub(crate) fn has_calls(&self) -> bool {
        self.filled(CALLS).is_some()
    }

    /// Returns whether the message has text that templates write in addition to the content.
    pub(crate) fn has_more_than_content(&self) -> bool {
        [CALLS, REASONING, "reasoning", "thinking"].iter().any(|key| self.filled(key).is_some())
    }

    /// Writes calls as text, if the text is known; returns whether no call is left.
    pub(crate) fn write_calls(&mut self) -> bool {
        if let Some(text) = self.call_text.take() {
            self.content.push(MessagePart::Text(text));
            self.keys.retain(|(key, _)| key != CALLS);
        }
        !self.has_calls()
    }
}

/// Role that is trained.
const ASSISTANT: &str = "assistant";
/// Key for tool calls in a message.
const CALLS: &str = "tool_calls";
/// Key for reasoning in a message.
pub(crate) const REASONING: &str = "reasoning_content";

/// Converts JSON; objects keep the key order.
pub(crate) fn to_value(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => number
            .as_i64()
            .map(Value::from)
            .or_else(|| number.as_u64().map(Value::from))
            .unwrap_or_else(|| Value::from(number.as_f64().unwrap_or_default())),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(values) => values.iter().map(to_value).collect::<Vec<_>>().into(),
        Json::Object(object) => {
            Value::from_pairs(object.iter().map(|(key, value)| (key.as_str(), to_value(value))))
        }
    }
}
