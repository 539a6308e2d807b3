//! Decodes JSON and rejects repeated keys, which `serde_json` accepts.
//!
//! Two values under one key mean that the writer was wrong; picking either of them would hide it.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::error::DecodeError;
use super::text::decode_str;

/// Decodes a JSON document of at most `bytes_max` bytes; a leading byte order mark is dropped.
///
/// Objects and arrays may be nested 127 levels deep. Integers beyond 64 bits become f64.
///
/// # Errors
/// [`DecodeError::Malformed`] with the offset at which parsing stopped: syntax, bad UTF-8, lone surrogate
/// escapes, repeated keys, too deep nesting, numbers beyond f64; [`DecodeError::TooLarge`].
///
/// # Examples
/// ```
/// let error = dflop_samples::media::decode_json(br#"{"a": 1, "a": 2}"#, 1024).unwrap_err();
/// assert_eq!(error.to_string(), "malformed json at byte 11: duplicate key `a`");
/// ```
pub fn decode_json(bytes: &[u8], bytes_max: u64) -> Result<Value, DecodeError> {
    let text = decode_str("json", bytes, bytes_max)?;
    let skipped = bytes.len() - text.len();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    UniqueKeys
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value))
        .map_err(|error| DecodeError::malformed("json", skipped + offset_of(&error, text), reason_of(&error)))
}

/// Converts line and column of an error to an offset.
fn offset_of(error: &serde_json::Error, text: &str) -> usize {
    let line_start: usize =
        text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    (line_start + error.column().saturating_sub(1)).min(text.len())
}

/// Returns the error message without line and column.
fn reason_of(error: &serde_json::Error) -> String {
    let message = error.to_string();
    match message.rfind(" at line ") {
        Some(end) => message[..end].to_owned(),
        None => message,
    }
}

/// Builds a [`Value`] and rejects objects that repeat a key.
struct UniqueKeys;

impl<'de> DeserializeSeed<'de> for UniqueKeys {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = sequence.next_element_seed(UniqueKeys)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!("duplicate key `{key}`")));
            }
            object.insert(key, entries.next_value_seed(UniqueKeys)?);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(bytes: &[u8]) -> (u64, String) {
        match decode_json(bytes, 1 << 20) {
            Err(DecodeError::Malformed { offset, reason, .. }) => (offset, reason),
            other => panic!("expected a malformed document, got {other:?}"),
        }
    }

    #[test]
    fn repeated_keys_are_refused_at_any_depth() {
        assert_eq!(refused(br#"[{"x": {"a": 1, "a": 1}}]"#).1, "duplicate key `a`");
        assert!(decode_json(br#"[{"a": 1}, {"a": 2}]"#, 100).is_ok());
    }

    #[test]
    fn offsets_count_from_the_first_byte_over_lines_and_byte_order_mark() {
        let (offset, reason) = refused(b"\xEF\xBB\xBF{\n \"a\": trux\n}");
        assert_eq!((offset, reason.as_str()), (14, "expected ident"));
    }

    #[test]
    fn lone_surrogates_and_bad_utf8_are_refused_with_their_offset() {
        let (offset, reason) = refused(br#"{"a": "\ud800"}"#);
        assert!(reason.contains("hex escape"), "{reason}");
        assert!((6..=14).contains(&offset), "{offset}");
        assert_eq!(refused(b"{\"a\": \"\xFF\"}"), (7, "not UTF-8".to_owned()));
    }

    #[test]
    fn deep_nesting_and_huge_numbers_are_refused() {
        assert!(refused("[".repeat(100_000).as_bytes()).1.contains("recursion limit"));
        assert!(refused(b"1e999").1.contains("out of range"));
        assert!(refused(b"{} x").1.contains("trailing characters"));
    }

    proptest! {
        #[test]
        fn accepted_documents_are_what_serde_json_reads(text in r#"[\[\]{}",:a0-9. -]{0,40}"#) {
            if let Ok(value) = decode_json(text.as_bytes(), 100) {
                prop_assert_eq!(value, serde_json::from_str::<Value>(&text).unwrap());
            }
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_json(&bytes, 100);
        }
    }
}
