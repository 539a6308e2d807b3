//! A row value: JSON types plus bytes.

use std::fmt;

use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

/// Column value in a row. Objects keep the column order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cell {
    Null,
    Bool(bool),
    Int(i64),
    Unsigned(u64),
    /// A 32-bit number, which prints with fewer digits than the same number in 64 bits.
    Single(f32),
    Float(f64),
    Text(String),
    Bytes(Bytes),
    List(Vec<Cell>),
    Object(Vec<(String, Cell)>),
    /// A medium that became a field, by number; the field name replaces it before JSON is written.
    Medium(usize),
}

impl Cell {
    /// Moves the value out and leaves null.
    pub(crate) fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Null)
    }

    /// Returns the value for a name in an object.
    pub(crate) fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Object(values) => values.iter().find(|(known, _)| known == name).map(|(_, value)| value),
            _ => None,
        }
    }

    /// Returns a text that is not blank.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) if !text.trim().is_empty() => Some(text),
            _ => None,
        }
    }

    /// Returns whether there is a value: no null, no blank text, no empty list.
    pub(crate) fn is_filled(&self) -> bool {
        match self {
            Self::Null => false,
            Self::Text(text) => !text.trim().is_empty(),
            Self::Bytes(bytes) => !bytes.is_empty(),
            Self::List(values) => !values.is_empty(),
            _ => true,
        }
    }

    /// Returns an integer, also if it is written as text.
    pub(crate) fn as_integer(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            Self::Unsigned(number) => i64::try_from(*number).ok(),
            Self::Text(text) => text.trim().parse().ok(),
            _ => None,
        }
    }

    /// Returns a text or a number as text.
    pub(crate) fn to_name(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text.clone()),
            Self::Int(number) => Some(number.to_string()),
            Self::Unsigned(number) => Some(number.to_string()),
            Self::Single(number) => Some(number.to_string()),
            Self::Float(number) => Some(number.to_string()),
            Self::Bool(value) => Some(value.to_string()),
            _ => None,
        }
    }

    /// Converts the value to JSON; bytes and media, which no text is read from, become null.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        use serde_json::Value;
        match self {
            Self::Null | Self::Bytes(_) | Self::Medium(_) => Value::Null,
            Self::Bool(value) => (*value).into(),
            Self::Int(number) => (*number).into(),
            Self::Unsigned(number) => (*number).into(),
            Self::Single(number) => (*number).into(),
            Self::Float(number) => (*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(values) => values.iter().map(Self::to_json).collect(),
            Self::Object(values) => {
                values.iter().map(|(name, value)| (name.clone(), value.to_json())).collect()
            }
        }
    }

    /// Names the kind of value, for messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Bool(_) => "a Boolean",
            Self::Int(_) | Self::Unsigned(_) => "an integer",
            Self::Single(_) | Self::Float(_) => "a number",
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
            Self::Medium(_) => "a medium",
        }
    }
}

impl Serialize for Cell {
    /// Writes JSON. Numbers without a JSON form (`NaN`, infinities) become null; bytes are not expected,
    /// since field names replace media before.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Int(number) => serializer.serialize_i64(*number),
            Self::Unsigned(number) => serializer.serialize_u64(*number),
            Self::Medium(number) => serializer.serialize_u64(*number as u64),
            Self::Single(number) => serializer.serialize_f32(*number),
            Self::Float(number) => serializer.serialize_f64(*number),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Bytes(bytes) => serializer.collect_seq(bytes.iter()),
            Self::List(values) => {
                let mut list = serializer.serialize_seq(Some(values.len()))?;
                values.iter().try_for_each(|value| list.serialize_element(value))?;
                list.end()
            }
            Self::Object(values) => {
                let mut object = serializer.serialize_map(Some(values.len()))?;
                values.iter().try_for_each(|(name, value)| object.serialize_entry(name, value))?;
                object.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Cell {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CellVisitor)
    }
}

struct CellVisitor;

impl<'de> Visitor<'de> for CellVisitor {
    type Value = Cell;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value or bytes")
    }

    fn visit_unit<E>(self) -> Result<Cell, E> {
        Ok(Cell::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Cell, E> {
        Ok(Cell::Bool(value))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Cell, E> {
        Ok(Cell::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Cell, E> {
        Ok(i64::try_from(number).map_or(Cell::Unsigned(number), Cell::Int))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Cell, E> {
        Ok(Cell::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Cell, E> {
        Ok(Cell::Text(text.to_owned()))
    }

    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Cell, E> {
        Ok(Cell::Bytes(Bytes::copy_from_slice(bytes)))
    }

    fn visit_string<E>(self, text: String) -> Result<Cell, E> {
        Ok(Cell::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Cell, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element()? {
            values.push(value);
        }
        Ok(Cell::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Cell, A::Error> {
        let mut values: Vec<(String, Cell)> = Vec::new();
        while let Some((name, value)) = object.next_entry::<String, Cell>()? {
            // For repeated names the last value counts, as in Python.
            match values.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => *known = value,
                None => values.push((name, value)),
            }
        }
        Ok(Cell::Object(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_comes_back_as_it_was_in_the_order_of_its_columns() {
        let text = r#"{"z":1,"a":[null,true,-2,1.5,"x"],"big":18446744073709551615,"o":{"b":1,"a":2}}"#;
        let cell: Cell = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&cell).unwrap(), text);
    }

    #[test]
    fn numbers_keep_their_width_and_those_that_json_lacks_become_null() {
        let list = Cell::List(vec![Cell::Single(0.1), Cell::Float(0.1), Cell::Single(f32::NAN)]);
        assert_eq!(serde_json::to_string(&list).unwrap(), "[0.1,0.1,null]");
    }
}
