//! Inputs of encoders, and the context that an encoder family makes of them on the host.

use crate::error::{Error, Result};
use crate::ops::sparse_rows::SparseRows;

/// The media of a microbatch, as their processors make them.
#[derive(Debug, Clone, Copy)]
pub enum EncoderInput<'a> {
    /// Squares, for towers that take one size.
    Tiles {
        /// `[tiles, channels, side, side]`, the tiles of an image one behind the other.
        pixels: &'a [f32],
        /// What the tiles show, in order.
        shown: &'a [TiledMedium],
    },
    /// Patches of images and videos of their own resolution.
    Patches {
        /// `[patches, channels * frames * side * side]`, those of a 2 x 2 block beside each other.
        values: &'a [f32],
        /// Layers, rows and columns of patches of every image.
        grids: &'a [[u32; 3]],
    },
    /// Windows of log-mel frames.
    Windows {
        /// `[windows, mel bins, frames]`, each as long as the encoder takes.
        features: &'a [f32],
        /// Real frames of every window.
        frames: &'a [u32],
    },
}

/// What a run of tiles shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TiledMedium {
    /// An image.
    Image {
        /// Rows of pixels before it was scaled.
        height: u32,
        /// Columns of pixels before it was scaled.
        width: u32,
        /// Its tiles, the one that shows it whole among them.
        tiles: u32,
    },
    /// A video, a tile a frame.
    Video {
        /// Its frames.
        frames: u32,
    },
}

impl TiledMedium {
    /// Returns the tiles.
    #[must_use]
    pub const fn tiles(&self) -> usize {
        match self {
            Self::Image { tiles, .. } => *tiles as usize,
            Self::Video { frames } => *frames as usize,
        }
    }
}

/// A context before it is on a device.
#[derive(Debug, Default)]
pub(super) struct HostContext {
    pub(super) medium: Vec<f32>,
    pub(super) medium_rows: usize,
    pub(super) stem: Vec<SparseRows>,
    pub(super) class: Option<SparseRows>,
    pub(super) positions: Option<SparseRows>,
    pub(super) segments: Vec<u32>,
    pub(super) windows: Vec<u32>,
    /// Positions of every row by axis, where layers rotate.
    pub(super) rotation: Option<[Vec<u32>; 2]>,
    pub(super) taken: Option<SparseRows>,
    pub(super) projected_rows: usize,
    pub(super) arranged: Option<SparseRows>,
    pub(super) newlines: Option<SparseRows>,
}

/// Fails with the name of an input.
pub(super) fn refuse<T>(input: &'static str, problem: String) -> Result<T> {
    Err(Error::Input { input, problem })
}
