//! What a run saves: checkpoints and corrections.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::super::corrections::CorrectionSource;

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CheckpointTable {
    /// Directory of saved states [default: none are saved].
    #[serde(rename = "folder")]
    pub(crate) directory: Option<PathBuf>,
    /// Steps between saved states; the last step is always saved.
    pub(crate) every: Option<u64>,
    /// Number of states to keep [default: 2].
    pub(crate) kept: Option<usize>,
    /// Number of earlier runs whose states are kept, after a run started anew [default: all].
    pub(crate) kept_earlier: Option<usize>,
}

#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CorrectionTable {
    /// Whether corrections are learned from measured times, recorded and reported.
    pub(crate) enabled: bool,
    /// Steps between updates of the correction.
    pub(crate) interval_steps: u64,
    /// File that learned tables are recorded in [default: `corrections.jsonl` in the directory of saved
    /// states].
    pub(crate) record: Option<PathBuf>,
    /// Corrections that plans use; an argument of the command, no setting.
    #[serde(skip)]
    pub(crate) source: Option<CorrectionSource>,
}

impl Default for CorrectionTable {
    fn default() -> Self {
        Self { enabled: true, interval_steps: 8, record: None, source: None }
    }
}
