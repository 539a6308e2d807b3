//! Memory limit with lane memory.

use crate::pipeline::config::PipelineConfig;
use crate::pipeline::memory_limits::StageMemoryLimit;
use crate::pipeline::search::change::Change;

/// Memory limit with the bytes for all slots.
pub(super) struct Limit<'a> {
    of: &'a StageMemoryLimit,
    /// Modules whose units take memory.
    modules: Vec<usize>,
    pub(super) is_shared: bool,
    /// Number of microbatches in a window.
    pub(super) window: usize,
    /// Kept and working bytes by lane and place.
    pub(super) bytes: Vec<Bytes>,
    pub(super) lanes: Vec<Lane>,
}

/// Bytes for a microbatch on a stage.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bytes {
    kept: u64,
    working: u64,
}

/// Lane memory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lane {
    /// Bytes kept in the largest window.
    kept_max: u64,
    /// First place of that window.
    pub(super) window_start: usize,
    /// Largest working bytes.
    working_max: u64,
    /// Bytes above the limit.
    pub(super) excess: u64,
}

impl<'a> Limit<'a> {
    pub(super) fn new(of: &'a StageMemoryLimit, config: &PipelineConfig, microbatches: usize) -> Self {
        let is_shared = of.is_shared(|module| config.has_own_dp_size(module));
        let lanes = if is_shared { 1 } else { config.dp_size };
        Self {
            of,
            modules: of.modules().collect(),
            is_shared,
            window: of.in_flight.min(microbatches),
            bytes: vec![Bytes::default(); lanes * microbatches],
            lanes: vec![Lane::default(); lanes],
        }
    }

    /// Returns the bytes for a microbatch with these units, `[modules]`.
    pub(super) fn microbatch_bytes(&self, units: &[u64]) -> Bytes {
        let mut bytes = Bytes::default();
        for &module in &self.modules {
            bytes.kept += self.of.kept[module] * units[module];
            bytes.working += self.of.working[module] * units[module];
        }
        bytes
    }

    /// Returns the index for a slot's bytes.
    fn index(&self, slot: usize, microbatches: usize) -> usize {
        if self.is_shared { slot % microbatches } else { slot }
    }

    /// Returns the excess before and after a change on the altered lanes, and the elementary steps spent.
    pub(super) fn compute_change(
        &mut self,
        change: Change,
        after: &[Vec<u64>; 2],
        microbatches: usize,
    ) -> ([(u64, u64); 2], u64) {
        let indices = [change.first, change.second].map(|slot| self.index(slot, microbatches));
        if indices[0] == indices[1] {
            return ([(0, 0); 2], 1);
        }
        let bytes = [self.microbatch_bytes(&after[0]), self.microbatch_bytes(&after[1])];
        let lanes = indices.map(|index| index / microbatches);
        let mut steps = self.modules.len() as u64;
        let mut sites = [(0, 0); 2];
        let edits = [(indices[0], bytes[0]), (indices[1], bytes[1])];
        let parts: [&[(usize, Bytes)]; 2] =
            if lanes[0] == lanes[1] { [&edits, &[]] } else { [&edits[..1], &edits[1..]] };
        for ((site, lane), edits) in sites.iter_mut().zip(lanes).zip(parts) {
            if !edits.is_empty() {
                *site = (self.lanes[lane].excess, self.excess_after(lane, edits, microbatches, &mut steps));
            }
        }
        (sites, steps)
    }

    /// Returns a lane's excess with the bytes for one or two microbatches replaced.
    fn excess_after(
        &mut self,
        lane: usize,
        edits: &[(usize, Bytes)],
        microbatches: usize,
        steps: &mut u64,
    ) -> u64 {
        let Lane { mut kept_max, mut working_max, .. } = self.lanes[lane];
        for (index, bytes) in edits {
            kept_max += bytes.kept.saturating_sub(self.bytes[*index].kept);
            working_max = working_max.max(bytes.working);
        }
        // Most changes leave room, which a bound shows without the windows.
        if kept_max + working_max <= self.of.bytes_max {
            return 0;
        }
        *steps += microbatches as u64;
        let mut before = [Bytes::default(); 2];
        for (before, (index, bytes)) in before.iter_mut().zip(edits) {
            *before = std::mem::replace(&mut self.bytes[*index], *bytes);
        }
        let excess = self.measure(lane, microbatches).excess;
        for (before, (index, _)) in before.iter().zip(edits) {
            self.bytes[*index] = *before;
        }
        excess
    }

    /// Replaces the bytes for both microbatches in a change; returns the elementary steps spent.
    pub(super) fn apply(&mut self, change: Change, after: &[Vec<u64>; 2], microbatches: usize) -> u64 {
        let indices = [change.first, change.second].map(|slot| self.index(slot, microbatches));
        if indices[0] == indices[1] {
            return 1;
        }
        for (index, units) in indices.into_iter().zip(after) {
            self.bytes[index] = self.microbatch_bytes(units);
        }
        for lane in indices.map(|index| index / microbatches) {
            self.lanes[lane] = self.measure(lane, microbatches);
        }
        2 * microbatches as u64
    }

    /// Sums a lane's windows.
    pub(super) fn measure(&self, lane: usize, microbatches: usize) -> Lane {
        let bytes = &self.bytes[lane * microbatches..(lane + 1) * microbatches];
        let working_max = bytes.iter().map(|bytes| bytes.working).max().unwrap_or(0);
        let mut kept: u64 = bytes[..self.window].iter().map(|bytes| bytes.kept).sum();
        let (mut kept_max, mut window_start) = (kept, 0);
        for (start, (leaves, enters)) in bytes.iter().zip(&bytes[self.window..]).enumerate() {
            kept = kept - leaves.kept + enters.kept;
            if kept > kept_max {
                (kept_max, window_start) = (kept, start + 1);
            }
        }
        let excess = (kept_max + working_max).saturating_sub(self.of.bytes_max);
        Lane { kept_max, window_start, working_max, excess }
    }
}
