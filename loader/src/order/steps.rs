//! Maps steps to samples.
//!
//! Step `t` holds positions `tB … (t+1)B` in the run's draws, where `B` is the global batch size. The draws
//! are the concatenated epochs of a dataset or a mixture. [`Tail`] determines the steps where an epoch, or
//! the run, ends inside a batch. Nothing here depends on ranks, and any step is computed without the earlier
//! steps.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

use super::epoch::{EpochOrder, Order};
use super::mixture::{MixRules, Origin, POSITION_MAX, Segments, SegmentsInput};
use crate::error::{Error, Result, SelectionError};

/// Treatment of samples in an epoch that do not fill a global batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tail {
    /// They start a batch that the next epoch fills. Every sample is visited, and every step is full except
    /// the last step in a finite run.
    #[default]
    Carry,
    /// They are left out of this epoch; in a mixture, which must be finite, left out at the end.
    Drop,
    /// They form a short last batch in this epoch; in a mixture, which must be finite, at the end.
    Short,
}

impl Tail {
    /// Returns the name: `carry`, `drop` or `short`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Carry => "carry",
            Self::Drop => "drop",
            Self::Short => "short",
        }
    }
}

/// A sample in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StepSample {
    /// Dataset number in the mixture; 0 where there is one dataset.
    pub dataset: usize,
    /// Dataset epoch to which the draw belongs.
    pub epoch: u64,
    /// Sample number in the dataset index.
    pub sample: u64,
}

/// The steps in a run.
#[derive(Debug, Clone)]
pub struct Steps {
    orders: Vec<Order>,
    pace: StepPositions,
}

impl Steps {
    /// Counts the steps over one dataset, without end, from the first sample of `first_epoch`.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`] if `tail` drops every sample, because the global batch is larger than
    /// an epoch.
    pub fn new(order: Order, global_batch: NonZeroU64, tail: Tail, first_epoch: u64) -> Result<Self> {
        let sizes = [order.samples()];
        let origin = Origin::at_epoch(first_epoch, &sizes);
        let (rules, global_batch, seed) = (MixRules::one(), global_batch.get(), 0);
        let input = StepPositionsInput {
            sizes: &sizes,
            rules: &rules,
            origin: &origin,
            first_epoch,
            global_batch,
            tail,
            seed,
        };
        Ok(Self { orders: vec![order], pace: StepPositions::new(input)? })
    }

    pub(crate) fn mixed(orders: Vec<Order>, pace: StepPositions) -> Self {
        Self { orders, pace }
    }

    pub(crate) fn pace(&self) -> &StepPositions {
        &self.pace
    }

    /// Returns the number of steps that start in an epoch; under [`Tail::Carry`] the last step is filled from
    /// the next epoch. For a mixture: the number of steps for as many samples as all datasets hold.
    #[must_use]
    pub fn per_epoch(&self) -> u64 {
        self.pace.per_epoch()
    }

    /// Returns the number of steps in the run, including steps before a restored state; `None` if it has no
    /// end.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a run that was restored at its end is empty, and rare")]
    pub fn len(&self) -> Option<u64> {
        self.pace.len()
    }

    /// Returns the first step that can be planned: 0, or the step at which a run resumed with changed data or
    /// a different global batch.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.pace.origin.step
    }

    /// Returns the number of samples per full step.
    #[must_use]
    pub fn global_batch(&self) -> u64 {
        self.pace.global_batch
    }

    /// Returns the number of samples per epoch; for a mixture, over all datasets.
    #[must_use]
    pub fn epoch_samples(&self) -> u64 {
        self.pace.samples()
    }

    /// Returns the samples in a step, in global order.
    ///
    /// # Errors
    /// [`Error::Selection`] if the run has no such step; [`crate::error::Error::Config`] if the step is
    /// before the step at which a changed run resumed, or too far out.
    pub fn samples(&self, step: u64) -> Result<Vec<StepSample>> {
        Ok(self.samples_at(self.pace.positions(step)?))
    }

    /// Returns a rank's share of a step, in global order: equally long for all ranks.
    ///
    /// Ranks read consecutive parts. A step that they cannot divide evenly continues with samples from the
    /// start of the step, at most `world - 1`.
    ///
    /// # Errors
    /// See [`Self::samples`].
    pub(crate) fn share(&self, step: u64, rank: usize, world: usize) -> Result<Vec<StepSample>> {
        let Range { start, end } = self.pace.positions(step)?;
        let samples = end - start;
        let length = samples.div_ceil(world as u64);
        let first = start + rank as u64 * length % samples;
        let until = end.min(first + length);
        let mut share = self.samples_at(first..until);
        let missing = length - (until - first);
        if missing > 0 {
            share.extend(self.samples_at(start..start + missing));
        }
        Ok(share)
    }

    /// Returns the number of samples in every rank's share of a step.
    ///
    /// # Errors
    /// See [`Self::samples`].
    pub(crate) fn share_len(&self, step: u64, world: usize) -> Result<u64> {
        let Range { start, end } = self.pace.positions(step)?;
        Ok((end - start).div_ceil(world as u64))
    }

    /// Returns the samples at positions before the end of the run.
    pub(crate) fn samples_at(&self, positions: Range<u64>) -> Vec<StepSample> {
        let mut at_work: Vec<Option<(u64, Arc<EpochOrder>)>> = vec![None; self.orders.len()];
        let sample = |draw: super::mixture::Draw| {
            let order = &self.orders[draw.dataset];
            let (epoch, offset) = (draw.number / order.samples(), draw.number % order.samples());
            let held = at_work[draw.dataset].take().filter(|(held, _)| *held == epoch);
            let (_, laid_out) =
                at_work[draw.dataset].insert(held.unwrap_or_else(|| (epoch, order.epoch(epoch))));
            StepSample { dataset: draw.dataset, epoch, sample: laid_out.sample_at(offset) }
        };
        self.pace.layout.draws(positions).into_iter().map(sample).collect()
    }
}

/// Run steps over the draws.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StepPositions {
    pub(crate) layout: Segments,
    pub(crate) origin: Origin,
    pub(crate) global_batch: u64,
    tail: Tail,
    /// Number of samples in the only dataset, whose epochs each end with a short or full batch.
    epoch: Option<u64>,
    samples: u64,
}

/// Inputs for [`StepPositions::new`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepPositionsInput<'a> {
    /// Number of samples per dataset.
    pub(crate) sizes: &'a [u64],
    pub(crate) rules: &'a MixRules,
    pub(crate) origin: &'a Origin,
    pub(crate) first_epoch: u64,
    pub(crate) global_batch: u64,
    pub(crate) tail: Tail,
    pub(crate) seed: u64,
}

fn invalid<T>(setting: &'static str, reason: impl Into<String>) -> Result<T> {
    Err(Error::Config { setting, reason: reason.into() })
}

impl StepPositions {
    /// Lays out the run.
    ///
    /// # Errors
    /// [`Error::Config`] if `tail` drops every sample, or is to end a mixture that has no end.
    pub(crate) fn new(input: StepPositionsInput<'_>) -> Result<Self> {
        let StepPositionsInput { sizes, rules, origin, first_epoch, global_batch, tail, seed } = input;
        let limit = |(samples, repeat): (&u64, &Option<u64>)| {
            repeat.map(|epochs| first_epoch.saturating_add(epochs).saturating_mul(*samples).min(POSITION_MAX))
        };
        let limits: Vec<Option<u64>> = sizes.iter().zip(rules.repeat()).map(limit).collect();
        let layout = Segments::new(rules, SegmentsInput { origin, limits: &limits, global_batch, seed });
        let samples = sizes.iter().sum();
        if tail == Tail::Drop && sizes.len() == 1 && samples < global_batch {
            let reason = format!("{global_batch} is more than the {samples} samples of an epoch");
            return invalid("global_batch", reason);
        }
        if tail != Tail::Carry && sizes.len() > 1 && layout.end.is_none() {
            let reason = "`drop` and `short` end a mixture, and this one has no end: set the epochs of its datasets, or `carry`";
            return invalid("tail", reason);
        }
        let epoch = (tail != Tail::Carry && sizes.len() == 1).then_some(samples);
        Ok(Self { layout, origin: origin.clone(), global_batch, tail, epoch, samples })
    }

    /// Returns the number of samples in all datasets.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// Steps that as many samples fill as all datasets have.
    pub(crate) fn per_epoch(&self) -> u64 {
        self.sample_steps(self.samples)
    }

    fn sample_steps(&self, samples: u64) -> u64 {
        if self.tail == Tail::Drop {
            samples / self.global_batch
        } else {
            samples.div_ceil(self.global_batch)
        }
    }

    /// Returns the number after the last step in the run; `None` if it has no end.
    pub(crate) fn len(&self) -> Option<u64> {
        let end = self.layout.end?;
        let steps = match self.epoch {
            Some(samples) => end / samples * self.per_epoch(),
            None => self.sample_steps(end),
        };
        Some(self.origin.step + steps)
    }

    /// Returns the position of the first sample in a step, or the end position of the run.
    ///
    /// # Errors
    /// [`Error::Selection`] if the step is after the end; [`Error::Config`] if it is before the origin, or
    /// too far out.
    pub(crate) fn position(&self, step: u64) -> Result<u64> {
        if let Some(steps) = self.len().filter(|&steps| step > steps) {
            return Err(Error::Selection(SelectionError::RunEnded { step, steps }));
        }
        let Some(steps) = step.checked_sub(self.origin.step) else {
            let origin = self.origin.step;
            return invalid("step", format!("{step} lies before step {origin}, where the run was taken up"));
        };
        let position = match self.epoch {
            Some(samples) => {
                u128::from(steps / self.per_epoch()) * u128::from(samples)
                    + u128::from(steps % self.per_epoch() * self.global_batch)
            }
            None => u128::from(steps) * u128::from(self.global_batch),
        };
        match u64::try_from(position) {
            Ok(position) if position <= POSITION_MAX => {
                // The last step in a run may be short.
                Ok(self.layout.end.map_or(position, |end| position.min(end)))
            }
            _ => invalid("step", format!("{step} is too far out: positions are counted up to 2^62")),
        }
    }

    /// Returns the positions in a step.
    ///
    /// # Errors
    /// [`Error::Selection`] if the run has ended before the step; and the errors of [`Self::position`].
    pub(crate) fn positions(&self, step: u64) -> Result<Range<u64>> {
        if let Some(steps) = self.len().filter(|&steps| step >= steps) {
            return Err(Error::Selection(SelectionError::RunEnded { step, steps }));
        }
        let start = self.position(step)?;
        let mut end = start.saturating_add(self.global_batch);
        if let Some(samples) = self.epoch {
            end = end.min(start / samples * samples + samples);
        }
        Ok(start..self.layout.end.map_or(end, |run_end| end.min(run_end)))
    }

    /// Returns the number of draws from each dataset before a step, from the first epoch on.
    ///
    /// # Errors
    /// See [`Self::position`].
    pub(crate) fn draws_before(&self, step: u64) -> Result<Vec<u64>> {
        Ok(self.draws_at(self.position(step)?))
    }

    /// Returns the number of draws from each dataset before a position, from the first epoch on.
    pub(crate) fn draws_at(&self, position: u64) -> Vec<u64> {
        self.layout.draws_before(position).unwrap_or_else(|| self.origin.draws.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(samples: u64, global_batch: u64, tail: Tail) -> Steps {
        let order = Order::new(vec![0..samples], "f", 1).unwrap();
        Steps::new(order, NonZeroU64::new(global_batch).unwrap(), tail, 0).unwrap()
    }

    fn sorted(steps: &Steps, range: std::ops::Range<u64>) -> Vec<u64> {
        let mut seen: Vec<_> =
            range.flat_map(|step| steps.samples(step).unwrap()).map(|item| item.sample).collect();
        seen.sort_unstable();
        seen
    }

    #[test]
    fn carry_fills_every_step_and_visits_every_sample() {
        let steps = steps(10, 4, Tail::Carry);
        assert!((0..10).all(|step| steps.samples(step).unwrap().len() == 4));
        let twice: Vec<u64> = (0..10).flat_map(|sample| [sample, sample]).collect();
        assert_eq!(sorted(&steps, 0..5), twice);
        assert_eq!(steps.samples(2).unwrap().iter().map(|item| item.epoch).collect::<Vec<_>>(), [0, 0, 1, 1]);
    }

    #[test]
    fn drop_and_short_end_with_the_epoch() {
        let drop = steps(10, 4, Tail::Drop);
        assert_eq!(
            (drop.per_epoch(), drop.samples(2).unwrap().len(), drop.samples(2).unwrap()[0].epoch),
            (2, 4, 1)
        );
        let short = steps(10, 4, Tail::Short);
        assert_eq!((short.per_epoch(), short.samples(2).unwrap().len()), (3, 2));
        assert_eq!(sorted(&short, 0..3), (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn a_batch_may_span_several_epochs() {
        let steps = steps(3, 8, Tail::Carry);
        let epochs: Vec<_> = steps.samples(0).unwrap().iter().map(|item| item.epoch).collect();
        assert_eq!(epochs, [0, 0, 0, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn shares_are_equally_long_and_leave_out_no_sample() {
        let steps = steps(37, 12, Tail::Short);
        for (world, step) in (1..9).flat_map(|world| (0..5).map(move |step| (world, step))) {
            let share = |rank| steps.share(step, rank, world).unwrap();
            let (whole, shares) = (steps.samples(step).unwrap(), (0..world).map(share).collect::<Vec<_>>());
            let length = steps.share_len(step, world).unwrap();
            assert_eq!(length, whole.len().div_ceil(world) as u64);
            assert!(shares.iter().all(|share| share.len() as u64 == length), "{world} ranks, step {step}");
            let read: Vec<StepSample> = shares.into_iter().flatten().collect();
            assert_eq!(read[..whole.len()], whole, "{world} ranks, step {step}");
            assert!(read[whole.len()..].iter().all(|sample| whole.contains(sample)));
        }
    }

    #[test]
    fn dropping_everything_is_refused() {
        let order = Order::new(vec![0..3], "f", 1).unwrap();
        assert!(Steps::new(order, NonZeroU64::new(4).unwrap(), Tail::Drop, 0).is_err());
    }
}
