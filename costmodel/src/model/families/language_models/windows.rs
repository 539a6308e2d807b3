//! Reads the layers with windowed attention.

use serde_json::Value;

use crate::error::Result;
use crate::model::config::ConfigFields;
use crate::model::{LayerSet, Window, WindowedAttention};

/// Window fields for an architecture; `layer_types`, if present, names every layer's kind.
#[derive(Clone, Copy)]
pub(super) enum WindowFields {
    /// No windows; a field that sets windows is rejected.
    None,
    /// Sliding windows with `sliding_window` tokens in all layers from `max_window_layers` on, if
    /// `use_sliding_window` is true (Qwen2, Qwen3).
    Upper {
        /// Default window.
        tokens: u32,
        /// Default number of layers below.
        below: u32,
    },
    /// Sliding windows in every second layer below `max_window_layers`, if `use_sliding_window` is true
    /// (Qwen2-MoE).
    LowerEven {
        /// Default window.
        tokens: u32,
        /// Default end of the layers with windows.
        end: u32,
    },
    /// Sliding windows with `sliding_window` tokens in all layers, if `use_sliding_window` is true
    /// (Qwen3-MoE).
    AllIfUsed(u32),
    /// Sliding windows with `sliding_window` tokens in all layers; this window if it is missing (Mistral).
    All(Option<u32>),
    /// Sliding windows in all layers except every layer at this period, which `sliding_window_pattern`
    /// changes (Gemma 3).
    ButEach {
        /// Default window.
        tokens: u32,
        /// Distance between layers with full attention.
        period: u32,
    },
    /// Chunks of `attention_chunk_size` in all layers with rotation, which are all but every
    /// `no_rope_layer_interval`-th, or the layers that are 1 in `no_rope_layers` (Llama 4).
    Chunks(u32),
}

impl WindowFields {
    /// Reads the windows for a model with this many layers.
    pub(super) fn read(self, fields: &ConfigFields<'_>, layers: u32) -> Result<Option<WindowedAttention>> {
        let kind = if matches!(self, Self::Chunks(_)) { Window::Chunk } else { Window::Sliding };
        let Some(tokens) = self.tokens(fields)? else {
            return no_windows(fields).map(|()| None);
        };
        require_few_layers(fields, layers)?;
        let windowed = match listed(fields, layers, kind)? {
            Some(listed) if matches!(self, Self::All(_) | Self::AllIfUsed(_)) && listed.len() < layers => {
                let problem = "must have `sliding_attention` only, all layers have windows";
                return Err(fields.invalid("layer_types", problem));
            }
            Some(listed) => listed,
            None => self.layers(fields, layers)?,
        };
        Ok((!windowed.is_empty()).then_some(WindowedAttention { layers: windowed, tokens, kind }))
    }

    /// Reads the window length; `None` if no layer has windows.
    fn tokens(self, fields: &ConfigFields<'_>) -> Result<Option<u32>> {
        let is_used = fields.flag("use_sliding_window", false)?;
        match self {
            Self::None if is_used => {
                Err(fields.invalid("use_sliding_window", "must be false, it has no windows"))
            }
            Self::None => Ok(None),
            Self::Upper { tokens, .. } | Self::LowerEven { tokens, .. } | Self::AllIfUsed(tokens) => {
                if is_used {
                    read_tokens(fields, "sliding_window", Some(tokens))
                } else {
                    Ok(None)
                }
            }
            Self::All(default) => read_tokens(fields, "sliding_window", default),
            Self::ButEach { tokens, .. } => read_tokens(fields, "sliding_window", Some(tokens)),
            Self::Chunks(tokens) => read_tokens(fields, "attention_chunk_size", Some(tokens)),
        }
    }

    /// Returns the layers with windows if no field names them.
    fn layers(self, fields: &ConfigFields<'_>, layers: u32) -> Result<LayerSet> {
        let window_layers = |default| match fields.value("max_window_layers") {
            None => Ok(default),
            Some(value) => fields.whole_number("max_window_layers", value, 0),
        };
        Ok(match self {
            Self::None => LayerSet::default(),
            Self::AllIfUsed(_) | Self::All(_) => LayerSet::range(0, layers),
            Self::Upper { below, .. } => LayerSet::range(window_layers(below)?, layers),
            Self::LowerEven { end, .. } => {
                let end = window_layers(end)?.min(layers);
                (0..end).filter(|layer| layer.is_multiple_of(2)).collect()
            }
            Self::ButEach { period, .. } => {
                let period = fields.count("sliding_window_pattern", period)?;
                (0..layers).filter(|layer| !(layer + 1).is_multiple_of(period)).collect()
            }
            Self::Chunks(_) => LayerSet::rotated(fields, layers)?,
        })
    }
}

/// Reads a window length; `null` is none.
fn read_tokens(fields: &ConfigFields<'_>, key: &str, default: Option<u32>) -> Result<Option<u32>> {
    if fields.is_null(key) {
        return Ok(None);
    }
    Ok(fields.optional_count(key)?.or(default))
}

impl LayerSet {
    /// Reads the layers in a language model whose queries and keys are rotated, if not all are (Llama 4): all
    /// but every `no_rope_layer_interval`-th, or the layers that are 1 in `no_rope_layers`.
    ///
    /// # Errors
    /// [`Error::Configuration`](crate::Error::Configuration) if a field is invalid, or there are more layers
    /// than a set can represent.
    pub fn rotated(fields: &ConfigFields<'_>, layers: u32) -> Result<Self> {
        require_few_layers(fields, layers)?;
        let interval = fields.count("no_rope_layer_interval", 4)?;
        // Despite its name, the list is 1 for layers with rotation.
        let Some(listed) = fields.whole_numbers("no_rope_layers")?.filter(|listed| !listed.is_empty()) else {
            return Ok((0..layers).filter(|layer| !(layer + 1).is_multiple_of(interval)).collect());
        };
        require_length(fields, "no_rope_layers", listed.len(), layers)?;
        Ok((0..).zip(listed).filter(|(_, is_rotated)| *is_rotated != 0).map(|(layer, _)| layer).collect())
    }
}

/// Reads the layers with windows from `layer_types`, if it is present.
fn listed(fields: &ConfigFields<'_>, layers: u32, kind: Window) -> Result<Option<LayerSet>> {
    let Some(value) = fields.value("layer_types") else { return Ok(None) };
    let Some(types) = value.as_array() else {
        return Err(fields.invalid("layer_types", "must be a list of kinds of attention"));
    };
    require_length(fields, "layer_types", types.len(), layers)?;
    let windowed = match kind {
        Window::Sliding => "sliding_attention",
        Window::Chunk => "chunked_attention",
    };
    let mut set = LayerSet::default();
    for (layer, found) in (0..).zip(types) {
        match found.as_str() {
            Some("full_attention") => {}
            Some(found) if found == windowed => set.insert(layer),
            _ => {
                let problem = format!("has unknown value {found}, expected `full_attention` or `{windowed}`");
                return Err(fields.invalid("layer_types", problem));
            }
        }
    }
    Ok(Some(set))
}

/// Checks that `layer_types`, if it is present, has full attention only.
fn no_windows(fields: &ConfigFields<'_>) -> Result<()> {
    let types = fields.value("layer_types").and_then(Value::as_array);
    match types.and_then(|types| types.iter().find(|found| **found != "full_attention")) {
        Some(found) => {
            let problem = format!("has {found}, without a window only `full_attention` is possible");
            Err(fields.invalid("layer_types", problem))
        }
        None => Ok(()),
    }
}

/// Checks that a set can tell the layers apart, for a model in which they differ.
pub(super) fn require_few_layers(fields: &ConfigFields<'_>, layers: u32) -> Result<()> {
    if layers <= LayerSet::LAYERS_MAX {
        return Ok(());
    }
    let problem = format!("= {layers} must be at most {} where layers differ", LayerSet::LAYERS_MAX);
    Err(fields.invalid("num_hidden_layers", problem))
}

/// Checks that a list has one entry for each layer.
pub(super) fn require_length(fields: &ConfigFields<'_>, key: &str, found: usize, layers: u32) -> Result<()> {
    if found == layers as usize {
        return Ok(());
    }
    Err(fields.invalid(key, format!("has {found} entries for {layers} layers")))
}
