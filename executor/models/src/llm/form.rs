//! Ways in which decoders differ, besides their dimensions.

use super::QueryTemperature;
use crate::norm::NormKind;
use crate::rope::Rope;
use dflop_costmodel::model::LayerSet;
use dflop_device::ops::activation::Activation;

/// Ways in which decoders differ, besides their dimensions; those of Llama by default.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderForm {
    /// Kind of all norms.
    pub norm: NormKind,
    /// Activation on the gate of an MLP.
    pub activation: Activation,
    /// Factor on attention scores; `None` for 1 / square root of the width of a head.
    pub score_scale: Option<f64>,
    /// Factor on the rows of the embedding.
    pub embedding_scale: f64,
    /// Rotation of layers with windows; `None` if it is that of the others.
    pub window_rope: Option<Rope>,
    /// Whether neighboring columns are rotated together, instead of columns half of the rotated ones apart.
    pub is_interleaved: bool,
    /// Layers without rotation.
    pub unrotated: LayerSet,
    /// Temperature of the queries of layers without rotation, if there is any.
    pub temperature: Option<QueryTemperature>,
    /// Whether rotated queries and keys are normalized, without weights.
    pub has_plain_qk_norm: bool,
    /// Whether consecutive media tokens attend to each other in both directions.
    pub has_media_blocks: bool,
}

impl Default for DecoderForm {
    fn default() -> Self {
        Self {
            norm: NormKind::Rms,
            activation: Activation::Silu,
            score_scale: None,
            embedding_scale: 1.0,
            window_rope: None,
            is_interleaved: false,
            unrotated: LayerSet::default(),
            temperature: None,
            has_plain_qk_norm: false,
            has_media_blocks: false,
        }
    }
}
