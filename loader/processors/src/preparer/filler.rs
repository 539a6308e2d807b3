//! Completes microbatches so that a model can run them: padding where there is no sample, blank media where
//! an encoder would otherwise have no input.
//!
//! A model fails without an input token, and an encoder that runs on only some ranks leaves parameters
//! without gradients (DDP) or ranks waiting for each other (FSDP). A filler has no targets and attends only
//! to itself, so it changes neither the loss nor the gradient.

use dflop_costmodel::Module;
use dflop_samples::inputs::{Filler, IGNORED, ModelInputs, PreparedSample};
use dflop_samples::media::{Audio, Modality, RgbImage};
use dflop_samples::{Error, Result};

use super::Preparer;
use super::frames::write_images;
use crate::chat::MarkedText;
use crate::message::MessagePart;

/// Side of a blank image in pixels; a processor may enlarge the image.
const BLANK_SIDE: u32 = 56;
/// Sample rate of a blank audio clip in Hz, and number of samples: a second.
const BLANK_RATE_HZ: u32 = 16_000;

impl Preparer {
    /// Returns the number of blank medium tokens for each encoder in the model, including markers.
    ///
    /// # Errors
    /// [`Error::Config`] if a processor rejects a blank medium.
    pub fn blank_tokens(&self) -> Result<Vec<(Module, u64)>> {
        let encoders = [(Module::Vision, self.images.is_some()), (Module::Audio, self.audio.is_some())];
        let encoders = encoders.into_iter().filter(|(_, is_present)| *is_present);
        encoders.map(|(module, _)| Ok((module, self.blank(module)?.tokens() as u64))).collect()
    }

    /// Creates the filler for microbatches that all have to run `encoders`.
    ///
    /// # Errors
    /// [`Error::Config`] if a processor rejects a blank medium.
    pub(super) fn make_filler(&self, encoders: &[Module]) -> Result<Filler> {
        let (input_ids, labels) = (vec![self.packer.pad_id], vec![IGNORED]);
        let padding = PreparedSample { input_ids, labels, ..PreparedSample::default() };
        let padding = Some(padding).filter(|_| self.packer.pad_to_tokens.is_none());
        let blanks = encoders.iter().map(|&module| Ok((module, self.blank(module)?)));
        Ok(Filler::new(padding, blanks.collect::<Result<_>>()?))
    }

    /// Creates the tensors for a microbatch that a model can run, for any samples.
    pub(super) fn pack_filled(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs {
        let fillers: Vec<PreparedSample> = filler.of(&samples).cloned().collect();
        // A blank image exists only if samples have none.
        let has_blank = fillers.iter().any(|filler| !filler.images.is_empty());
        let blank = self.media_filler(if has_blank { &fillers } else { &samples });
        self.packer.pack(samples, fillers.into_iter().chain(blank).collect()).unwrap_or_default()
    }

    /// Creates a sequence with a blank medium, black or silent, without targets.
    fn blank(&self, module: Module) -> Result<PreparedSample> {
        let refused = |reason: String| Error::Config {
            setting: "blank_media",
            reason: format!("no blank medium for the {module} encoder: {reason}"),
        };
        let part = MessagePart::Medium(match module {
            Module::Audio => Modality::Audio,
            Module::Vision | Module::Llm => Modality::Image,
        });
        let mut filler = PreparedSample::default();
        match (module, &self.images, &self.audio) {
            (Module::Vision, Some(images), _) => {
                let pixels = vec![0; 3 * (BLANK_SIDE * BLANK_SIDE) as usize];
                let image = RgbImage { width: BLANK_SIDE, height: BLANK_SIDE, pixels, is_truncated: false };
                filler.images = images.images(&[&image]).map_err(|error| refused(error.to_string()))?;
            }
            (Module::Audio, _, Some(audio)) => {
                let samples = vec![0.0; BLANK_RATE_HZ as usize];
                let clip = Audio { samples, sample_rate_hz: BLANK_RATE_HZ, channels: 1, is_truncated: false };
                filler.clips = vec![audio.clip(&clip).map_err(|error| refused(error.to_string()))?];
            }
            _ => return Err(refused("the model has no such encoder".into())),
        }
        let mut marked = MarkedText { text: self.family.inline(&[part], ""), targets: Vec::new() };
        if let Some(word) = self.family.image_word() {
            write_images(&mut marked, word, &filler.images);
        }
        let encoded = self.tokenizer.encode(&marked.text, false).map_err(refused)?;
        let is_target = vec![false; encoded.ids.len()];
        let tokens_of = |modality| match modality {
            Modality::Image => self.image_runs(&filler.images),
            Modality::Audio => filler.clips.iter().map(|clip| clip.tokens).collect(),
            Modality::Video => Vec::new(),
        };
        let expanded = self.expander.expand(&encoded.ids, &is_target, tokens_of, &filler.images);
        let expanded = expanded.map_err(|error| refused(error.to_string()))?;
        filler.labels = vec![IGNORED; expanded.ids.len()];
        (filler.input_ids, filler.runs) = (expanded.ids, expanded.runs);
        Ok(filler)
    }
}
