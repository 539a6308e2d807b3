//! Image, video and audio encoders, with projectors.
//!
//! [`EncoderConfig`], which a family creates, declares the blocks: stem, transformer layers, tail, projector.
//! [`EncoderConfig::context`] turns the [`EncoderInput`] of a microbatch into the sparse matrices that blocks
//! multiply with. A family builds a host context from the input first.

mod audio_rows;
mod config;
mod convolution;
mod deepstack;
mod native_resolution;
mod projector;
mod stem;
mod tiles;

use crate::error::{Error, Result};
use crate::parameters::weights::Init;
use dflop_device::ops::sparse_rows::SparseRows;

pub use config::{Arrangement, EncoderConfig, EncoderInputKind, FrozenEncoder, Stem};
pub use convolution::AudioPositions;
pub use native_resolution::NativeResolution;
pub use projector::{ProjectorMap, ProjectorSpec};
pub use stem::{PatchStemSpec, TailSpec};
pub use tiles::{TileRule, Tiles};

/// Matrix initialization without a checkpoint.
pub(crate) const INIT: Init = Init::Normal(0.02);

/// Microbatch media, as output by processors.
#[derive(Debug, Clone, Copy)]
pub enum EncoderInput<'a> {
    /// Square tiles, for encoders with a fixed size.
    Tiles {
        /// `[tiles, channels, side, side]`; tiles from the same image are contiguous.
        pixels: &'a [f32],
        /// Tile contents, in order.
        shown: &'a [TiledMedium],
    },
    /// Image and video patches at native resolution.
    Patches {
        /// `[patches, channels * frames * side * side]`; patches in a 2 x 2 block are contiguous.
        values: &'a [f32],
        /// Number of layers, patch rows and patch columns for every image.
        grids: &'a [[u32; 3]],
    },
    /// Log-mel frame windows.
    Windows {
        /// `[windows, mel bins, frames]`, each with the full encoder length.
        features: &'a [f32],
        /// Number of frames with audio in every window.
        frames: &'a [u32],
    },
    /// Variable-length audio clips, in log-mel frames.
    Clips {
        /// `[mel bins, frames]` for every clip, clips in sequence.
        features: &'a [f32],
        /// Number of frames in every clip.
        frames: &'a [u32],
    },
}

/// Medium shown by consecutive tiles.
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
    /// Returns the number of tiles.
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
struct HostContext {
    medium: Vec<f32>,
    medium_rows: usize,
    stem: Vec<SparseRows>,
    class: Option<SparseRows>,
    positions: Option<SparseRows>,
    /// Computed position table rows.
    position_table: Vec<f32>,
    segments: Vec<u32>,
    windows: Vec<u32>,
    /// Positions for every row by axis, if layers rotate.
    rotation: Option<[Vec<u32>; 2]>,
    taken: Option<SparseRows>,
    projected_rows: usize,
    arranged: Option<SparseRows>,
    newlines: Option<SparseRows>,
}

/// Returns an error that names an input.
fn refuse<T>(input: &'static str, problem: String) -> Result<T> {
    Err(Error::Input { input, problem })
}
