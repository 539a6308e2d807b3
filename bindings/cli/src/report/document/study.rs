//! A study: strategies compared on the same steps, with timelines, loads and samples.

use serde::{Deserialize, Serialize};

/// Time source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Basis {
    /// Predicted times put through a schedule.
    Simulated,
    /// Measured by a clock.
    Measured,
    /// Counted, without times.
    Counted,
}

/// Strategies compared on the same steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Study {
    pub(crate) name: String,
    /// Paragraph below the heading.
    pub(crate) about: String,
    /// Module names, in the order that all lists by module use.
    pub(crate) modules: Vec<String>,
    /// The strategies, data-blind first; the speed-up compares each strategy with the first on the same
    /// basis.
    pub(crate) strategies: Vec<StrategyResult>,
    /// Samples in the shown steps, to which groups refer by index.
    pub(crate) samples: Vec<Sample>,
    /// The shown steps.
    pub(crate) steps: Vec<StudyStep>,
}

/// Strategy results over all steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StrategyResult {
    pub(crate) name: String,
    pub(crate) basis: Basis,
    /// Mean step.
    pub(crate) step_seconds: f64,
    #[serde(default)]
    pub(crate) step_seconds_p95: Option<f64>,
    /// Fraction of the stage time that is idle, in `0..=1`.
    #[serde(default)]
    pub(crate) bubble_fraction: Option<f64>,
    /// Lower bound on the mean step for every cut of the same samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bound_seconds: Option<f64>,
    /// Number of steps in the mean.
    pub(crate) steps: u64,
    /// Parallelism plan, if strategies differ in it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) plan: String,
}

/// A step that is shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StudyStep {
    pub(crate) step: u64,
    /// Timelines for this step, at most one per strategy.
    pub(crate) timelines: Vec<Timeline>,
}

/// Timeline for a step under a strategy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timeline {
    /// Strategy index in the study.
    pub(crate) strategy: usize,
    /// End time on the slowest rank.
    pub(crate) makespan_ns: u64,
    /// Predicted compute by rank and module; empty if unknown.
    #[serde(default)]
    pub(crate) loads_ns: Vec<Vec<u64>>,
    pub(crate) rows: Vec<Row>,
    /// Samples in each pass group, a module microbatch, as indices into the study samples.
    pub(crate) groups: Vec<Vec<u32>>,
    /// Number of samples of each group that are not listed, because the page would be too large; empty if all
    /// are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) unlisted: Vec<u32>,
}

/// A timeline row: a stage on a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Label, such as `rank 0 vision 0`.
    pub(crate) label: String,
    pub(crate) rank: usize,
    /// Module index in the study.
    pub(crate) module: usize,
    pub(crate) bars: Vec<Bar>,
}

/// A pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "[u64; 5]", from = "[u64; 5]")]
pub(crate) struct Bar {
    /// Start time since the step start.
    pub(crate) start_ns: u64,
    pub(crate) length_ns: u64,
    pub(crate) pass: PassCode,
    /// Number of the microbatch, as the schedule counts.
    pub(crate) microbatch: u32,
    /// Group index in the timeline.
    pub(crate) group: u32,
}

/// Pass kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassCode {
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
}

impl PassCode {
    const ALL: [Self; 4] = [Self::Forward, Self::Backward, Self::BackwardInput, Self::BackwardWeight];
}

impl From<Bar> for [u64; 5] {
    fn from(bar: Bar) -> Self {
        let Bar { start_ns, length_ns, pass, microbatch, group } = bar;
        [start_ns, length_ns, pass as u64, microbatch.into(), group.into()]
    }
}

impl From<[u64; 5]> for Bar {
    /// An unknown pass is drawn as a forward pass; numbers are clamped.
    fn from([start_ns, length_ns, pass, microbatch, group]: [u64; 5]) -> Self {
        let number = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let pass = PassCode::ALL.get(pass as usize).copied().unwrap_or(PassCode::Forward);
        Self { start_ns, length_ns, pass, microbatch: number(microbatch), group: number(group) }
    }
}

impl Sample {
    /// Returns the predicted time over all modules.
    pub(crate) fn total_ns(&self) -> u64 {
        self.module_ns.iter().sum()
    }
}

/// A sample.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) key: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) shard: String,
    /// Media shapes, such as `image 1024 × 768`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) media: String,
    /// LLM positions.
    pub(crate) tokens: u32,
    /// Predicted time per module.
    pub(crate) module_ns: Vec<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) previews: Vec<Preview>,
}

/// Small rendering of a sample's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Preview {
    /// JPEG as a `data:` URL.
    Image(String),
    /// Audio clip peaks over time, 0 to 100.
    Audio(Vec<u8>),
    /// Beginning of a text.
    Text(String),
}
