//! Reads the flags that exclude a turn from training.

use serde_json::{Map, Value};

use crate::error::json_excerpt;

/// Flags on assistant turns: OpenAI's `weight`, ms-swift's `loss` and `loss_scale`, axolotl's `train` and
/// `training`.
const FLAGS: [&str; 5] = ["weight", "loss", "loss_scale", "train", "training"];
/// Flags that axolotl obeys on turns with any role.
const FLAGS_OF_ANY_ROLE: [&str; 2] = ["train", "training"];
/// Word prefixes in names of other switches, which must not be overlooked.
const SWITCH_WORDS: [&str; 7] = ["train", "loss", "mask", "weight", "learn", "supervis", "ignore"];

/// Returns whether a turn key is a flag.
pub(super) fn is_flag(key: &str) -> bool {
    FLAGS.contains(&key)
}

/// Returns whether the flags keep a turn as a training target; without flags, an assistant turn is a target.
///
/// # Errors
/// A flag that is neither on nor off, that marks a turn with a different role as a target, or that is
/// unknown.
pub(super) fn is_target(turn: &Map<String, Value>, is_assistant: bool) -> Result<bool, String> {
    let mut is_on = true;
    for (key, value) in turn {
        if value.is_null() || !is_switch(key, value) {
            continue;
        }
        if !is_flag(key) {
            return Err(format!(
                "`{key}` looks like a training flag that is not known; known flags are {}",
                FLAGS.map(|flag| format!("`{flag}`")).join(", ")
            ));
        }
        let is_set = match value.as_bool().or_else(|| value.as_f64().map(|number| number != 0.0)) {
            Some(_) if value.as_f64().is_some_and(|number| ![0.0, 1.0].contains(&number)) => None,
            is_set => is_set,
        };
        let Some(is_set) = is_set else {
            return Err(format!("`{key}` must be true or false, 1 or 0, found {}", json_excerpt(value)));
        };
        if is_set && !is_assistant && FLAGS_OF_ANY_ROLE.contains(&key.as_str()) {
            return Err(format!("`{key}` is true, but only turns of the assistant can be training targets"));
        }
        is_on &= is_set;
    }
    Ok(is_on && is_assistant)
}

/// Returns whether a turn key switches training: a known flag, a flag by name, or character ranges to train
/// on.
fn is_switch(key: &str, value: &Value) -> bool {
    if is_flag(key) {
        return true;
    }
    let is_short = value.is_boolean() || value.is_number() || key.ends_with("_detail");
    is_short && words(key).any(|word| SWITCH_WORDS.iter().any(|switch| word.starts_with(switch)))
}

/// Returns the words in a key such as `is_train` or `isTrain`, in lower case.
fn words(key: &str) -> impl Iterator<Item = String> {
    let mut spaced = String::with_capacity(key.len() + 1);
    for letter in key.chars() {
        if letter.is_uppercase() {
            spaced.push(' ');
        }
        spaced.extend(letter.to_lowercase());
    }
    let words: Vec<String> =
        spaced.split(|letter: char| !letter.is_alphanumeric()).map(str::to_owned).collect();
    words.into_iter()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(turn: &Value, is_assistant: bool) -> Result<bool, String> {
        is_target(turn.as_object().unwrap(), is_assistant)
    }

    #[test]
    fn known_flags_are_on_or_off() {
        for (turn, expected) in [
            (json!({"content": "x"}), true),
            (json!({"weight": 0}), false),
            (json!({"weight": 1, "loss": null}), true),
            (json!({"weight": 1.0, "train": false}), false),
            (json!({"training": true}), true),
            (json!({"loss": false}), false),
            (json!({"loss_scale": 0.0}), false),
        ] {
            assert_eq!(read(&turn, true), Ok(expected), "{turn}");
        }
        assert_eq!(read(&json!({"weight": 1, "loss": true}), false), Ok(false));
        assert_eq!(read(&json!({"train": false}), false), Ok(false));
    }

    #[test]
    fn flags_that_are_not_understood_are_refused_by_name() {
        for (turn, is_assistant, reason) in [
            (json!({"weight": 0.5}), true, "`weight` must be true or false, 1 or 0, found 0.5"),
            (json!({"train": "no"}), true, "`train` must be true or false, 1 or 0, found \"no\""),
            (json!({"train": true}), false, "`train` is true, but only turns of the assistant"),
            (json!({"is_train": true}), true, "`is_train` looks like a training flag"),
            (json!({"mask": 1}), true, "`mask` looks like a training flag"),
            (json!({"isTrainable": false}), true, "`isTrainable` looks like a training flag"),
            (json!({"train_detail": [{"begin_offset": 0}]}), true, "`train_detail` looks like"),
        ] {
            let found = read(&turn, is_assistant).unwrap_err();
            assert!(found.starts_with(reason), "{turn}: {found}");
        }
        assert_eq!(read(&json!({"toxic": true, "turn": 3, "mask": null, "constraints": 1}), true), Ok(true));
    }
}
