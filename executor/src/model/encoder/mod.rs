//! Encoders of images, videos and audio, with their projectors.
//!
//! [`EncoderConfig`] reads one from a `config.json` and makes its blocks: a stem, transformer layers, what is taken of
//! the last layer, the projector. [`EncoderInput`] is what it encodes; [`EncoderConfig::context`] turns one microbatch's
//! media into the sparse matrices that the blocks multiply with.

mod any_res;
mod audio;
mod convolution;
mod input;
mod input_kind;
mod native;
mod projector;
mod stem;
mod tail;
mod tower;

use std::ops::Range;

pub use input::{EncoderInput, TiledMedium};
pub use input_kind::EncoderInputKind;

use serde_json::Value;

use self::convolution::AudioStem;
use self::projector::{Projector, ProjectorSpec};
use self::stem::{PatchStem, PatchStemSpec};
use self::tail::{Tail, TailSpec};
use super::Block;
use super::config::ConfigFields;
use super::layer::{Layer, LayerSpec};
use super::parameters::{Declaration, Init};
use super::tensor_parallel::{self, DimensionFields};
use crate::device::Device;
use crate::error::{Error, Result};

/// Beginning of matrices where there is no checkpoint.
const INIT: Init = Init::Normal(0.02);

/// Whose encoders of images are known.
const VISION: &str =
    "llava_onevision, internvl, qwen2_vl, qwen2_5_vl, clip_vision_model and siglip_vision_model";

/// An encoder that the cost model knows in a form, or inside a model, whose checkpoints have other names than those here.
fn refuse_other_form(top: &ConfigFields<'_>, model_type: &str, known: &str) -> Error {
    top.refused("model_type", format!("= \"{model_type}\" is not supported, encoders are read from {known}"))
}

/// What turns a medium into rows of the first layer.
#[derive(Debug, Clone, PartialEq)]
enum Stem {
    Patches(PatchStemSpec),
    /// Prefix of the names, mel bins, positions.
    Audio {
        prefix: &'static str,
        mels: usize,
        positions: usize,
    },
}

/// What kind of media, and how rows are arranged.
#[derive(Debug, Clone, PartialEq)]
enum Arrangement {
    /// Squares of one size.
    Tiles(tower::Tiles),
    /// Patches of images of their own resolution.
    Native(native::Native),
    /// Windows of log-mel frames.
    Audio,
}

/// An encoder with its projector.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    hidden: usize,
    stem: Stem,
    layers: Vec<LayerSpec>,
    tail: Option<TailSpec>,
    projector: Option<ProjectorSpec>,
    arrangement: Arrangement,
    /// Tensors of checkpoints that nothing here reads.
    ignored: Vec<String>,
    /// Where dimensions stand in the configuration.
    fields: &'static DimensionFields,
}

/// Which parts of an encoder are not trained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct FrozenEncoder {
    /// All but the projector.
    pub encoder: bool,
    /// The projector.
    pub projector: bool,
}

impl EncoderConfig {
    /// Reads the encoder of images, if the model has one: of LLaVA-OneVision, InternVL, Qwen2-VL or Qwen2.5-VL, or CLIP
    /// or SigLIP alone.
    ///
    /// # Errors
    /// [`Error::Model`] or [`Error::Config`] if a field makes no sense or has no counterpart here.
    pub fn vision(document: &Value) -> Result<Option<Self>> {
        let top = ConfigFields::of(document);
        match top.text("model_type")?.unwrap_or_default() {
            "llava_onevision" => tower::llava_onevision(document).map(Some),
            "internvl" => tower::intern_vl(document).map(Some),
            "clip_vision_model" | "siglip_vision_model" => tower::alone(document).map(Some),
            "qwen2_vl" => native::qwen2_vl(document).map(Some),
            "qwen2_5_vl" => native::qwen2_5_vl(document).map(Some),
            other @ ("clip" | "siglip" | "internvl_chat") => Err(refuse_other_form(&top, other, VISION)),
            _ => Ok(None),
        }
    }

    /// Reads the encoder of audio, if the model has one: of Qwen2-Audio.
    ///
    /// # Errors
    /// [`Error::Model`] or [`Error::Config`] if a field makes no sense or has no counterpart here.
    pub fn audio(document: &Value) -> Result<Option<Self>> {
        match ConfigFields::of(document).text("model_type")? {
            Some("qwen2_audio") => audio::qwen2_audio(document).map(Some),
            Some(other @ ("whisper" | "qwen2_audio_encoder")) => {
                Err(refuse_other_form(&ConfigFields::of(document), other, "qwen2_audio"))
            }
            _ => Ok(None),
        }
    }

    /// Returns the transformer layers that run.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the width of a row between layers.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Returns prefixes of tensors of checkpoints that nothing here reads: layers behind the one that is taken, pooling
    /// heads.
    #[must_use]
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// Checks that a tensor-parallel group of this degree can share the layers and the projector's MLP.
    ///
    /// # Errors
    /// [`Error::TensorParallel`] that names the field which does not fit.
    pub fn check_tensor_parallel(&self, degree: usize) -> Result<()> {
        for layer in &self.layers {
            tensor_parallel::check_heads(self.fields, &layer.attention, degree)?;
            tensor_parallel::check_size(self.fields.mlp, layer.mlp.middle, degree)?;
        }
        let projector = self.projector.as_ref().and_then(ProjectorSpec::middle);
        projector.map_or(Ok(()), |middle| tensor_parallel::check_size("projector", middle, degree))
    }

    /// Declares the parameters of some layers and returns their blocks: with the stem before the first layer and the
    /// projector behind the last.
    ///
    /// The blocks of the encoder proper and those of the projector are apart, as they are frozen apart.
    ///
    /// # Errors
    /// [`Error::Config`] if there are no such layers, [`Error::TensorParallel`] if ranks cannot share them.
    pub fn add_to<D: Device>(
        &self,
        layers: Range<usize>,
        frozen: FrozenEncoder,
        parts: &mut crate::stage::StageBlocks<D>,
    ) -> Result<()> {
        if layers.start > layers.end || layers.end > self.layers() {
            let problem = format!("= {} has no layers {layers:?}", self.layers());
            return Err(Error::Config { field: "num_hidden_layers".to_owned(), problem });
        }
        self.check_tensor_parallel(parts.tp_rank().size)?;
        for layers in crate::stage::single_layers(&layers) {
            parts.add(frozen.encoder, |declaration| Ok(self.encoder_blocks(&layers, declaration)))?;
        }
        let projector = self.projector.as_ref().filter(|_| layers.end == self.layers());
        let Some(projector) = projector else { return Ok(()) };
        parts.add(frozen.projector, |declaration| {
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
}
