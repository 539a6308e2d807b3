//! Sizes of encoders, from which each family makes an [`EncoderSpec`].
//!
//! A family expands a few sizes to every matrix, vector and extra token of its encoder; presets and readers
//! share these functions, so that both count the same parameters and FLOPs. Towers come without a projector;
//! the caller adds it.
//!
//! # Source
//! The modules of transformers 4.57.1; parameter counts are compared with them in `costmodel/tests/flops.rs`.

use crate::model::{EncoderDetails, EncoderSpec, Mlp, Projector};

/// Multiply-adds per hidden unit of a patch of 14 pixels a side in three colors.
pub(crate) const PATCH_INPUTS: u32 = 3 * 14 * 14;

/// Sizes that all towers have.
#[derive(Clone, Copy)]
pub(crate) struct TowerSize {
    pub(crate) layers: u32,
    pub(crate) hidden: u32,
    pub(crate) heads: u32,
    pub(crate) ffn: u32,
}

/// Input of a tower that takes squares of one size.
#[derive(Clone, Copy)]
pub(crate) struct SquareInput {
    /// Multiply-adds per hidden unit and patch: channels * patch².
    pub(crate) patch_inputs: u32,
    /// Patches of a square.
    pub(crate) patches: u32,
}

/// Makes an encoder without windows and without a projector.
pub(super) const fn tower(
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

/// Multiplies a count of vectors by their width.
pub(super) const fn product(count: u32, width: u32) -> u64 {
    count as u64 * width as u64
}
