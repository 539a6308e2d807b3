//! Reads YAML as a JSON value.
//!
//! Supports sequences, mappings with text keys, and scalars; scalars stay texts, as names of shards are.
//! Features that those files never use are rejected: anchors, aliases (which let a small file expand without
//! bounds), tags, a second document.

use saphyr_parser::{Event, Parser};
use serde_json::{Map, Value};

/// Deepest nesting that is accepted.
const DEPTH_MAX: usize = 16;

/// Parses one document; an empty one is `Null`.
///
/// # Errors
/// The reason, with its line.
pub(super) fn parse_yaml(text: &str) -> Result<Value, String> {
    let mut open: Vec<Open> = Vec::new();
    let mut root = None;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| error.to_string())?;
        let at_line = |what: &str| format!("line {}: {what}", span.start.line());
        let value = match event {
            Event::Scalar(_, _, 1.., _) | Event::SequenceStart(1.., _) | Event::MappingStart(1.., _) => {
                return Err(at_line("anchors are not supported"));
            }
            Event::Alias(_) => return Err(at_line("aliases are not supported")),
            Event::Scalar(.., Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => {
                return Err(at_line("tags are not supported"));
            }
            Event::Scalar(text, ..) => Value::String(text.into_owned()),
            Event::SequenceStart(..) | Event::MappingStart(..) if open.len() == DEPTH_MAX => {
                return Err(at_line("nested too deeply"));
            }
            Event::SequenceStart(..) => {
                open.push(Open::Sequence(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(Open::Mapping(Map::new(), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(ended) => ended.into_value(),
                None => return Err(at_line("unexpected end of a collection")),
            },
            _ => continue,
        };
        match open.last_mut() {
            Some(parent) => parent.push(value).map_err(|what| at_line(&what))?,
            None if root.is_some() => return Err(at_line("only one document is supported")),
            None => root = Some(value),
        }
    }
    Ok(root.unwrap_or(Value::Null))
}

/// Collection that has not ended; a mapping with the key whose value follows.
enum Open {
    Sequence(Vec<Value>),
    Mapping(Map<String, Value>, Option<String>),
}

impl Open {
    fn push(&mut self, value: Value) -> Result<(), String> {
        match (self, value) {
            (Self::Sequence(items), value) => items.push(value),
            (Self::Mapping(_, key @ None), Value::String(name)) => *key = Some(name),
            (Self::Mapping(_, None), _) => return Err("a key must be a text".to_owned()),
            (Self::Mapping(entries, key), value) => {
                let name = key.take().unwrap_or_default();
                if entries.contains_key(&name) {
                    return Err(format!("key `{name}` comes twice"));
                }
                entries.insert(name, value);
            }
        }
        Ok(())
    }

    fn into_value(self) -> Value {
        match self {
            Self::Sequence(items) => Value::Array(items),
            Self::Mapping(entries, _) => Value::Object(entries),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_split_file_is_read() {
        let text =
            "split_parts:\n  train:\n  - shard-{0..1}.tar\n  - 'b: c.tar'\n  val: []\nexclude: []\n# end\n";
        let expected =
            json!({"split_parts": {"train": ["shard-{0..1}.tar", "b: c.tar"], "val": []}, "exclude": []});
        assert_eq!(parse_yaml(text).unwrap(), expected);
        assert_eq!(parse_yaml("").unwrap(), Value::Null);
    }

    #[test]
    fn what_could_be_misread_is_refused() {
        let refused = [
            ("a: &x [1]\nb: *x", "anchors"),
            ("a: !!binary aGk=", "tags"),
            ("a: 1\n---\nb: 2", "only one document"),
            ("a: 1\na: 2", "twice"),
            ("[1]: 2", "must be a text"),
            (&"[".repeat(40), "nested too deeply"),
            ("a: [1", "line"),
            ("a: b: c", "line"),
        ];
        for (text, reason) in refused {
            let error = parse_yaml(text).unwrap_err();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }
}
