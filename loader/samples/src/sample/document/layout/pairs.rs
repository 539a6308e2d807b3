//! Reads a question and an answer, each under a separate key, with the context of the question.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::is_blank;
use super::turns::{ASSISTANT, Turn, USER, push_pair, read_turns};
use super::unread::Unread;
use crate::error::json_excerpt;
use crate::media::extension_modality;
use crate::sample::document::content::readable;

/// Question keys, in order of precedence.
const ASKED_KEYS: [&str; 9] =
    ["instruction", "query", "question", "prompt", "problem", "inputs", "input", "user", "human"];
/// Answer keys, in order of precedence.
const ANSWER_KEYS: [&str; 12] = [
    "response",
    "output",
    "completion",
    "multiple_choice_answer",
    "answer",
    "answers",
    "solution",
    "targets",
    "target",
    "assistant",
    "gpt",
    LABEL,
];
/// Answer key next to a `query` or a `question`; elsewhere a class label.
const LABEL: &str = "label";
/// Keys for text that follows an instruction or a question, on a separate line.
const MORE_KEYS: [&str; 2] = ["input", "context"];
/// Keys for earlier questions and answers, and for reasoning before the answer.
const HISTORY: &str = "history";
const REASONING: &str = "reasoning_content";
/// Keys for multiple-choice answers, which the question needs.
const CHOICE_KEYS: [&str; 2] = ["choices", "options"];
/// Text keys in an answer object.
const TEXT_KEYS: [&str; 4] = ["answer", "text", "value", "caption"];

/// Question key and answer key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sample) struct Pair {
    asked: &'static str,
    answered: &'static str,
    more: Option<&'static str>,
    has_history: bool,
    has_reasoning: bool,
}

impl Pair {
    /// Finds a question and an answer; a lone question may be a file name or an id, so both are required.
    pub(in crate::sample::document) fn of(object: &Map<String, Value>) -> Option<Self> {
        let is_text = |key: &str| object.get(key).and_then(Value::as_str).is_some_and(is_words);
        let asked = ASKED_KEYS.into_iter().find(|key| is_text(key))?;
        // A problem has a worked solution, next to the bare result.
        let first = (asked == "problem").then_some("solution");
        let mut answers = first.into_iter().chain(ANSWER_KEYS).filter(|key| *key != asked);
        let answered =
            answers.find(|key| object.get(*key).is_some_and(|value| is_answer(asked, key, value)))?;
        let more = MORE_KEYS.into_iter().find(|key| *key != asked && is_text(key));
        let is_there = |key: &str| object.get(key).is_some_and(|value| !is_blank(value));
        Some(Self {
            asked,
            answered,
            more,
            has_history: is_there(HISTORY),
            has_reasoning: object.get(REASONING).and_then(Value::as_str).is_some(),
        })
    }

    /// Returns the keys that create the turns.
    pub(super) fn keys<'k>(self) -> Vec<&'k str> {
        let history = self.has_history.then_some(HISTORY);
        let reasoning = self.has_reasoning.then_some(REASONING);
        [Some(self.asked), Some(self.answered), self.more, history, reasoning].into_iter().flatten().collect()
    }
}

/// Returns whether a key belongs to pairs; `label` may also be a class.
pub(super) fn is_key(name: &str) -> bool {
    let known = [&ASKED_KEYS[..], &ANSWER_KEYS, &MORE_KEYS, &[HISTORY, REASONING]];
    name != LABEL && known.iter().any(|keys| keys.contains(&name))
}

/// Returns whether a string is text, rather than a medium path.
fn is_words(text: &str) -> bool {
    let text = text.trim();
    !text.is_empty()
        && (text.contains(char::is_whitespace) || extension_modality(text).is_none() || !text.contains('.'))
}

fn is_answer(asked: &str, key: &str, value: &Value) -> bool {
    match value {
        Value::String(text) => {
            (key != LABEL || is_asked_by_label(asked)) && (text.is_empty() || is_words(text))
        }
        Value::Array(values) => {
            !values.is_empty()
                && (key != LABEL || (is_asked_by_label(asked) && values.iter().all(Value::is_string)))
        }
        Value::Object(_) => key != LABEL,
        Value::Number(_) | Value::Bool(_) => ["answer", "answers", "solution"].contains(&key),
        Value::Null => false,
    }
}

fn is_asked_by_label(asked: &str) -> bool {
    ["query", "question"].contains(&asked)
}

/// Appends the earlier turns, the question and the answer.
///
/// # Errors
/// The unreadable part: an answer without text, or choices next to the question.
pub(super) fn read_pair<'a>(
    object: &'a Map<String, Value>,
    pair: &Pair,
    turns: &mut Vec<Turn<'a>>,
) -> Result<(), String> {
    if let Some(key) = CHOICE_KEYS.iter().find(|key| object.get(**key).is_some_and(|value| !is_blank(value)))
    {
        let asked = pair.asked;
        return Err(format!("`{key}` beside `{asked}` is not read; write the choices into `{asked}`"));
    }
    if pair.has_history {
        read_history(&object[HISTORY], turns)?;
    }
    let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default();
    let asked = match pair.more {
        Some(more) => Cow::Owned(format!("{}\n{}", text(pair.asked), text(more))),
        None => Cow::Borrowed(text(pair.asked)),
    };
    turns.push(Turn::from_text(USER, asked)?);
    let answered = answer_text(&object[pair.answered], pair.answered)?;
    let turn = Turn::from_text(ASSISTANT, answered)?;
    turns.push(if pair.has_reasoning {
        turn.with_key(REASONING, readable(text(REASONING))?.into())
    } else {
        turn
    });
    Ok(())
}

/// Appends earlier turns: string pairs, or turns as in a conversation.
fn read_history<'a>(history: &'a Value, turns: &mut Vec<Turn<'a>>) -> Result<(), String> {
    let pairs = history.as_array().filter(|list| list.iter().all(Value::is_array));
    let Some(pairs) = pairs else {
        return read_turns(history, HISTORY, turns, &mut Unread::default());
    };
    for (number, pair) in pairs.iter().enumerate() {
        let pair = pair.as_array().map_or(&[][..], Vec::as_slice);
        push_pair(pair, turns).map_err(|reason| format!("`{HISTORY}`, entry {number}: {reason}"))?;
    }
    Ok(())
}

/// Returns the answer text; among several answers, the most frequent answer, and the first if there is a tie.
fn answer_text<'a>(value: &'a Value, key: &str) -> Result<Cow<'a, str>, String> {
    match value {
        Value::String(text) => Ok(Cow::Borrowed(text)),
        Value::Number(number) => Ok(Cow::Owned(number.to_string())),
        Value::Array(values) => {
            let texts: Result<Vec<Cow<'a, str>>, String> =
                values.iter().map(|value| answer_text(value, key)).collect();
            most_frequent(texts?).ok_or_else(|| format!("`{key}` is empty"))
        }
        Value::Object(object) => {
            let inner = TEXT_KEYS.iter().find_map(|key| object.get(*key));
            let known = TEXT_KEYS.map(|key| format!("`{key}`")).join(", ");
            let inner = inner.ok_or_else(|| format!("`{key}` is an object without {known}"))?;
            answer_text(inner, key)
        }
        _ => Err(format!("`{key}` must be a text, found {}", json_excerpt(value))),
    }
}

fn most_frequent<'a>(texts: Vec<Cow<'a, str>>) -> Option<Cow<'a, str>> {
    let count = |text: &Cow<'a, str>| texts.iter().filter(|other| *other == text).count();
    // For equal counts `max_by_key` returns the last item.
    let best = texts.iter().enumerate().rev().max_by_key(|(_, text)| count(text)).map(|(at, _)| at)?;
    texts.into_iter().nth(best)
}
