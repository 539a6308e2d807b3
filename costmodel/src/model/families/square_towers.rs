//! Reads the towers for square images, by `model_type`.

use super::squares::SquareTower;
use super::{clip, siglip};
use crate::error::Result;
use crate::model::config::ConfigFields;

/// Reads the tower of a `vision_config`; without a `model_type`, it is SigLIP.
pub(super) fn tower(fields: &ConfigFields<'_>) -> Result<SquareTower> {
    tower_or(fields, "siglip_vision_model")
}

/// Reads the tower of a `vision_config`; without a `model_type`, it is that of `default_type`.
pub(super) fn tower_or(fields: &ConfigFields<'_>, default_type: &str) -> Result<SquareTower> {
    match fields.text("model_type")?.unwrap_or(default_type) {
        "siglip_vision_model" => siglip::tower(fields),
        "clip_vision_model" => clip::tower(fields),
        unknown => {
            let problem =
                format!("= \"{unknown}\" is unknown, known are clip_vision_model, siglip_vision_model");
            Err(fields.invalid("model_type", problem))
        }
    }
}
