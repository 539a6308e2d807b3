//! Reads turn lists: messages, `ShareGPT`, pairs under role names, and string lists.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::{Unread, is_blank, is_flag, is_target};
use crate::error::{EXCERPT_CHARACTERS, excerpt, json_excerpt};
use crate::media::extension_modality;
use crate::sample::document::parts::{
    Content, UnplacedPart, parse_content, readable, split_owned, unused_keys,
};

/// Turn whose placeholders are not matched with fields yet.
#[derive(Debug, Clone, Default)]
pub(in crate::sample::document) struct Turn<'a> {
    /// Role name for chat templates.
    pub(in crate::sample::document) role: Cow<'a, str>,
    pub(in crate::sample::document) content: Vec<UnplacedPart<'a>>,
    /// Whether the content is a string rather than a list of parts.
    pub(in crate::sample::document) is_string: bool,
    pub(in crate::sample::document) is_target: bool,
    /// Text of a tool call turn, for templates that write no calls.
    pub(in crate::sample::document) call_text: Option<Cow<'a, str>>,
    /// Object that the turn was read from.
    source: Option<Cow<'a, Map<String, Value>>>,
    /// Source keys used for role and content.
    taken: [&'static str; 2],
    /// Message keys whose source form is different.
    made: Map<String, Value>,
}

/// Keys for the speaker and the content of a turn.
const ROLE_KEYS: [&str; 2] = ["role", "from"];
const CONTENT_KEYS: [&str; 3] = ["content", "value", "text"];
/// Message keys other than role, content and flags that chat templates read.
const MESSAGE_KEYS: [&str; 7] =
    ["tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking", "function_call"];

/// Role names for the assistant, the user, and tool results.
const ASSISTANT_ROLES: [&str; 6] = ["assistant", "gpt", "model", "bot", "chatgpt", "ai"];
const USER_ROLES: [&str; 3] = ["user", "human", "prompter"];
const TOOL_ROLES: [&str; 7] =
    ["tool", "observation", "observations", "function", "tool_response", "function_response", "ipython"];
/// Assistant role names for a turn that is a tool call.
const CALL_ROLES: [&str; 2] = ["function_call", "tool_call"];

impl<'a> Turn<'a> {
    /// Creates a turn from a text, and splits the text at placeholders.
    pub(super) fn from_text(role: &'static str, text: Cow<'a, str>) -> Result<Self, String> {
        let is_target = role == ASSISTANT;
        Ok(Self {
            role: role.into(),
            content: split_owned(text)?,
            is_string: true,
            is_target,
            ..Self::default()
        })
    }

    /// Adds a key to the message.
    fn with_key(mut self, key: &str, value: Value) -> Self {
        self.made.insert(key.to_owned(), value);
        self
    }

    /// Returns the message keys other than role and content, in order.
    pub(in crate::sample::document) fn keys(&self) -> impl Iterator<Item = (&String, &Value)> {
        let is_other =
            |key: &str| !self.taken.contains(&key) && key != FUNCTION_CALL && !self.made.contains_key(key);
        let source = self.source.iter().flat_map(|source| source.iter());
        source.filter(move |(key, _)| is_other(key)).chain(&self.made)
    }

    /// Copies borrowed data.
    pub(super) fn into_owned<'b>(self) -> Turn<'b> {
        Turn {
            role: Cow::Owned(self.role.into_owned()),
            content: self.content.into_iter().map(UnplacedPart::into_owned).collect(),
            source: self.source.map(|source| Cow::Owned(source.into_owned())),
            is_string: self.is_string,
            is_target: self.is_target,
            call_text: self.call_text.map(|text| Cow::Owned(text.into_owned())),
            taken: self.taken,
            made: self.made,
        }
    }
}

/// Role that is trained.
pub(super) const ASSISTANT: &str = "assistant";
const USER: &str = "user";
pub(super) const SYSTEM: &str = "system";
const TOOL: &str = "tool";
/// Key for a call in the first version of OpenAI's API.
const FUNCTION_CALL: &str = "function_call";

/// Returns whether a value can be a turn list, so that a column with any name is a conversation: objects with
/// a known role, or strings and pairs in a known form.
pub(super) fn is_turns(value: &Value) -> bool {
    let Some(list) = value.as_array() else { return false };
    let is_turn = |turn: &Value| match turn {
        Value::Object(turn) => {
            let role = ROLE_KEYS.iter().find_map(|key| turn.get(*key)?.as_str());
            role.is_some() && CONTENT_KEYS.iter().any(|key| turn.contains_key(*key))
        }
        Value::Array(_) => is_turns(turn),
        _ => false,
    };
    !list.is_empty() && list.iter().all(is_turn)
}

/// Appends the turns from a conversation.
///
/// - `path`: key of the list in the document, for the account
///
/// # Errors
/// The malformed turn and the reason.
pub(super) fn read_turns<'a>(
    value: &'a Value,
    path: &str,
    turns: &mut Vec<Turn<'a>>,
    unread: &mut Unread,
) -> Result<(), String> {
    match value {
        Value::String(text) => {
            let parsed: Value = serde_json::from_str(text)
                .map_err(|error| format!("`{path}` is a string that is not JSON: {error}"))?;
            let mut owned = Vec::new();
            read_turns(&parsed, path, &mut owned, unread)?;
            turns.extend(owned.into_iter().map(Turn::into_owned));
            Ok(())
        }
        Value::Array(list) => match &list[..] {
            // A batch with a single conversation.
            [Value::Array(inner)] if inner.first().is_some_and(Value::is_object) => {
                read_turns(&list[0], path, turns, unread)
            }
            [Value::Array(first), _, ..] if first.first().is_some_and(Value::is_object) => {
                Err(format!("`{path}` holds {} conversations, expected one", list.len()))
            }
            _ => read_list(list, path, turns, unread),
        },
        Value::Object(columns) => {
            let rows = rows_from_columns(columns)
                .ok_or_else(|| format!("`{path}` must be a list of turns, found an object"))?;
            let mut owned = Vec::new();
            read_list(&rows, path, &mut owned, unread)?;
            turns.extend(owned.into_iter().map(Turn::into_owned));
            Ok(())
        }
        _ => Err(format!("`{path}` must be a list of turns")),
    }
}

/// Converts an object with lists, which some libraries store for a list with objects, to a list with objects.
fn rows_from_columns(columns: &Map<String, Value>) -> Option<Vec<Value>> {
    let lists: Option<Vec<(&String, &Vec<Value>)>> =
        columns.iter().map(|(name, values)| Some((name, values.as_array()?))).collect();
    let lists = lists.filter(|lists| lists.iter().any(|(name, _)| ROLE_KEYS.contains(&name.as_str())))?;
    let count = lists.first()?.1.len();
    if lists.iter().any(|(_, values)| values.len() != count) {
        return None;
    }
    let row = |at: usize| -> Map<String, Value> {
        lists.iter().map(|(name, values)| ((*name).clone(), values[at].clone())).collect()
    };
    Some((0..count).map(|at| Value::Object(row(at))).collect())
}

fn read_list<'a>(
    list: &'a [Value],
    path: &str,
    turns: &mut Vec<Turn<'a>>,
    unread: &mut Unread,
) -> Result<(), String> {
    for (number, value) in list.iter().enumerate() {
        let in_turn = |reason| format!("turn {number}: {reason}");
        match value {
            // The speakers alternate, beginning with the user.
            Value::String(text) => {
                let role = if number % 2 == 0 { USER } else { ASSISTANT };
                turns.push(Turn::from_text(role, text.into()).map_err(in_turn)?);
            }
            Value::Array(pair) => push_pair(pair, turns).map_err(in_turn)?,
            Value::Object(turn) => read_turn(turn, path, turns, unread).map_err(in_turn)?,
            _ => return Err(in_turn("it must be an object".to_owned())),
        }
    }
    Ok(())
}

/// Appends a question and an answer, `["what is it", "a kite"]`.
fn push_pair<'a>(pair: &'a [Value], turns: &mut Vec<Turn<'a>>) -> Result<(), String> {
    let [Value::String(asked), Value::String(answered)] = pair else {
        return Err("it must be a pair of strings".to_owned());
    };
    turns.push(Turn::from_text(USER, asked.into())?);
    turns.push(Turn::from_text(ASSISTANT, answered.into())?);
    Ok(())
}

/// Appends the turn in an object, or a turn for each role name in the object.
fn read_turn<'a>(
    turn: &'a Map<String, Value>,
    path: &str,
    turns: &mut Vec<Turn<'a>>,
    unread: &mut Unread,
) -> Result<(), String> {
    let stated = ROLE_KEYS.iter().find_map(|key| turn.get(*key)?.as_str());
    let Some(stated) = stated.filter(|role| !role.is_empty()) else {
        let before = turns.len();
        let used = read_roles(turn, turns)?;
        if turns.len() == before {
            return Err("a role is required".to_owned());
        }
        let is_target = is_target(turn, true)?;
        turns[before..].iter_mut().for_each(|turn| turn.is_target &= is_target);
        unread.note_keys(turn, path, |key| used.contains(&key) || is_flag(key));
        return Ok(());
    };
    let is_call = CALL_ROLES.contains(&lowered(stated).as_str());
    let role = if is_call { Cow::Borrowed(ASSISTANT) } else { normalize_role(stated) };
    let first_key = |keys: &[&'static str]| keys.iter().copied().find(|key| turn.contains_key(*key));
    let taken = [first_key(&ROLE_KEYS), first_key(&CONTENT_KEYS)].map(Option::unwrap_or_default);
    let value = turn.get(taken[1]);
    let mut made = Map::new();
    let content = match value {
        Some(value) if is_call => {
            made.insert("tool_calls".to_owned(), called(value)?);
            Content::default()
        }
        None | Some(Value::Null) => content_without(turn)?,
        Some(value) => parse_content(value)?,
    };
    if let Some(reasoning) = content.reasoning {
        made.insert("reasoning_content".to_owned(), reasoning.into());
    }
    if let Some(call) = turn.get(FUNCTION_CALL).filter(|call| !is_blank(call)) {
        made.insert("tool_calls".to_owned(), json!([{"type": "function", "function": call}]));
    }
    let is_target = is_target(turn, role == ASSISTANT)?;
    let is_string = !matches!(value, Some(Value::Array(_)));
    if let Some(parts) = value.and_then(Value::as_array).filter(|_| unread.is_noted()) {
        for (key, value) in parts.iter().flat_map(unused_keys) {
            unread.note(&format!("{path}[].content[].{key}"), value);
        }
    }
    unread.note_keys(turn, path, |key| taken.contains(&key) || MESSAGE_KEYS.contains(&key) || is_flag(key));
    turns.push(Turn {
        role,
        content: content.parts,
        is_string,
        is_target,
        call_text: value.filter(|_| is_call).and_then(Value::as_str).map(Cow::Borrowed),
        source: Some(Cow::Borrowed(turn)),
        taken,
        made,
    });
    Ok(())
}

/// Converts a role to the chat template's role name.
fn normalize_role(stated: &str) -> Cow<'_, str> {
    let name = lowered(stated);
    match known_role(&name) {
        Some(role) => Cow::Borrowed(role),
        None => Cow::Owned(stated.to_ascii_lowercase()),
    }
}

fn lowered(stated: &str) -> String {
    stated.to_ascii_lowercase().replace('-', "_")
}

fn known_role(name: &str) -> Option<&'static str> {
    let known =
        [(&ASSISTANT_ROLES[..], ASSISTANT), (&USER_ROLES, USER), (&TOOL_ROLES, TOOL), (&[SYSTEM], SYSTEM)];
    known.into_iter().find(|(names, _)| names.contains(&name)).map(|(_, role)| role)
}

/// Returns the content for a message without content: calls, reasoning and refusals need none.
fn content_without(turn: &Map<String, Value>) -> Result<Content<'_>, String> {
    if let Some(Value::String(refusal)) = turn.get("refusal") {
        return Ok(Content { parts: crate::sample::document::parts::split_text(refusal)?, reasoning: None });
    }
    let may_stand_alone = ["tool_calls", FUNCTION_CALL, "reasoning_content"];
    let is_alone = may_stand_alone.iter().any(|key| turn.get(*key).is_some_and(|value| !is_blank(value)));
    if is_alone {
        return Ok(Content::default());
    }
    Err("its content must be a string or a list of parts".to_owned())
}

/// Returns the calls in a tool call turn: one or several objects, as JSON or in a string.
fn called(value: &Value) -> Result<Value, String> {
    let parsed = match value {
        Value::String(text) => serde_json::from_str(text).ok(),
        value => Some(value.clone()),
    };
    let calls = match parsed {
        Some(Value::Array(calls)) => calls,
        Some(call @ Value::Object(_)) => vec![call],
        _ => Vec::new(),
    };
    let is_call = |call: &Value| call.get("name").or_else(|| call.get("function")).is_some();
    if calls.is_empty() || !calls.iter().all(is_call) {
        let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let shown = excerpt(&shown, EXCERPT_CHARACTERS);
        return Err(format!("a call of a tool must be JSON with `name` and `arguments`, found `{shown}`"));
    }
    let wrapped = |call: Value| {
        if call.get("function").is_some() { call } else { json!({"type": "function", "function": call}) }
    };
    Ok(calls.into_iter().map(wrapped).collect())
}

/// Appends the turns from an object whose keys are roles, or a question and an answer; returns the used keys.
fn read_roles<'a>(turn: &'a Map<String, Value>, turns: &mut Vec<Turn<'a>>) -> Result<Vec<&'a str>, String> {
    if let Some(pair) = Pair::of(turn) {
        let used = pair.keys();
        read_pair(turn, &pair, turns)?;
        return Ok(used);
    }
    let mut used = Vec::new();
    for (key, value) in turn {
        let (Some(text), Some(role)) = (value.as_str(), known_role(&lowered(key))) else { continue };
        if role != TOOL {
            turns.push(Turn::from_text(role, text.into())?);
            used.push(key.as_str());
        }
    }
    Ok(used)
}

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
