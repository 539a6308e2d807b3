//! Selects the frozen parts of a model.
//!
//! Multimodal models are often trained in stages: first only the projectors, then the LLM with them, finally
//! the encoders too. A frozen part runs forward as usual. In the backward pass it computes no weight
//! gradient, and no gradient at all if nothing before it is trained.

use std::fmt;
use std::str::FromStr;

use crate::Module;
use crate::error::{Error, Result};
use crate::flops::Gradients;
use crate::model::ModelSpec;

/// Parts whose parameters are not updated; parsed from and displayed as names like `vision,projector`.
///
/// # Examples
/// ```
/// let frozen: dflop_costmodel::FrozenParts = "vision,llm".parse()?;
/// assert!(frozen.vision && frozen.llm && !frozen.projector);
/// # Ok::<(), dflop_costmodel::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "any combination of parts may be frozen")]
pub struct FrozenParts {
    /// Vision encoder without projector.
    pub vision: bool,
    /// Audio encoder without projector.
    pub audio: bool,
    /// Projectors in all encoders.
    pub projector: bool,
    /// Language model, with embedding and LM head.
    pub llm: bool,
}

impl FrozenParts {
    /// Part names, in field order.
    pub const NAMES: [&str; 4] = ["vision", "audio", "projector", "llm"];

    const fn parts(self) -> [bool; 4] {
        [self.vision, self.audio, self.projector, self.llm]
    }

    /// Checks that the model has the frozen parts, and that something is left to train.
    ///
    /// # Errors
    /// [`Error::Incompatible`] otherwise.
    pub fn check(self, spec: &ModelSpec) -> Result<()> {
        let incompatible =
            |problem: &str| Err(Error::Incompatible { name: spec.name.clone(), problem: problem.to_owned() });
        let has_encoder = spec.vision.is_some() || spec.audio.is_some();
        for (is_frozen, is_there, problem) in [
            (self.vision, spec.vision.is_some(), "has no vision encoder to freeze"),
            (self.audio, spec.audio.is_some(), "has no audio encoder to freeze"),
            (self.projector, has_encoder, "has no projector to freeze"),
        ] {
            if is_frozen && !is_there {
                return incompatible(problem);
            }
        }
        if self.llm && !self.trains_before_llm(spec) {
            return incompatible("has every part frozen, so that nothing is trained");
        }
        Ok(())
    }

    /// Returns the gradients that an encoder's tower and projector compute.
    pub(crate) const fn encoder_gradients(self, encoder: Module) -> [Gradients; 2] {
        match (self.is_tower_frozen(encoder), self.projector) {
            (false, false) => [Gradients::All, Gradients::All],
            (false, true) => [Gradients::All, Gradients::Inputs],
            // Nothing before the projector is trained, so its inputs need no gradient.
            (true, false) => [Gradients::None, Gradients::Weights],
            (true, true) => [Gradients::None, Gradients::None],
        }
    }

    /// Whether this encoder's tower, or the LLM, is frozen.
    pub(crate) const fn is_tower_frozen(self, module: Module) -> bool {
        match module {
            Module::Vision => self.vision,
            Module::Audio => self.audio,
            Module::Llm => self.llm,
        }
    }

    /// Returns a module's backward time divided by the forward time, for the layers and for what is outside
    /// them (an encoder's projector, the LM head): 2 for input and weight gradients, 1 for either, 0 for
    /// none.
    #[must_use]
    pub const fn backward_ratios(self, module: Module) -> [f64; 2] {
        if matches!(module, Module::Llm) {
            let ratio = self.llm_gradients().over_forward();
            return [ratio, ratio];
        }
        let [tower, projector] = self.encoder_gradients(module);
        [tower.over_forward(), projector.over_forward()]
    }

    /// Returns the gradients that the LLM computes.
    pub(crate) const fn llm_gradients(self) -> Gradients {
        if self.llm { Gradients::Inputs } else { Gradients::All }
    }

    const fn trains_before_llm(self, spec: &ModelSpec) -> bool {
        let (vision, audio) = (spec.vision.is_some(), spec.audio.is_some());
        (vision && !self.vision) || (audio && !self.audio) || ((vision || audio) && !self.projector)
    }
}

impl FromStr for FrozenParts {
    type Err = Error;

    fn from_str(names: &str) -> Result<Self> {
        let mut frozen = Self::default();
        for name in names.split(',') {
            *match name.trim() {
                "vision" => &mut frozen.vision,
                "audio" => &mut frozen.audio,
                "projector" => &mut frozen.projector,
                "llm" => &mut frozen.llm,
                other => {
                    return Err(Error::UnknownPart { name: other.to_owned(), known: Self::NAMES.join(", ") });
                }
            } = true;
        }
        Ok(frozen)
    }
}

impl fmt::Display for FrozenParts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMES.into_iter().zip(self.parts());
        let frozen: Vec<&str> = named.filter_map(|(name, is_frozen)| is_frozen.then_some(name)).collect();
        formatter.pad(&frozen.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for names in ["vision", "audio,llm", "vision,audio,projector,llm"] {
            assert_eq!(names.parse::<FrozenParts>().unwrap().to_string(), names);
        }
        assert_eq!("llm, vision".parse::<FrozenParts>().unwrap().to_string(), "vision,llm");
        let error = "vision,head".parse::<FrozenParts>().unwrap_err().to_string();
        assert_eq!(error, "unknown part `head`, known are vision, audio, projector, llm");
    }

    #[test]
    fn something_must_be_trained_and_what_is_frozen_must_exist() {
        let check = |model: &str, names: &str| {
            let spec = ModelSpec::preset(model).unwrap();
            names.parse::<FrozenParts>().unwrap().check(&spec).map_err(|error| error.to_string())
        };
        assert!(check("omni-7b", "vision,llm,projector").is_ok(), "the audio encoder is trained");
        assert!(check("qwen2.5-vl-7b", "vision,llm").is_ok(), "the projector is trained");
        assert!(check("qwen2.5-vl-7b", "vision,projector").is_ok());
        let nothing = check("qwen2.5-vl-7b", "vision,projector,llm").unwrap_err();
        assert!(nothing.ends_with("has every part frozen, so that nothing is trained"), "{nothing}");
        let missing = check("qwen2.5-vl-7b", "audio").unwrap_err();
        assert_eq!(missing, "`qwen2.5-vl-7b`: has no audio encoder to freeze");
    }
}
