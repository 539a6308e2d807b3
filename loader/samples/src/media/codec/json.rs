//! JSON documents, with or without texts, and JSON Lines, which are a list of the line values.

use bytes::Bytes;

use super::{Codec, Content};
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, decode_json};

/// JSON document codec.
#[derive(Debug)]
pub(super) struct JsonCodec;

impl Codec for JsonCodec {
    fn name(&self) -> &'static str {
        "json"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["json", "jsn"]
    }

    fn content(&self) -> Content {
        Content::Document
    }

    fn probe(&self, _: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        Ok(MediaShape::Opaque)
    }

    fn decode(&self, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
        decode_json(&bytes, limits.text_bytes_max).map(Media::Json)
    }
}

/// JSON Lines codec: the value of a single line, or a list with the values of all lines.
#[derive(Debug)]
pub(super) struct JsonLinesCodec;

impl Codec for JsonLinesCodec {
    fn name(&self) -> &'static str {
        "json-lines"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["jsonl", "ndjson"]
    }

    fn content(&self) -> Content {
        Content::Document
    }

    fn probe(&self, _: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        Ok(MediaShape::Opaque)
    }

    fn decode(&self, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
        let whole = decode_json(&bytes, limits.text_bytes_max);
        let lines = || bytes.split(|&byte| byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
        if whole.is_ok() || lines().nth(1).is_none() {
            return whole.map(Media::Json);
        }
        let values: Result<Vec<_>, _> =
            lines().map(|line| decode_json(line, limits.text_bytes_max)).collect();
        values.map(|values| Media::Json(values.into()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::media::decode;

    #[test]
    fn lines_are_a_list_and_one_line_is_its_value() {
        let decoded = |text: &'static str| decode("jsonl", text.into(), &DecodeLimits::default());
        assert_eq!(decoded("{\"a\": 1}\n").unwrap(), Media::Json(json!({"a": 1})));
        assert_eq!(decoded("{\n\"a\": 1}").unwrap(), Media::Json(json!({"a": 1})));
        assert!(decoded("{\"a\": 1}\n{\n").is_err());
        assert_eq!(decoded("{\"a\": NaN}\r\n\n[2]\n").unwrap(), Media::Json(json!([{"a": null}, [2]])));
    }
}
