//! Computes step times on pipelines whose ranks share items.
//!
//! Every rank runs the same passes in the same order. Ranks that share an item of a microbatch begin and end
//! its passes in the LLM together, because they wait for each other's keys in every layer: such a pass begins
//! when the last of them is ready, and takes the longest. Encoders run on their own; their outputs reach all
//! ranks in the group before its first pass in the LLM.

use crate::error::{Error, Result};
use crate::pipeline::{Pass, PassGraph, PassShape, PipelineConfig};
use crate::simulate::split_time;
use std::ops::Range;

/// Divisor of the number of ranks: if as many changed, all groups are visited in turn.
const DENSE: usize = 2;

/// Pipeline passes, listed after their inputs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PipelinePasses {
    passes: Vec<RankPass>,
    /// First pass in every slot.
    first: Vec<usize>,
    /// Passes without a receiver.
    last: Vec<usize>,
    modules: usize,
    /// Stages per module.
    stages: Vec<usize>,
    has_parallel_encoders: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct RankPass {
    slot: usize,
    /// Cell in a rank's row of [`PipelineTimes::stage_ns`].
    cell: usize,
    is_llm: bool,
    /// Cells in a rank's row of [`PipelineTimes::ends_ns`].
    before: [usize; 2],
}

/// Rank times under a placement. A change overwrites times, and may be taken back.
#[derive(Debug, Clone, Default)]
pub(super) struct PipelineTimes {
    /// Stage time, `[ranks * (slots * modules * 2 + 1)]`, forward before backward; in the LLM the longest in
    /// the group. The last in a row is 0, for passes that take no time.
    stage_ns: Vec<u64>,
    /// First rank and end of the group whose ranks share items with a rank, `[slots * ranks]`.
    groups: Vec<[usize; 2]>,
    /// Pass ends, `[ranks * (1 + passes)]`; the first of a rank is 0.
    ends_ns: Vec<u64>,
    /// Time at which every rank is done, `[ranks]`.
    done_ns: Vec<u64>,
    change: TimesChange,
}

/// Times that changed, with what they were before.
#[derive(Debug, Clone, Default)]
struct TimesChange {
    /// First changed pass.
    from: usize,
    /// Ranks whose times may have changed, as a list and by rank.
    ranks: Vec<usize>,
    is_changed: Vec<bool>,
    stage_ns: Vec<(usize, u64)>,
    groups: Vec<(usize, [usize; 2])>,
    /// Pass ends of these ranks from the one before that on, and when they were done.
    ends_ns: Vec<u64>,
    done_ns: Vec<u64>,
    /// Pass after the one in which a group, by first rank, was computed.
    seen: Vec<usize>,
}

/// Overwrites a value, and keeps what it was.
fn replace<T: Copy + PartialEq>(values: &mut [T], at: usize, value: T, before: &mut Vec<(usize, T)>) {
    if values[at] != value {
        before.push((at, std::mem::replace(&mut values[at], value)));
    }
}

/// Puts overwritten values back, the last first.
fn put_back<T>(values: &mut [T], before: &mut Vec<(usize, T)>) {
    for (at, value) in before.drain(..).rev() {
        values[at] = value;
    }
}

impl PipelineTimes {
    /// Returns the time at which every rank is done.
    pub(super) fn done_ns(&self) -> &[u64] {
        &self.done_ns
    }

    /// Begins a change, which keeps the one before.
    fn begin_change(&mut self, passes: usize) {
        let change = &mut self.change;
        change.from = passes;
        change.ranks.clear();
        change.is_changed.fill(false);
        change.seen.fill(0);
        change.stage_ns.clear();
        change.groups.clear();
        change.ends_ns.clear();
        change.done_ns.clear();
    }

    /// Takes the last change back.
    pub(super) fn undo(&mut self) {
        let (ranks, change) = (self.ranks(), &mut self.change);
        put_back(&mut self.stage_ns, &mut change.stage_ns);
        put_back(&mut self.groups, &mut change.groups);
        let rows = self.ends_ns.len() / ranks;
        let saved = change.ends_ns.chunks(rows - change.from).zip(&change.done_ns);
        for (&rank, (ends_ns, done_ns)) in change.ranks.iter().zip(saved) {
            self.ends_ns[rank * rows + change.from..(rank + 1) * rows].copy_from_slice(ends_ns);
            self.done_ns[rank] = *done_ns;
        }
        change.ranks.clear();
    }

    /// Keeps the ends of a rank that is about to change.
    fn save_ends(&mut self, rank: usize) {
        let (rows, change) = (self.ends_ns.len() / self.ranks(), &mut self.change);
        change.ends_ns.extend_from_slice(&self.ends_ns[rank * rows + change.from..(rank + 1) * rows]);
        change.done_ns.push(self.done_ns[rank]);
        change.is_changed[rank] = true;
        change.ranks.push(rank);
    }

    /// Whether a rank shares no items with others.
    fn is_alone(&self, rank: usize) -> bool {
        self.groups[rank..].iter().step_by(self.ranks()).all(|[first, end]| end - first == 1)
    }

    fn ranks(&self) -> usize {
        self.done_ns.len()
    }

    /// Returns the ranks that share items with a rank in a slot, and the rank itself.
    fn group(&self, slot: usize, rank: usize) -> Range<usize> {
        let [first, end] = self.groups[slot * self.ranks() + rank];
        first..end
    }
}

impl RankPass {
    /// Returns when a pass may begin, from its rank's row of ends.
    fn ready_ns(&self, ends_ns: &[u64]) -> u64 {
        ends_ns[self.before[0]].max(ends_ns[self.before[1]])
    }
}

impl PipelinePasses {
    /// Lists one rank's passes.
    ///
    /// # Errors
    /// [`Error::Config`] if stages and modules do not match, the schedule does not fit them, a module has
    /// its own DP size, or memory is limited.
    pub(super) fn new(config: &PipelineConfig, [ranks, slots]: [usize; 2], modules: usize) -> Result<Self> {
        let refused = |setting, reason: String| Err(Error::Config { setting, reason });
        if config.dp_size != ranks {
            return refused(
                "dp_size",
                format!("must be {ranks}, the number of ranks, got {}", config.dp_size),
            );
        }
        if config.module_dp_sizes.iter().any(|dp_size| *dp_size != ranks) {
            return refused("module_dp_sizes", "ranks that share items have all modules".to_owned());
        }
        if config.memory.is_some() {
            return refused("memory", "is not counted where ranks share items; set caps".to_owned());
        }
        config.check_stages(modules)?;
        config.check_schedule()?;
        let (step, rows) = (config.step_shape(slots), config.rows());
        let shape = PassShape { step, rows: &rows, is_shared: &vec![false; modules], ranks: 1 };
        let graph = PassGraph::new(shape);
        let nothing = graph.passes.len() as u32;
        let pass = |pass: &Pass| RankPass {
            slot: pass.microbatch,
            cell: (pass.time as usize).min(shape.cells()),
            is_llm: (pass.time as usize) < shape.cells()
                && (pass.time as usize / 2 + 1).is_multiple_of(modules),
            before: pass.before.map(|at| if at == nothing { 0 } else { at as usize + 1 }),
        };
        let passes: Vec<RankPass> = graph.passes.iter().map(pass).collect();
        let last = graph.passes.iter().enumerate().filter(|(_, pass)| pass.after == [nothing; 2]);
        let first = |slot| passes.iter().position(|pass| pass.slot == slot).unwrap_or(0);
        Ok(Self {
            first: (0..slots).map(first).collect(),
            last: last.map(|(at, _)| at).collect(),
            modules,
            stages: config.stages.clone(),
            has_parallel_encoders: config.has_parallel_encoders,
            passes,
        })
    }

    /// Counts the passes on a rank.
    pub(super) fn passes(&self) -> usize {
        self.passes.len()
    }

    /// Returns an item's time through all stages alone, from its time in one stage per module.
    pub(super) fn through_ns(&self, stage_ns: &[u64]) -> u64 {
        let mut modules = stage_ns.iter().zip(&self.stages).map(|(ns, stages)| ns * *stages as u64);
        let llm_ns = modules.next_back().unwrap_or(0);
        let encoders_ns = if self.has_parallel_encoders { modules.max().unwrap_or(0) } else { modules.sum() };
        encoders_ns + llm_ns
    }

    pub(super) fn times(&self, ranks: usize) -> PipelineTimes {
        let slots = self.first.len();
        let change =
            TimesChange { is_changed: vec![false; ranks], seen: vec![0; ranks], ..TimesChange::default() };
        PipelineTimes {
            stage_ns: vec![0; ranks * self.stage_cells()],
            groups: (0..slots).flat_map(|_| (0..ranks).map(|rank| [rank, rank + 1])).collect(),
            ends_ns: vec![0; (1 + self.passes.len()) * ranks],
            done_ns: vec![0; ranks],
            change,
        }
    }

    /// Counts the stage times of a rank.
    fn stage_cells(&self) -> usize {
        self.first.len() * self.modules * 2 + 1
    }

    /// Changes the times of some ranks in some slots, and computes when every rank is done. Returns the
    /// number of computed ends.
    ///
    /// - `changed`: slots with ranks whose times or groups changed
    /// - `module_ns`: stage time by slot, rank and module
    /// - `group`: ranks that share items with a rank, by slot and rank
    pub(super) fn change(
        &self,
        times: &mut PipelineTimes,
        changed: impl Iterator<Item = (usize, Range<usize>)>,
        module_ns: impl Fn(usize, usize, usize) -> u64,
        group: impl Fn(usize, usize) -> Range<usize>,
    ) -> usize {
        times.begin_change(self.passes.len());
        for (slot, ranks) in changed {
            let union =
                |one: Range<usize>, other: Range<usize>| one.start.min(other.start)..one.end.max(other.end);
            let mut whole = ranks.clone();
            for rank in [ranks.start, ranks.end - 1] {
                whole = union(union(whole, times.group(slot, rank)), group(slot, rank));
            }
            self.set_ranks(times, slot, whole, &module_ns, &group);
        }
        self.find_ends(times);
        times.change.ranks.len() * (self.passes.len() - times.change.from)
    }

    /// Sets the times of ranks in a slot that share no items with others.
    fn set_ranks(
        &self,
        times: &mut PipelineTimes,
        slot: usize,
        ranks: Range<usize>,
        module_ns: &impl Fn(usize, usize, usize) -> u64,
        group: &impl Fn(usize, usize) -> Range<usize>,
    ) {
        let (row, llm) = (slot * times.ranks(), self.modules - 1);
        let change = &mut times.change;
        change.from = change.from.min(self.first[slot]);
        let mut rank = ranks.start;
        while rank < ranks.end {
            let group = group(slot, rank);
            let llm_ns = group.clone().map(|rank| module_ns(slot, rank, llm)).max().unwrap_or(0);
            for rank in group.clone() {
                replace(&mut times.groups, row + rank, [group.start, group.end], &mut change.groups);
                for module in 0..self.modules {
                    let ns = if module == llm { llm_ns } else { module_ns(slot, rank, module) };
                    let at = rank * self.stage_cells() + (slot * self.modules + module) * 2;
                    let (forward, backward) = split_time(ns);
                    replace(&mut times.stage_ns, at, forward, &mut change.stage_ns);
                    replace(&mut times.stage_ns, at + 1, backward, &mut change.stage_ns);
                }
                change.is_changed[rank] = true;
            }
            rank = group.end;
        }
    }

    /// Computes the ends of the changed ranks' passes, and of ranks that wait for them.
    fn find_ends(&self, times: &mut PipelineTimes) {
        let rows = 1 + self.passes.len();
        let mut alone = 0;
        for is_alone in [true, false] {
            for rank in 0..times.ranks() {
                if times.change.is_changed[rank] && times.is_alone(rank) == is_alone {
                    times.save_ends(rank);
                }
            }
            if is_alone {
                alone = times.change.ranks.len();
            }
        }
        // Passes before the first changed one end as before.
        let passes = || self.passes.iter().enumerate().skip(times.change.from);
        for &rank in &times.change.ranks[..alone] {
            let cells = self.stage_cells();
            let (row, own) =
                (&mut times.ends_ns[rank * rows..][..rows], &times.stage_ns[rank * cells..][..cells]);
            for (at, pass) in passes() {
                row[at + 1] = pass.ready_ns(row) + own[pass.cell];
            }
        }
        if alone < times.change.ranks.len() {
            for (at, pass) in self.passes.iter().enumerate().skip(times.change.from) {
                self.find_pass_ends(times, alone, (at, pass));
            }
        }
        for &rank in &times.change.ranks {
            let row = &times.ends_ns[rank * rows..][..rows];
            times.done_ns[rank] = self.last.iter().map(|at| row[at + 1]).max().unwrap_or(0);
        }
    }

    /// Computes when the changed ranks that share items end a pass. Ranks that share an item with them in it
    /// join them if they end at another time than before.
    ///
    /// - `alone`: number of changed ranks that share no items
    fn find_pass_ends(&self, times: &mut PipelineTimes, alone: usize, (at, pass): (usize, &RankPass)) {
        let (ranks, rows, cells) = (times.ranks(), 1 + self.passes.len(), self.stage_cells());
        let mut index = 0;
        let changed = times.change.ranks.len() - alone;
        // Where most ranks changed, groups are visited in turn.
        let visits_all = pass.is_llm && changed * DENSE >= ranks;
        let count = if visits_all { ranks } else { changed };
        while index < count {
            let rank = if visits_all { index } else { times.change.ranks[alone + index] };
            let [first, end] =
                if pass.is_llm { times.groups[pass.slot * ranks + rank] } else { [rank, rank + 1] };
            index += if visits_all { end - first } else { 1 };
            if visits_all && !times.change.is_changed[first..end].contains(&true) {
                continue;
            }
            let work_ns = times.stage_ns[rank * cells + pass.cell];
            if end - first == 1 {
                let row = &mut times.ends_ns[rank * rows..][..rows];
                row[at + 1] = pass.ready_ns(row) + work_ns;
                continue;
            }
            if !visits_all && std::mem::replace(&mut times.change.seen[first], at + 1) == at + 1 {
                continue;
            }
            let ready_ns = |rank: usize| pass.ready_ns(&times.ends_ns[rank * rows..][..rows]);
            let end_ns = (first..end).map(ready_ns).max().unwrap_or(0) + work_ns;
            for rank in first..end {
                if !times.change.is_changed[rank] && times.ends_ns[rank * rows + at + 1] != end_ns {
                    times.save_ends(rank);
                }
                times.ends_ns[rank * rows + at + 1] = end_ns;
            }
        }
    }
}

/// Returns the step time on pipelines from all ranks' times, in nanoseconds.
///
/// - `ranks_ns`: time in a stage by rank, slot and module
/// - `meetings`: groups of ranks that share an item, by slot, disjoint or nested
/// - `config`: pipelines with as many DP ranks, which all modules have
///
/// # Errors
/// [`Error::Config`] if `config` does not fit ranks and modules; [`Error::Length`] if slots or modules
/// differ.
pub fn context_pipeline_ns(
    ranks_ns: &[Vec<Vec<u64>>],
    meetings: &[Vec<Range<usize>>],
    config: &PipelineConfig,
) -> Result<u64> {
    let (ranks, slots) = (ranks_ns.len(), ranks_ns.first().map_or(0, Vec::len));
    let modules = config.stages.len();
    for own in ranks_ns {
        let lengths = own.iter().map(|own| ("modules", own.len(), modules));
        for (field, found, expected) in lengths.chain([("microbatches", own.len(), slots)]) {
            if found != expected {
                return Err(Error::Length { field, found, expected });
            }
        }
    }
    if slots == 0 {
        return Ok(0);
    }
    let passes = PipelinePasses::new(config, [ranks, slots], modules)?;
    let mut times = passes.times(ranks);
    let meetings: Vec<Vec<Range<usize>>> =
        (0..slots).map(|slot| super::largest_groups(meetings.get(slot).map_or(&[], Vec::as_slice))).collect();
    let group = |slot: usize, rank: usize| {
        let group = meetings[slot].iter().find(|group| group.contains(&rank));
        group.cloned().unwrap_or(rank..rank + 1)
    };
    let module_ns = |slot: usize, rank: usize, module: usize| ranks_ns[rank][slot][module];
    passes.change(&mut times, (0..slots).map(|slot| (slot, 0..ranks)), module_ns, group);
    Ok(times.done_ns().iter().copied().max().unwrap_or(0))
}
