//! Encoders of images, videos and audio, with their projectors.
//!
//! [`EncoderConfig`] reads one from a `config.json` and makes its blocks: a stem, transformer layers, what is taken of
//! the last layer, the projector. [`EncoderInput`] is what it encodes; [`EncoderConfig::context`] turns one microbatch's
//! media into the sparse matrices that the blocks multiply with.

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

/// Beginning of matrices where there is no checkpoint.
const INIT: Init = Init::Normal(0.02);
