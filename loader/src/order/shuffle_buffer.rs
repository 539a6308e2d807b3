//! Shuffles input without an index, in a bounded buffer.
//!
//! Samples enter as they are read; the sample that leaves is drawn from (seed, epoch, draw number) by integer
//! arithmetic, so equal input yields equal output anywhere. The buffer drains at the end of every epoch:
//! epochs do not mix, and each is a permutation of the samples read in it. [`crate::deliver`] owns the buffer
//! and writes the contents into the loader state.

use std::fmt;

use crate::error::{Error, Result, check_at_most};
use dflop_costmodel::random::mix64;

/// Maximum number of samples in a buffer.
const SAMPLES_MAX: u64 = 1 << 24;

/// Bounds and seed for a shuffle buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShuffleBuffer {
    /// Maximum number of samples in the buffer; at least 1, which shuffles nothing.
    pub samples_max: usize,
    /// Payload bytes at which the buffer counts as full; exceeded by at most one sample.
    pub bytes_max: u64,
    /// Number of buffered samples before the first sample in an epoch leaves; from then on the buffer grows
    /// by one with every sample that leaves. A smaller number yields an earlier, less shuffled first batch.
    pub samples_initial: usize,
    /// Seed for the draws; `None` for the loader seed.
    pub seed: Option<u64>,
}

impl fmt::Display for ShuffleBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { samples_max, bytes_max, samples_initial, seed } = self;
        let seed = seed.unwrap_or_default();
        write!(
            formatter,
            "a buffer of {samples_max} samples and {bytes_max} bytes that begins with {samples_initial}, seed {seed}"
        )
    }
}

impl ShuffleBuffer {
    /// Creates a buffer with up to `samples_max` samples and 256 MiB that fills before the first sample
    /// leaves.
    #[must_use]
    pub fn new(samples_max: usize) -> Self {
        Self { samples_max, bytes_max: 256 << 20, samples_initial: samples_max, seed: None }
    }

    pub(crate) fn check(&self) -> Result<()> {
        for (setting, value) in
            [("shuffle.samples_max", self.samples_max), ("shuffle.samples_initial", self.samples_initial)]
        {
            check_at_most(setting, value as u64, SAMPLES_MAX)?;
            if value == 0 {
                return Err(Error::Config { setting, reason: "must be at least 1".into() });
            }
        }
        if self.bytes_max == 0 {
            return Err(Error::Config { setting: "shuffle.bytes_max", reason: "must be at least 1".into() });
        }
        Ok(())
    }
}

/// Shuffle buffer contents, with sizes.
#[derive(Debug)]
pub(crate) struct Shuffler<T> {
    settings: ShuffleBuffer,
    epoch: u64,
    drawn: u64,
    waiting: Vec<(T, u64)>,
    bytes: u64,
}

impl<T> Shuffler<T> {
    /// Continues inside an epoch after `drawn` samples have left; `waiting` is in buffer order.
    pub(crate) fn resume(
        settings: ShuffleBuffer,
        (epoch, drawn): (u64, u64),
        waiting: Vec<(T, u64)>,
    ) -> Self {
        let bytes = waiting.iter().map(|(_, bytes)| bytes).sum();
        Self { settings, epoch, drawn, waiting, bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Starts an epoch.
    pub(crate) fn begin_epoch(&mut self, epoch: u64) {
        debug_assert!(self.waiting.is_empty(), "an epoch drains the buffer");
        (self.epoch, self.drawn) = (epoch, 0);
    }

    /// Returns whether one more sample must enter, if there is one, before the next may leave.
    pub(crate) fn has_room(&self) -> bool {
        let grown = (self.settings.samples_initial as u64).saturating_add(self.drawn);
        let most = grown.min(self.settings.samples_max as u64);
        (self.waiting.len() as u64) < most && self.bytes < self.settings.bytes_max
    }

    pub(crate) fn push(&mut self, sample: T, bytes: u64) {
        self.bytes += bytes;
        self.waiting.push((sample, bytes));
    }

    /// Removes the next sample and returns its position; the last sample moves there. `None` if the buffer is
    /// empty.
    pub(crate) fn draw(&mut self) -> Option<(usize, T)> {
        let at =
            draw_below(self.waiting.len(), self.settings.seed.unwrap_or_default(), self.epoch, self.drawn)?;
        let (sample, bytes) = self.waiting.swap_remove(at);
        self.drawn += 1;
        self.bytes -= bytes;
        Some((at, sample))
    }
}

/// Draws a number below `len` from (seed, epoch, count); `None` if `len` is 0.
fn draw_below(len: usize, seed: u64, epoch: u64, count: u64) -> Option<usize> {
    let bits = mix64(mix64(mix64(seed) ^ epoch) ^ count);
    // The high half of the product is uniform below `len`, except for a bias of `len` in 2^64.
    (len > 0).then(|| ((u128::from(bits) * len as u128) >> 64) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs an epoch over samples with these sizes; returns the order, and the maximum number of samples and
    /// bytes in the buffer.
    fn shuffled(settings: ShuffleBuffer, epoch: u64, sizes: &[u64]) -> (Vec<usize>, usize, u64) {
        let mut buffer = Shuffler::resume(settings, (epoch, 0), Vec::new());
        let (mut order, mut samples_high, mut bytes_high) = (Vec::new(), 0, 0);
        let mut input = sizes.iter().enumerate();
        loop {
            while buffer.has_room()
                && let Some((number, &bytes)) = input.next()
            {
                buffer.push(number, bytes);
            }
            (samples_high, bytes_high) =
                (samples_high.max(buffer.waiting.len()), bytes_high.max(buffer.bytes));
            match buffer.draw() {
                Some((_, number)) => order.push(number),
                None => return (order, samples_high, bytes_high),
            }
        }
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_doubled_and_the_bounds_hold(
            sizes in prop::collection::vec(0u64..500, 0..300),
            samples_max in 1usize..400,
            samples_initial in 1usize..400,
            bytes_max in 1u64..5_000,
            seed: u64,
            epoch in 0u64..3,
        ) {
            let settings = ShuffleBuffer { samples_max, bytes_max, samples_initial, seed: Some(seed) };
            let (order, samples_high, bytes_high) = shuffled(settings, epoch, &sizes);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert!(sorted.into_iter().eq(0..sizes.len()));
            prop_assert!(samples_high <= samples_max);
            prop_assert!(bytes_high < bytes_max + sizes.iter().max().copied().unwrap_or(0).max(1));
            prop_assert_eq!(order, shuffled(settings, epoch, &sizes).0);
        }

        #[test]
        fn no_sample_leaves_before_its_buffer_was_full(samples_max in 1usize..50, seed: u64) {
            let settings = ShuffleBuffer { seed: Some(seed), ..ShuffleBuffer::new(samples_max) };
            let (order, ..) = shuffled(settings, 0, &[1; 200]);
            for (place, &number) in order.iter().enumerate() {
                prop_assert!(number < place + samples_max, "sample {number} left as number {place}");
            }
        }
    }

    #[test]
    fn seeds_and_epochs_draw_apart_and_a_buffer_of_one_keeps_the_order() {
        let sizes = [1; 100];
        let order = |seed, epoch| {
            shuffled(ShuffleBuffer { seed: Some(seed), ..ShuffleBuffer::new(50) }, epoch, &sizes).0
        };
        assert_ne!(order(0, 0), order(1, 0));
        assert_ne!(order(0, 0), order(0, 1));
        assert!(shuffled(ShuffleBuffer::new(1), 0, &sizes).0.into_iter().eq(0..100));
    }

    #[test]
    fn every_place_is_drawn_equally_often() {
        let mut counts = [0u32; 7];
        for count in 0..70_000 {
            counts[draw_below(7, 3, 1, count).unwrap()] += 1;
        }
        // Ten thousand each, give or take four standard deviations.
        assert!(counts.iter().all(|&count| count.abs_diff(10_000) < 400), "{counts:?}");
    }

    #[test]
    fn the_draws_of_a_seed_never_change() {
        let draws: Vec<_> = (0..8).map(|count| draw_below(100, 7, 2, count).unwrap()).collect();
        assert_eq!(draws, [50, 41, 55, 66, 59, 47, 6, 90]);
    }

    #[test]
    fn a_small_start_gives_the_first_sample_at_once() {
        let settings = ShuffleBuffer { samples_initial: 2, ..ShuffleBuffer::new(50) };
        let mut buffer = Shuffler::resume(settings, (0, 0), Vec::new());
        buffer.push("a", 1);
        assert!(buffer.has_room());
        buffer.push("b", 1);
        assert!(!buffer.has_room());
        buffer.draw().unwrap();
        assert!(buffer.has_room());
        buffer.push("c", 1);
        assert!(buffer.has_room(), "the bound grows with every sample that leaves");
    }

    #[test]
    fn bounds_of_nothing_are_refused() {
        let good = ShuffleBuffer::new(10);
        assert!(good.check().is_ok());
        for bad in [
            ShuffleBuffer { samples_max: 0, ..good },
            ShuffleBuffer { samples_initial: 0, ..good },
            ShuffleBuffer { bytes_max: 0, ..good },
            ShuffleBuffer { samples_max: usize::MAX, ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
