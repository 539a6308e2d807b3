//! Decoder properties other than dimensions.

use super::QueryTemperature;
use crate::layers::{NormKind, Rope};
use dflop_costmodel::model::LayerSet;
use dflop_device::ops::activation::Activation;

/// Decoder properties other than dimensions; the default is Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderForm {
    /// Norm kind.
    pub norm: NormKind,
    /// MLP gate activation.
    pub activation: Activation,
    /// Attention score factor; `None` for 1 / square root of the head width.
    pub score_scale: Option<f64>,
    /// Embedding row factor.
    pub embedding_scale: f64,
    /// Rotation for layers with windows; `None` if all layers use the same rotation.
    pub window_rope: Option<Rope>,
    /// Whether neighboring columns are rotated together, instead of columns half a rotated width apart.
    pub is_interleaved: bool,
    /// Layers without rotation.
    pub unrotated: LayerSet,
    /// Query temperature for layers without rotation, if any.
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
