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
    /// Module and direction, 0 for forward; `None` takes no time.
    work: Option<(usize, usize)>,
    /// Rows in [`PipelineTimes::ends_ns`], 0 for the start of the step.
    before: [usize; 2],
}

/// Rank times under a placement.
#[derive(Debug, Clone, Default)]
pub(super) struct PipelineTimes {
    /// Stage time forward and backward, `[slots * ranks * modules]`; in the LLM the longest in the group.
    stage_ns: Vec<[u64; 2]>,
    /// Groups with more than one rank that share items, by slot.
    groups: Vec<Vec<Range<usize>>>,
    /// Pass ends, `[(1 + passes) * ranks]`, after a row with zeros.
    ends_ns: Vec<u64>,
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
            work: ((pass.time as usize) < shape.cells())
                .then(|| (pass.time as usize / 2 % modules, pass.time as usize % 2)),
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
        PipelineTimes {
            stage_ns: vec![[0; 2]; slots * ranks * self.modules],
            groups: vec![Vec::new(); slots],
            ends_ns: vec![0; (1 + self.passes.len()) * ranks],
        }
    }

    /// Sets a slot's times.
    ///
    /// - `module_ns`: stage time by rank and module
    /// - `groups`: disjoint groups of ranks that share items
    pub(super) fn set_slot(
        &self,
        times: &mut PipelineTimes,
        slot: usize,
        module_ns: impl Fn(usize, usize) -> u64,
        groups: impl Iterator<Item = Range<usize>>,
    ) {
        let llm = self.modules - 1;
        let ranks = times.ends_ns.len() / (1 + self.passes.len());
        let own = &mut times.stage_ns[slot * ranks * self.modules..(slot + 1) * ranks * self.modules];
        for (at, stage) in own.iter_mut().enumerate() {
            *stage = split_time(module_ns(at / self.modules, at % self.modules)).into();
        }
        times.groups[slot].clear();
        times.groups[slot].extend(groups);
        for group in &times.groups[slot] {
            let longest = group.clone().map(|rank| own[rank * self.modules + llm]).max().unwrap_or_default();
            group.clone().for_each(|rank| own[rank * self.modules + llm] = longest);
        }
    }

    /// Computes when every rank is done, after slot times have changed.
    ///
    /// - `slots`: the changed slots
    pub(super) fn finish(
        &self,
        times: &mut PipelineTimes,
        slots: impl Iterator<Item = usize>,
        done_ns: &mut [u64],
    ) {
        let ranks = done_ns.len();
        // Passes before the first of these slots end as before.
        let from = slots.map(|slot| self.first[slot]).min().unwrap_or(self.passes.len());
        for (at, pass) in self.passes.iter().enumerate().skip(from) {
            let (before, own) = times.ends_ns.split_at_mut((at + 1) * ranks);
            let own = &mut own[..ranks];
            let [one, other] = pass.before.map(|row| &before[row * ranks..(row + 1) * ranks]);
            for ((own, one), other) in own.iter_mut().zip(one).zip(other) {
                *own = (*one).max(*other);
            }
            let Some((module, direction)) = pass.work else { continue };
            let stage_ns = times.stage_ns[pass.slot * ranks * self.modules..].iter().skip(module);
            for (own, stage) in own.iter_mut().zip(stage_ns.step_by(self.modules)) {
                *own += stage[direction];
            }
            if module + 1 == self.modules {
                for group in &times.groups[pass.slot] {
                    let end = own[group.clone()].iter().copied().max().unwrap_or(0);
                    own[group.clone()].fill(end);
                }
            }
        }
        let end = |rank: usize| self.last.iter().map(|at| times.ends_ns[(at + 1) * ranks + rank]).max();
        done_ns.iter_mut().enumerate().for_each(|(rank, done)| *done = end(rank).unwrap_or(0));
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
    let (mut times, mut done_ns) = (passes.times(ranks), vec![0; ranks]);
    (0..slots).for_each(|slot| {
        let groups = super::largest_groups(meetings.get(slot).map_or(&[], Vec::as_slice));
        let module_ns = |rank: usize, module: usize| ranks_ns[rank][slot][module];
        passes.set_slot(&mut times, slot, module_ns, groups.into_iter());
    });
    passes.finish(&mut times, 0..slots, &mut done_ns);
    Ok(done_ns.into_iter().max().unwrap_or(0))
}
