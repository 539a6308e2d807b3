//! How settings are spelled: names of choices, values with a text form, lists of names.

use std::fmt::Display;
use std::str::FromStr;

use serde::de::{Deserializer, Error as _, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Declares the names of the choices of a setting, and what they stand for.
macro_rules! choices {
    ($(#[$about:meta])* $name:ident for $target:ty {
        $($(#[$choice_about:meta])* $choice:ident, $text:literal => $value:expr;)+
    }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[expect(missing_docs, reason = "the setting describes its choices")]
        pub enum $name {
            $($(#[$choice_about])* #[serde(rename = $text)] $choice,)+
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(
                deserializer: D,
            ) -> std::result::Result<Self, D::Error> {
                $crate::settings::spelling::choice(deserializer, &[$(($text, Self::$choice)),+])
            }
        }

        impl From<$name> for $target {
            fn from(name: $name) -> Self {
                match name {
                    $($name::$choice => $value,)+
                }
            }
        }
    };
}

pub(super) use choices;

/// Reads the name of a choice.
pub(super) fn choice<'de, D: Deserializer<'de>, T: Copy>(
    deserializer: D,
    choices: &[(&str, T)],
) -> Result<T, D::Error> {
    choose(&String::deserialize(deserializer)?, choices).map_err(D::Error::custom)
}

/// Reads the name of a choice for a setting in a file.
///
/// # Errors
/// The deserializer's error with the setting and all choices, for an unknown name.
pub fn choice_for<'de, D: Deserializer<'de>, T: Copy>(
    setting: &str,
    deserializer: D,
    choices: &[(&str, T)],
) -> Result<T, D::Error> {
    let invalid = |reason| D::Error::custom(format!("invalid `{setting}`: {reason}"));
    choose(&String::deserialize(deserializer)?, choices).map_err(invalid)
}

/// Finds a choice by name; an error lists the names.
fn choose<T: Copy>(name: &str, choices: &[(&str, T)]) -> Result<T, String> {
    let chosen = choices.iter().find(|(known, _)| *known == name).map(|(_, choice)| *choice);
    chosen.ok_or_else(|| {
        let known: Vec<&str> = choices.iter().map(|(known, _)| *known).collect();
        let known = match known.split_last() {
            Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
            _ => known.concat(),
        };
        format!("expected {known}, found `{name}`")
    })
}

/// Reads and writes a value by its text form, for `#[serde(with)]`.
pub(super) mod text {
    use super::{Deserialize, Deserializer, Display, FromStr, Serializer};
    use serde::de::Error;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }

    pub(crate) fn serialize<S: Serializer, T: Display>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }
}

/// Reads and writes a value that may be missing by its text form, for `#[serde(with)]`.
pub(super) mod optional_text {
    use super::{Deserialize, Deserializer, Display, FromStr, Serializer};
    use serde::de::Error;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }

    #[expect(clippy::ref_option, reason = "serde passes a reference")]
    pub(crate) fn serialize<S: Serializer, T: Display>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }
}

/// Names, given as a list or as one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Names(pub Vec<String>);

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Names {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Names".into()
    }

    fn json_schema(_generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        })
    }
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::String(name) => Ok(Self(vec![name])),
            names => serde_json::from_value(names).map(Self).map_err(D::Error::custom),
        }
    }
}

/// Deserializer that keeps the names of the fields of a struct, and deserializes nothing.
pub(super) struct FieldNames<'a>(pub(super) &'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("only the names of fields are read"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}
