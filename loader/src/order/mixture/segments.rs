//! Maps positions in a run to draws: the dataset, and the number of earlier draws from it.
//!
//! A run consists of a few *segments* in which shares do not change: they start where weights change at a
//! stated step and where a dataset is exhausted. Segments and the draws before each are found once, when a
//! run is built; after that every position costs the same.

use std::ops::Range;

use super::shares::Shares;
use super::{MixRules, Origin, Stop};
use dflop_costmodel::random::mix64;

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
