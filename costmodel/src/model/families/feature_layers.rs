//! Reads which tower hidden states LLaVA-like models use.

use serde_json::Value;

use super::squares::{SquareTower, layers_until};
use crate::error::Result;
use crate::model::config::{ConfigFields, excerpt};

/// Returns the number of layers up to the last used output, and the number of used outputs; `default` is the
/// index of the hidden state that is used without the field.
pub(super) fn feature_layers(config: &ConfigFields<'_>, layers: u32, default: i64) -> Result<(u32, u32)> {
    let key = "vision_feature_layer";
    let index = |value: &Value| match value.as_i64() {
        Some(index) => layers_until(config, key, index, layers),
        None => Err(config.invalid(key, format!("must be whole numbers, found {}", excerpt(value)))),
    };
    match config.value(key) {
        None => Ok((layers_until(config, key, default, layers)?, 1)),
        Some(Value::Array(indices)) => {
            let used = indices.iter().map(index).collect::<Result<Vec<u32>>>()?;
            match used.iter().max() {
                Some(last) => Ok((*last, u32::try_from(used.len()).unwrap_or(u32::MAX))),
                None => Err(config.invalid(key, "names no layer")),
            }
        }
        Some(value) => Ok((index(value)?, 1)),
    }
}

/// Checks that the selection strategy fits the tower.
///
/// Only the strategy `default` drops the class token; in a tower without a class token it would drop a patch.
/// `missing` is the strategy without the field.
pub(super) fn check_class_token(config: &ConfigFields<'_>, tower: &SquareTower, missing: &str) -> Result<()> {
    let key = "vision_feature_select_strategy";
    let has_class_token = tower.encoder.details.class_tokens > 0;
    match config.text(key)?.unwrap_or(missing) {
        "default" if has_class_token => Ok(()),
        "full" if !has_class_token => Ok(()),
        strategy => {
            let has = if has_class_token { "has a" } else { "has no" };
            Err(config.invalid(key, format!("= \"{strategy}\", but the vision tower {has} class token")))
        }
    }
}
