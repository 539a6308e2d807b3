//! Finds the rows of a step, from the positions before the steps that were planned.
//!
//! Rows are filled from token counts before anything is balanced, so they are the same for any number of
//! ranks. A step without a known position is reached from the last known one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::order::{Documents, Row, RowCursor, RowLayout, RowRule, Run, TokenSpan, fit_rows, split_rows};

/// Number of recent steps whose positions are kept.
const STEPS_KEPT: usize = 8_192;
/// Distance of the earlier steps whose positions are kept.
const STEPS_APART: u64 = 256;

/// Position before a step of rows.
pub(super) enum StepStart {
    At(RowCursor),
    /// The run has only this many steps.
    Ended(u64),
}

/// Rows of a run, and the positions before the steps that were planned.
#[derive(Debug)]
pub(super) struct RowSteps {
    pub(super) layout: RowLayout,
    pub(super) room: u32,
    pub(super) rows_per_step: usize,
    cursors: Mutex<BTreeMap<u64, RowCursor>>,
    /// The last window, with the position of its first document.
    window: Mutex<Option<(u64, Arc<Vec<Row>>)>>,
}

impl RowSteps {
    /// Starts at the origin of the run, and at the step of a restored state; `None` for steps of samples.
    pub(super) fn new(run: &Run) -> Option<Self> {
        let rows = run.source.rows?;
        let at = run.source.row_cursors;
        let cursors = BTreeMap::from([(run.steps.first(), at.origin), (run.first_step(), at.next)]);
        Some(Self {
            layout: rows.layout,
            room: rows.room,
            rows_per_step: run.steps.global_batch() as usize,
            cursors: Mutex::new(cursors),
            window: Mutex::default(),
        })
    }

    /// Returns at most as many rows as a step has, and the position after them.
    pub(super) fn next(&self, documents: &impl Documents, cursor: RowCursor) -> (Vec<Row>, RowCursor) {
        match self.layout.rule {
            RowRule::Split => split_rows(documents, self.room, self.rows_per_step, cursor),
            RowRule::Fit { window } => self.next_fitted(documents, u64::from(window), cursor),
        }
    }

    fn next_fitted(
        &self,
        documents: &impl Documents,
        window: u64,
        mut cursor: RowCursor,
    ) -> (Vec<Row>, RowCursor) {
        let mut rows = Vec::with_capacity(self.rows_per_step);
        while rows.len() < self.rows_per_step {
            let until = cursor.position.saturating_add(window);
            let until = documents.end().map_or(until, |end| end.min(until));
            if cursor.position >= until {
                break;
            }
            let filled = self.window(documents, cursor.position..until);
            let from = (cursor.used as usize).min(filled.len());
            let taken = (self.rows_per_step - rows.len()).min(filled.len() - from);
            rows.extend_from_slice(&filled[from..from + taken]);
            cursor.used = (from + taken) as u64;
            if from + taken == filled.len() {
                cursor = RowCursor { position: until, used: 0 };
            }
        }
        (rows, cursor)
    }

    /// Returns the rows of a window.
    fn window(&self, documents: &impl Documents, positions: Range<u64>) -> Arc<Vec<Row>> {
        let mut last = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, rows)) = last.as_ref().filter(|(start, _)| *start == positions.start) {
            return rows.clone();
        }
        let start = positions.start;
        let rows = Arc::new(fit_rows(documents, self.room, positions));
        *last = Some((start, rows.clone()));
        rows
    }

    /// Returns the position before a step.
    ///
    /// # Errors
    /// [`Error::Config`] if the step is before the first step of a resumed run.
    pub(super) fn start(&self, documents: &impl Documents, step: u64) -> Result<StepStart> {
        let known = {
            let cursors = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
            cursors.range(..=step).next_back().map(|(step, cursor)| (*step, *cursor))
        };
        let Some((mut at, mut cursor)) = known else {
            let reason = format!("{step} lies before the step where the run was taken up");
            return Err(Error::Config { setting: "step", reason });
        };
        while at < step {
            let (rows, next) = self.next(documents, cursor);
            if rows.is_empty() {
                return Ok(StepStart::Ended(at));
            }
            (at, cursor) = (at + 1, next);
            self.keep(at, cursor);
        }
        Ok(StepStart::At(cursor))
    }

    pub(super) fn keep(&self, step: u64, cursor: RowCursor) {
        let mut cursors = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
        cursors.entry(step).or_insert(cursor);
        if cursors.len() > 2 * STEPS_KEPT {
            let first = cursors.keys().next().copied();
            let recent = cursors.keys().rev().nth(STEPS_KEPT).copied().unwrap_or(0);
            cursors
                .retain(|&step, _| step > recent || step.is_multiple_of(STEPS_APART) || Some(step) == first);
        }
    }
}

/// Returns the reason why a document with media has no row.
pub(super) fn refusal(span: TokenSpan, room: u64) -> String {
    let tokens = span.document_tokens;
    format!("{tokens} tokens exceed the {room} of a row, and a sample with media is not cut")
}
