//! Decodes UTF-8 text, and JSON as Python's `json` writes and reads it.
//!
//! Unread metadata does not exclude a sample: `NaN` and infinities become null, the last of repeated keys
//! counts, and half a surrogate pair becomes [`LONE_SURROGATE`], which text readers reject. Such documents
//! are rare, so they are repaired only after the strict parser rejects them.

use std::borrow::Cow;

use Surrogate::{High, Low};
use serde_json::Value;

use super::DecodeError;
use super::shape::check_limit;

/// Noncharacter in place of a lone surrogate escape, so that text readers can reject the text.
pub const LONE_SURROGATE: char = '\u{10FFFE}';

/// Decodes a JSON document with at most `bytes_max` bytes; a leading byte order mark is dropped.
///
/// Objects and arrays may be nested 127 levels deep. Integers beyond 64 bits become f64. `NaN`, `Infinity`,
/// `-Infinity` and numbers beyond f64 become null.
///
/// # Errors
/// [`DecodeError::Malformed`] with the offset at which parsing stopped: syntax, bad UTF-8, too deep nesting;
/// [`DecodeError::TooLarge`].
///
/// # Examples
/// ```
/// use dflop_samples::media::decode_json;
/// let json = decode_json(br#"{"similarity": NaN, "a": 1, "a": 2}"#, 1024)?;
/// assert_eq!(json, serde_json::json!({"similarity": null, "a": 2}));
/// # Ok::<(), dflop_samples::media::DecodeError>(())
/// ```
pub fn decode_json(bytes: &[u8], bytes_max: u64) -> Result<Value, DecodeError> {
    let text = decode_str("json", bytes, bytes_max)?;
    let skipped = bytes.len() - text.len();
    let malformed = |error: &serde_json::Error, offset: usize| {
        DecodeError::malformed("json", skipped + offset, error_reason(error))
    };
    match serde_json::from_str(text) {
        Ok(value) => Ok(value),
        Err(strict) => {
            let repaired = Repaired::of(text);
            let Some(repaired) = repaired else {
                return Err(malformed(&strict, error_offset(&strict, text)));
            };
            serde_json::from_str(&repaired.text)
                .map_err(|error| malformed(&error, repaired.offset(error_offset(&error, &repaired.text))))
        }
    }
}

/// Repairs a text that Python writes and the strict parser rejects: see [`decode_json`]. Borrows a text that
/// needs no repair.
///
/// # Examples
/// ```
/// use dflop_samples::media::repair_json;
/// assert_eq!(repair_json(r#"{"a": -Infinity, "b": "NaN"}"#), r#"{"a": null, "b": "NaN"}"#);
/// ```
#[must_use]
pub fn repair_json(text: &str) -> Cow<'_, str> {
    Repaired::of(text).map_or(Cow::Borrowed(text), |repaired| Cow::Owned(repaired.text))
}

/// Document with replacements for numbers and surrogates that JSON lacks.
struct Repaired {
    text: String,
    /// End of each replacement in the new text, and the number of bytes by which the old text is longer up to
    /// that end.
    shifts: Vec<(usize, isize)>,
}

impl Repaired {
    /// Repairs a text; `None` if there is nothing to repair.
    fn of(text: &str) -> Option<Self> {
        let mut repaired = Self { text: String::new(), shifts: Vec::new() };
        let bytes = text.as_bytes();
        let (mut copied, mut at) = (0, 0);
        while at < bytes.len() {
            let (end, by) = match bytes[at] {
                b'"' => {
                    at = repaired.string(text, &mut copied, at + 1);
                    continue;
                }
                b'N' | b'I' | b'-' | b'0'..=b'9' => number(text, at),
                _ => (at + 1, None),
            };
            if let Some(by) = by {
                repaired.replace(text, &mut copied, at..end, by);
            }
            at = end;
        }
        if repaired.shifts.is_empty() {
            return None;
        }
        repaired.text.push_str(&text[copied..]);
        Some(repaired)
    }

    /// Repairs the rest of a string; returns the position after the string.
    fn string(&mut self, text: &str, copied: &mut usize, mut at: usize) -> usize {
        let bytes = text.as_bytes();
        while let Some(&byte) = bytes.get(at) {
            match byte {
                b'"' => return at + 1,
                b'\\' => match surrogate(bytes, at) {
                    Some(High) if matches!(surrogate(bytes, at + ESCAPE), Some(Low)) => at += 2 * ESCAPE,
                    Some(_) => {
                        self.replace(text, copied, at..at + ESCAPE, LONE_SURROGATE.encode_utf8(&mut [0; 4]));
                        at += ESCAPE;
                    }
                    None => at += 2,
                },
                _ => at += 1,
            }
        }
        at
    }

    fn replace(&mut self, text: &str, copied: &mut usize, range: std::ops::Range<usize>, by: &str) {
        self.text.push_str(&text[*copied..range.start]);
        self.text.push_str(by);
        *copied = range.end;
        self.shifts.push((self.text.len(), range.end as isize - self.text.len() as isize));
    }

    /// Returns the old-text offset for a new-text offset.
    fn offset(&self, offset: usize) -> usize {
        let before = self.shifts.partition_point(|(end, _)| *end <= offset);
        let shift = before.checked_sub(1).map_or(0, |last| self.shifts[last].1);
        offset.saturating_add_signed(shift)
    }
}

/// Length of an escape such as `\ud800`, in bytes.
const ESCAPE: usize = 6;

/// Half of a surrogate pair.
enum Surrogate {
    High,
    Low,
}

/// Returns the surrogate whose escape starts at this position.
fn surrogate(bytes: &[u8], at: usize) -> Option<Surrogate> {
    let digits = bytes.get(at..at + ESCAPE)?.strip_prefix(b"\\u")?;
    let code = u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    match code {
        0xD800..0xDC00 => Some(High),
        0xDC00..0xE000 => Some(Low),
        _ => None,
    }
}

/// Returns the end of the word or number at this position outside strings, and the replacement.
fn number(text: &str, at: usize) -> (usize, Option<&'static str>) {
    let rest = &text[at..];
    if let Some(word) = ["NaN", "Infinity", "-Infinity"].into_iter().find(|word| rest.starts_with(word)) {
        return (at + word.len(), Some("null"));
    }
    let is_digit = |byte: u8| byte.is_ascii_digit() || b"+-.eE".contains(&byte);
    let length = rest.bytes().position(|byte| !is_digit(byte)).unwrap_or(rest.len()).max(1);
    let is_infinite = rest[..length].parse().is_ok_and(f64::is_infinite);
    (at + length, is_infinite.then_some("null"))
}

/// Converts an error's line and column to an offset.
fn error_offset(error: &serde_json::Error, text: &str) -> usize {
    let line_start: usize =
        text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    (line_start + error.column().saturating_sub(1)).min(text.len())
}

/// Returns the error message without line and column.
fn error_reason(error: &serde_json::Error) -> String {
    let message = error.to_string();
    match message.rfind(" at line ") {
        Some(end) => message[..end].to_owned(),
        None => message,
    }
}

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Decodes a text with at most `bytes_max` bytes; a leading byte order mark is dropped, NUL is kept.
///
/// # Errors
/// [`DecodeError::Malformed`] with the offset of the first byte that is not UTF-8, [`DecodeError::TooLarge`].
///
/// # Examples
/// ```
/// let error = dflop_samples::media::decode_text(b"caf\xE9", 1024).unwrap_err();
/// assert_eq!(error.to_string(), "malformed text at byte 3: not UTF-8");
/// ```
pub fn decode_text(bytes: &[u8], bytes_max: u64) -> Result<String, DecodeError> {
    Ok(decode_str("text", bytes, bytes_max)?.to_owned())
}

/// Checks a text and returns the text without byte order mark.
fn decode_str<'a>(format: &'static str, bytes: &'a [u8], bytes_max: u64) -> Result<&'a str, DecodeError> {
    check_limit(format, bytes.len() as u64, "bytes", "text_bytes_max", bytes_max)?;
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let is_utf16 = bytes.starts_with(b"\xFF\xFE") || bytes.starts_with(b"\xFE\xFF");
        let reason = if is_utf16 { "not UTF-8; it looks like UTF-16" } else { "not UTF-8" };
        DecodeError::malformed(format, error.valid_up_to(), reason)
    })?;
    Ok(if bytes.starts_with(BYTE_ORDER_MARK) { &text[BYTE_ORDER_MARK.len()..] } else { text })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn refused(bytes: &[u8]) -> (u64, String) {
        match decode_json(bytes, 1 << 20) {
            Err(DecodeError::Malformed { offset, reason, .. }) => (offset, reason),
            other => panic!("expected a malformed document, got {other:?}"),
        }
    }

    fn decoded(text: &str) -> Value {
        decode_json(text.as_bytes(), 1 << 20).unwrap()
    }

    #[test]
    fn what_python_writes_is_read() {
        assert_eq!(decoded(r"[NaN, Infinity, -Infinity, 1e999, -1e999, 1]"), {
            json!([null, null, null, null, null, 1])
        });
        assert_eq!(
            decoded(r#"{"a": "NaN \" Infinity", "b":NaN}"#),
            json!({"a": "NaN \" Infinity", "b": null})
        );
        let big = decoded("123456789012345678901234567890");
        assert!(big.as_f64().is_some_and(|number| (number / 1.234_567_890_123_456_8e29 - 1.0).abs() < 1e-12));
    }

    #[test]
    fn the_last_of_repeated_keys_counts_in_the_place_of_the_first() {
        assert_eq!(decoded(r#"[{"x": {"b": 1, "a": 1, "b": 2}}]"#).to_string(), r#"[{"x":{"b":2,"a":1}}]"#);
    }

    #[test]
    fn keys_keep_their_order() {
        let text = r#"{"z":1,"a":{"y":2,"b":3}}"#;
        assert_eq!(decoded(text).to_string(), text);
    }

    #[test]
    fn lone_surrogates_are_marked_and_pairs_are_characters() {
        let mark = LONE_SURROGATE;
        for (text, expected) in [
            (r#""\ud83e\ude81""#, "\u{1fa81}".to_owned()),
            (r#""a\ud800""#, format!("a{mark}")),
            (r#""\udc00\ud800\n""#, format!("{mark}{mark}\n")),
            (r#""\ud800\ud83e\ude81 \\ud800""#, format!("{mark}\u{1fa81} \\ud800")),
        ] {
            assert_eq!(decoded(text), Value::from(expected), "{text}");
        }
    }

    #[test]
    fn offsets_count_from_the_first_byte_over_lines_marks_and_repairs() {
        let (offset, reason) = refused(b"\xEF\xBB\xBF{\n \"a\": trux\n}");
        assert_eq!((offset, reason.as_str()), (14, "expected ident"));
        assert_eq!(refused(b"[NaN, -Infinity,\n x]").0, 18);
        assert_eq!(refused(b"[-Infinity, x]").0, 12);
        assert_eq!(refused(b"{\"a\": \"\xFF\"}"), (7, "not UTF-8".to_owned()));
    }

    #[test]
    fn other_documents_are_refused() {
        assert!(refused("[".repeat(100_000).as_bytes()).1.contains("recursion limit"));
        assert!(refused(b"{} x").1.contains("trailing characters"));
        for text in ["", "[1,]", "{a: 1}", "nan", "Inf", "NaNa", "'a'", "[\"\\ud800]", "\"\\ud80\""] {
            refused(text.as_bytes());
        }
    }

    proptest! {
        #[test]
        fn accepted_documents_are_what_serde_json_reads(text in r#"[\[\]{}",:a0-9. -]{0,40}"#) {
            if let Ok(value) = serde_json::from_str::<Value>(&text) {
                prop_assert_eq!(decode_json(text.as_bytes(), 100).unwrap(), value);
            }
        }

        #[test]
        fn a_repaired_document_needs_no_repair(text in r#"[\[\]{}",:aNIefinty0-9.\\ud8-]{0,60}"#) {
            let repaired = repair_json(&text).into_owned();
            prop_assert_eq!(repair_json(&repaired), repaired.as_str());
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_json(&bytes, 100);
        }
    }

    #[test]
    fn byte_order_mark_is_dropped_and_nul_is_kept() {
        assert_eq!(decode_text(b"\xEF\xBB\xBFa\0b", 100).unwrap(), "a\0b");
    }

    #[test]
    fn utf16_is_named() {
        let error = decode_text(b"\xFF\xFEa\0", 100).unwrap_err();
        assert_eq!(error.to_string(), "malformed text at byte 0: not UTF-8; it looks like UTF-16");
    }

    #[test]
    fn long_text_is_refused() {
        assert!(matches!(decode_text(&[b'a'; 11], 10), Err(DecodeError::TooLarge { actual: 11, .. })));
    }
}
