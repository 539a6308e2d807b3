//! Parses JSON as Python writes it: with `NaN`, `Infinity` and `-Infinity`, which JSON does not have.

use serde_json::Value;

/// Parses a checkpoint's JSON document.
///
/// Python's `json` module writes non-finite numbers as words. `NaN` is read as `null`, and so as a missing
/// field; infinities as the largest and the smallest `f64`, which a whole number is limited to. Words inside
/// strings stay.
///
/// # Errors
/// The `serde_json` error at the first fault; columns count the replaced words.
pub fn parse_json(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).or_else(|error| match with_finite_numbers(text) {
        Some(text) => serde_json::from_str(&text),
        None => Err(error),
    })
}

/// Replaces Python words outside strings; `None` if there are none.
fn with_finite_numbers(text: &str) -> Option<String> {
    const WORDS: [(&str, &str); 2] = [("NaN", "null"), ("Infinity", "1.7976931348623157e308")];
    let mut made = String::new();
    let (mut rest, mut is_quoted) = (text, false);
    while let Some(first) = rest.chars().next() {
        let word = WORDS.iter().find(|(word, _)| !is_quoted && rest.starts_with(word));
        let taken = match (first, word) {
            (_, Some((word, number))) => {
                made.push_str(number);
                rest = &rest[word.len()..];
                continue;
            }
            // The letter after a backslash ends no string.
            ('\\', None) if is_quoted => rest.char_indices().nth(2).map_or(rest.len(), |(at, _)| at),
            (letter, None) => {
                is_quoted ^= letter == '"';
                letter.len_utf8()
            }
        };
        made.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    (made != text).then_some(made)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::config::ConfigFields;

    #[test]
    fn words_of_python_are_numbers_outside_strings_only() {
        let text = r#"{"a": [0.0, Infinity, -Infinity], "b": NaN, "Infinity": "NaN \"Infinity\\", "c": "é", "d": Infinity}"#;
        let expected = json!({"a": [0.0, f64::MAX, f64::MIN], "b": null, "Infinity": "NaN \"Infinity\\", "c": "é",
            "d": f64::MAX});
        assert_eq!(parse_json(text).unwrap(), expected);
        let document = parse_json(r#"{"max_pixels": Infinity, "scale": Infinity, "layers": NaN}"#).unwrap();
        let fields = ConfigFields::new("config.json", &document).unwrap();
        assert_eq!(fields.count("max_pixels", 1), Ok(u32::MAX));
        assert_eq!(fields.number("scale", 1.0), Ok(f64::MAX));
        assert_eq!(fields.count("layers", 7), Ok(7));
    }

    #[test]
    fn other_faults_stay_faults() {
        for text in ["{", r#"{"a": Infinite}"#, r#"{"a": nan}"#, r#"{"a": "\"#, "NaNNaN", ""] {
            assert!(parse_json(text).is_err(), "{text}");
        }
        assert_eq!(parse_json(r#"{"a": [1, "NaN"]}"#).unwrap(), json!({"a": [1, "NaN"]}));
    }
}
