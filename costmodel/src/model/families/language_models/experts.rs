//! Reads mixtures of experts.

use super::windows::{require_few_layers, require_length};
use crate::error::Result;
use crate::model::config::ConfigFields;
use crate::model::{ExpertsDetails, ExpertsSpec, LayerSet};

/// Expert fields for an architecture.
pub(super) struct ExpertFields {
    /// Fields with the number of experts: the architecture's own field and alternative spellings.
    pub(super) count_fields: &'static [&'static str],
    pub(super) count: u32,
    /// Field with the number of experts per token.
    pub(super) per_token_field: &'static str,
    /// Default number of experts per token; 0 if the field is required.
    pub(super) per_token: u32,
    /// Field with the expert width.
    pub(super) ffn_field: &'static str,
    pub(super) ffn: u32,
    pub(super) shared: SharedExperts,
    pub(super) layers: SparseLayers,
    pub(super) details: ExpertsDetails,
}

/// Shared expert width.
#[derive(Clone, Copy)]
pub(super) enum SharedExperts {
    /// No shared experts.
    None,
    /// A single shared expert, with the width in this field.
    Width(&'static str, u32),
    /// As many shared experts as in this field, each as wide as the other experts; `null` is none.
    Count(&'static str, u32),
    /// A single shared expert, as wide as the other experts.
    One,
}

/// Layers with experts.
#[derive(Clone, Copy)]
pub(super) enum SparseLayers {
    /// All layers.
    All,
    /// Every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`.
    Step,
    /// All layers from `first_k_dense_replace` on, or the layers that `mlp_layer_types` calls `sparse`.
    From(u32),
    /// The layers in `moe_layers`, or every `interleave_moe_layer_step`-th layer.
    Interleaved,
}

impl ExpertFields {
    /// Reads the experts for a model with this many layers; `None` if no layer has experts.
    pub(super) fn read(&self, fields: &ConfigFields<'_>, layers: u32) -> Result<Option<ExpertsSpec>> {
        let found = self.count_fields.iter().find(|field| fields.has(field));
        let count_field = found.unwrap_or(&self.count_fields[0]);
        let experts = match fields.value(count_field) {
            None => self.count,
            Some(value) => fields.whole_number(count_field, value, 0)?,
        };
        require_few_layers(fields, layers)?;
        let sparse = self.layers.read(fields, layers)?;
        if experts == 0 || sparse.is_empty() {
            return Ok(None);
        }
        let experts_per_token = fields.count(self.per_token_field, self.per_token)?;
        if experts_per_token == 0 {
            return Err(fields.invalid(self.per_token_field, "is missing"));
        }
        if experts_per_token > experts {
            let problem = format!("= {experts_per_token}, but there are {experts} experts (`{count_field}`)");
            return Err(fields.invalid(self.per_token_field, problem));
        }
        let ffn = fields.count(self.ffn_field, self.ffn)?;
        Ok(Some(ExpertsSpec {
            layers: sparse,
            experts,
            experts_per_token,
            ffn,
            shared_ffn: self.shared.read(fields, ffn)?,
            details: self.details,
        }))
    }
}

impl SharedExperts {
    fn read(self, fields: &ConfigFields<'_>, ffn: u32) -> Result<u32> {
        let number = |key: &str, default: u32| match fields.value(key) {
            None if fields.is_null(key) => Ok(0),
            None => Ok(default),
            Some(value) => fields.whole_number(key, value, 0),
        };
        match self {
            Self::None => Ok(0),
            Self::One => Ok(ffn),
            Self::Width(key, default) => number(key, default),
            Self::Count(key, default) => number(key, default)?
                .checked_mul(ffn)
                .ok_or_else(|| fields.invalid(key, "makes the shared experts too wide")),
        }
    }
}

impl SparseLayers {
    fn read(self, fields: &ConfigFields<'_>, layers: u32) -> Result<LayerSet> {
        Ok(match self {
            Self::All => LayerSet::range(0, layers),
            Self::Step => {
                let step = fields.count("decoder_sparse_step", 1)?;
                let dense = fields.whole_numbers("mlp_only_layers")?.unwrap_or_default();
                (0..layers)
                    .filter(|layer| (layer + 1).is_multiple_of(step) && !dense.contains(layer))
                    .collect()
            }
            Self::From(default) => match listed(fields, layers)? {
                Some(listed) => listed,
                None => LayerSet::range(dense_below(fields, default)?, layers),
            },
            Self::Interleaved => {
                let listed = fields.whole_numbers("moe_layers")?;
                let step = fields.count("interleave_moe_layer_step", 1)?;
                let is_sparse = |layer: &u32| match &listed {
                    Some(listed) => listed.contains(layer),
                    None => (layer + 1).is_multiple_of(step),
                };
                (0..layers).filter(is_sparse).collect()
            }
        })
    }
}

/// Reads the number of layers without experts, which come first.
fn dense_below(fields: &ConfigFields<'_>, default: u32) -> Result<u32> {
    let frequency = fields.count("moe_layer_freq", 1)?;
    if frequency != 1 {
        return Err(fields.invalid("moe_layer_freq", format!("must be 1, found {frequency}")));
    }
    match fields.value("first_k_dense_replace") {
        None => Ok(default),
        Some(value) => fields.whole_number("first_k_dense_replace", value, 0),
    }
}

/// Reads the layers that `mlp_layer_types` calls `sparse`, if it is present.
fn listed(fields: &ConfigFields<'_>, layers: u32) -> Result<Option<LayerSet>> {
    let Some(value) = fields.value("mlp_layer_types") else { return Ok(None) };
    let Some(types) = value.as_array() else {
        return Err(fields.invalid("mlp_layer_types", "must be a list of `dense` and `sparse`"));
    };
    require_length(fields, "mlp_layer_types", types.len(), layers)?;
    let mut set = LayerSet::default();
    for (layer, found) in (0..).zip(types) {
        match found.as_str() {
            Some("sparse") => set.insert(layer),
            Some("dense") => {}
            _ => {
                let problem = format!("has unknown value {found}, expected `dense` or `sparse`");
                return Err(fields.invalid("mlp_layer_types", problem));
            }
        }
    }
    Ok(Some(set))
}
