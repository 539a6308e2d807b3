//! Keeps what is made from declared settings: the reference pages for the loader settings and for the
//! training configuration, and the dataclasses of the Python package. With `UPDATE_DOCS=1` the files are
//! written.

use std::path::Path;

use dflop_executor::run::{EvaluationTable, GenerateTable, ModelTable, RunConfig};
use dflop_loader::settings::{Described, DescribedTable, Settings};
use dflop_tests::markdown::{expect_current, read, with_generated};
use serde_json::Value;

use super::source::root;

/// Columns of the Python sources.
const COLUMNS: usize = 110;
/// Dataclasses by group.
const CLASSES: [(&str, &str); 4] =
    [("plan", "Plan"), ("order", "Order"), ("processor", "Processor"), ("read", "Read")];
/// Fields that take Python objects, or that only Python has.
const OF_PYTHON: [&str; 3] = ["cost", "augment", "python_threads"];
/// Settings that only commands have; in Python, arguments of methods hold some of them.
const OF_COMMANDS: [&str; 5] =
    ["stall_log_seconds", "field_bytes", "scaled_decode", "first_epoch", "accept_changed_data"];

#[test]
fn the_reference_lists_all_settings() {
    let document = Path::new("docs/reference/settings.md");
    let mut text = read(document);
    for (group, about) in Settings::described_groups() {
        let described = Settings::described();
        let of_group = described.iter().filter(|setting| setting.group == group);
        let rows: String = of_group.map(|setting| row(&setting.name(), setting)).collect();
        let table =
            format!("{about}\n\n| setting | values | default | meaning |\n| --- | --- | --- | --- |\n{rows}");
        let name = format!("settings of {group}");
        text = with_generated(&text, &name, &table).unwrap_or_else(|| panic!("no marker `{name}`"));
    }
    expect_current(document, &text);
}

#[test]
fn the_reference_of_training_lists_all_keys() {
    let document = Path::new("docs/reference/train.md");
    let mut text = read(document);
    // The loader settings have a page of their own.
    let loader: Vec<String> = Settings::described_groups().into_iter().map(|(group, _)| group).collect();
    let described = RunConfig::described().into_iter().filter(|table| !loader.contains(&table.name));
    let described: Vec<DescribedTable> = described.collect();
    // Tables with equal keys share a section.
    for tables in described.chunk_by(|left, right| key_rows(left) == key_rows(right)) {
        let names: Vec<&str> = tables.iter().map(|table| table.name.as_str()).collect();
        let abouts: Vec<&str> = tables.iter().map(|table| table.about.as_str()).collect();
        let table = format!(
            "{}\n\n| key | values | default | meaning |\n| --- | --- | --- | --- |\n{}",
            abouts.join(" "),
            key_rows(&tables[0])
        );
        let place = if names == [""] { "the run".to_owned() } else { names.join(", ") };
        let name = format!("keys of {place}");
        text = with_generated(&text, &name, &table).unwrap_or_else(|| panic!("no marker `{name}`"));
    }
    expect_current(document, &text);
}

#[test]
fn every_key_of_training_is_described_once_with_its_default() {
    let mut config = RunConfig::new(ModelTable::default());
    config.data.generate = Some(GenerateTable::default());
    config.evaluation = Some(EvaluationTable::default());
    let written = serde_json::to_value(&config).expect("a configuration can be written");
    let tables = RunConfig::described();
    let described: Vec<&Described> = tables.iter().flat_map(|table| &table.settings).collect();
    assert_eq!(described.len(), leaves(&written));
    for setting in described {
        let name = setting.name();
        assert!(!setting.about.is_empty(), "{name}");
        let default = written.pointer(&format!("/{}", name.replace('.', "/")));
        assert_eq!(default, Some(&setting.default), "{name}");
    }
}

/// Returns the number of values that are no tables.
fn leaves(value: &Value) -> usize {
    value.as_object().map_or(1, |table| table.values().map(leaves).sum())
}

fn key_rows(table: &DescribedTable) -> String {
    table.settings.iter().map(|setting| row(&setting.key, setting)).collect()
}

/// Returns a table row for a setting under a name.
fn row(name: &str, setting: &Described) -> String {
    let default = setting.shown_default().map_or_else(String::new, |value| format!("`{value}`"));
    let about = setting.about.replace('|', "\\|");
    format!("| `{name}` | {} | {default} | {about} |\n", values(&setting.schema))
}

#[test]
fn the_python_dataclasses_are_those_of_the_library() {
    let file = "bindings/python/python/dflop/settings.py";
    let mut text = std::fs::read_to_string(root().join(file)).expect("the file can be read");
    for (group, class) in CLASSES {
        let start = text.find(&format!("class {class}(_Settings):")).expect("the class is there");
        let end = text[start..].find("\n\n\n").map_or(text.len(), |length| start + length + 1);
        let written = dataclass(&text[start..end], group);
        text.replace_range(start..end, &written);
    }
    expect_current(Path::new(file), &text);
}

/// Describes values for people.
fn values(schema: &Value) -> String {
    let undocumented = schema["enum"].as_array().into_iter().flatten();
    let documented = schema["oneOf"].as_array().into_iter().flatten().map(|choice| &choice["const"]);
    let choices = undocumented.chain(documented).filter_map(Value::as_str);
    let names: Vec<String> = choices.map(|name| format!("`{name}`")).collect();
    if !names.is_empty() {
        return names.join(", ");
    }
    if let Some(alternatives) = schema["anyOf"].as_array() {
        let shown: Vec<String> = alternatives.iter().map(values).filter(|shown| !shown.is_empty()).collect();
        return shown.join(", or ");
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let shown = kinds.into_iter().filter_map(|kind| match kind {
        "integer" => Some("integer".to_owned()),
        "number" => Some("number".to_owned()),
        "boolean" => Some("true, false".to_owned()),
        "string" => Some("text".to_owned()),
        "array" => Some(format!("list of {}", values(&schema["items"]))),
        "object" => Some("table".to_owned()),
        _ => None,
    });
    shown.collect::<Vec<_>>().join(", or ")
}

/// Returns a value's type in Python.
fn python_type(schema: &Value) -> Vec<String> {
    let names: Vec<String> = schema["enum"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(|name| format!("\"{name}\""))
        .collect();
    if !names.is_empty() {
        let null = schema["enum"].as_array().is_some_and(|all| all.contains(&Value::Null));
        return [Some(format!("Literal[{}]", names.join(", "))), null.then(|| "None".to_owned())]
            .into_iter()
            .flatten()
            .collect();
    }
    if let Some(alternatives) = schema["anyOf"].as_array() {
        return alternatives.iter().flat_map(python_type).collect();
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let named = kinds.into_iter().map(|kind| match kind {
        "integer" => "int".to_owned(),
        "number" => "float".to_owned(),
        "boolean" => "bool".to_owned(),
        "string" => "str".to_owned(),
        "array" => format!("Sequence[{}]", python_type(&schema["items"]).join(" | ")),
        _ => "None".to_owned(),
    });
    named.collect()
}

/// Returns a value as Python writes it.
fn python_value(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(flag) => if *flag { "True" } else { "False" }.to_owned(),
        Value::Number(number) => number
            .as_u64()
            .filter(|number| *number >= 10_000)
            .map_or_else(|| number.to_string(), |number| format!("{}_{:03}", number / 1000, number % 1000)),
        other => other.to_string(),
    }
}

/// Rewrites attributes and fields of a dataclass; those of Python alone stay where they are.
fn dataclass(class: &str, group: &str) -> String {
    let described = Settings::described();
    let declared: Vec<&Described> = described
        .iter()
        .filter(|setting| setting.group == group && !OF_COMMANDS.contains(&setting.key.as_str()))
        .collect();
    let (head, rest) = class.split_once("    Attributes:\n").expect("attributes are described");
    let (attributes, rest) = rest.split_once("\n\n").expect("a blank line ends the attributes");
    let (examples, fields) = rest.rsplit_once("    \"\"\"\n\n").expect("the description ends");
    let attributes = merged(attributes, "        ", &declared, attribute);
    let fields = merged(fields.trim_end_matches('\n'), "    ", &declared, |setting| {
        let (kind, default) = (python_type(&setting.schema).join(" | "), python_value(&setting.default));
        format!("    {}: {kind} = {default}", setting.key)
    });
    format!("{head}    Attributes:\n{attributes}\n\n{examples}    \"\"\"\n\n{fields}\n")
}

/// Returns entries in their present order: declared ones as declared, those of Python as they are.
fn merged(
    present: &str,
    indentation: &str,
    declared: &[&Described],
    entry: impl Fn(&Described) -> String,
) -> String {
    let mut entries: Vec<(String, String)> = Vec::new();
    for line in present.lines() {
        let inner = line.strip_prefix(indentation).filter(|inner| !inner.starts_with(' '));
        if let Some((name, _)) = inner.and_then(|inner| inner.split_once(':')) {
            entries.push((name.to_owned(), line.to_owned()));
        } else {
            let (_, last) = entries.last_mut().expect("an entry comes first");
            last.extend(["\n", line]);
        }
    }
    entries.retain(|(name, _)| {
        OF_PYTHON.contains(&name.as_str()) || declared.iter().any(|setting| setting.key == *name)
    });
    for setting in declared {
        match entries.iter_mut().find(|(name, _)| *name == setting.key) {
            Some((_, text)) => *text = entry(setting),
            None => entries.push((setting.key.clone(), entry(setting))),
        }
    }
    entries.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n")
}

/// Describes a field, wrapped, with the markup of Python's documents.
fn attribute(setting: &Described) -> String {
    let mut about = setting.about.replace('`', "``");
    for (group, class) in CLASSES {
        about = about.replace(&format!("``{group}."), &format!("``{class}."));
    }
    let (mut text, mut line) = (String::new(), format!("        {}:", setting.key));
    for word in format!("{about}.").split(' ') {
        if line.chars().count() + 1 + word.chars().count() > COLUMNS {
            text += &line;
            text.push('\n');
            line = format!("           {}", "");
        }
        line.push(' ');
        line += word;
    }
    text + &line
}
