//! Computes a rank's makespan after a change of one or two microbatches, without simulating the rest.
//!
//! A 1F1B step is a graph of passes; the makespan is its longest path. Keep for every pass its *end* (the
//! longest path up to it) and its *tail* (the longest path from its start to the end of the step). If
//! microbatches `first..=last` change, only the passes between the first forward pass of `first` and the last
//! backward pass of `last` on each stage, the *window*, lie both after and before a changed pass. Ends before
//! the window and tails after it stay the same, and every path from start to end crosses the window. So the
//! new makespan is the longest path through it: `p (p + 1)` passes for one microbatch on `p` stages, instead
//! of `2 p K`.
//!
//! # Source
//! Heads and tails are from job-shop local search: Taillard, "Parallel taboo search techniques for the
//! job shop scheduling problem", ORSA J. Computing 6, 1994.

use crate::error::Result;
use crate::schedule::{Action, ScheduleKind, schedule};
use crate::simulate::{StageTimes, simulate};

/// Most passes in all windows together; further pairs of microbatches share the window of everything.
const WINDOW_PASSES_MAX: usize = 1 << 16;

/// A pass, in an order in which every pass comes after its inputs.
#[derive(Debug, Clone, Copy)]
struct Pass {
    stage: usize,
    /// Index into the rank's times.
    time: u32,
    /// Previous pass on the same stage and the pass that sends the input, or `passes.len()`.
    before: [u32; 2],
    /// Next pass on the same stage and the pass that receives the output, or `passes.len()`.
    after: [u32; 2],
}

/// A pass of a window; `before` indexes the ends, then the ends of the window itself.
#[derive(Debug, Clone, Copy)]
struct Step {
    time: u32,
    before: [u32; 2],
}

/// Passes to walk over again, and the edges that leave them.
#[derive(Debug, Clone, Default)]
struct Window {
    steps: Vec<Step>,
    /// End of a step, indexed like `before`, and the pass after the window whose tail follows.
    exits: Vec<(u32, u32)>,
}

/// Graph of passes that all ranks share.
#[derive(Debug)]
pub(crate) struct Timeline {
    passes: Vec<Pass>,
    microbatches: usize,
    /// Passes of every stage, in order.
    stages: Vec<Vec<u32>>,
    /// Positions of a microbatch's forward and backward pass on its stage, `[stages * microbatches]`.
    places: Vec<(usize, usize)>,
    /// Index of every microbatch's first and last pass.
    spans: Vec<(usize, usize)>,
    /// The window of everything, then the windows of single microbatches, of neighbors, and so on; each is
    /// built at its first use.
    windows: Vec<Window>,
    /// Index of every pass in the window under construction, like [`Step::before`].
    codes: Vec<u32>,
}

/// Times of one rank, and the ends, tails and longest path that follow from them.
#[derive(Debug, Clone)]
pub(crate) struct RankTimes {
    /// Times of all passes, `[microbatches * modules * 2]`, forward and backward.
    pub(crate) times_ns: Vec<u64>,
    pub(crate) makespan_ns: u64,
    /// Number of times that the longest path takes each cell of `times_ns`.
    pub(crate) critical: Vec<u32>,
    /// End of every pass, then a zero as the input of the first passes, then space for a window.
    ends_ns: Vec<u64>,
    tails_ns: Vec<u64>,
}

impl Timeline {
    /// Sorts the passes of 1F1B; `rows` is the module of every stage.
    pub(crate) fn new(rows: &[usize], modules: usize, microbatches: usize) -> Result<Self> {
        let passes = sorted_passes(rows, modules, microbatches)?;
        let mut stages = vec![Vec::new(); rows.len()];
        let mut places = vec![(usize::MAX, 0); rows.len() * microbatches];
        let mut spans = vec![(usize::MAX, 0); microbatches];
        for (at, pass) in passes.iter().enumerate() {
            let microbatch = pass.time as usize / (2 * modules);
            let place = &mut places[pass.stage * microbatches + microbatch];
            *place = (place.0.min(stages[pass.stage].len()), stages[pass.stage].len());
            spans[microbatch] = (spans[microbatch].0.min(at), at);
            stages[pass.stage].push(at as u32);
        }
        let codes = (0..=passes.len() as u32).collect();
        let windows = Vec::new();
        let mut timeline = Self { passes, microbatches, stages, places, spans, windows, codes };
        timeline.windows = vec![Window::default(); timeline.windows_that_fit()];
        let all: Vec<u32> = (0..timeline.passes.len() as u32).collect();
        timeline.windows[0] = timeline.window_of(&all);
        Ok(timeline)
    }

    /// Returns the passes that a full simulation walks over.
    pub(crate) fn passes(&self) -> u64 {
        self.passes.len() as u64
    }

    /// Counts the windows, including the window of everything, up to [`WINDOW_PASSES_MAX`].
    fn windows_that_fit(&self) -> usize {
        let (mut windows, mut total) = (1, 0);
        for distance in 0..self.microbatches {
            for first in 0..self.microbatches - distance {
                total +=
                    self.places_of(first, first + distance).map(|(from, to)| to + 1 - from).sum::<usize>();
                if total > WINDOW_PASSES_MAX {
                    return windows;
                }
                windows += 1;
            }
        }
        windows
    }

    /// Lists the first and last position of the window of these microbatches on every stage.
    fn places_of(&self, first: usize, last: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let stages = self.places.chunks_exact(self.microbatches);
        stages.map(move |stage| (stage[first].0, stage[last].1))
    }

    /// Returns the index of the window of two microbatches, the first not after the last; builds it if
    /// needed.
    fn window(&mut self, first: usize, last: usize) -> usize {
        let distance = last - first;
        // The windows of smaller distances come first: `K`, `K - 1`, ... of them.
        let before = distance * self.microbatches - distance * distance.saturating_sub(1) / 2;
        let index = 1 + before + first;
        // No memory for this window: the window of everything gives the same makespan, slower.
        if index >= self.windows.len() {
            return 0;
        }
        if self.windows[index].steps.is_empty() {
            let places: Vec<_> = self.places_of(first, last).collect();
            let on_stages = self.stages.iter().zip(places);
            let mut members: Vec<u32> =
                on_stages.flat_map(|(stage, (from, to))| &stage[from..=to]).copied().collect();
            members.sort_unstable();
            self.windows[index] = self.window_of(&members);
        }
        index
    }

    /// Builds the window of these passes, ascending.
    fn window_of(&mut self, members: &[u32]) -> Window {
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

    /// Allocates a rank whose times are all zero.
    pub(crate) fn rank(&self, cells: usize) -> RankTimes {
        let passes = self.passes.len();
        RankTimes {
            times_ns: vec![0; cells],
            makespan_ns: 0,
            critical: vec![0; cells],
            ends_ns: vec![0; 2 * passes + 1],
            tails_ns: vec![0; passes + 1],
        }
    }

    /// Returns the makespan after a change of the times of two microbatches (or one, twice), and the number
    /// of passes walked over.
    pub(super) fn makespan_with(&mut self, rank: &mut RankTimes, first: usize, last: usize) -> (u64, u64) {
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

    /// Updates ends, tails, makespan and longest path after the times of these microbatches changed.
    pub(super) fn settle(&self, rank: &mut RankTimes, first: usize, last: usize) {
        let (from, to) = (self.spans[first].0, self.spans[last].1);
        self.find_ends(rank, from);
        for (at, pass) in self.passes.iter().enumerate().take(to + 1).rev() {
            let rest = rank.tails_ns[pass.after[0] as usize].max(rank.tails_ns[pass.after[1] as usize]);
            rank.tails_ns[at] = rest + rank.times_ns[pass.time as usize];
        }
        self.follow_longest_path(rank);
    }

    /// Computes the makespan and the longest path from the times alone.
    pub(crate) fn find_longest_path(&self, rank: &mut RankTimes) {
        self.find_ends(rank, 0);
        self.follow_longest_path(rank);
    }

    fn find_ends(&self, rank: &mut RankTimes, from: usize) {
        for (at, pass) in self.passes.iter().enumerate().skip(from) {
            let begin = rank.ends_ns[pass.before[0] as usize].max(rank.ends_ns[pass.before[1] as usize]);
            rank.ends_ns[at] = begin + rank.times_ns[pass.time as usize];
        }
    }

    /// Follows the longest path back from the last pass, by the inputs that each pass waited for without a
    /// gap.
    fn follow_longest_path(&self, rank: &mut RankTimes) {
        // The first stage's last backward pass comes after all others, in time and in this list.
        let nothing = self.passes.len();
        let mut at = nothing - 1;
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

fn sorted_passes(rows: &[usize], modules: usize, microbatches: usize) -> Result<Vec<Pass>> {
    let stages = rows.len();
    let kind = ScheduleKind::OneForwardOneBackward;
    let lists: Vec<Vec<Action>> =
        (0..stages).map(|stage| schedule(kind, stage, stages, microbatches)).collect();
    // With a time of 1 for every pass, a pass starts later than each of its inputs.
    let ones = vec![1; stages * microbatches];
    let mut events = simulate(&lists, &StageTimes::new(stages, microbatches, ones.clone(), ones)?)?.events;
    events.sort_by_key(|event| (event.start_ns, event.stage));

    let nothing = events.len() as u32;
    let cell = |stage: usize, microbatch: u32, is_backward: bool| {
        (stage * microbatches + microbatch as usize) * 2 + usize::from(is_backward)
    };
    let mut place = vec![nothing; 2 * stages * microbatches];
    let mut before = vec![nothing; stages];
    let mut passes: Vec<Pass> = Vec::with_capacity(events.len());
    for (at, event) in events.iter().enumerate() {
        let (stage, microbatch) = (event.stage, event.microbatch);
        let sender = if event.kind.is_backward() { stage.checked_add(1) } else { stage.checked_sub(1) };
        let sender = sender.filter(|sender| *sender < stages);
        let input =
            sender.map_or(nothing, |sender| place[cell(sender, microbatch, event.kind.is_backward())]);
        let time = ((microbatch as usize * modules + rows[stage]) * 2 + usize::from(event.kind.is_backward()))
            as u32;
        for (edge, from) in [before[stage], input].into_iter().enumerate() {
            if let Some(from) = passes.get_mut(from as usize) {
                from.after[edge] = at as u32;
            }
        }
        passes.push(Pass { stage, time, before: [before[stage], input], after: [nothing; 2] });
        place[cell(stage, microbatch, event.kind.is_backward())] = at as u32;
        before[stage] = at as u32;
    }
    Ok(passes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::CompiledSchedule;
    use proptest::prelude::*;

    /// Computes the makespan by a full simulation.
    fn simulated(rows: &[usize], modules: usize, microbatches: usize, rank: &RankTimes) -> u64 {
        let cells = (0..modules)
            .flat_map(|module| (0..microbatches).map(move |microbatch| 2 * (microbatch * modules + module)));
        let (forward_ns, backward_ns): (Vec<u64>, Vec<u64>) =
            cells.map(|cell| (rank.times_ns[cell], rank.times_ns[cell + 1])).unzip();
        let times = StageTimes::new(modules, microbatches, forward_ns, backward_ns).unwrap();
        let mut compiled =
            CompiledSchedule::new(ScheduleKind::OneForwardOneBackward, rows, microbatches).unwrap();
        compiled.makespan_ns(&times)
    }

    fn check(stages: &[usize], microbatches: usize, times_ns: &[u64], changes: &[(usize, usize, u64)]) {
        let rows: Vec<usize> =
            stages.iter().enumerate().flat_map(|(module, count)| vec![module; *count]).collect();
        let modules = stages.len();
        let mut timeline = Timeline::new(&rows, modules, microbatches).unwrap();
        let mut rank = timeline.rank(2 * modules * microbatches);
        let cells = rank.times_ns.len();
        rank.times_ns.iter_mut().zip(times_ns.iter().cycle()).for_each(|(cell, time)| *cell = *time);
        timeline.settle(&mut rank, 0, microbatches - 1);
        assert_eq!(rank.makespan_ns, simulated(&rows, modules, microbatches, &rank));
        for &(one, other, time) in changes {
            let (one, other) = (one % microbatches, other % microbatches);
            for microbatch in [one, other] {
                rank.times_ns[2 * modules * microbatch + time as usize % (2 * modules)] = time;
            }
            let (first, last) = (one.min(other), one.max(other));
            let found = timeline.makespan_with(&mut rank, first, last).0;
            assert_eq!(found, simulated(&rows, modules, microbatches, &rank));
            timeline.settle(&mut rank, first, last);
            assert_eq!(rank.makespan_ns, found);
            let path: u64 = (0..cells).map(|at| u64::from(rank.critical[at]) * rank.times_ns[at]).sum();
            assert_eq!(path, found);
        }
    }

    proptest! {
        #[test]
        fn a_window_gives_the_makespan_of_a_full_simulation(
            stages in prop::collection::vec(1..4_usize, 1..4),
            microbatches in 1..14_usize,
            times_ns in prop::collection::vec(0..1000_u64, 60),
            changes in prop::collection::vec((0..14_usize, 0..14_usize, 0..1000_u64), 8),
        ) {
            check(&stages, microbatches, &times_ns, &changes);
        }
    }

    #[test]
    fn pairs_beyond_the_room_for_windows_are_simulated_whole() {
        let times_ns: Vec<u64> = (0..97).map(|i| i * 7919 % 1009).collect();
        check(
            &[2, 6],
            120,
            &times_ns,
            &[(3, 3, 500), (10, 11, 900), (5, 118, 700), (0, 119, 1), (60, 2, 80)],
        );
    }
}
