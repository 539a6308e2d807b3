//! Inputs of encoders, and the context that a family makes of them on the host.

use crate::error::{Error, Result};
use dflop_device::ops::sparse_rows::SparseRows;

/// Media of a microbatch, as their processors output them.
#[derive(Debug, Clone, Copy)]
pub enum EncoderInput<'a> {
    /// Square tiles, for encoders of one size.
    Tiles {
        /// `[tiles, channels, side, side]`, the tiles of an image contiguous.
        pixels: &'a [f32],
        /// Content of the tiles, in order.
        shown: &'a [TiledMedium],
    },
    /// Patches of images and videos of their own resolution.
    Patches {
        /// `[patches, channels * frames * side * side]`, the patches of a 2 x 2 block contiguous.
        values: &'a [f32],
        /// Number of layers, rows and columns of patches of every image.
        grids: &'a [[u32; 3]],
    },
    /// Windows of log-mel frames.
    Windows {
        /// `[windows, mel bins, frames]`, each with the full length of the encoder.
        features: &'a [f32],
        /// Number of frames with audio in every window.
        frames: &'a [u32],
    },
    /// Audio clips of their own length, in log-mel frames.
    Clips {
        /// `[mel bins, frames]` of every clip, one after another.
        features: &'a [f32],
        /// Number of frames of every clip.
        frames: &'a [u32],
    },
}

/// Medium shown by a run of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TiledMedium {
    /// An image.
    Image {
        /// Pixel rows before scaling.
        height: u32,
        /// Pixel columns before scaling.
        width: u32,
        /// Number of tiles, including the base tile that shows the whole image.
        tiles: u32,
    },
    /// A video, one tile per frame.
    Video {
        /// Number of frames.
        frames: u32,
    },
}

impl TiledMedium {
    /// Number of tiles.
    #[must_use]
    pub const fn tiles(&self) -> usize {
        match self {
            Self::Image { tiles, .. } => *tiles as usize,
            Self::Video { frames } => *frames as usize,
        }
    }
}

/// Context before it is uploaded to a device.
#[derive(Debug, Default)]
pub(super) struct HostContext {
    pub(super) medium: Vec<f32>,
    pub(super) medium_rows: usize,
    pub(super) stem: Vec<SparseRows>,
    pub(super) class: Option<SparseRows>,
    pub(super) positions: Option<SparseRows>,
    /// Rows of a computed position table.
    pub(super) position_table: Vec<f32>,
    pub(super) segments: Vec<u32>,
    pub(super) windows: Vec<u32>,
    /// Positions of every row by axis, for layers that rotate.
    pub(super) rotation: Option<[Vec<u32>; 2]>,
    pub(super) taken: Option<SparseRows>,
    pub(super) projected_rows: usize,
    pub(super) arranged: Option<SparseRows>,
    pub(super) newlines: Option<SparseRows>,
}

/// Returns an error that names an input.
pub(super) fn refuse<T>(input: &'static str, problem: String) -> Result<T> {
    Err(Error::Input { input, problem })
}
