//! Draws the samples in a run: datasets, draw rules, epoch orders and steps, for both loaders.
//!
//! A run is the same for any number of ranks: ranks only divide the samples of each step.

use std::sync::Arc;

use super::epoch::{Order, Shuffle};
use super::mixture::{MixRules, Mixture, Origin, POSITION_MAX};
use super::rows::RowCursor;
use super::run_state::{LoaderState, Restored, RowCursors, RowSettings, RunSettings};
use super::steps::{StepPositions, StepPositionsInput, Steps, Tail};
use crate::dataset::Dataset;
use crate::error::{Error, Result};

/// Settings of a [`Run`].
#[derive(Debug, Clone)]
pub(crate) struct RunBuilder {
    pub(crate) mixture: Mixture,
    /// Number of samples per step, over all ranks; at least 1.
    pub(crate) global_batch: u64,
    pub(crate) seed: u64,
    pub(crate) first_epoch: u64,
    pub(crate) tail: Tail,
    pub(crate) shuffle: Shuffle,
    pub(crate) state: Option<LoaderState>,
    pub(crate) accepts_changed_data: bool,
    /// Rows that a step consists of in place of samples; [`Self::global_batch`] then counts rows.
    pub(crate) rows: Option<RowSettings>,
}

/// Steps over datasets, from the first sample or a restored state on.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) source: Arc<SampleSource>,
    pub(crate) steps: Steps,
}

/// Datasets, and the rules by which samples are drawn from them.
#[derive(Debug)]
pub(crate) struct SampleSource {
    pub(crate) datasets: Vec<Dataset>,
    pub(crate) rules: MixRules,
    pub(crate) seed: u64,
    pub(crate) shuffle: Shuffle,
    pub(crate) tail: Tail,
    pub(crate) first_epoch: u64,
    /// First step of a restored run.
    pub(crate) first_step: u64,
    /// Rows that a step consists of in place of samples.
    pub(crate) rows: Option<RowSettings>,
    /// Positions before the first row of the origin and of [`Self::first_step`].
    pub(crate) row_cursors: RowCursors,
}

impl RunBuilder {
    /// Creates settings with the defaults; the global batch has none.
    pub(crate) fn new(mixture: Mixture) -> Self {
        Self {
            mixture,
            global_batch: 0,
            seed: 0,
            first_epoch: 0,
            tail: Tail::Carry,
            shuffle: Shuffle::Global,
            state: None,
            accepts_changed_data: false,
            rows: None,
        }
    }

    /// Checks the mixture, and lays out the steps.
    ///
    /// # Errors
    /// [`Error::Config`] if the mixture, the shuffle or the tail do not fit the datasets; [`Error::State`] if
    /// a state does not fit, with the shard that changed.
    pub(crate) fn build(self) -> Result<Run> {
        let Self { global_batch, seed, tail, shuffle, rows, .. } = self;
        let (datasets, rules) = self.mixture.check()?;
        if rows.is_some() {
            check_rows(&rules, tail)?;
        }
        let run = RunSettings { datasets: &datasets, rules: &rules, seed, global_batch, tail, shuffle, rows };
        let sizes: Vec<u64> = datasets.iter().map(Dataset::len).collect();
        let fresh = Restored {
            origin: Origin::at_epoch(self.first_epoch, &sizes),
            first_epoch: self.first_epoch,
            step: 0,
            rows: RowCursors::default(),
        };
        let start = self.state.map_or(Ok(fresh), |state| state.restore(run, self.accepts_changed_data))?;
        if start.origin.draws.iter().any(|&draws| draws > POSITION_MAX) {
            let reason = format!("{} is too far out for a dataset of this size", start.first_epoch);
            return Err(Error::Config { setting: "first_epoch", reason });
        }
        let Restored { origin, first_epoch, step: first_step, rows: row_cursors } = start;
        let input = StepPositionsInput {
            sizes: &sizes,
            rules: &rules,
            origin: &origin,
            first_epoch,
            global_batch,
            tail,
            seed,
        };
        let pace = StepPositions::new(input)?;
        let twins =
            |at: usize| datasets[..at].iter().filter(|other| other.has_same_samples(&datasets[at])).count();
        let orders = datasets
            .iter()
            .enumerate()
            .map(|(at, set)| Order::from_dataset(set, shuffle, seed, twins(at) as u64));
        let steps = Steps::mixed(orders.collect::<Result<_>>()?, pace);
        let source =
            SampleSource { datasets, rules, seed, shuffle, tail, first_epoch, first_step, rows, row_cursors };
        Ok(Run { source: Arc::new(source), steps })
    }
}

impl Run {
    /// Returns the datasets, in the order of their numbers.
    pub(crate) fn datasets(&self) -> &[Dataset] {
        &self.source.datasets
    }

    /// Returns the first step: 0, or the step of a restored state.
    pub(crate) fn first_step(&self) -> u64 {
        self.source.first_step
    }

    /// Saves the position of the run before a step.
    ///
    /// # Errors
    /// [`Error::Selection`] if the run ends before the step; [`Error::Config`] if the step is before the step
    /// at which changed data or a different global batch was accepted.
    pub(crate) fn state(&self, step: u64) -> Result<LoaderState> {
        LoaderState::save(self.settings(), self.steps.pace(), self.source.first_epoch, step, None)
    }

    /// Saves the position of a run of rows before a step, whose first row follows the cursor.
    ///
    /// # Errors
    /// Never for a cursor of this run.
    pub(crate) fn state_at_row(&self, step: u64, row: RowCursor) -> Result<LoaderState> {
        let rows = RowCursors { origin: self.source.row_cursors.origin, next: row };
        LoaderState::save(self.settings(), self.steps.pace(), self.source.first_epoch, step, Some(rows))
    }

    /// Returns the step in a state that was saved by this very run.
    ///
    /// # Errors
    /// [`Error::State`] if the state is from a different run.
    pub(crate) fn saved_step(&self, state: &LoaderState) -> Result<u64> {
        let restored = state.restore(self.settings(), false)?;
        if restored.origin != self.steps.pace().origin || restored.first_epoch != self.source.first_epoch {
            let reason = "it is of another run: restore it when the planner is built".into();
            return Err(Error::State { reason });
        }
        Ok(restored.step)
    }

    fn settings(&self) -> RunSettings<'_> {
        let SampleSource { datasets, rules, seed, shuffle, tail, rows, .. } = &*self.source;
        let global_batch = self.steps.global_batch();
        let (seed, tail, shuffle, rows) = (*seed, *tail, *shuffle, *rows);
        RunSettings { datasets, rules, seed, global_batch, tail, shuffle, rows }
    }
}

/// Checks that the rules of a run do not depend on which samples a step has.
fn check_rows(rules: &MixRules, tail: Tail) -> Result<()> {
    if tail != Tail::Carry {
        let reason = "rows continue over the ends of epochs, and the last step of a run may have fewer: use the \
                      tail `carry`";
        return Err(Error::Config { setting: "tail", reason: reason.into() });
    }
    if rules.changes_weights() {
        let reason = "the samples of a step are not known before the rows are filled, so weights cannot change at \
                      a step";
        return Err(Error::Config { setting: "weights_from", reason: reason.into() });
    }
    Ok(())
}
