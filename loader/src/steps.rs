//! Which samples make up step `t`.
//!
//! Step `t` holds positions `tB … (t+1)B` of the concatenated epochs, `B` being the global batch. [`Tail`] says
//! what happens where an epoch ends inside a batch. Nothing here depends on ranks, and any step is computed
//! without those before it.

use std::num::NonZeroU64;

use crate::error::{Error, Result};
use crate::order::Order;

/// What happens to the samples of an epoch that do not fill a global batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tail {
    /// They begin a batch that the next epoch fills. Every step is full and every sample is visited.
    #[default]
    Carry,
    /// They are left out of this epoch.
    Drop,
    /// They make a short last batch.
    Short,
}

/// A sample of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSample {
    /// Epoch that the sample is drawn from.
    pub epoch: u64,
    /// Number of the sample in the index.
    pub sample: u64,
}

/// The steps of a run.
#[derive(Debug, Clone)]
pub struct Steps {
    order: Order,
    global_batch: u64,
    tail: Tail,
    first_epoch: u64,
}

impl Steps {
    /// Counts steps from the first sample of `first_epoch`.
    ///
    /// # Errors
    /// [`Error::Config`] if `tail` drops every sample, because the global batch is larger than an epoch.
    pub fn new(order: Order, global_batch: NonZeroU64, tail: Tail, first_epoch: u64) -> Result<Self> {
        let (global_batch, samples) = (global_batch.get(), order.samples());
        if tail == Tail::Drop && samples < global_batch {
            let reason = format!("{global_batch} is more than the {samples} samples of an epoch");
            return Err(Error::Config { setting: "global_batch", reason });
        }
        Ok(Self { order, global_batch, tail, first_epoch })
    }

    /// Returns the number of steps that begin in one epoch; under [`Tail::Carry`] the last of them is filled
    /// from the next epoch.
    #[must_use]
    pub fn per_epoch(&self) -> u64 {
        match self.tail {
            Tail::Drop => self.order.samples() / self.global_batch,
            Tail::Carry | Tail::Short => self.order.samples().div_ceil(self.global_batch),
        }
    }

    /// Returns the number of samples of a full step.
    #[must_use]
    pub fn global_batch(&self) -> u64 {
        self.global_batch
    }

    /// Returns the number of samples of an epoch.
    #[must_use]
    pub fn epoch_samples(&self) -> u64 {
        self.order.samples()
    }

    /// Returns the samples of a step, in global order.
    #[must_use]
    pub fn samples(&self, step: u64) -> Vec<StepSample> {
        let (mut epoch, mut offset, mut left) = self.start(step);
        let mut batch = Vec::with_capacity(left as usize);
        while left > 0 {
            let order = self.order.epoch(self.first_epoch + epoch);
            let until = self.order.samples().min(offset + left);
            let here = (offset..until).map(|offset| StepSample {
                epoch: self.first_epoch + epoch,
                sample: order.sample_at(offset),
            });
            batch.extend(here);
            left -= until - offset;
            (epoch, offset) = (epoch + 1, 0);
        }
        batch
    }

    /// Epoch, offset in it, and number of samples of a step.
    fn start(&self, step: u64) -> (u64, u64, u64) {
        let samples = self.order.samples();
        if self.tail == Tail::Carry {
            let position = u128::from(step) * u128::from(self.global_batch);
            let epoch = (position / u128::from(samples)) as u64;
            return (epoch, (position % u128::from(samples)) as u64, self.global_batch);
        }
        let offset = step % self.per_epoch() * self.global_batch;
        (step / self.per_epoch(), offset, self.global_batch.min(samples - offset))
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
        let mut seen: Vec<_> = range.flat_map(|step| steps.samples(step)).map(|item| item.sample).collect();
        seen.sort_unstable();
        seen
    }

    #[test]
    fn carry_fills_every_step_and_visits_every_sample() {
        let steps = steps(10, 4, Tail::Carry);
        assert!((0..10).all(|step| steps.samples(step).len() == 4));
        let twice: Vec<u64> = (0..10).flat_map(|sample| [sample, sample]).collect();
        assert_eq!(sorted(&steps, 0..5), twice);
        assert_eq!(steps.samples(2).iter().map(|item| item.epoch).collect::<Vec<_>>(), [0, 0, 1, 1]);
    }

    #[test]
    fn drop_and_short_end_with_the_epoch() {
        let drop = steps(10, 4, Tail::Drop);
        assert_eq!((drop.per_epoch(), drop.samples(2).len(), drop.samples(2)[0].epoch), (2, 4, 1));
        let short = steps(10, 4, Tail::Short);
        assert_eq!((short.per_epoch(), short.samples(2).len()), (3, 2));
        assert_eq!(sorted(&short, 0..3), (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn a_batch_may_span_several_epochs() {
        let steps = steps(3, 8, Tail::Carry);
        let epochs: Vec<_> = steps.samples(0).iter().map(|item| item.epoch).collect();
        assert_eq!(epochs, [0, 0, 0, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn dropping_everything_is_refused() {
        let order = Order::new(vec![0..3], "f", 1).unwrap();
        assert!(Steps::new(order, NonZeroU64::new(4).unwrap(), Tail::Drop, 0).is_err());
    }
}
