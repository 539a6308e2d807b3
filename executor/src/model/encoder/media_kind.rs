//! What kind of media an encoder takes, and how large they are: what made-up media are made after.

use super::super::layer::LayerSpec;
use super::{Arrangement, EncoderConfig, Stem};

/// The kind of [`super::EncoderInput`] that an encoder takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EncoderInputKind {
    /// Squares of one size.
    Tiles {
        /// Numbers of a tile.
        elements: usize,
    },
    /// Patches of images of their own resolution.
    Patches {
        /// Numbers of a patch.
        elements: usize,
    },
    /// Windows of log-mel frames.
    Windows {
        /// Numbers of a window.
        elements: usize,
        /// Frames of a full window.
        frames: usize,
    },
}

impl EncoderConfig {
    /// Returns what kind of media the encoder takes.
    #[must_use]
    pub fn input_kind(&self) -> EncoderInputKind {
        match (&self.arrangement, &self.stem) {
            (Arrangement::Tiles(tiles), _) => EncoderInputKind::Tiles { elements: tiles.elements() },
            (Arrangement::Native(native), _) => EncoderInputKind::Patches { elements: native.patch_inputs() },
            (Arrangement::Audio, Stem::Audio { mels, positions, .. }) => {
                EncoderInputKind::Windows { elements: mels * 2 * positions, frames: 2 * positions }
            }
            (Arrangement::Audio, Stem::Patches(spec)) => {
                EncoderInputKind::Windows { elements: spec.patch_inputs(), frames: 1 }
            }
        }
    }

    /// Returns what its layers are made of.
    #[must_use]
    pub fn layer_specs(&self) -> &[LayerSpec] {
        &self.layers
    }
}
