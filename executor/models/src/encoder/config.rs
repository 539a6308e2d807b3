//! Configuration of an encoder with its projector, and the blocks it declares.

use std::ops::Range;

use super::convolution::AudioStem;
use super::native_resolution::NativeResolution;
use super::projector::{Projector, ProjectorSpec};
use super::stem::{PatchStem, PatchStemSpec};
use super::tail::{Tail, TailSpec};
use super::tiles::Tiles;
use crate::block::Block;
use crate::declaration::Declaration;
use crate::error::{Error, Result};
use crate::layer::{Layer, LayerSpec};
use crate::sharding_check::{self, DimensionFields};
use crate::stage_blocks::{StageBlocks, single_layers};
use dflop_device::Device;

/// First block of an encoder, which turns a medium into rows of the first layer.
#[derive(Debug, Clone, PartialEq)]
pub enum Stem {
    /// Patches of images and videos.
    Patches(PatchStemSpec),
    /// Two convolutions over log-mel frames.
    Audio {
        /// Prefix of the names of parameters.
        prefix: &'static str,
        /// Number of mel bins.
        mels: usize,
        /// Number of positions of a window.
        positions: usize,
    },
}

/// Kind of media, and their arrangement in rows.
#[derive(Debug, Clone, PartialEq)]
pub enum Arrangement {
    /// Square tiles of one size.
    Tiles(Tiles),
    /// Patches of images of their own resolution.
    Native(NativeResolution),
    /// Windows of log-mel frames.
    Audio,
}

/// Encoder with its projector.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// Width of a row between layers.
    pub hidden: usize,
    /// First block.
    pub stem: Stem,
    /// Transformer layers that run.
    pub layers: Vec<LayerSpec>,
    /// Selection of rows after the layers, with norms.
    pub tail: Option<TailSpec>,
    /// Projector into the LLM; `None` for an encoder alone.
    pub projector: Option<ProjectorSpec>,
    /// Arrangement of media in rows.
    pub arrangement: Arrangement,
    /// Prefixes of checkpoint tensors that the encoder does not use.
    pub ignored: Vec<String>,
    /// Names of the dimensions in the configuration, for errors.
    pub fields: &'static DimensionFields,
}

/// Frozen parts of an encoder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct FrozenEncoder {
    /// Everything but the projector.
    pub encoder: bool,
    /// The projector.
    pub projector: bool,
}

/// Kind of [`EncoderInput`](super::EncoderInput) that an encoder takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EncoderInputKind {
    /// Square tiles of one size.
    Tiles {
        /// Number of elements of a tile.
        elements: usize,
    },
    /// Patches of images of their own resolution.
    Patches {
        /// Number of elements of a patch.
        elements: usize,
    },
    /// Windows of log-mel frames.
    Windows {
        /// Number of elements of a window.
        elements: usize,
        /// Frames of a full window.
        frames: usize,
    },
}

impl EncoderConfig {
    /// Number of transformer layers that run.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Width of a row between layers.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Prefixes of checkpoint tensors that the encoder does not use: layers after the selected one, pooling
    /// heads.
    #[must_use]
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// Checks that a tensor-parallel group of this degree can share the layers and the projector's MLP.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the mismatched field.
    pub fn check_tensor_parallel(&self, degree: usize) -> Result<()> {
        for layer in &self.layers {
            sharding_check::check_heads(self.fields, &layer.attention, degree)?;
            sharding_check::check_size(self.fields.mlp, layer.mlp.middle(), degree)?;
        }
        let projector = self.projector.as_ref().and_then(ProjectorSpec::middle);
        projector.map_or(Ok(()), |middle| sharding_check::check_size("projector", middle, degree))
    }

    /// Declares the parameters of some layers and returns their blocks, with the stem before the first layer
    /// and the projector after the last.
    ///
    /// The blocks of the encoder and of the projector are separate, as they are frozen separately.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there are no such layers, or ranks cannot share them.
    pub fn add_to<D: Device>(
        &self,
        layers: Range<usize>,
        frozen: FrozenEncoder,
        blocks: &mut StageBlocks<D>,
    ) -> Result<()> {
        if layers.start > layers.end || layers.end > self.layers() {
            let problem = format!("= {}, but layers {layers:?} were requested", self.layers());
            return Err(Error::ModelConfig { field: "num_hidden_layers".to_owned(), problem });
        }
        self.check_tensor_parallel(blocks.tp_rank().size)?;
        for layers in single_layers(&layers) {
            blocks.add(frozen.encoder, |declaration| Ok(self.encoder_blocks(&layers, declaration)))?;
        }
        let projector = self.projector.as_ref().filter(|_| layers.end == self.layers());
        let Some(projector) = projector else { return Ok(()) };
        blocks.add(frozen.projector, |declaration| {
            Ok(vec![Box::new(Projector::declare(declaration, projector)) as Box<dyn Block<D>>])
        })
    }

    fn encoder_blocks<D: Device>(
        &self,
        layers: &Range<usize>,
        declaration: &mut Declaration,
    ) -> Vec<Box<dyn Block<D>>> {
        let mut blocks: Vec<Box<dyn Block<D>>> = Vec::new();
        if layers.start == 0 {
            blocks.push(match &self.stem {
                Stem::Patches(spec) => Box::new(PatchStem::declare(declaration, spec, self.hidden)),
                Stem::Audio { prefix, mels, positions } => {
                    Box::new(AudioStem::declare(declaration, prefix, [*mels, self.hidden, *positions]))
                }
            });
        }
        for layer in &self.layers[layers.clone()] {
            blocks.push(Box::new(Layer::declare(declaration, layer)));
        }
        if let Some(tail) = self.tail.as_ref().filter(|_| layers.end == self.layers()) {
            blocks.push(Box::new(Tail::declare(declaration, tail, self.hidden)));
        }
        blocks
    }

    /// Kind of media that the encoder takes.
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

    /// Specifications of the layers.
    #[must_use]
    pub fn layer_specs(&self) -> &[LayerSpec] {
        &self.layers
    }
}
