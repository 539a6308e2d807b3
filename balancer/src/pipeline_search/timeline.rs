//! What a change of one or two microbatches does to a rank's makespan, without simulating the rest.
//!
//! A 1F1B step is a graph of passes; the makespan is its longest path. Keep for every pass when it *ends*
//! (the longest path up to it) and its *tail* (the longest path from its begin to the end of the step).
//! If microbatches `first..=last` change, only the passes between the first forward pass of `first` and
//! the last backward pass of `last` on each stage, the *window*, lie both after and before a changed pass.
//! Ends before the window and tails after it stay as they are, and every path from begin to end crosses
//! the window. So the new makespan is the longest path through it: `p (p + 1)` passes for one microbatch
//! on `p` stages, instead of `2 p K`.
//!
//! # Source
//! Heads and tails are those of job-shop local search: Taillard, "Parallel taboo search techniques for the
//! job shop scheduling problem", ORSA J. Computing 6, 1994.

use crate::error::Result;
use crate::schedule::{Action, ScheduleKind, schedule};
use crate::simulate::{StageTimes, simulate};

/// Most passes in all windows together; pairs of microbatches beyond share the window of everything.
const WINDOW_PASSES_MAX: usize = 1 << 16;

/// A pass, in an order in which every pass comes after those that it waits for.
#[derive(Debug, Clone, Copy)]
struct Pass {
    stage: usize,
    /// Cell in the rank's times.
    time: u32,
    /// The pass before on the same stage and the one that sends the input, or `passes.len()`.
    before: [u32; 2],
    /// The pass after on the same stage and the one that takes the output, or `passes.len()`.
    after: [u32; 2],
}

/// A pass of a window; `before` counts into the ends, then into those of the window itself.
#[derive(Debug, Clone, Copy)]
struct Step {
    time: u32,
    before: [u32; 2],
}

/// Passes to walk over again, and the edges that leave them.
#[derive(Debug, Clone, Default)]
struct Window {
    steps: Vec<Step>,
    /// A step's end, counted like `before`, and the pass after the window whose tail follows.
    exits: Vec<(u32, u32)>,
}

/// The graph of passes that all ranks share.
#[derive(Debug)]
pub(super) struct Timeline {
    passes: Vec<Pass>,
    microbatches: usize,
    windows: Vec<Window>,
    /// `[microbatches * microbatches]`, index of the window from the first to the last of two microbatches.
    window_of: Vec<u32>,
    longest_window: usize,
}

/// Times of one rank, and what follows from them.
#[derive(Debug, Clone)]
pub(super) struct RankTimes {
    /// `[microbatches * modules * 2]`, forward and backward.
    pub(super) times_ns: Vec<u64>,
    pub(super) makespan_ns: u64,
    /// How often the longest path takes each cell of `times_ns`.
    pub(super) critical: Vec<u32>,
    /// End of every pass, a zero for what the first wait for, then room for a window.
    ends_ns: Vec<u64>,
    tails_ns: Vec<u64>,
}

impl Timeline {
    /// Sorts the passes of 1F1B; `rows` is the module of every stage.
    pub(super) fn new(rows: &[usize], modules: usize, microbatches: usize) -> Result<Self> {
        let passes = sorted_passes(rows, modules, microbatches)?;
        let mut timeline = Self {
            passes,
            microbatches,
            windows: Vec::new(),
            window_of: vec![0; microbatches * microbatches],
            longest_window: 0,
        };
        timeline.add_windows(rows.len());
        Ok(timeline)
    }

    /// Passes that a full simulation walks over.
    pub(super) fn passes(&self) -> u64 {
        self.passes.len() as u64
    }

    /// Passes that a change of these two microbatches walks over.
    pub(super) fn window_passes(&self, first: usize, last: usize) -> u64 {
        self.window(first, last).steps.len() as u64
    }

    fn window(&self, first: usize, last: usize) -> &Window {
        &self.windows[self.window_of[first * self.microbatches + last] as usize]
    }

    /// Window 0 is everything; then single microbatches, then pairs, near ones first, while there is room.
    fn add_windows(&mut self, stages: usize) {
        self.windows.push(self.window_where(|_, _| true));
        self.longest_window = self.windows[0].steps.len();
        let places = self.places(stages);
        let mut total = 0;
        for distance in 0..self.microbatches {
            for first in 0..self.microbatches - distance {
                let last = first + distance;
                let from = |stage: usize| places[stage * self.microbatches + first].0;
                let to = |stage: usize| places[stage * self.microbatches + last].1;
                let size: u32 = (0..stages).map(|stage| to(stage) - from(stage) + 1).sum();
                total += size as usize;
                if total > WINDOW_PASSES_MAX {
                    return;
                }
                let window = self.window_where(|stage, place| (from(stage)..=to(stage)).contains(&place));
                for cell in [first * self.microbatches + last, last * self.microbatches + first] {
                    self.window_of[cell] = self.windows.len() as u32;
                }
                self.windows.push(window);
            }
        }
    }

    /// Places of every microbatch's two passes on its stage, `[stages * microbatches]`.
    fn places(&self, stages: usize) -> Vec<(u32, u32)> {
        let mut places = vec![(u32::MAX, 0); stages * self.microbatches];
        let mut counts = vec![0; stages];
        let modules = self.passes.iter().map(|pass| pass.time).max().unwrap_or(0) as usize + 1;
        let cells = modules / self.microbatches;
        for pass in &self.passes {
            let microbatch = pass.time as usize / cells;
            let place = &mut places[pass.stage * self.microbatches + microbatch];
            if place.0 == u32::MAX { place.0 = counts[pass.stage] } else { place.1 = counts[pass.stage] }
            counts[pass.stage] += 1;
        }
        places
    }

    /// The window of all passes for which `is_inside(stage, place on it)`.
    fn window_where(&self, is_inside: impl Fn(usize, u32) -> bool) -> Window {
        let nothing = self.passes.len() as u32;
        let mut code: Vec<u32> = (0..=nothing).collect();
        let mut counts = vec![0_u32; self.passes.iter().map(|pass| pass.stage + 1).max().unwrap_or(0)];
        let mut window = Window::default();
        let mut members = Vec::new();
        for (at, pass) in self.passes.iter().enumerate() {
            let place = counts[pass.stage];
            counts[pass.stage] += 1;
            if is_inside(pass.stage, place) {
                let before = pass.before.map(|before| code[before as usize]);
                code[at] = nothing + 1 + window.steps.len() as u32;
                window.steps.push(Step { time: pass.time, before });
                members.push(at);
            }
        }
        for at in members {
            let after = self.passes[at].after;
            let leaves = |after: u32| after < nothing && code[after as usize] <= nothing;
            let is_last = after == [nothing; 2];
            window.exits.extend(after.iter().filter(|after| leaves(**after)).map(|&after| (code[at], after)));
            if is_last {
                window.exits.push((code[at], nothing));
            }
        }
        window
    }

    /// Room for a rank whose times are all zero.
    pub(super) fn rank(&self, cells: usize) -> RankTimes {
        let passes = self.passes.len();
        RankTimes {
            times_ns: vec![0; cells],
            makespan_ns: 0,
            critical: vec![0; cells],
            ends_ns: vec![0; passes + 1 + self.longest_window],
            tails_ns: vec![0; passes + 1],
        }
    }

    /// The makespan after a change of the times of two microbatches (or one, twice).
    pub(super) fn makespan_with(&self, rank: &mut RankTimes, first: usize, last: usize) -> u64 {
        let window = self.window(first, last);
        let (start, times_ns) = (self.passes.len() + 1, &rank.times_ns);
        for (at, step) in window.steps.iter().enumerate() {
            let begin = rank.ends_ns[step.before[0] as usize].max(rank.ends_ns[step.before[1] as usize]);
            rank.ends_ns[start + at] = begin + times_ns[step.time as usize];
        }
        let path = |&(end, after): &(u32, u32)| rank.ends_ns[end as usize] + rank.tails_ns[after as usize];
        window.exits.iter().map(path).max().unwrap_or(0)
    }

    /// Works out ends, tails, makespan and longest path after the times have changed.
    pub(super) fn settle(&self, rank: &mut RankTimes) {
        let nothing = self.passes.len();
        for (at, pass) in self.passes.iter().enumerate() {
            let begin = rank.ends_ns[pass.before[0] as usize].max(rank.ends_ns[pass.before[1] as usize]);
            rank.ends_ns[at] = begin + rank.times_ns[pass.time as usize];
        }
        for (at, pass) in self.passes.iter().enumerate().rev() {
            let rest = rank.tails_ns[pass.after[0] as usize].max(rank.tails_ns[pass.after[1] as usize]);
            rank.tails_ns[at] = rest + rank.times_ns[pass.time as usize];
        }
        let mut last = nothing;
        for at in 0..nothing {
            if rank.ends_ns[at] > rank.ends_ns[last] || last == nothing {
                last = at;
            }
        }
        rank.makespan_ns = rank.ends_ns[last];
        rank.critical.fill(0);
        while last < nothing {
            let pass = self.passes[last];
            rank.critical[pass.time as usize] += 1;
            let [same_stage, input] = pass.before.map(|before| before as usize);
            last = if rank.ends_ns[input] > rank.ends_ns[same_stage] || same_stage == nothing {
                input
            } else {
                same_stage
            };
        }
    }
}

fn sorted_passes(rows: &[usize], modules: usize, microbatches: usize) -> Result<Vec<Pass>> {
    let stages = rows.len();
    let kind = ScheduleKind::OneForwardOneBackward;
    let lists: Vec<Vec<Action>> =
        (0..stages).map(|stage| schedule(kind, stage, stages, microbatches)).collect();
    // With a time of 1 for every pass, what waits starts later than what it waits for.
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
        let sender = if event.is_backward { stage.checked_add(1) } else { stage.checked_sub(1) };
        let sender = sender.filter(|sender| *sender < stages);
        let input = sender.map_or(nothing, |sender| place[cell(sender, microbatch, event.is_backward)]);
        let time = ((microbatch as usize * modules + rows[stage]) * 2 + usize::from(event.is_backward)) as u32;
        for (edge, from) in [before[stage], input].into_iter().enumerate() {
            if let Some(from) = passes.get_mut(from as usize) {
                from.after[edge] = at as u32;
            }
        }
        passes.push(Pass { stage, time, before: [before[stage], input], after: [nothing; 2] });
        place[cell(stage, microbatch, event.is_backward)] = at as u32;
        before[stage] = at as u32;
    }
    Ok(passes)
}
