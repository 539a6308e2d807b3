//! Describes settings and configuration tables, for documents, help texts and bindings.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::Settings;

/// A setting, as it is declared.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// Name of the group or table, with dots if it is nested; empty outside of all tables.
    pub group: String,
    /// Name in the group.
    pub key: String,
    /// What it does, with the default where that is not a value, and the meaning of documented choices;
    /// without the full stop.
    pub about: String,
    /// Value without which nothing is set.
    pub default: Value,
    /// JSON schema of its values.
    pub schema: Value,
}

/// A table of settings, as it is declared.
#[derive(Debug, Clone, PartialEq)]
pub struct DescribedTable {
    /// Name, with dots if it is nested; empty for the settings outside of all tables.
    pub name: String,
    /// Purpose, as a sentence.
    pub about: String,
    /// Settings in it, without nested tables.
    pub settings: Vec<Described>,
}

/// Describes the tables of a type, in the order of their declaration: each before the tables nested in it.
#[must_use]
pub fn described_tables<T: JsonSchema>() -> Vec<DescribedTable> {
    let settings = SchemaSettings::default().with(|settings| settings.inline_subschemas = true);
    let schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    let mut tables = Vec::new();
    append_tables("", &schema, &mut tables);
    tables
}

fn append_tables(name: &str, schema: &Value, tables: &mut Vec<DescribedTable>) {
    let fields = schema["properties"].as_object().into_iter().flatten();
    let (nested, own): (Vec<_>, Vec<_>) = fields.partition(|(_, field)| field["properties"].is_object());
    let described = own.into_iter().map(|(key, field)| Described {
        group: name.to_owned(),
        key: key.clone(),
        about: about(field),
        default: field["default"].clone(),
        schema: field.clone(),
    });
    let settings: Vec<Described> = described.collect();
    if !settings.is_empty() {
        tables.push(DescribedTable { name: name.to_owned(), about: first_paragraph(schema), settings });
    }
    for (key, table) in nested {
        let nested_name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
        append_tables(&nested_name, table, tables);
    }
}

/// Returns the description of a setting and of its documented choices, without the full stop.
fn about(schema: &Value) -> String {
    let mut text = first_paragraph(schema);
    for choice in schema["oneOf"].as_array().into_iter().flatten() {
        if let Some(name) = choice["const"].as_str() {
            text.extend([" `", name, "`: ", &first_paragraph(choice)]);
        }
    }
    text.trim_end_matches('.').to_owned()
}

/// Returns the first paragraph of a description, as one line.
fn first_paragraph(schema: &Value) -> String {
    let description = schema["description"].as_str().unwrap_or_default();
    description.split("\n\n").next().unwrap_or_default().replace('\n', " ")
}

impl Settings {
    /// Describes all settings, in the order of their declaration.
    #[must_use]
    pub fn described() -> Vec<Described> {
        described_tables::<Self>().into_iter().flat_map(|table| table.settings).collect()
    }

    /// Describes the groups: name and sentence, in the order of their declaration.
    #[must_use]
    pub fn described_groups() -> Vec<(String, String)> {
        described_tables::<Self>().into_iter().map(|table| (table.name, table.about)).collect()
    }
}

impl Described {
    /// Returns the name, such as `order.tail`.
    #[must_use]
    pub fn name(&self) -> String {
        if self.group.is_empty() { self.key.clone() } else { format!("{}.{}", self.group, self.key) }
    }

    /// Returns the default as text; `None` where the description has it, and for what is off or not set.
    #[must_use]
    pub fn shown_default(&self) -> Option<String> {
        match &self.default {
            Value::Null | Value::Bool(false) => None,
            _ if self.about.contains("Default:") => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
    }

    /// Returns the names that the setting takes; none for numbers and free text.
    #[must_use]
    pub fn choices(&self) -> Vec<&str> {
        let lists = [&self.schema["anyOf"], &self.schema["oneOf"]];
        let alternatives = lists.into_iter().filter_map(Value::as_array).flatten();
        choices_in(&self.schema).chain(alternatives.flat_map(choices_in)).collect()
    }
}

fn choices_in(schema: &Value) -> impl Iterator<Item = &str> {
    schema["enum"].as_array().into_iter().flatten().chain(schema.get("const")).filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_described_once_with_its_default() {
        let described = Settings::described();
        let defaults = serde_json::to_value(Settings::default()).unwrap();
        let groups = defaults.as_object().unwrap();
        assert_eq!(
            described.len(),
            groups.values().map(|group| group.as_object().unwrap().len()).sum::<usize>()
        );
        for setting in &described {
            assert!(!setting.about.is_empty(), "{}", setting.name());
            assert_eq!(setting.default, defaults[&setting.group][&setting.key], "{}", setting.name());
        }
        let tail = described.iter().find(|setting| setting.name() == "order.tail").unwrap();
        assert_eq!(tail.choices(), ["carry", "repeat", "drop", "short"]);
        assert_eq!(tail.shown_default().as_deref(), Some("carry"));
        assert!(Settings::described_groups().iter().all(|(_, about)| !about.is_empty()));
    }
}
