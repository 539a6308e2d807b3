//! Draws samples through indexes, in the order of the balanced loader.
//!
//! A step has `batch_size` samples for every rank, from the same run that a planner cuts into microbatches:
//! datasets by weight, shuffled by arithmetic on (seed, epoch, position). Every rank reads an equally long
//! part of each step, so the position is the step, for any number of ranks. A sample that cannot be delivered
//! is replaced by a sample that depends only on the draw.

mod reader;
mod refill;

pub(super) use self::reader::{DrawnItem, DrawnSettings, read_drawn};
pub(super) use self::refill::Refill;

use super::builder::StreamSettings;
use crate::dataset::Dataset;
use crate::error::{Error, Result, check_at_most};
use crate::order::{LoaderState, Mixture, Run, RunBuilder, Shuffle, StepSample, Tail};

/// Largest step, in samples over all ranks.
const STEP_SAMPLES_MAX: u64 = 1 << 32;

/// Data and order of drawn samples, unchecked.
#[derive(Debug, Clone, Default)]
pub(super) struct DrawSettings {
    /// Data, rank and number of ranks.
    pub(super) share: Option<(Mixture, usize, usize)>,
    pub(super) shuffle: Option<Shuffle>,
    pub(super) tail: Option<Tail>,
    pub(super) state: Option<LoaderState>,
    pub(super) accepts_changed_data: bool,
}

/// A rank's share of a run.
#[derive(Debug, Clone)]
pub(super) struct Draw {
    pub(super) run: Run,
    rank: usize,
    world: usize,
    batch_size: u64,
    samples_max: Option<u64>,
    /// Number after the last step; `None` if the run has no end.
    pub(super) end: Option<u64>,
    /// Number of samples in the rank's share; `None` if the run has no end.
    pub(super) samples: Option<u64>,
}

impl DrawSettings {
    /// Lays out the steps; `None` where whole shards are read.
    ///
    /// # Errors
    /// [`Error::Config`] if the settings do not fit each other or the data; [`Error::State`] if a state is
    /// from a different run.
    pub(super) fn build(self, stream: &StreamSettings) -> Result<Option<Draw>> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let Self { share, shuffle, tail, state, accepts_changed_data } = self;
        let Some((mixture, rank, world)) = share else {
            if shuffle.is_some() || tail.is_some() || state.is_some() {
                let reason = "whole shards are read; samples are ordered through an index, by \
                              `samples_of_rank`";
                return invalid("order", reason.into());
            }
            return Ok(None);
        };
        check_share(rank, world)?;
        if stream.input.shuffle.is_some() || stream.input.is_shuffled {
            let setting = if stream.input.is_shuffled { "shuffle_shards" } else { "shuffle_buffer" };
            let reason = "samples that are drawn through an index have a global shuffle instead: use `order`";
            return invalid(setting, reason.into());
        }
        if stream.input.restored.is_some() {
            let reason = "it is of whole shards, and samples are now drawn through an index".into();
            return Err(Error::State { reason });
        }
        let tail = checked_tail(tail, stream.drops_last)?;
        let batch_size = stream.batch_size as u64;
        let global_batch = batch_size.saturating_mul(world as u64);
        check_at_most("batch_size", global_batch, STEP_SAMPLES_MAX)?;
        let per_epoch = mixture.datasets().iter().fold(0u64, |sum, set| sum.saturating_add(set.len()));
        let has_end = stream.epochs != u64::MAX;
        let run = RunBuilder {
            global_batch,
            seed: stream.shared.seed.unwrap_or_default(),
            first_epoch: stream.input.first_epoch,
            tail,
            shuffle: shuffle.unwrap_or(Shuffle::None),
            state,
            accepts_changed_data,
            ..RunBuilder::new(if has_end { mixture.epochs(stream.epochs) } else { mixture })
        };
        let no_batch = || {
            let reason =
                format!("{per_epoch} samples make no full batch of {batch_size} on each of {world} ranks");
            Error::Config { setting: "drop_last", reason }
        };
        if tail == Tail::Drop && per_epoch < global_batch {
            return Err(no_batch());
        }
        let run = run.build()?;
        let by_samples = stream.samples_max.map(|samples| {
            if tail == Tail::Drop { samples / batch_size } else { samples.div_ceil(batch_size) }
        });
        let end = [run.steps.len(), by_samples].into_iter().flatten().min();
        if end == Some(0) {
            return Err(no_batch());
        }
        let in_epochs = per_epoch.saturating_mul(stream.epochs).div_ceil(world as u64);
        let samples = end.map(|end| end.saturating_mul(batch_size).min(in_epochs));
        let samples_max = stream.samples_max;
        Ok(Some(Draw { run, rank, world, batch_size, samples_max, end, samples }))
    }
}

/// Returns the tail, which also drops a short last batch.
fn checked_tail(tail: Option<Tail>, drops_last: bool) -> Result<Tail> {
    match (tail, drops_last) {
        (None | Some(Tail::Carry | Tail::Drop), true) => Ok(Tail::Drop),
        (Some(Tail::Short), true) => {
            let reason = "the tail `short` delivers short batches: leave out one of the two".into();
            Err(Error::Config { setting: "drop_last", reason })
        }
        (tail, false) => Ok(tail.unwrap_or_default()),
    }
}

/// Checks that the rank is below the number of ranks.
fn check_share(rank: usize, world: usize) -> Result<()> {
    if world == 0 {
        return Err(Error::Config { setting: "world", reason: "must be at least 1".into() });
    }
    if rank >= world {
        let reason = format!("{rank} is not below `world`, which is {world}");
        return Err(Error::Config { setting: "rank", reason });
    }
    Ok(())
}

impl Draw {
    /// Returns the datasets, in the order of their numbers.
    pub(super) fn datasets(&self) -> &[Dataset] {
        self.run.datasets()
    }

    /// Returns the rank's samples in a step.
    ///
    /// # Errors
    /// [`Error::Selection`] if the run has no such step.
    fn share(&self, step: u64) -> Result<Vec<StepSample>> {
        let mut share = self.run.steps.share(step, self.rank, self.world)?;
        share.truncate(self.samples_left(step));
        Ok(share)
    }

    /// Returns the number of the rank's samples in a step.
    ///
    /// # Errors
    /// Those of [`Self::share`].
    pub(super) fn share_len(&self, step: u64) -> Result<usize> {
        let samples = self.run.steps.share_len(step, self.world)?;
        Ok(self.samples_left(step).min(samples as usize))
    }

    /// Returns the number of samples from a step on that the limit allows.
    fn samples_left(&self, step: u64) -> usize {
        let before = step.saturating_mul(self.batch_size);
        self.samples_max.map_or(usize::MAX, |samples| samples.saturating_sub(before) as usize)
    }
}
