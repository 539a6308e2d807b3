//! Computes the makespan for a pipeline, or for several coupled pipelines, after a change in one or two
//! microbatches, without simulating the rest.
//!
//! A step is a graph of passes; the makespan is its longest path. Each pass stores its *end* (the longest
//! path up to it) and its *tail* (the longest path from its start to the step's end). If microbatches
//! `first..=last` change, only the passes between the first forward pass for `first` and the last backward
//! pass for `last` on each stage, the *window*, are both after and before a changed pass. Ends before the
//! window and tails after it stay the same, and every path from start to end crosses the window. So the new
//! makespan is the longest path through it: under 1F1B `p (p + 1)` passes for one microbatch on `p` stages,
//! instead of `2 p K`. If a rank holds several stages, a path may leave these passes and come back: the whole
//! step is recomputed.
//!
//! # Source
//! Heads and tails are from job-shop local search: Taillard, "Parallel taboo search techniques for the
//! job shop scheduling problem", ORSA J. Computing 6, 1994.

use super::pass_graph::{Pass, PassGraph, PassShape};
use crate::schedule::ScheduleKind;

/// Maximum number of passes in all windows together; further microbatch pairs share the window over all
/// passes.
const WINDOW_PASSES_MAX: usize = 1 << 16;

/// Pass in a window; `before` indexes the ends, then the window's own ends.
#[derive(Debug, Clone, Copy)]
struct Step {
    time: u32,
    before: [u32; 2],
}

/// Passes to recompute, and the edges that leave them.
#[derive(Debug, Clone, Default)]
struct Window {
    steps: Vec<Step>,
    /// Step end, indexed like `before`, and the pass after the window whose tail follows.
    exits: Vec<(u32, u32)>,
}

/// Ordered passes in a step, with their windows.
#[derive(Debug)]
pub(crate) struct Timeline {
    passes: Vec<Pass>,
    microbatches: usize,
    cells: usize,
    /// Passes on every lane, in order.
    lanes: Vec<Vec<u32>>,
    lanes_of_rank: Vec<Vec<usize>>,
    /// Positions of a microbatch's first and last pass on its lane, `[lanes * microbatches]`.
    places: Vec<(usize, usize)>,
    /// Passes without a receiver.
    last: Vec<u32>,
    /// Indices of every microbatch's first and last pass.
    spans: Vec<(usize, usize)>,
    /// Window over all passes, then windows for single microbatches, for neighbors, and so on; each window is
    /// built at its first use.
    windows: Vec<Window>,
    /// Index for every pass in the window under construction, like [`Step::before`].
    codes: Vec<u32>,
}

/// Timeline times, with the resulting ends, tails and longest path.
#[derive(Debug, Clone)]
pub(crate) struct PassTimes {
    /// Times for all passes by [`PassShape::cell`], forward and backward, then a zero.
    pub(crate) times_ns: Vec<u64>,
    pub(crate) makespan_ns: u64,
    /// Number of times that the longest path visits each `times_ns` cell.
    pub(crate) critical: Vec<u32>,
    /// End of every pass, then a zero as input for the first passes, then space for a window.
    ends_ns: Vec<u64>,
    tails_ns: Vec<u64>,
}

impl Timeline {
    /// Sorts a step's passes.
    pub(crate) fn new(shape: PassShape<'_>) -> Self {
        let PassGraph { passes, lanes, lanes_of_rank } = PassGraph::new(shape);
        let (microbatches, cells) = (shape.step.slots, shape.cells());
        let mut places = vec![(usize::MAX, 0); lanes.len() * microbatches];
        let mut spans = vec![(usize::MAX, 0); microbatches];
        for (lane, own) in lanes.iter().enumerate() {
            for (position, &at) in own.iter().enumerate() {
                let microbatch = passes[at as usize].microbatch;
                let place = &mut places[lane * microbatches + microbatch];
                *place = (place.0.min(position), position);
                let span = &mut spans[microbatch];
                *span = (span.0.min(at as usize), span.1.max(at as usize));
            }
        }
        let nothing = passes.len() as u32;
        let last = (0..nothing).filter(|at| passes[*at as usize].after == [nothing; 2]).collect();
        let (codes, windows) = ((0..=nothing).collect(), Vec::new());
        let mut timeline =
            Self { passes, microbatches, cells, lanes, lanes_of_rank, places, last, spans, windows, codes };
        let has_windows = !matches!(shape.step.kind, ScheduleKind::Interleaved { .. });
        let windows = if has_windows { timeline.windows_that_fit() } else { 1 };
        timeline.windows = vec![Window::default(); windows];
        let all: Vec<u32> = (0..nothing).collect();
        timeline.windows[0] = timeline.build_window(&all);
        timeline
    }

    /// Returns the number of passes in a full simulation.
    pub(crate) fn passes(&self) -> u64 {
        self.passes.len() as u64
    }

    /// Counts the windows, including the window over all passes, up to [`WINDOW_PASSES_MAX`].
    fn windows_that_fit(&self) -> usize {
        let (mut windows, mut total) = (1, 0);
        for distance in 0..self.microbatches {
            for first in 0..self.microbatches - distance {
                total += self
                    .window_places(first, first + distance)
                    .map(|(from, to)| to + 1 - from)
                    .sum::<usize>();
                if total > WINDOW_PASSES_MAX {
                    return windows;
                }
                windows += 1;
            }
        }
        windows
    }

    /// Lists the window's first and last position for these microbatches on every lane.
    fn window_places(&self, first: usize, last: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let lanes = self.places.chunks_exact(self.microbatches);
        lanes.map(move |lane| (lane[first].0, lane[last].1))
    }

    /// Returns the window index for two microbatches, the first not after the last; builds the window if
    /// needed.
    fn window(&mut self, first: usize, last: usize) -> usize {
        let distance = last - first;
        // Windows for smaller distances come first: `K`, `K - 1`, ... of them.
        let before = distance * self.microbatches - distance * distance.saturating_sub(1) / 2;
        let index = 1 + before + first;
        // There is no such window: the window over all passes gives the same makespan, slower.
        if index >= self.windows.len() {
            return 0;
        }
        if self.windows[index].steps.is_empty() {
            let places: Vec<_> = self.window_places(first, last).collect();
            let on_lanes = self.lanes.iter().zip(places);
            let mut members: Vec<u32> =
                on_lanes.flat_map(|(lane, (from, to))| &lane[from..=to]).copied().collect();
            members.sort_unstable();
            self.windows[index] = self.build_window(&members);
        }
        index
    }

    /// Builds the window for these passes, ascending.
    fn build_window(&mut self, members: &[u32]) -> Window {
        let nothing = self.passes.len() as u32;
        let mut window = Window::default();
        for &at in members {
            let pass = self.passes[at as usize];
            let before = pass.before.map(|before| self.codes[before as usize]);
            self.codes[at as usize] = nothing + 1 + window.steps.len() as u32;
            window.steps.push(Step { time: pass.time, before });
        }
        for &at in members {
            let after = self.passes[at as usize].after;
            let is_outside = |pass: &u32| *pass < nothing && self.codes[*pass as usize] == *pass;
            let code = self.codes[at as usize];
            window.exits.extend(after.iter().filter(|pass| is_outside(pass)).map(|&pass| (code, pass)));
            if after == [nothing; 2] {
                window.exits.push((code, nothing));
            }
        }
        for &at in members {
            self.codes[at as usize] = at;
        }
        window
    }

    /// Allocates times that are all zero.
    pub(crate) fn times(&self) -> PassTimes {
        let passes = self.passes.len();
        PassTimes {
            times_ns: vec![0; self.cells + 1],
            makespan_ns: 0,
            critical: vec![0; self.cells + 1],
            ends_ns: vec![0; 2 * passes + 1],
            tails_ns: vec![0; passes + 1],
        }
    }

    /// Returns the makespan after the times for two microbatches (or one, twice) changed, and the number of
    /// visited passes.
    pub(super) fn makespan_with(&mut self, rank: &mut PassTimes, first: usize, last: usize) -> (u64, u64) {
        let index = self.window(first, last);
        let window = &self.windows[index];
        let (start, times_ns, ends_ns) = (self.passes.len() + 1, &rank.times_ns, &mut rank.ends_ns);
        for (at, step) in window.steps.iter().enumerate() {
            let begin = ends_ns[step.before[0] as usize].max(ends_ns[step.before[1] as usize]);
            ends_ns[start + at] = begin + times_ns[step.time as usize];
        }
        let path = |&(end, after): &(u32, u32)| ends_ns[end as usize] + rank.tails_ns[after as usize];
        let makespan_ns = window.exits.iter().map(path).max().unwrap_or(0);
        (makespan_ns, window.steps.len() as u64)
    }

    /// Updates ends, tails, makespan and longest path after the times for these microbatches changed.
    pub(super) fn settle(&self, rank: &mut PassTimes, first: usize, last: usize) {
        let (from, to) = (self.spans[first].0, self.spans[last].1);
        self.find_ends(rank, from);
        for (at, pass) in self.passes.iter().enumerate().take(to + 1).rev() {
            let rest = rank.tails_ns[pass.after[0] as usize].max(rank.tails_ns[pass.after[1] as usize]);
            rank.tails_ns[at] = rest + rank.times_ns[pass.time as usize];
        }
        self.follow_longest_path(rank);
    }

    /// Computes the makespan and the longest path only from the times.
    pub(crate) fn find_longest_path(&self, rank: &mut PassTimes) {
        self.find_ends(rank, 0);
        self.follow_longest_path(rank);
    }

    fn find_ends(&self, rank: &mut PassTimes, from: usize) {
        for (at, pass) in self.passes.iter().enumerate().skip(from) {
            let begin = rank.ends_ns[pass.before[0] as usize].max(rank.ends_ns[pass.before[1] as usize]);
            rank.ends_ns[at] = begin + rank.times_ns[pass.time as usize];
        }
    }

    /// Returns the pass ends on each rank, shared modules included.
    pub(crate) fn rank_ends_ns(&self, times: &PassTimes) -> impl Iterator<Item = u64> {
        let end = |lane: &usize| self.lanes[*lane].iter().map(|&at| times.ends_ns[at as usize]).max();
        self.lanes_of_rank.iter().map(move |lanes| lanes.iter().filter_map(end).max().unwrap_or(0))
    }

    /// Follows the longest path back from the last pass, by the inputs that each pass waited for without a
    /// gap.
    fn follow_longest_path(&self, rank: &mut PassTimes) {
        let nothing = self.passes.len();
        // Ties between passes that end together go to the first.
        let last = self.last.iter().rev().max_by_key(|&&at| rank.ends_ns[at as usize]);
        let mut at = last.map_or(nothing, |&at| at as usize);
        rank.makespan_ns = rank.ends_ns[at];
        rank.critical.fill(0);
        while at < nothing {
            let pass = self.passes[at];
            rank.critical[pass.time as usize] += 1;
            let [same_stage, input] = pass.before.map(|before| before as usize);
            let waits_for_input = rank.ends_ns[input] > rank.ends_ns[same_stage] || same_stage == nothing;
            at = if waits_for_input { input } else { same_stage };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::PipelineConfig;
    use crate::schedule::{ModuleStages, PipelineLayout, ScheduleKind};
    use crate::simulate::{Communication, CompiledSchedule, StageTimes};
    use proptest::prelude::*;

    /// Computes the makespan by a full simulation.
    fn simulated(
        kind: ScheduleKind,
        rows: &[usize],
        modules: usize,
        microbatches: usize,
        rank: &PassTimes,
    ) -> u64 {
        let cells = (0..modules)
            .flat_map(|module| (0..microbatches).map(move |microbatch| 2 * (microbatch * modules + module)));
        let (forward_ns, backward_ns): (Vec<u64>, Vec<u64>) =
            cells.map(|cell| (rank.times_ns[cell], rank.times_ns[cell + 1])).unzip();
        let times = StageTimes::new(modules, microbatches, forward_ns, backward_ns).unwrap();
        if kind.chunks() > 1 {
            return CompiledSchedule::new(kind, rows, microbatches).unwrap().makespan_ns(&times);
        }
        // Modules before the last are encoders, as in the timeline.
        let stages: Vec<usize> =
            (0..modules).map(|module| rows.iter().filter(|row| **row == module).count()).collect();
        let stages: Vec<ModuleStages> =
            stages.into_iter().map(|stages| ModuleStages::new(stages, 1)).collect();
        let layout = PipelineLayout::from_modules(&stages, microbatches).unwrap();
        let free = Communication::free(rows.len(), microbatches);
        let mut compiled = CompiledSchedule::from_layout(kind, &layout, rows, &free).unwrap();
        compiled.makespan_ns(&times)
    }

    const KIND: ScheduleKind = ScheduleKind::OneForwardOneBackward;

    fn check(
        kind: ScheduleKind,
        stages: &[usize],
        microbatches: usize,
        times_ns: &[u64],
        changes: &[(usize, usize, u64)],
    ) {
        let rows: Vec<usize> =
            stages.iter().enumerate().flat_map(|(module, count)| vec![module; *count]).collect();
        let modules = stages.len();
        let config = PipelineConfig::new(1, stages.to_vec()).schedule(kind);
        let step = config.step_shape(microbatches);
        let shape = PassShape { step, rows: &rows, is_shared: &vec![false; modules], ranks: 1 };
        let mut timeline = Timeline::new(shape);
        let mut rank = timeline.times();
        let cells = shape.cells();
        rank.times_ns[..cells].iter_mut().zip(times_ns.iter().cycle()).for_each(|(cell, time)| *cell = *time);
        timeline.settle(&mut rank, 0, microbatches - 1);
        assert_eq!(rank.makespan_ns, simulated(kind, &rows, modules, microbatches, &rank));
        for &(one, other, time) in changes {
            let (one, other) = (one % microbatches, other % microbatches);
            for microbatch in [one, other] {
                rank.times_ns[2 * modules * microbatch + time as usize % (2 * modules)] = time;
            }
            let (first, last) = (one.min(other), one.max(other));
            let found = timeline.makespan_with(&mut rank, first, last).0;
            assert_eq!(found, simulated(kind, &rows, modules, microbatches, &rank));
            timeline.settle(&mut rank, first, last);
            assert_eq!(rank.makespan_ns, found);
            let path: u64 = (0..cells).map(|at| u64::from(rank.critical[at]) * rank.times_ns[at]).sum();
            assert_eq!(path, found);
        }
    }

    proptest! {
        #[test]
        fn a_window_gives_the_makespan_of_a_full_simulation(
            kind in prop::sample::select(vec![
                KIND, ScheduleKind::GPipe, ScheduleKind::EncoderAhead { rounds: 2 },
            ]),
            stages in prop::collection::vec(1..4_usize, 1..4),
            microbatches in 1..14_usize,
            times_ns in prop::collection::vec(0..1000_u64, 60),
            changes in prop::collection::vec((0..14_usize, 0..14_usize, 0..1000_u64), 8),
        ) {
            check(kind, &stages, microbatches, &times_ns, &changes);
        }
    }

    proptest! {
        #[test]
        fn ranks_with_several_stages_take_what_the_simulator_says(
            chunks in 2..4_u16, ranks in 1..4_usize, first in 0..6_usize,
            microbatches in 1..14_usize,
            times_ns in prop::collection::vec(0..1000_u64, 60),
            changes in prop::collection::vec((0..14_usize, 0..14_usize, 0..1000_u64), 8),
        ) {
            let stages = ranks * usize::from(chunks);
            let first = first.min(stages - 1);
            let stages: Vec<usize> = [first, stages - first].into_iter().filter(|count| *count > 0).collect();
            check(ScheduleKind::Interleaved { chunks }, &stages, microbatches, &times_ns, &changes);
        }
    }

    #[test]
    fn pairs_beyond_the_room_for_windows_are_simulated_whole() {
        let times_ns: Vec<u64> = (0..97).map(|i| i * 7919 % 1009).collect();
        check(
            KIND,
            &[2, 6],
            120,
            &times_ns,
            &[(3, 3, 500), (10, 11, 900), (5, 118, 700), (0, 119, 1), (60, 2, 80)],
        );
    }
}
