//! Joins modules from several checkpoints to a single model.

use super::PartialModelSpec;
use crate::error::{Error, Result};
use crate::model::families::{llava_onevision, qwen2_audio};
use crate::model::{FamilyId, ModelSpec};

impl ModelSpec {
    /// Joins modules to a model: one language model, at most one encoder per modality.
    ///
    /// A vision encoder without a language model gets LLaVA's projector (two matrices, as wide as the LLM),
    /// an audio encoder gets Qwen2-Audio's projector (pooling by 2, a single matrix). The family is the
    /// encoders' common family, the language model's without encoders, or else [`FamilyId::COMPOSED`].
    ///
    /// # Errors
    /// [`Error::Composition`] if there is no language model, or two modules of a kind.
    pub fn compose(name: &str, parts: &[PartialModelSpec]) -> Result<Self> {
        let invalid =
            |problem: &str| Error::Composition { name: name.to_owned(), problem: problem.to_owned() };
        let only = |found: Vec<usize>, kind: &str| match found[..] {
            [] => Ok(None),
            [only] => Ok(Some(parts[only])),
            _ => Err(invalid(&format!("it has {} {kind}", found.len()))),
        };
        let having =
            |has: fn(&PartialModelSpec) -> bool| (0..parts.len()).filter(|&at| has(&parts[at])).collect();
        let llm = only(having(|part| part.llm.is_some()), "language models")?;
        let Some((llm, llm_family)) = llm.and_then(|part| Some((part.llm?, part.family))) else {
            return Err(invalid("it is an encoder; join it with a language model"));
        };
        let vision = only(having(|part| part.vision.is_some()), "encoders of images")?;
        let audio = only(having(|part| part.audio.is_some()), "encoders of audio")?;
        let vision = vision.and_then(|part| part.vision.map(|vision| (vision, part.llm.is_some())));
        let audio = audio.and_then(|part| part.audio.map(|audio| (audio, part.llm.is_some())));
        let encoders = [vision.map(|(vision, _)| vision.family), audio.map(|(audio, _)| audio.family)];
        let family = match encoders {
            [Some(vision), Some(audio)] if vision != audio => FamilyId::COMPOSED,
            [Some(family), _] | [None, Some(family)] => family,
            [None, None] => llm_family,
        };
        Ok(Self {
            name: name.to_owned(),
            family,
            vision: vision.map(|(mut vision, has_projector)| {
                if !has_projector {
                    let hidden = vision.encoder.hidden;
                    vision.encoder.projector = llava_onevision::projector(hidden, llm.hidden, true);
                }
                vision
            }),
            audio: audio.map(|(mut audio, has_projector)| {
                if !has_projector {
                    let hidden = audio.encoder.hidden;
                    audio.encoder.projector = qwen2_audio::projector(hidden, llm.hidden);
                }
                audio
            }),
            llm,
        })
    }
}
