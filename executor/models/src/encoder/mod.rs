//! Encoders of images, videos and audio, with their projectors.
//!
//! [`EncoderConfig`] is read from a `config.json` and declares the blocks: stem, transformer layers, tail,
//! projector. [`EncoderConfig::context`] turns the [`EncoderInput`] of a microbatch into the sparse matrices
//! that blocks multiply with.

mod any_res;
mod audio_windows;
mod config;
mod context;
mod convolution;
mod families;
mod input;
mod native_resolution;
mod projector;
mod stem;
mod tail;
mod tiles;

pub use config::{EncoderConfig, EncoderInputKind, FrozenEncoder};
pub use input::{EncoderInput, TiledMedium};

use crate::weights::Init;

/// Initialization of matrices without a checkpoint.
const INIT: Init = Init::Normal(0.02);
