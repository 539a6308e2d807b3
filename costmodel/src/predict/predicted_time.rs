//! Times predicted from a profile, in whole nanoseconds with uncertainty, and warnings about those that rest
//! on too few measurements.

use serde::Serialize;

use crate::curve::Estimate;
use crate::module::Module;
use crate::profile::{Part, Phase};

/// Time predicted from a profile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PredictedTime {
    /// Time in whole nanoseconds.
    pub ns: u64,
    /// Half width of the 90 % interval around `ns`, in nanoseconds: 9 of 10 measurements at a shape that was
    /// not measured are at most this far off.
    ///
    /// Covers the spread between repeats, the interpolation error and the difference between measurement
    /// sessions; never below the measured spread. Errors in a module's parts add up in full.
    pub uncertainty_ns: u64,
    /// Whether the shape is outside the measured points.
    #[serde(rename = "is_beyond")]
    pub is_extrapolated: bool,
}

impl From<Estimate> for PredictedTime {
    fn from(estimate: Estimate) -> Self {
        let Estimate { ns, uncertainty_ns, is_extrapolated } = estimate;
        Self { ns: whole_ns(ns), uncertainty_ns: whole_ns(uncertainty_ns), is_extrapolated }
    }
}

/// Rounds to whole nanoseconds, half up, saturating.
pub(super) fn whole_ns(ns: f64) -> u64 {
    // A cast from f64 saturates, and truncates, which makes `+ 0.5` round half up.
    (ns + 0.5) as u64
}

/// Reason why a prediction from a profile is weaker than between measured points.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant names its fields")]
pub enum ProfileWarning {
    /// The shape is outside the measured points; time was extrapolated linearly in work.
    #[serde(rename = "beyond")]
    Extrapolated {
        module: Module,
        part: Part,
        phase: Phase,
        batch: f64,
        tokens: f64,
        tokens_min: f64,
        tokens_max: f64,
    },
    /// Only one layer count was measured, so the cost outside the layers was scaled with them.
    LayersInProportion { module: Module, part: Part, phase: Phase, measured: u32, asked: u32 },
    /// Shapes with fewer layer counts than other shapes, or with more layers in less time, were not used.
    ShapesLeftOut { module: Module, part: Part, phase: Phase, shapes: usize },
    /// Attention was not measured separately, so attention over packed samples is overestimated.
    #[serde(rename = "attention_not_apart")]
    AttentionNotSeparate { module: Module, phase: Phase },
    /// A single shape was measured; time is scaled in proportion to work.
    SingleShape { module: Module, part: Part, phase: Phase },
    /// Some points have fewer than 3 repeats; a spread of 5 % is assumed for each.
    FewRepeats { module: Module, points: usize },
    /// The file does not state the widths of the measured module, so it was not compared with the model.
    #[serde(rename = "unknown_dimensions")]
    UnknownWidths { module: Module, file: String },
}

impl std::fmt::Display for ProfileWarning {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Extrapolated { module, part, phase, batch, tokens, tokens_min, tokens_max } => write!(
                formatter,
                "{module} {part} {phase}: {batch:.0} x {tokens:.0} tokens is outside the measured shapes \
                 ({tokens_min:.0} to {tokens_max:.0} tokens)"
            ),
            Self::LayersInProportion { module, part, phase, measured, asked } => write!(
                formatter,
                "{module} {part} {phase}: only {measured} layers were measured, scaled in proportion to {asked}; \
                 measure a second layer count to separate layers and constant"
            ),
            Self::ShapesLeftOut { module, part, phase, shapes } => write!(
                formatter,
                "{module} {part} {phase}: {shapes} shapes left out: they lack a layer count that others have, or took less \
                 time with more layers"
            ),
            Self::AttentionNotSeparate { module, phase } => {
                write!(formatter, "{module} {phase}: attention was not measured separately from linear work")
            }
            Self::SingleShape { module, part, phase } => {
                write!(
                    formatter,
                    "{module} {part} {phase}: one shape was measured, time is scaled in proportion"
                )
            }
            Self::FewRepeats { module, points } => write!(
                formatter,
                "{module}: {points} points have fewer than 3 repeats, a spread of 5 % is assumed for each"
            ),
            Self::UnknownWidths { module, file } => {
                write!(formatter, "{module}: `{file}` does not state the measured widths")
            }
        }
    }
}
