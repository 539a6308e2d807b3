//! Report contents as a JSON document: everything that the page shows.
//!
//! Sections other than studies: training, accuracy, data profile, parallelism plan.
//!
//! A reader rejects a different [`VERSION`]; fields that may be missing have a default, so that a document
//! with the same version stays readable.

mod study;

use dflop_executor::step_record::EvaluationLine;
use serde::{Deserialize, Serialize};

pub(crate) use study::{
    Bar, Basis, PassCode, Preview, Row, Sample, StrategyResult, Study, StudyStep, Timeline,
};

/// Value for [`RunReport::format`].
pub(crate) const FORMAT: &str = "dflop-report";
/// Document version; a reader rejects any other version.
pub(crate) const VERSION: u32 = 1;

/// Command report. A section without data is left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunReport {
    /// [`FORMAT`].
    pub(crate) format: String,
    /// [`VERSION`].
    pub(crate) version: u32,
    /// Command name, such as `simulate`.
    pub(crate) command: String,
    /// Report heading.
    pub(crate) title: String,
    /// The result in words, most important first.
    pub(crate) verdict: Vec<Verdict>,
    /// Labels and values with their units: the model, the cluster, the dataset and so on.
    pub(crate) facts: Vec<Fact>,
    /// Strategy comparisons on the same steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) studies: Vec<Study>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) training: Option<Training>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) accuracy: Option<Accuracy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) profile: Option<DataProfile>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) plan: Option<Plan>,
    /// Notes for the reader, a paragraph each.
    pub(crate) notes: Vec<String>,
    pub(crate) origin: Origin,
}

/// A sentence in the verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) basis: Basis,
    /// Number in large type, such as `1.65×`; empty for none.
    #[serde(default)]
    pub(crate) figure: String,
    pub(crate) text: String,
}

/// A label with a value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fact {
    pub(crate) label: String,
    pub(crate) value: String,
}

/// Report origin: program, arguments, time, machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// dflop version.
    pub(crate) version: String,
    /// The command line, without credentials.
    pub(crate) arguments: String,
    /// Seconds since 1970-01-01 UTC.
    pub(crate) written_unix_seconds: u64,
    pub(crate) system: String,
    pub(crate) processor: String,
    /// Cores that the process may use.
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
}

impl RunReport {
    /// Starts a command report without sections.
    pub(crate) fn new(command: &str, title: impl Into<String>, origin: Origin) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            command: command.to_owned(),
            title: title.into(),
            origin,
            ..Self::default()
        }
    }

    /// Adds a fact.
    pub(crate) fn fact(&mut self, label: &str, value: impl Into<String>) {
        self.facts.push(Fact { label: label.to_owned(), value: value.into() });
    }
}

/// Steps in a training run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Training {
    /// Partition strategy.
    pub(crate) strategy: String,
    /// Last step in each entry; an entry shows the mean since the previous entry.
    pub(crate) steps: Vec<TrainedStep>,
    /// Number of steps that were taken.
    pub(crate) taken: u64,
}

/// Mean over consecutive steps; a value that a run does not record is missing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainedStep {
    pub(crate) step: u64,
    pub(crate) seconds: f64,
    pub(crate) data_wait_seconds: f64,
    #[serde(default)]
    pub(crate) loss: Option<f64>,
    /// Measured pass makespan.
    #[serde(default)]
    pub(crate) pipeline_seconds: Option<f64>,
    /// The same as predicted.
    #[serde(default)]
    pub(crate) predicted_seconds: Option<f64>,
    /// Pass makespan, simulated with the measured CPU time for each pass.
    #[serde(default)]
    pub(crate) replayed_seconds: Option<f64>,
    #[serde(default)]
    pub(crate) exposed_communication_seconds: Option<f64>,
    #[serde(default)]
    pub(crate) tokens_per_second: Option<f64>,
    /// Fraction of the step in which pipeline stages wait.
    #[serde(default)]
    pub(crate) bubble_fraction: Option<f64>,
    #[serde(default)]
    pub(crate) pass_seconds: Option<f64>,
    #[serde(default)]
    pub(crate) update_seconds: Option<f64>,
    #[serde(default)]
    pub(crate) input_seconds: Option<f64>,
    #[serde(default)]
    pub(crate) plan_seconds: Option<f64>,
    #[serde(default)]
    pub(crate) result_seconds: Option<f64>,
    #[serde(default)]
    pub(crate) report_seconds: Option<f64>,
    #[serde(default)]
    pub(crate) checkpoint_seconds: Option<f64>,
    /// Last evaluation in the entry.
    #[serde(default)]
    pub(crate) evaluation: Option<EvaluationLine>,
}

/// Predictions compared with measurements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Accuracy {
    /// Paragraph below the heading.
    pub(crate) about: String,
    /// Module names.
    pub(crate) modules: Vec<String>,
    /// Factor on predictions before the comparison: 1 for a measured profile, a fitted factor for a stated
    /// rate, whose predictions only weigh samples against each other.
    pub(crate) scale: f64,
    /// Fraction of points inside the intervals.
    pub(crate) within_interval: f64,
    pub(crate) rows: Vec<ErrorRow>,
    pub(crate) points: Vec<AccuracyPoint>,
    /// Number of points, of which at most as many as the page can hold are listed.
    pub(crate) count: usize,
}

/// Errors for a point group: predicted over measured time, minus one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ErrorRow {
    pub(crate) name: String,
    pub(crate) count: usize,
    pub(crate) bias: f64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) max: f64,
}

/// A measured time with the prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct AccuracyPoint {
    /// Index into the modules.
    pub(crate) module: usize,
    pub(crate) label: String,
    /// Before the scale.
    pub(crate) predicted_ns: u64,
    /// Half width of the 90 % interval around the scaled prediction.
    pub(crate) interval_ns: u64,
    pub(crate) measured_ns: u64,
    /// Whether the prediction is outside the measured profile points.
    #[serde(default)]
    pub(crate) is_extrapolated: bool,
}

/// Dataset distributions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct DataProfile {
    /// Number of samples in the dataset, and the number of profiled samples.
    pub(crate) samples: u64,
    pub(crate) profiled: u64,
    pub(crate) modules: Vec<String>,
    pub(crate) quantities: Vec<Quantity>,
    /// The most expensive samples.
    pub(crate) dearest: Vec<Sample>,
    /// Cost of each sample over the median cost.
    pub(crate) times_median: Vec<f64>,
}

/// Distribution of a quantity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Quantity {
    /// Name with the unit last, such as `audio_seconds`.
    pub(crate) name: String,
    pub(crate) count: u64,
    pub(crate) mean: f64,
    /// Minimum, 5 %, quartiles, 95 %, 99 %, maximum.
    pub(crate) quantiles: [f64; 8],
    /// Histogram edges.
    pub(crate) range: [f64; 2],
    pub(crate) counts: Vec<u64>,
}

/// A parallelism plan and the runner-up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) winner: PlannedParallelism,
    pub(crate) runner_up: Option<PlannedParallelism>,
    /// Why the runner-up came second.
    pub(crate) reason: String,
    pub(crate) lower_bound_seconds: f64,
    pub(crate) memory_limit_gib: f64,
    pub(crate) bottleneck: String,
    pub(crate) searched: String,
}

/// Degrees for all modules with the resulting step time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PlannedParallelism {
    pub(crate) text: String,
    pub(crate) step_seconds: f64,
    #[serde(default)]
    pub(crate) step_seconds_p95: Option<f64>,
    pub(crate) microbatches: u32,
    pub(crate) placement: String,
    pub(crate) modules: Vec<PlannedModule>,
}

/// Module degrees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PlannedModule {
    pub(crate) name: String,
    pub(crate) tp: u32,
    pub(crate) pp: u32,
    pub(crate) dp: u32,
    /// Number of layers in each stage.
    pub(crate) layers: Vec<u32>,
    /// Peak GPU memory, where it is known.
    #[serde(default)]
    pub(crate) gib: Option<f64>,
}
