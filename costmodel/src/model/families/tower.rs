//! Encoder sizes, from which each family builds an [`EncoderSpec`].
//!
//! A family expands a few sizes to every matrix, vector and extra token in its encoder; presets and readers
//! share these functions, so both count the same parameters and FLOPs. Towers have no projector; the caller
//! adds it.
//!
//! # Source
//! The modules in transformers 4.57.1; parameter counts are compared with them in `costmodel/tests/flops.rs`.

use crate::model::{EncoderDetails, EncoderSpec, Mlp, Projector};

/// Multiply-adds per hidden unit for a patch with 14 pixels per side in three colors.
pub(crate) const PATCH_INPUTS: u32 = 3 * 14 * 14;

/// Common tower sizes.
#[derive(Clone, Copy)]
pub(crate) struct TowerSize {
    pub(crate) layers: u32,
    pub(crate) hidden: u32,
    pub(crate) heads: u32,
    pub(crate) ffn: u32,
}

/// Input to a tower with fixed-size squares.
#[derive(Clone, Copy)]
pub(crate) struct SquareInput {
    /// Multiply-adds per hidden unit and patch: channels * patch².
    pub(crate) patch_inputs: u32,
    /// Number of patches per square.
    pub(crate) patches: u32,
}

/// Builds an encoder without windows and without a projector.
pub(super) const fn bare_tower(
    size: TowerSize,
    mlp: Mlp,
    stem_inputs: u32,
    details: EncoderDetails,
) -> EncoderSpec {
    let TowerSize { layers, hidden, heads, ffn } = size;
    EncoderSpec {
        layers,
        windowed_layers: 0,
        hidden,
        heads,
        ffn,
        mlp,
        stem_inputs,
        projector: Projector::new(1, hidden, None),
        details,
    }
}

/// Multiplies a vector count by the vector width.
pub(super) const fn product(count: u32, width: u32) -> u64 {
    count as u64 * width as u64
}
