//! Renders conversation turns to text with the model's chat template.
//!
//! A model defines in Jinja how turns are written. Templates are rendered as in `transformers`: trimmed
//! blocks, Python's string methods, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML,
//! and `{% generation %}` blocks, whose content the model is trained on. Messages keep all keys, and `tools`
//! and `documents` are none if a sample has none. The clock is read once, when the template is parsed, so
//! that prompts do not change at midnight during a run.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::SystemTime;

use dflop_samples::{EXCERPT_CHARACTERS, Error, Result, excerpt, guarded};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::json;

use crate::family::{Family, Placeholder, VideoText};
use crate::message::{Dialogue, Message, MessagePart, REASONING, to_value};

/// Name of the only template in an environment.
const NAME: &str = "chat_template";

/// Maximum number of instructions for rendering a conversation; real templates need about a hundred per turn.
const FUEL: u64 = 10_000_000;
/// Maximum number of bytes in a rendered conversation.
const RENDERED_BYTES_MAX: usize = 256 << 20;

/// Maximum nesting depth for macros and values.
const DEPTH_MAX: usize = 100;

/// Variables with the text written at the bounds of a `{% generation %}` block.
const BOUNDS: [&str; 2] = ["__generation_start__", "__generation_end__"];
/// Variables that `transformers` always passes.
const ALWAYS_PASSED: [&str; 2] = ["tools", "documents"];

/// Parsed chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    variables: BTreeMap<String, String>,
    family: Family,
    form: ContentForm,
    /// Whether a string content in the sample is passed as a string.
    takes_strings: bool,
    has_generation: bool,
    written: Written,
}

/// Message parts that a template writes in addition to roles and contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Written {
    /// Tool calls.
    pub(crate) calls: bool,
    /// Tool descriptions.
    pub(crate) tools: bool,
    /// Reasoning in the last turn.
    pub(crate) reasoning: bool,
}

/// Form that a template expects for message content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContentForm {
    /// A list with typed parts.
    Parts,
    /// A string that contains media placeholders.
    Text,
}

impl ChatTemplate {
    /// Parses a template; `variables` are available in addition to the messages, for example `bos_token`.
    ///
    /// # Errors
    /// [`Error::Config`] with the line, if the template is not valid Jinja or cannot render a user turn.
    pub fn parse(
        source: &str,
        variables: BTreeMap<String, String>,
        family: &Family,
        now: SystemTime,
    ) -> Result<Self> {
        let mut environment = environment(now);
        let (source, has_generation) = with_bounds(source);
        let parsed = guarded(|| environment.add_template_owned(NAME, source));
        let parsed = parsed.map_err(|reason| Error::Config { setting: "chat_template", reason })?;
        parsed.map_err(|error| invalid(&error))?;
        let mut template = Self {
            environment,
            variables,
            family: family.clone(),
            form: ContentForm::Parts,
            takes_strings: false,
            has_generation,
            written: Written::default(),
        };
        template.form = template.probe_form()?;
        template.takes_strings = template.form == ContentForm::Parts && template.probe_strings();
        template.written = template.probe_written();
        Ok(template)
    }

    /// Returns whether the template marks training targets with `{% generation %}`.
    pub(crate) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Returns the message parts that the template writes in addition to roles and contents.
    pub(crate) fn written(&self) -> Written {
        self.written
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// The message from the template's `raise_exception`, or the reason why rendering failed.
    pub fn render(&self, dialogue: &Dialogue, has_generation_prompt: bool) -> Result<String, String> {
        let rendered =
            self.render_as(self.form, self.takes_strings, dialogue, has_generation_prompt, ["", ""]);
        rendered.map_err(|error| reason(&error))
    }

    /// Renders a conversation with a text before and a text after the content of each `{% generation %}`
    /// block.
    ///
    /// # Errors
    /// See [`render`](Self::render).
    pub(crate) fn render_bounds(&self, dialogue: &Dialogue, bounds: [&str; 2]) -> Result<String, String> {
        let rendered = self.render_as(self.form, self.takes_strings, dialogue, false, bounds);
        rendered.map_err(|error| reason(&error))
    }

    fn render_as(
        &self,
        form: ContentForm,
        takes_strings: bool,
        dialogue: &Dialogue,
        has_generation_prompt: bool,
        bounds: [&str; 2],
    ) -> Result<String, minijinja::Error> {
        let message = |message| self.message(form, takes_strings, message);
        let messages: Vec<Value> = dialogue.messages.iter().map(message).collect();
        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        context.extend(self.variables.iter().map(|(name, text)| (name.as_str(), text.into())));
        context.insert("image_placeholder", self.family.image_text().into());
        let audio = self.family.audio().map_or_else(String::new, Placeholder::to_text);
        context.insert("audio_placeholder", audio.into());
        let video = self.family.video().map(VideoText::to_text);
        context.insert("video_placeholder", video.unwrap_or_default().into());
        context.extend(ALWAYS_PASSED.map(|name| (name, Value::from(()))));
        context.extend(dialogue.variables.iter().map(|(name, value)| (name.as_str(), value.clone())));
        context.insert("messages", Value::from(messages));
        context.insert("add_generation_prompt", has_generation_prompt.into());
        context.extend(BOUNDS.into_iter().zip(bounds.map(Value::from)));
        let failed = |reason| minijinja::Error::new(ErrorKind::InvalidOperation, reason);
        let rendered = guarded(|| {
            let mut out = Rendered::default();
            let template = self.environment.get_template(NAME)?;
            template.render_captured_to(Value::from(context), &mut out)?;
            Ok::<_, minijinja::Error>(out)
        });
        let Rendered { bytes } = rendered.map_err(failed)??;
        String::from_utf8(bytes).map_err(|error| failed(error.to_string()))
    }

    fn message(&self, form: ContentForm, takes_strings: bool, message: &Message) -> Value {
        let is_text = |part: &MessagePart| matches!(part, MessagePart::Text(_));
        let is_string = takes_strings && message.is_string && message.content.iter().all(is_text);
        let content = match form {
            ContentForm::Parts if !is_string => message.content.iter().map(part_value).collect(),
            ContentForm::Parts => Value::from(message.content.iter().map(part_text).collect::<String>()),
            ContentForm::Text => Value::from(self.family.inline(&message.content, "\n")),
        };
        let first = [("role", Value::from(message.role.as_str())), ("content", content)];
        let others = message.keys.iter().map(|(key, value)| (key.as_str(), value.clone()));
        Value::from_pairs(first.into_iter().chain(others))
    }

    /// Returns parts if the template renders them like a string, or cannot render a string.
    fn probe_form(&self) -> Result<ContentForm> {
        const WORD: &str = "probe";
        let content = vec![MessagePart::Text(WORD.to_owned())];
        let turn = Dialogue::new(vec![Message::new("user", content)]);
        let [parts, text] = [ContentForm::Parts, ContentForm::Text]
            .map(|form| self.render_as(form, false, &turn, false, ["", ""]));
        match (parts, text) {
            (Ok(parts), Ok(text)) if parts == text || !text.contains(WORD) => Ok(ContentForm::Parts),
            (Ok(_), Err(_)) => Ok(ContentForm::Parts),
            (_, Ok(text)) if text.contains(WORD) => Ok(ContentForm::Text),
            (_, Ok(_)) => {
                let reason = "the template omits the text of the user".to_owned();
                Err(Error::Config { setting: "chat_template", reason })
            }
            (Err(_), Err(error)) => Err(invalid(&error)),
        }
    }

    /// Returns whether the template renders strings like lists of parts, for every role.
    fn probe_strings(&self) -> bool {
        let turn = |role: &str| Message::new(role, vec![MessagePart::Text(format!("probe of {role}"))]);
        let dialogues = [["user", "assistant"], ["system", "user"]];
        let mut dialogues =
            dialogues.iter().map(|roles| Dialogue::new(roles.iter().map(|role| turn(role)).collect()));
        dialogues.all(|dialogue| {
            let [parts, strings] = [false, true].map(|takes_strings| {
                self.render_as(ContentForm::Parts, takes_strings, &dialogue, false, ["", ""])
            });
            match (parts, strings) {
                (Ok(parts), Ok(strings)) => parts == strings,
                // The roles are rejected, regardless of the content.
                (Err(_), _) => true,
                (Ok(_), Err(_)) => false,
            }
        })
    }

    /// Detects calls, tools and reasoning in rendered conversations.
    fn probe_written(&self) -> Written {
        const WORD: &str = "probe_of_keys";
        let function = |name: &str| json!({"name": name, "description": "", "parameters": {}});
        let call =
            json!([{"id": "call12345", "type": "function", "function": {"name": WORD, "arguments": {}}}]);
        let tools = |name: &str| json!([{"type": "function", "function": function(name)}]);
        let is_written = |key: Option<(&str, serde_json::Value)>, tools: serde_json::Value| {
            let question = Message::new("user", vec![MessagePart::Text("question".to_owned())]);
            let mut answer = Message::new("assistant", vec![MessagePart::Text("answer".to_owned())]);
            answer.keys.extend(key.map(|(key, value)| (key.to_owned(), to_value(&value))));
            if answer.has_calls() {
                answer.content.clear();
            }
            let variables = vec![("tools".to_owned(), to_value(&tools))];
            let dialogue = Dialogue { messages: vec![question, answer], variables };
            // A template that rejects this conversation reports an error for a real conversation itself.
            self.render(&dialogue, false).map_or(true, |text| text.contains(WORD))
        };
        Written {
            calls: is_written(Some(("tool_calls", call)), tools("tool")),
            tools: is_written(None, tools(WORD)),
            reasoning: is_written(Some((REASONING, json!(WORD))), json!(null)),
        }
    }
}

/// Rendered text, up to a limit.
#[derive(Debug, Default)]
struct Rendered {
    bytes: Vec<u8>,
}

impl Write for Rendered {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > RENDERED_BYTES_MAX {
            let reason = format!("the template renders more than {RENDERED_BYTES_MAX} bytes");
            return Err(std::io::Error::other(reason));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn part_text(part: &MessagePart) -> &str {
    match part {
        MessagePart::Text(text) => text,
        MessagePart::Medium(_) => "",
    }
}

fn part_value(part: &MessagePart) -> Value {
    let kind = match part {
        MessagePart::Text(_) => "text",
        MessagePart::Medium(modality) => modality.name(),
    };
    let mut value = BTreeMap::from([("type", Value::from(kind))]);
    if let MessagePart::Text(text) = part {
        value.insert("text", Value::from(text.as_str()));
    }
    Value::from(value)
}

/// Creates an environment like the environment in `transformers`.
fn environment(now: SystemTime) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters are valid"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_recursion_limit(DEPTH_MAX);
    environment.set_fuel(Some(FUEL));
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: String| strftime(now, &format));
    environment
}

/// Replaces `{% generation %}` tags, which do not exist in Jinja, by the bound variables; returns whether
/// there are any.
fn with_bounds(source: &str) -> (String, bool) {
    let mut plain = String::with_capacity(source.len());
    let mut has_generation = false;
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let end = rest[start + 2..].find("%}").map_or(rest.len(), |end| start + 2 + end);
        let tag = &rest[start + 2..end];
        plain.push_str(&rest[..start + 2]);
        let is_mark = |character: char| character.is_whitespace() || "+-".contains(character);
        let name = tag.trim_matches(is_mark);
        let replaced = match name {
            "generation" => Some((BOUNDS[0], "if true")),
            "endgeneration" => Some((BOUNDS[1], "endif")),
            _ => None,
        };
        match replaced.zip(tag.split_once(name)) {
            // A tag on either side of the variable keeps the white space control there.
            Some(((bound, word), (before, after))) => {
                has_generation = true;
                for part in [before, word, " %}{{ ", bound, " }}{% ", word, after] {
                    plain.push_str(part);
                }
            }
            None => plain.push_str(tag),
        }
        rest = &rest[end..];
    }
    (plain + rest, has_generation)
}

fn strftime(now: SystemTime, format: &str) -> Result<String, minijinja::Error> {
    use std::fmt::Write as _;
    let now: chrono::DateTime<chrono::Utc> = {
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        chrono::DateTime::from_timestamp(seconds as i64, 0).unwrap_or_default()
    };
    let mut text = String::new();
    write!(text, "{}", now.format(format)).map_err(|_| {
        minijinja::Error::new(
            ErrorKind::InvalidOperation,
            format!("`{format}` is not a date format of `strftime`"),
        )
    })?;
    Ok(text)
}

/// Equals Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
#[expect(clippy::needless_pass_by_value, reason = "minijinja requires this signature")]
fn to_json(value: &Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut text = String::new();
    write_json(value, indent, 0, &mut text)?;
    Ok(text)
}

fn write_json(
    value: &Value,
    indent: Option<usize>,
    depth: usize,
    out: &mut String,
) -> Result<(), minijinja::Error> {
    let too_deep =
        || minijinja::Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply for JSON");
    if depth > DEPTH_MAX {
        return Err(too_deep());
    }
    let (brackets, is_map) = match value.kind() {
        ValueKind::Map => (['{', '}'], true),
        ValueKind::Seq | ValueKind::Iterable => (['[', ']'], false),
        ValueKind::String => {
            out.push_str(&json_string(value.as_str().unwrap_or_default()));
            return Ok(());
        }
        ValueKind::None | ValueKind::Undefined => {
            out.push_str("null");
            return Ok(());
        }
        ValueKind::Bool => {
            out.push_str(if value.is_true() { "true" } else { "false" });
            return Ok(());
        }
        _ => {
            out.push_str(&value.to_string());
            return Ok(());
        }
    };
    out.push(brackets[0]);
    let mut is_empty = true;
    for item in value.try_iter()? {
        out.push_str(match (is_empty, indent) {
            (true, _) => "",
            (false, None) => ", ",
            (false, Some(_)) => ",",
        });
        is_empty = false;
        break_line(indent, depth + 1, out);
        if is_map {
            out.push_str(&json_string(&item.to_string()));
            out.push_str(": ");
            write_json(&value.get_item(&item)?, indent, depth + 1, out)?;
        } else {
            write_json(&item, indent, depth + 1, out)?;
        }
    }
    if !is_empty {
        break_line(indent, depth, out);
    }
    out.push(brackets[1]);
    Ok(())
}

fn break_line(indent: Option<usize>, depth: usize, out: &mut String) {
    if let Some(indent) = indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent.min(DEPTH_MAX) * depth));
    }
}

fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn invalid(error: &minijinja::Error) -> Error {
    Error::Config { setting: "chat_template", reason: reason(error) }
}

/// Returns a template error's message, with the line.
fn reason(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let what = excerpt(&what, EXCERPT_CHARACTERS);
    error.line().map_or_else(|| what.to_string(), |line| format!("{what} (chat template, line {line})"))
}
