//! Records the rows of a run in a saved state: layout, token counts, and the position inside a document.

use serde::{Deserialize, Serialize};

use super::{RunSettings, unfit};
use crate::dataset::Dataset;
use crate::error::Result;
use crate::order::rows::{RowCursor, RowLayout, RowRule};

/// Rows that the steps of a run consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RowSettings {
    pub(crate) layout: RowLayout,
    /// Number of tokens per row that documents may fill; blank media take the rest.
    pub(crate) room: u32,
}

/// Positions in the documents of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RowCursors {
    /// Position before the first row of the origin of the run.
    pub(crate) origin: RowCursor,
    /// Position before the next row.
    pub(crate) next: RowCursor,
}

/// Rows of a run, and the position in them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RowState {
    settings: RowSettings,
    /// Digest of the counter of the texts of each dataset; null for estimates.
    counted_by: Vec<Option<String>>,
    cursors: RowCursors,
}

impl RowState {
    pub(super) fn new(settings: RowSettings, cursors: RowCursors, datasets: &[Dataset]) -> Self {
        Self { settings, counted_by: counters(datasets), cursors }
    }

    pub(super) fn cursors(&self) -> RowCursors {
        self.cursors
    }

    /// Returns the positions after the origin moved to the next row.
    pub(super) fn moved_origin(&self) -> RowCursors {
        let next = RowCursor { position: 0, ..self.cursors.next };
        RowCursors { origin: next, next }
    }

    pub(super) fn has_layout(&self, settings: Option<RowSettings>) -> bool {
        settings == Some(self.settings)
    }

    /// Checks that a run continues the rows of a state.
    ///
    /// # Errors
    /// [`Error::State`](crate::error::Error::State) if one has rows and the other whole samples, if rows of
    /// windows have another length or another window, or if texts were counted by another tokenizer.
    pub(super) fn check(saved: Option<&Self>, run: &RunSettings<'_>) -> Result<()> {
        let (saved, now) = match (saved, run.rows) {
            (None, None) => return Ok(()),
            (Some(saved), Some(now)) => (saved, now),
            (Some(saved), None) => {
                let layout = saved.settings.layout;
                return unfit(format!("it has rows, `{layout}`, and this run packs whole samples"));
            }
            (None, Some(now)) => {
                let layout = now.layout;
                return unfit(format!("it packs whole samples, and this run has rows, `{layout}`"));
            }
        };
        // Only rows that are cut anywhere continue with another length.
        let is_split = |settings: RowSettings| settings.layout.rule == RowRule::Split;
        if saved.settings != now && !(is_split(saved.settings) && is_split(now)) {
            let described = |RowSettings { layout, room }: RowSettings| {
                if room == layout.tokens {
                    format!("`{layout}`")
                } else {
                    format!("`{layout}` with {room} tokens beside blank media")
                }
            };
            let (before, after) = (described(saved.settings), described(now));
            return unfit(format!("it has rows {before}, and this run has rows {after}"));
        }
        if saved.counted_by != counters(run.datasets) {
            return unfit("its texts were counted by another tokenizer, chat template or model");
        }
        Ok(())
    }
}

fn counters(datasets: &[Dataset]) -> Vec<Option<String>> {
    datasets.iter().map(|dataset| dataset.index().token_counts().map(str::to_owned)).collect()
}
