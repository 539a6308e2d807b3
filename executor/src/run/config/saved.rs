//! Checkpoints and records of learned corrections.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Saved states in a run.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointTable {
    /// Directory for saved states [default: none are saved].
    pub directory: Option<PathBuf>,
    /// Steps between saved states; the last step is always saved.
    pub every: Option<u64>,
    /// Number of states to keep [default: 2].
    pub kept: Option<usize>,
    /// Number of earlier runs whose states are kept when a run starts from step 0 [default: all].
    pub kept_earlier: Option<usize>,
}

/// Corrections that a run learns from measured times.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CorrectionTable {
    /// Whether corrections are learned from measured times, recorded and reported.
    pub enabled: bool,
    /// Number of steps between correction updates.
    pub interval_steps: u64,
    /// File that learned tables are recorded in [default: `corrections.jsonl` in the directory of saved
    /// states].
    pub record: Option<PathBuf>,
}

impl Default for CorrectionTable {
    fn default() -> Self {
        Self { enabled: true, interval_steps: 8, record: None }
    }
}
