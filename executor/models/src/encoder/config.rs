//! Encoder configuration with a projector, and the blocks that it declares.
//!
//! [`EncoderConfig::context`] uploads microbatch media to the device.

use super::audio_rows::{arrange_chunks, arrange_windows};
use super::convolution::{AudioPositions, AudioStem};
use super::deepstack::{JoinKept, Snapshot, SplitKept, StackedProjectors};
use super::native_resolution::NativeResolution;
use super::projector::{Projector, ProjectorSpec};
use super::stem::{PatchStem, PatchStemSpec, Tail, TailSpec};
use super::tiles::Tiles;
use super::{EncoderInput, refuse};
use crate::block::{
    Block, EncoderInputs, LayerContext, MicrobatchContext, ModuleInputs, StageBlocks, single_layers,
};
use crate::error::{Error, Result};
use crate::layers::{DimensionFields, Layer, LayerSpec, check_heads, check_size};
use crate::parameters::Declaration;
use dflop_device::ops::sparse_rows::SparseRows;
use dflop_device::{Device, DeviceSparseRows, Segments};
use std::ops::Range;

/// First encoder block, which turns a medium into first-layer rows.
#[derive(Debug, Clone, PartialEq)]
pub enum Stem {
    /// Image and video patches.
    Patches(PatchStemSpec),
    /// Two convolutions over log-mel frames.
    Audio {
        /// Parameter name prefix.
        prefix: &'static str,
        /// Number of mel bins.
        mels: usize,
        /// Positions in a window or chunk.
        positions: AudioPositions,
    },
}

/// Media kind and row arrangement.
#[derive(Debug, Clone, PartialEq)]
pub enum Arrangement {
    /// Square tiles with a fixed size.
    Tiles(Tiles),
    /// Image patches at native resolution.
    Native(NativeResolution),
    /// Log-mel frame windows, padded to a fixed length.
    Windows,
    /// Log-mel frame chunks from variable-length clips.
    Chunks {
        /// Number of mel frames in a full chunk.
        frames: usize,
    },
}

/// Encoder with its projector.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// Row width between layers.
    pub hidden: usize,
    /// First block.
    pub stem: Stem,
    /// Transformer layers that run.
    pub layers: Vec<LayerSpec>,
    /// Row selection after the layers, with norms.
    pub tail: Option<TailSpec>,
    /// Projector into the LLM; `None` for an encoder without LLM.
    pub projector: Option<ProjectorSpec>,
    /// Earlier layers with their projectors, in ascending layer order; the first LLM layers add the projector
    /// outputs. Usually empty.
    pub deepstack: Vec<(usize, ProjectorSpec)>,
    /// Row arrangement of media.
    pub arrangement: Arrangement,
    /// Prefixes of unused checkpoint tensors.
    pub ignored: Vec<String>,
    /// Configuration field names, for errors.
    pub fields: &'static DimensionFields,
}

/// Frozen encoder parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct FrozenEncoder {
    /// Whether everything but the projector is frozen.
    pub encoder: bool,
    /// Whether the projector is frozen.
    pub projector: bool,
}

/// Kind of [`EncoderInput`] that an encoder accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EncoderInputKind {
    /// Square tiles with a fixed size.
    Tiles {
        /// Number of elements in a tile.
        elements: usize,
    },
    /// Image patches at native resolution.
    Patches {
        /// Number of elements in a patch.
        elements: usize,
    },
    /// Log-mel frame windows.
    Windows {
        /// Number of elements in a window.
        elements: usize,
        /// Number of frames in a full window.
        frames: usize,
    },
    /// Variable-length audio clips.
    Clips {
        /// Number of elements in a log-mel frame.
        elements: usize,
    },
}

impl EncoderConfig {
    /// Returns the number of transformer layers that run.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the row width between layers.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Returns the prefixes of unused checkpoint tensors: layers after the selected layer, pooling heads.
    #[must_use]
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// Checks that a tensor-parallel group with this degree can share the layers and the projector MLP.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the mismatched field.
    pub fn check_tensor_parallel(&self, degree: usize) -> Result<()> {
        for layer in &self.layers {
            check_heads(self.fields, &layer.attention, degree)?;
            check_size(self.fields.mlp, layer.mlp.middle(), degree)?;
        }
        let middles = self.projector.iter().chain(self.deepstack.iter().map(|(_, spec)| spec));
        let mut middles = middles.filter_map(ProjectorSpec::middle);
        middles.try_for_each(|middle| check_size("projector", middle, degree))
    }

    /// Declares parameters for a layer range and returns the blocks, with the stem before the first layer and
    /// the projector after the last.
    ///
    /// Encoder blocks and projector blocks are separate because they are frozen separately.
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
        for own in single_layers(&layers) {
            blocks.add(frozen.encoder, |declaration| Ok(self.encoder_blocks(&own, &layers, declaration)))?;
        }
        let projector = self.projector.as_ref().filter(|_| layers.end == self.layers());
        let Some(projector) = projector else { return Ok(()) };
        blocks.add(frozen.projector, |declaration| Ok(vec![self.projector_block(projector, declaration)]))
    }

    /// Returns the number of layers before `layer` that have a projector.
    fn deepstack_before(&self, layer: usize) -> usize {
        self.deepstack.iter().filter(|(own, _)| *own < layer).count()
    }

    /// Returns the row width between stages if a pipeline cuts the encoder before `layer`, including rows of
    /// earlier layers that have a projector.
    #[must_use]
    pub fn row_width(&self, layer: usize) -> usize {
        self.hidden * (1 + self.deepstack_before(layer))
    }

    fn projector_block<D: Device>(
        &self,
        last: &ProjectorSpec,
        declaration: &mut Declaration,
    ) -> Box<dyn Block<D>> {
        let projector = Projector::declare(declaration, last);
        if self.deepstack.is_empty() {
            return Box::new(projector);
        }
        let earlier = self.deepstack.iter().map(|(_, spec)| Projector::declare(declaration, spec));
        let projectors = std::iter::once(projector).chain(earlier).collect();
        Box::new(StackedProjectors { projectors, outputs: last.outputs })
    }

    /// Declares the encoder layers that a stage has.
    fn encoder_blocks<D: Device>(
        &self,
        layers: &Range<usize>,
        of_stage: &Range<usize>,
        declaration: &mut Declaration,
    ) -> Vec<Box<dyn Block<D>>> {
        let hidden = self.hidden;
        let mut blocks: Vec<Box<dyn Block<D>>> = Vec::new();
        if layers.start == 0 {
            blocks.push(match &self.stem {
                Stem::Patches(spec) => Box::new(PatchStem::declare(declaration, spec, self.hidden)),
                Stem::Audio { prefix, mels, positions } => {
                    Box::new(AudioStem::declare(declaration, prefix, [*mels, self.hidden], *positions))
                }
            });
        }
        let kept = self.deepstack_before(of_stage.start);
        if layers.start == of_stage.start && kept > 0 {
            blocks.push(Box::new(SplitKept { hidden, kept }));
        }
        for layer in layers.clone() {
            blocks.push(Box::new(Layer::declare(declaration, &self.layers[layer])));
            if self.deepstack.iter().any(|(own, _)| *own == layer) {
                blocks.push(Box::new(Snapshot { hidden }));
            }
        }
        let kept = self.deepstack_before(of_stage.end);
        if layers.end == of_stage.end && of_stage.end < self.layers() && kept > 0 {
            blocks.push(Box::new(JoinKept { hidden, kept }));
        }
        if let Some(tail) = self.tail.as_ref().filter(|_| layers.end == self.layers()) {
            blocks.push(Box::new(Tail::declare(declaration, tail, self.hidden)));
        }
        blocks
    }

    /// Returns the media kind that the encoder accepts.
    #[must_use]
    pub fn input_kind(&self) -> EncoderInputKind {
        match (&self.arrangement, &self.stem) {
            (Arrangement::Tiles(tiles), _) => EncoderInputKind::Tiles { elements: tiles.elements() },
            (Arrangement::Native(native), _) => EncoderInputKind::Patches { elements: native.patch_inputs() },
            (Arrangement::Windows, Stem::Audio { mels, positions, .. }) => {
                let frames = 2 * positions.rows();
                EncoderInputKind::Windows { elements: mels * frames, frames }
            }
            (Arrangement::Windows, Stem::Patches(spec)) => {
                EncoderInputKind::Windows { elements: spec.patch_inputs(), frames: 1 }
            }
            (Arrangement::Chunks { .. }, Stem::Audio { mels, .. }) => {
                EncoderInputKind::Clips { elements: *mels }
            }
            (Arrangement::Chunks { .. }, Stem::Patches(spec)) => {
                EncoderInputKind::Clips { elements: spec.patch_inputs() }
            }
        }
    }

    /// Returns the layer specifications.
    #[must_use]
    pub fn layer_specs(&self) -> &[LayerSpec] {
        &self.layers
    }
}

impl EncoderConfig {
    /// Checks microbatch media and uploads the encoder stage inputs.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) that names the mismatched input.
    pub fn context<D: Device>(&self, device: &D, medium: &EncoderInput<'_>) -> Result<MicrobatchContext<D>> {
        let plan = match (&self.arrangement, *medium) {
            (Arrangement::Tiles(tiles), EncoderInput::Tiles { pixels, shown }) => {
                tiles.plan(pixels, shown)?
            }
            (Arrangement::Native(native), EncoderInput::Patches { values, grids }) => {
                native.plan(values, grids)?
            }
            (Arrangement::Windows, EncoderInput::Windows { features, frames }) => {
                let (mels, positions) = self.audio_stem()?;
                arrange_windows(mels, positions.rows(), features, frames)?
            }
            (Arrangement::Chunks { frames: chunk }, EncoderInput::Clips { features, frames }) => {
                let (mels, _) = self.audio_stem()?;
                arrange_chunks(mels, self.hidden, *chunk, features, frames)?
            }
            _ => return refuse("medium", "is of another kind than the encoder takes".to_owned()),
        };
        let rotation = match (&self.arrangement, &plan.rotation) {
            (Arrangement::Native(native), Some([rows, columns])) => {
                Some(native.rope().angles(device, &[rows.as_slice(), columns].concat(), rows.len())?)
            }
            _ => None,
        };
        let upload = |mix: &SparseRows| mix.upload(device);
        let stem: Vec<DeviceSparseRows<D>> = plan.stem.iter().map(upload).collect::<Result<_, _>>()?;
        let optional = |mix: &Option<SparseRows>| mix.as_ref().map(upload).transpose();
        let has_table = !plan.position_table.is_empty();
        let has_windows = !plan.windows.is_empty();
        let windows = has_windows.then(|| Segments::new(device, &plan.windows)).transpose()?;
        Ok(MicrobatchContext {
            layers: LayerContext {
                rows: plan.segments.last().map_or(0, |&rows| rows as usize),
                segments: Segments::new(device, &plan.segments)?,
                windows,
                rotation,
                window_rotation: None,
                query_scales: None,
            },
            inputs: ModuleInputs::Encoder(EncoderInputs {
                medium: device.upload(&plan.medium)?,
                medium_rows: plan.medium_rows,
                stem,
                positions: optional(&plan.positions)?,
                position_table: has_table.then(|| device.upload(&plan.position_table)).transpose()?,
                class: optional(&plan.class)?,
                taken: optional(&plan.taken)?,
                projected_rows: plan.projected_rows,
                // without an arrangement, projected rows are the tokens
                tokens: plan.arranged.as_ref().map_or(plan.projected_rows, SparseRows::rows),
                arranged: optional(&plan.arranged)?,
                newlines: optional(&plan.newlines)?,
            }),
        })
    }

    /// Returns mel bins and positions for an audio encoder.
    fn audio_stem(&self) -> Result<(usize, AudioPositions)> {
        match self.stem {
            Stem::Audio { mels, positions, .. } => Ok((mels, positions)),
            Stem::Patches(_) => refuse("medium", "is of another kind than the encoder takes".to_owned()),
        }
    }
}
