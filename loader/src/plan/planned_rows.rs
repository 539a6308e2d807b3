//! Plans steps whose microbatches are rows with a fixed number of tokens.
//!
//! Rows have equal numbers of tokens and still differ in cost, by the lengths of the documents and by media:
//! whole rows are the items that the balancer assigns to ranks and microbatches, a row each.

use std::ops::Range;

use dflop_balancer::{Budget, Caps, balance_pipeline};
use dflop_costmodel::{ModelConstants, ModuleTimes, SampleCost, SampleShape};

use super::config::COUNT_MAX;
use super::padding::Padding;
use super::planner::StepPlanner;
use super::rows::{RowSteps, StepStart};
use super::step_plan::{StepPartition, StepPlan, StepSamples};
use crate::dataset::Dataset;
use crate::error::{Error, PlanError, Result, SelectionError, check_at_most};
use crate::order::{DocumentLength, Documents, LoaderState, Piece, Row, RowLayout, StepSample};

/// Draws of a run as documents, with the token counts of the index.
struct DrawnDocuments<'a>(&'a StepPlanner);

impl Documents for DrawnDocuments<'_> {
    fn documents(&self, positions: Range<u64>) -> Vec<StepSample> {
        self.0.run.steps.samples_at(positions)
    }

    fn end(&self) -> Option<u64> {
        self.0.run.steps.pace().layout.end
    }

    fn length(&self, document: StepSample) -> DocumentLength {
        let mut shape = SampleShape::default();
        self.0.row(document).read_shape(&mut shape);
        let has_media = !(shape.images.is_empty() && shape.audio.is_empty() && shape.videos.is_empty());
        // Documents that the model rejects take no room.
        let tokens = match has_media.then(|| self.0.model.predict(&shape)) {
            None => shape.text_tokens,
            Some(cost) => cost.map_or(0, |cost| cost.tokens),
        };
        DocumentLength { tokens, may_be_cut: tokens == shape.text_tokens }
    }

    fn key(&self, position: u64) -> u64 {
        self.0.run.steps.pace().draws_at(position).iter().fold(0, |sum, draws| sum.wrapping_add(*draws))
    }
}

impl StepPlanner {
    /// Returns the layout of rows, where microbatches are rows.
    #[must_use]
    pub fn rows(&self) -> Option<RowLayout> {
        self.rows.as_ref().map(|rows| rows.layout)
    }

    /// Returns the number after the last step in the run, including steps before a restored state; `None` if
    /// the run has no end. Rows are counted by filling all of them, once.
    #[must_use]
    pub fn end_step(&self) -> Option<u64> {
        let end = self.run.steps.len()?;
        let Some(rows) = &self.rows else { return Some(end) };
        match rows.start(&DrawnDocuments(self), u64::MAX) {
            Ok(StepStart::Ended(steps)) => Some(steps),
            _ => None,
        }
    }

    /// Returns whether the run has a step.
    #[must_use]
    pub fn has_step(&self, step: u64) -> bool {
        let Some(rows) = &self.rows else {
            return self.run.steps.len().is_none_or(|end| step < end);
        };
        let documents = DrawnDocuments(self);
        match rows.start(&documents, step) {
            Ok(StepStart::At(cursor)) => documents.end().is_none_or(|end| cursor.position < end),
            Ok(StepStart::Ended(_)) => false,
            // Planning explains why.
            Err(_) => true,
        }
    }

    /// Returns the number of steps that start in an epoch, for a mixture the steps for as many samples as all
    /// datasets hold; for rows that are fitted, the number if no row had padding.
    #[must_use]
    pub fn steps_per_epoch(&self) -> u64 {
        let Some(rows) = &self.rows else { return self.run.steps.per_epoch() };
        let documents = DrawnDocuments(self);
        let dataset_tokens = |(dataset, set): (usize, &Dataset)| -> u64 {
            let sample = |place| StepSample { dataset, epoch: 0, sample: set.sample_number(place) };
            (0..set.len()).map(|place| u64::from(documents.length(sample(place)).tokens)).sum()
        };
        let tokens: u64 = self.datasets().iter().enumerate().map(dataset_tokens).sum();
        tokens.div_ceil(u64::from(rows.room) * rows.rows_per_step as u64).max(1)
    }

    /// Saves the position of a run of rows before a step.
    ///
    /// # Errors
    /// See [`Self::state`].
    pub(super) fn row_state(&self, rows: &RowSteps, step: u64) -> Result<LoaderState> {
        match rows.start(&DrawnDocuments(self), step)? {
            StepStart::At(cursor) => self.run.state_at_row(step, cursor),
            StepStart::Ended(steps) => Err(Error::Selection(SelectionError::RunEnded { step, steps })),
        }
    }

    /// Returns the rows of a step; the last step of a run may have fewer.
    ///
    /// # Errors
    /// [`Error::Selection`] if the run has no such step; [`Error::Config`] if the step is before the first
    /// step of a resumed run.
    fn step_rows(&self, rows: &RowSteps, step: u64) -> Result<Vec<Row>> {
        let documents = DrawnDocuments(self);
        let ended = |steps| Error::Selection(SelectionError::RunEnded { step, steps });
        let cursor = match rows.start(&documents, step)? {
            StepStart::At(cursor) => cursor,
            StepStart::Ended(steps) => return Err(ended(steps)),
        };
        let (filled, next) = rows.next(&documents, cursor);
        if filled.is_empty() {
            return Err(ended(step));
        }
        rows.keep(step + 1, next);
        Ok(filled)
    }

    /// Plans a step of rows: each microbatch of each rank is a row, or empty in the last step of a run.
    ///
    /// # Errors
    /// Those of [`Self::plan`].
    pub(super) fn plan_rows(&self, rows: &RowSteps, step: u64) -> Result<StepPlan> {
        check_at_most("step", step, COUNT_MAX)?;
        let filled = self.step_rows(rows, step)?;
        let places = places(&filled);
        let pieces = filled.iter().flatten();
        let (samples, spans) = pieces.map(|Piece { sample, span }| (*sample, *span)).unzip();
        let drawn = StepSamples { samples, spans };
        let model = self.model_at(step);
        let (mut costs, refused) = self.predict_costs(&drawn, &model);
        self.apply_cost_function(step, &drawn, &refused, &mut costs)?;
        let constants = self.plan_constants(&model);
        let padding = self.config.pad_to.map(|to| Padding { to, model: &model });
        let row_costs: Vec<SampleCost> =
            places.iter().map(|places| self.row_cost(&costs[places.clone()], padding)).collect();
        let bytes = places.iter().map(|places| self.bytes(&drawn.samples[places.clone()]).sum()).collect();
        let partition = self.partition_rows(&row_costs, bytes, &constants);
        let mut partition = partition.map_err(|source| Error::Plan(PlanError::Unsolved { step, source }))?;
        self.sort_microbatches(&mut partition, &row_costs);
        for microbatch in partition.assignment.ranks.iter_mut().flatten() {
            let pieces = microbatch.iter().flat_map(|&row| places[row as usize].clone());
            *microbatch = pieces.map(|place| place as u32).collect();
        }
        self.assemble((step, drawn), (costs, refused), constants, partition, padding)
    }

    /// Returns the cost of a row: that of its pieces, and of the padding after them.
    fn row_cost(&self, pieces: &[SampleCost], padding: Option<Padding<'_>>) -> SampleCost {
        let mut sum = self.zero_cost;
        let mut module_ns = vec![0_u64; self.model.modules().len()];
        let mut tokens = 0;
        for piece in pieces {
            tokens += u64::from(piece.tokens);
            sum.target_tokens += piece.target_tokens;
            for (total, ns) in module_ns.iter_mut().zip(piece.module_ns.as_slice()) {
                *total = total.saturating_add(*ns);
            }
        }
        // A model has few modules, which its own times hold.
        sum.module_ns = ModuleTimes::new(&module_ns).unwrap_or(sum.module_ns);
        if let Some(padding) = padding {
            sum.module_ns.add_llm(padding.overhead_ns(pieces.len(), tokens));
            sum.tokens = padding.to.tokens as u32;
        }
        sum
    }

    /// Assigns each row to a microbatch of a rank.
    fn partition_rows(
        &self,
        rows: &[SampleCost],
        bytes: Vec<u64>,
        constants: &ModelConstants,
    ) -> Result<StepPartition, dflop_balancer::Error> {
        let instance = self.instance_with_bytes(rows, bytes, constants)?;
        // Two rows do not fit into a microbatch.
        let tokens_max = rows.first().map(|row| u64::from(row.tokens));
        let caps = Caps { tokens_max, ..self.config.caps };
        let mut budget = Budget::work(self.config.work);
        let (pipeline, strategy) = (self.pipeline(), self.config.strategy);
        Ok(balance_pipeline(&instance, &pipeline, strategy, &caps, &mut budget)?.into())
    }
}

/// Returns the places of the pieces of each row among the pieces of all rows.
fn places(rows: &[Row]) -> Vec<Range<usize>> {
    let mut end = 0;
    let place = |row: &Row| {
        let start = end;
        end += row.len();
        start..end
    };
    rows.iter().map(place).collect()
}
