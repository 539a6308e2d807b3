//! Shares of the datasets of a mixture, and segments in an order that every rank computes.
//!
//! A run consists of a few *segments* in which shares do not change: they start where weights change at a
//! stated step and where a dataset is exhausted. Segments and the draws before each are found once, when a
//! run is built; after that every position costs the same.
//!
//! Positions are cut into *blocks*. The number of draws from each dataset before a block is known in closed
//! form, and inside a block of at most [`BLOCK`] positions draws are counted: every position costs the same.
//!
//! With weights, a *period* is as long as the sum of the weights. A tree halves the list of datasets; a node
//! that has seen `p` positions has sent `floor((p * left + phase) / (left + right))` to the left half, so
//! every period draws each dataset exactly as often as the dataset weight, and no dataset is ever more than a
//! few draws early or late. Inside each block a permutation hides the regular pattern, with which dealing
//! round robin over ranks would resonate.

use super::{MixRules, Origin, Stop};
use dflop_costmodel::random::{Permutation, mix64};
use std::ops::Range;

/// Bound on positions, far beyond the end of any run.
pub(crate) const POSITION_MAX: u64 = 1 << 62;

/// A draw from a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Draw {
    pub(crate) dataset: usize,
    /// Number of earlier draws from the dataset, counted from the first epoch.
    pub(crate) number: u64,
}

/// All draws in a run, by position after the origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segments {
    segments: Vec<Segment>,
    /// Position at which the run ends; `None` if it does not.
    pub(crate) end: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    start: u64,
    /// Position within the shares at which the segment starts.
    phase: u64,
    shares: Shares,
    /// Offset added to the share counts, by dataset.
    base: Vec<i64>,
}

impl Segment {
    fn new(start: u64, phase: u64, shares: Shares, draws: &[u64]) -> Self {
        let counts = shares.counts(phase);
        let base = draws.iter().zip(counts).map(|(draws, count)| *draws as i64 - count as i64).collect();
        Self { start, phase, shares, base }
    }

    fn draws_before(&self, position: u64) -> Vec<u64> {
        let counts = self.shares.counts(position - self.start + self.phase);
        counts.iter().zip(&self.base).map(|(count, base)| (*count as i64 + base) as u64).collect()
    }
}

/// Layout input, in addition to the rules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SegmentsInput<'a> {
    pub(crate) origin: &'a Origin,
    /// Number of draws that exhaust each dataset, counted from the first epoch.
    pub(crate) limits: &'a [Option<u64>],
    pub(crate) global_batch: u64,
    pub(crate) seed: u64,
}

impl Segments {
    /// Finds the segments; there are none where nothing is left to draw at the origin.
    pub(crate) fn new(rules: &MixRules, input: SegmentsInput<'_>) -> Self {
        let SegmentsInput { origin, limits, global_batch, seed } = input;
        let key = mix64(seed ^ mix64(0x006d_6978_7475_7265));
        let step_position =
            |step: u64| step.saturating_sub(origin.step).saturating_mul(global_batch).min(POSITION_MAX);
        let mut layout = Self { segments: Vec::new(), end: None };
        let (mut start, mut phase, mut draws) = (0, origin.phase, origin.draws.clone());
        let mut changes = rules.weights.iter().map(|change| step_position(change.step)).peekable();
        let mut in_force = 0;
        loop {
            let passed = std::iter::from_fn(|| changes.next_if(|&change| change <= start)).count();
            in_force += passed;
            let is_active: Vec<bool> = draws
                .iter()
                .zip(limits)
                .map(|(draws, limit)| limit.is_none_or(|limit| *draws < limit))
                .collect();
            let is_over = rules.stop == Stop::FirstExhausted && is_active.contains(&false);
            let shares =
                if is_over { None } else { rules.shares(in_force.saturating_sub(1), &is_active, key) };
            let Some(shares) = shares else {
                layout.end = Some(start);
                return layout;
            };
            let exhausted = (0..draws.len()).filter_map(|at| {
                let left = limits[at]?.checked_sub(draws[at])?;
                shares.reach(at, phase, left, POSITION_MAX).map(|reach| reach - phase + start)
            });
            // An exhausted dataset has no share, so it is never reached again.
            let next = exhausted.chain(changes.peek().copied()).min().filter(|&next| next < POSITION_MAX);
            layout.segments.push(Segment::new(start, phase, shares, &draws));
            let Some(next) = next else { return layout };
            let segment = &layout.segments[layout.segments.len() - 1];
            draws = segment.draws_before(next);
            let is_active: Vec<bool> = draws
                .iter()
                .zip(limits)
                .map(|(draws, limit)| limit.is_none_or(|limit| *draws < limit))
                .collect();
            phase = segment.shares.phase_behind(next - start + phase, &is_active);
            start = next;
        }
    }

    fn segment_at(&self, position: u64) -> usize {
        self.segments.partition_point(|segment| segment.start <= position).saturating_sub(1)
    }

    /// Returns the number of draws from each dataset before a position, from the first epoch; O(256) plus the
    /// number of datasets.
    pub(crate) fn draws_before(&self, position: u64) -> Option<Vec<u64>> {
        self.segments.get(self.segment_at(position)).map(|segment| segment.draws_before(position))
    }

    /// Returns the position within the shares for a run position.
    pub(crate) fn phase_at(&self, position: u64) -> u64 {
        let segment = self.segments.get(self.segment_at(position));
        segment.map_or(0, |segment| position - segment.start + segment.phase)
    }

    /// Returns the draws for a position range before the end.
    pub(crate) fn draws(&self, positions: Range<u64>) -> Vec<Draw> {
        let mut drawn = Vec::with_capacity((positions.end - positions.start) as usize);
        let mut position = positions.start;
        let mut at = self.segment_at(position);
        while position < positions.end {
            let segment = &self.segments[at];
            let segment_end =
                self.segments.get(at + 1).map_or(u64::MAX, |next| next.start).min(positions.end);
            let mut counts = segment.draws_before(position);
            while position < segment_end {
                let local = position - segment.start + segment.phase;
                let (block_start, block) = segment.shares.block(local);
                let here = &block[(local - block_start) as usize..];
                for &dataset in here.iter().take((segment_end - position) as usize) {
                    let dataset = dataset as usize;
                    drawn.push(Draw { dataset, number: counts[dataset] });
                    counts[dataset] += 1;
                    position += 1;
                }
            }
            at += 1;
        }
        drawn
    }

    /// Returns whether two runs draw the same up to a position.
    pub(crate) fn agrees_until(&self, other: &Self, position: u64) -> bool {
        let starts =
            |layout: &Self| layout.segments.iter().filter(|segment| segment.start < position).count();
        let count = starts(self);
        let reaches = |layout: &Self| layout.end.is_none_or(|end| end >= position);
        count == starts(other)
            && self.segments[..count] == other.segments[..count]
            && reaches(self)
            && reaches(other)
    }
}

/// Maximum number of positions per block for weighted draws.
const BLOCK: u64 = 256;

/// Dataset at every position, counted from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shares {
    /// Always the same dataset.
    One { dataset: usize, datasets: usize },
    /// By weights; `sums[i]` is the sum over the weights before `i`.
    Weighted { sums: Vec<u64>, key: u64 },
    /// By a repeating pattern; `per_cycle[i]` is how often it names `i`.
    Cyclic { pattern: Vec<u32>, per_cycle: Vec<u64> },
}

impl Shares {
    /// Draws by integer weights; `None` if all are zero.
    pub(super) fn weighted(weights: &[u64], key: u64) -> Option<Self> {
        let drawn: Vec<usize> = (0..weights.len()).filter(|&at| weights[at] > 0).collect();
        match drawn[..] {
            [] => None,
            [dataset] => Some(Self::One { dataset, datasets: weights.len() }),
            _ => {
                let divisor = weights.iter().copied().reduce(gcd).unwrap_or(1);
                let mut sums = vec![0];
                sums.extend(weights.iter().scan(0, |sum, weight| {
                    *sum += weight / divisor;
                    Some(*sum)
                }));
                Some(Self::Weighted { sums, key })
            }
        }
    }

    /// Draws by a dataset number pattern below `datasets`; `None` if it is empty.
    pub(super) fn cyclic(pattern: Vec<u32>, datasets: usize) -> Option<Self> {
        let mut per_cycle = vec![0; datasets];
        for &dataset in &pattern {
            per_cycle[dataset as usize] += 1;
        }
        (!pattern.is_empty()).then_some(Self::Cyclic { pattern, per_cycle })
    }

    /// Returns the period length, and the number of draws from this dataset in it.
    fn period(&self, dataset: usize) -> (u64, u64) {
        match self {
            Self::One { dataset: only, .. } => (1, u64::from(*only == dataset)),
            Self::Weighted { sums, .. } => (sums[sums.len() - 1], sums[dataset + 1] - sums[dataset]),
            Self::Cyclic { pattern, per_cycle } => (pattern.len() as u64, per_cycle[dataset]),
        }
    }

    /// Returns the first position in the block around `position`, and the dataset at each block position.
    pub(super) fn block(&self, position: u64) -> (u64, Vec<u32>) {
        match self {
            Self::One { dataset, .. } => {
                let start = position / BLOCK * BLOCK;
                (start, vec![*dataset as u32; BLOCK as usize])
            }
            Self::Weighted { sums, key } => {
                let period = sums[sums.len() - 1];
                let (number, within) = (position / period, position % period / BLOCK * BLOCK);
                let start = number * period + within;
                let scatter = Permutation::new(BLOCK.min(period - within), mix64(key ^ mix64(start)));
                let dataset = |place| self.in_tree(start + scatter.at(place)) as u32;
                (start, (0..BLOCK.min(period - within)).map(dataset).collect())
            }
            Self::Cyclic { pattern, .. } => {
                let start = position - position % pattern.len() as u64;
                (start, pattern.clone())
            }
        }
    }

    /// Counts the draws from each dataset before `position`.
    pub(super) fn counts(&self, position: u64) -> Vec<u64> {
        let (start, block) = self.block(position);
        let mut counts = self.counts_at_block(start);
        block[..(position - start) as usize].iter().for_each(|&dataset| counts[dataset as usize] += 1);
        counts
    }

    fn counts_at_block(&self, start: u64) -> Vec<u64> {
        match self {
            Self::One { dataset, datasets } => {
                (0..*datasets).map(|at| if at == *dataset { start } else { 0 }).collect()
            }
            Self::Weighted { sums, .. } => {
                (0..sums.len() - 1).map(|at| self.count_in_tree(at, start)).collect()
            }
            Self::Cyclic { pattern, per_cycle } => {
                per_cycle.iter().map(|count| start / pattern.len() as u64 * count).collect()
            }
        }
    }

    /// Counts the draws from one dataset before `position`.
    fn count(&self, dataset: usize, position: u64) -> u64 {
        let Self::Weighted { .. } = self else { return self.counts(position)[dataset] };
        let (start, block) = self.block(position);
        let within =
            block[..(position - start) as usize].iter().filter(|&&at| at as usize == dataset).count();
        self.count_in_tree(dataset, start) + within as u64
    }

    /// Returns the first position, from `from` on, that comes after `draws` more draws from a dataset; `None`
    /// if that never happens, or is beyond `most`.
    pub(super) fn reach(&self, dataset: usize, from: u64, draws: u64, most: u64) -> Option<u64> {
        let (period, weight) = self.period(dataset);
        let wanted = self.count(dataset, from).checked_add(draws)?;
        let periods = wanted.checked_div(weight)? + 1;
        let (mut low, mut high) =
            (from, u64::try_from(u128::from(periods) * u128::from(period)).ok()?.min(most));
        if low > high || self.count(dataset, high) < wanted {
            return None;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            (low, high) =
                if self.count(dataset, middle) < wanted { (middle + 1, high) } else { (low, middle) };
        }
        Some(low)
    }

    /// Returns the phase of the shares that follow these at `position`: a pattern continues where it is,
    /// without the datasets that are no longer active; weights start a new period.
    pub(super) fn phase_behind(&self, position: u64, is_active: &[bool]) -> u64 {
        let Self::Cyclic { pattern, .. } = self else { return 0 };
        let passed = &pattern[..(position % pattern.len() as u64) as usize];
        passed.iter().filter(|&&dataset| is_active[dataset as usize]).count() as u64
    }

    /// Returns the dataset to which the tree sends a position.
    fn in_tree(&self, position: u64) -> usize {
        let Self::Weighted { sums, key } = self else { return 0 };
        let (mut first, mut end, mut position) = (0, sums.len() - 1, position);
        while end - first > 1 {
            let node = Node::new(sums, *key, first, end);
            let before = node.sent_left(position);
            if node.sent_left(position + 1) > before {
                (end, position) = (node.middle, before);
            } else {
                (first, position) = (node.middle, position - before);
            }
        }
        first
    }

    /// Counts how many of the first `position` positions the tree sends to a dataset.
    fn count_in_tree(&self, dataset: usize, position: u64) -> u64 {
        let Self::Weighted { sums, key } = self else { return 0 };
        let (mut first, mut end, mut position) = (0, sums.len() - 1, position);
        while end - first > 1 {
            let node = Node::new(sums, *key, first, end);
            let left = node.sent_left(position);
            if dataset < node.middle {
                (end, position) = (node.middle, left);
            } else {
                (first, position) = (node.middle, position - left);
            }
        }
        position
    }
}

/// Tree node: a dataset number range, halved.
struct Node {
    middle: usize,
    left: u64,
    both: u64,
    phase: u64,
}

impl Node {
    fn new(sums: &[u64], key: u64, first: usize, end: usize) -> Self {
        let middle = first.midpoint(end);
        let both = sums[end] - sums[first];
        let phase = mix64(key ^ mix64(middle as u64)).checked_rem(both).unwrap_or(0);
        Self { middle, left: sums[middle] - sums[first], both, phase }
    }

    /// Counts how many of the first `position` positions go to the left half.
    fn sent_left(&self, position: u64) -> u64 {
        let scaled = u128::from(position) * u128::from(self.left) + u128::from(self.phase);
        scaled.checked_div(u128::from(self.both)).unwrap_or(0) as u64
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drawn(shares: &Shares, positions: std::ops::Range<u64>) -> Vec<u32> {
        let dataset = |position| {
            let (start, block) = shares.block(position);
            block[(position - start) as usize]
        };
        positions.map(dataset).collect()
    }

    proptest! {
        #[test]
        fn every_period_meets_the_weights_exactly_and_counts_are_those_of_the_draws(
            weights in prop::collection::vec(0u64..400, 1..7), key: u64,
        ) {
            let Some(shares) = Shares::weighted(&weights, key) else { return Ok(()) };
            let period = shares.period(0).0;
            let mut counts = vec![0; weights.len()];
            for (position, dataset) in drawn(&shares, 0..period * 3).into_iter().enumerate() {
                prop_assert_eq!(&shares.counts(position as u64), &counts, "at {}", position);
                if (position as u64).is_multiple_of(period) {
                    let met = |at: usize| counts[at] == position as u64 / period * shares.period(at).1;
                    prop_assert!((0..weights.len()).all(met));
                }
                counts[dataset as usize] += 1;
            }
            for (at, count) in counts.iter().enumerate() {
                prop_assert_eq!(*count, 3 * shares.period(at).1);
            }
        }

        #[test]
        fn the_reach_of_draws_is_the_first_position_behind_them(
            weights in prop::collection::vec(0u64..60, 2..5), key: u64, from in 0u64..500, draws in 1u64..200,
        ) {
            let Some(shares) = Shares::weighted(&weights, key) else { return Ok(()) };
            for (at, weight) in weights.iter().enumerate() {
                let reach = shares.reach(at, from, draws, 1 << 40);
                prop_assert_eq!(reach.is_some(), *weight > 0);
                if let Some(reach) = reach {
                    let drawn = |position| shares.count(at, position) - shares.count(at, from);
                    prop_assert_eq!((drawn(reach), drawn(reach - 1)), (draws, draws - 1));
                }
            }
        }
    }

    #[test]
    fn a_pattern_repeats() {
        let shares = Shares::cyclic(vec![0, 0, 2], 3).unwrap();
        assert_eq!(drawn(&shares, 4..9), [0, 2, 0, 0, 2]);
        assert_eq!(shares.counts(5), [4, 0, 1]);
        assert_eq!((shares.reach(2, 0, 2, 99), shares.reach(1, 0, 1, 99)), (Some(6), None));
    }

    /// Resumed runs rely on these values, so they never change.
    #[test]
    fn the_draws_of_a_key_are_the_recorded_ones() {
        let shares = Shares::weighted(&[7, 3], 42).unwrap();
        assert_eq!(drawn(&shares, 0..20), [1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn late_positions_and_long_periods_are_counted_as_early_ones() {
        let shares = Shares::weighted(&[3_333, 6_667, 123_456_789], 1).unwrap();
        let at = 1 << 61;
        let (before, after) = (shares.counts(at), shares.counts(at + 1));
        assert_eq!(before.iter().sum::<u64>(), at);
        assert_eq!(after.iter().sum::<u64>(), at + 1);
    }

    #[test]
    fn equal_weights_do_not_simply_alternate() {
        let drawn = drawn(&Shares::weighted(&[1, 1], 3).unwrap(), 0..200);
        let in_first_place = drawn.iter().step_by(2).filter(|&&dataset| dataset == 0).count();
        assert!((30..70).contains(&in_first_place), "{in_first_place}");
    }
}
