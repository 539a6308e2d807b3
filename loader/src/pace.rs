//! Step → positions: where each step begins in the draws of a run, and how many it takes.

use crate::error::{Error, Result};
use crate::mix::{Layout, LayoutInput, MixRules, Origin, POSITION_MAX};
use crate::steps::Tail;

/// Steps of a run over its draws.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pace {
    pub(crate) layout: Layout,
    pub(crate) origin: Origin,
    pub(crate) global_batch: u64,
    tail: Tail,
    /// Samples of the only dataset, whose epochs each end with a short or full batch.
    epoch: Option<u64>,
    samples: u64,
}

/// What steps are made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PaceInput<'a> {
    /// Samples of each dataset.
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

impl Pace {
    /// Lays out the run.
    ///
    /// # Errors
    /// [`Error::Config`] if `tail` drops every sample, or is to end a mixture that has no end.
    pub(crate) fn new(input: PaceInput<'_>) -> Result<Self> {
        let PaceInput { sizes, rules, origin, first_epoch, global_batch, tail, seed } = input;
        let limit = |(samples, repeat): (&u64, &Option<u64>)| {
            repeat.map(|epochs| first_epoch.saturating_add(epochs).saturating_mul(*samples).min(POSITION_MAX))
        };
        let limits: Vec<Option<u64>> = sizes.iter().zip(rules.repeat()).map(limit).collect();
        let layout = Layout::new(rules, LayoutInput { origin, limits: &limits, global_batch, seed });
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

    /// Number of samples of all datasets.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// Steps that as many samples fill as all datasets have.
    pub(crate) fn per_epoch(&self) -> u64 {
        self.steps_of(self.samples)
    }

    fn steps_of(&self, samples: u64) -> u64 {
        if self.tail == Tail::Drop {
            samples / self.global_batch
        } else {
            samples.div_ceil(self.global_batch)
        }
    }

    /// Number of the first step that the run does not have; `None` if it has no end.
    pub(crate) fn len(&self) -> Option<u64> {
        let end = self.layout.end?;
        let steps = match self.epoch {
            Some(samples) => end / samples * self.per_epoch(),
            None => self.steps_of(end),
        };
        Some(self.origin.step + steps)
    }

    /// Position of the first sample of a step, or of the end of the run.
    ///
    /// # Errors
    /// [`Error::RunEnded`] if the step lies behind the end; [`Error::Config`] if it lies before the origin, or too far out.
    pub(crate) fn position(&self, step: u64) -> Result<u64> {
        if let Some(steps) = self.len().filter(|&steps| step > steps) {
            return Err(Error::RunEnded { step, steps });
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
                // The last step of a run may be short.
                Ok(self.layout.end.map_or(position, |end| position.min(end)))
            }
            _ => invalid("step", format!("{step} is too far out: positions are counted up to 2^62")),
        }
    }

    /// Positions of a step.
    ///
    /// # Errors
    /// [`Error::RunEnded`] if the run has ended before the step; those of [`Self::position`].
    pub(crate) fn positions(&self, step: u64) -> Result<std::ops::Range<u64>> {
        if let Some(steps) = self.len().filter(|&steps| step >= steps) {
            return Err(Error::RunEnded { step, steps });
        }
        let start = self.position(step)?;
        let mut end = start.saturating_add(self.global_batch);
        if let Some(samples) = self.epoch {
            end = end.min(start / samples * samples + samples);
        }
        Ok(start..self.layout.end.map_or(end, |run_end| end.min(run_end)))
    }

    /// Draws of each dataset before a step, from its first epoch on.
    ///
    /// # Errors
    /// Those of [`Self::position`].
    pub(crate) fn draws_before(&self, step: u64) -> Result<Vec<u64>> {
        let draws = self.layout.draws_before(self.position(step)?);
        Ok(draws.unwrap_or_else(|| self.origin.draws.clone()))
    }
}
