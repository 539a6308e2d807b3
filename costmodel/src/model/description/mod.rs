//! Models that were described by themselves: reads `model.json`, which `dflop describe` writes.
//!
//! A [`Description`] has counted parameters, FLOPs as polynomials, widths and token rules; the format is in
//! `docs/reference/formats.md`. Where the formulas over sizes give the same parameters and FLOPs for every
//! layer, the specification has these sizes. Otherwise it has [counts](super::counts), which replace the
//! formulas. Nothing is rounded: what cannot be expressed is an error.

mod document;
mod encoder;
mod llm;
mod token_rule;

use serde_json::Value;

pub use self::document::{
    CountedPart, DESCRIPTION_FILE, DeclaredSizes, DescribedExperts, DescribedHead, DescribedModule,
    Description, FORMAT, LayerRun, ModuleRole, VERSION,
};
pub use self::token_rule::{TokenRule, TokenRuleKind};

use crate::Module;
use crate::error::{Error, Result};
use crate::model::config::{DESCRIBED, PartialModelSpec};
use crate::model::{AudioSpec, FamilyId, VisionSpec};

const FAMILY: FamilyId = FamilyId::new(DESCRIBED);

/// Pairs that attention computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reach {
    /// None: no attention, or linear attention.
    None,
    /// All pairs.
    Full,
    /// Pairs with earlier tokens.
    Causal,
    /// Pairs with so many earlier tokens.
    Sliding(u32),
    /// Pairs within squares with so many patches along a side.
    Window(u32),
    /// Pairs within chunks with so many tokens.
    Chunk(u32),
}

impl Reach {
    /// Returns the name in the document.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Full => "full",
            Self::Causal => "causal",
            Self::Sliding(_) => "sliding",
            Self::Window(_) => "window",
            Self::Chunk(_) => "chunk",
        }
    }
}

impl Description {
    /// Returns the modules as specifications.
    ///
    /// # Errors
    /// [`Error::Configuration`] that names the field, for counts that contradict each other or that dflop
    /// cannot predict with.
    pub fn spec(&self) -> Result<PartialModelSpec> {
        // Parameters beside the modules, such as newline embeddings, belong to the first encoder.
        let has_encoder = self.modules.len() > 1;
        let mut beside = self.parameters_beside_modules;
        let llm_beside = if has_encoder { 0 } else { std::mem::take(&mut beside) };
        let Some(llm_module) = self.module(Module::Llm) else {
            return Err(invalid(Module::Llm, "module", "is missing".to_owned()));
        };
        let llm = llm::spec(llm_module, llm_beside)?;
        let mut spec = PartialModelSpec { family: FAMILY, llm: Some(llm), ..PartialModelSpec::default() };
        if let Some(module) = self.module(Module::Vision) {
            let (encoder, rule) = encoder::vision(module, llm.hidden, std::mem::take(&mut beside))?;
            spec.vision = Some(VisionSpec { family: FAMILY, encoder, rule });
        }
        if let Some(module) = self.module(Module::Audio) {
            let (encoder, rule) = encoder::audio(module, llm.hidden, std::mem::take(&mut beside))?;
            spec.audio = Some(AudioSpec { family: FAMILY, encoder, rule });
        }
        Ok(spec)
    }
}

/// Reads a document into specifications.
///
/// # Errors
/// The errors of [`Description::read`] and [`Description::spec`].
pub(super) fn read(document: &Value) -> Result<PartialModelSpec> {
    Description::read(document)?.spec()
}

fn invalid(module: Module, field: &str, problem: String) -> Error {
    Error::Configuration { file: DESCRIPTION_FILE, field: format!("modules[{module}].{field}"), problem }
}

/// Divides, if the quotient is whole and fits.
fn whole(value: u64, divisor: u64) -> Option<u32> {
    let is_whole = divisor > 0 && value.is_multiple_of(divisor);
    if is_whole { u32::try_from(value / divisor).ok() } else { None }
}

/// Multiplies, saturating.
fn product<const N: usize>(factors: [u32; N]) -> u64 {
    factors.into_iter().fold(1, |product: u64, factor| product.saturating_mul(u64::from(factor)))
}

#[cfg(test)]
mod tests;
