//! Describes all settings, for documents, help texts and bindings.

use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::{Settings, names};

/// A setting, as it is declared.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// Name of the group.
    pub group: &'static str,
    /// Name in the group.
    pub key: String,
    /// What it does, with the default where that is not a value; without the full stop.
    pub about: String,
    /// Value without which nothing is set.
    pub default: Value,
    /// JSON schema of its values.
    pub schema: Value,
}

impl Settings {
    /// Describes all settings, in the order of their declaration.
    #[must_use]
    pub fn described() -> Vec<Described> {
        let settings = SchemaSettings::default().with(|settings| settings.inline_subschemas = true);
        let schema = settings.into_generator().into_root_schema_for::<Self>().to_value();
        let mut found = Vec::new();
        for group in names::<Self>() {
            let keys = schema["properties"][group]["properties"].as_object();
            for (key, schema) in keys.into_iter().flatten() {
                let about = schema["description"].as_str().unwrap_or_default().replace('\n', " ");
                found.push(Described {
                    group,
                    key: key.clone(),
                    about: about.trim_end_matches('.').to_owned(),
                    default: schema["default"].clone(),
                    schema: schema.clone(),
                });
            }
        }
        found
    }

    /// Describes the groups: name and sentence, in the order of their declaration.
    #[must_use]
    pub fn described_groups() -> Vec<(&'static str, String)> {
        let schema = schemars::schema_for!(Self).to_value();
        let about =
            |group: &str| schema["properties"][group]["description"].as_str().unwrap_or_default().into();
        names::<Self>().iter().map(|group| (*group, about(group))).collect()
    }
}

impl Described {
    /// Returns the name, such as `order.tail`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}.{}", self.group, self.key)
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
        let alternatives = self.schema["anyOf"].as_array().into_iter().flatten();
        choices_in(&self.schema).chain(alternatives.flat_map(choices_in)).collect()
    }
}

fn choices_in(schema: &Value) -> impl Iterator<Item = &str> {
    schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str)
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
            assert_eq!(setting.default, defaults[setting.group][&setting.key], "{}", setting.name());
        }
        let tail = described.iter().find(|setting| setting.name() == "order.tail").unwrap();
        assert_eq!(tail.choices(), ["carry", "drop", "short"]);
        assert_eq!(tail.shown_default().as_deref(), Some("carry"));
        assert!(Settings::described_groups().iter().all(|(_, about)| !about.is_empty()));
    }
}
