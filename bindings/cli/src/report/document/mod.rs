//! Report contents as a JSON document: everything that the page shows.
//!
//! A reader rejects a different [`VERSION`]; fields that may be missing have a default, so that a document
//! with the same version stays readable.

mod sections;
mod study;

use serde::{Deserialize, Serialize};

pub(crate) use sections::{
    Accuracy, AccuracyPoint, DataProfile, ErrorRow, Plan, PlannedModule, PlannedParallelism, Quantity,
    TrainedStep, Training,
};
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
