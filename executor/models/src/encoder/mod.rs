//! Image, video and audio encoders, with projectors.
//!
//! [`EncoderConfig`], which a family creates, declares the blocks: stem, transformer layers, tail, projector.
//! [`EncoderConfig::context`] turns the [`EncoderInput`] of a microbatch into the sparse matrices that blocks
//! multiply with.

mod any_res;
mod audio_rows;
mod config;
mod convolution;
mod deepstack;
mod input;
mod native_resolution;
mod projector;
mod stem;
mod tiles;

pub use config::{Arrangement, EncoderConfig, EncoderInputKind, FrozenEncoder, Stem};
pub use convolution::AudioPositions;
pub use input::{EncoderInput, TiledMedium};
pub use native_resolution::NativeResolution;
pub use projector::{ProjectorMap, ProjectorSpec};
pub use stem::{PatchStemSpec, TailSpec};
pub use tiles::{TileRule, Tiles};

use crate::parameters::weights::Init;

/// Matrix initialization without a checkpoint.
pub(crate) const INIT: Init = Init::Normal(0.02);
