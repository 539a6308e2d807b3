//! Ways in which decoders differ, besides their dimensions.

use crate::norm::NormKind;
use crate::rope::Rope;
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
            has_media_blocks: false,
        }
    }
}
