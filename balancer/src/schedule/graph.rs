//! Pass graph for all ranks, with dependencies.

use super::action::{Part, Pass, PassKind};
use super::layout::PipelineLayout;
use crate::error::{Error, Result};

/// Marks a pass that no rank runs.
const NONE: u32 = u32::MAX;
/// Entries per part: forward, backward or input half, weight half.
const PLACES: usize = 3;

/// Passes numbered rank by rank, each rank's passes in execution order.
#[derive(Debug)]
pub(crate) struct PassGraph<'a> {
    layout: &'a PipelineLayout,
    pub(crate) passes: Vec<Pass>,
    /// First pass number for every rank, then the number of passes.
    starts: Vec<usize>,
    /// Pass numbers, by part and kind.
    numbers: Vec<u32>,
}

impl<'a> PassGraph<'a> {
    /// Numbers the passes: `[ranks]` lists, with parts from the layout.
    pub(crate) fn new(layout: &'a PipelineLayout, lists: &[Vec<Pass>]) -> Self {
        let mut numbers = vec![NONE; layout.stages() * layout.microbatches() * PLACES];
        let mut starts = vec![0];
        let mut passes = Vec::new();
        for list in lists {
            for pass in list {
                numbers[place(layout, pass.part, pass.kind)] = passes.len() as u32;
                passes.push(*pass);
            }
            starts.push(passes.len());
        }
        Self { layout, passes, starts, numbers }
    }

    /// Returns the pass numbers for a rank.
    pub(crate) fn rank_passes(&self, rank: usize) -> std::ops::Range<usize> {
        self.starts[rank]..self.starts[rank + 1]
    }

    /// Returns the rank that runs a pass.
    pub(crate) fn rank(&self, number: usize) -> usize {
        self.layout.rank(self.passes[number].part)
    }

    /// Returns the previous pass on the same rank.
    pub(crate) fn before(&self, number: usize) -> Option<usize> {
        (number > self.starts[self.rank(number)]).then(|| number - 1)
    }

    /// Lists the passes in other stages whose result a pass needs.
    pub(crate) fn inputs(&self, number: usize) -> impl Iterator<Item = usize> + '_ {
        let Pass { kind, part } = self.passes[number];
        let (forward, backward) = ways(kind);
        let producers = forward.then(|| self.layout.producers(part)).into_iter().flatten();
        let consumers = backward.then(|| self.layout.consumers(part)).into_iter().flatten();
        producers.chain(consumers).filter_map(move |part| self.find(part, kind))
    }

    /// Lists the passes in other stages that need a pass's result.
    fn outputs(&self, number: usize) -> impl Iterator<Item = usize> + '_ {
        let Pass { kind, part } = self.passes[number];
        let (forward, backward) = ways(kind);
        let consumers = forward.then(|| self.layout.consumers(part)).into_iter().flatten();
        let producers = backward.then(|| self.layout.producers(part)).into_iter().flatten();
        consumers.chain(producers).filter_map(move |part| self.find(part, kind))
    }

    fn find(&self, part: Part, kind: PassKind) -> Option<usize> {
        let number = self.numbers[place(self.layout, part, kind)];
        (number != NONE).then_some(number as usize)
    }

    /// Computes when each pass would start if every pass took 1 tick and every message none.
    ///
    /// # Errors
    /// [`Error::Deadlock`] if ranks wait for each other.
    pub(crate) fn ticks(&self) -> Result<Vec<u32>> {
        let ranks = self.starts.len() - 1;
        let mut ticks = vec![NONE; self.passes.len()];
        let mut next: Vec<usize> = self.starts[..ranks].to_vec();
        let mut waiting: Vec<usize> = (0..ranks).rev().collect();
        // Each rank runs until an input is missing; the pass that produces it queues the rank again.
        while let Some(rank) = waiting.pop() {
            while next[rank] < self.starts[rank + 1] {
                let number = next[rank];
                let inputs = self.before(number).into_iter().chain(self.inputs(number));
                let Some(tick) = inputs.map(|input| ticks[input]).try_fold(0, later) else { break };
                ticks[number] = tick;
                next[rank] += 1;
                waiting.extend(self.outputs(number).map(|output| self.rank(output)));
            }
        }
        let stuck = (0..ranks).find(|&rank| next[rank] < self.starts[rank + 1]);
        stuck.map_or(Ok(ticks), |rank| {
            Err(Error::Deadlock { rank, action: self.passes[next[rank]].to_string() })
        })
    }

    /// Returns when the last backward pass in every stage has ended, on all ranks that hold it, `[stages]`.
    pub(crate) fn sum_ticks(&self, ticks: &[u32]) -> Vec<u32> {
        let mut done = vec![0; self.layout.stages()];
        for (pass, tick) in self.passes.iter().zip(ticks) {
            let stage = pass.part.stage as usize;
            done[stage] = done[stage].max(tick + 1);
        }
        done
    }
}

/// Returns the first tick at which both are done; `None` if the second never starts.
fn later(tick: u32, input: u32) -> Option<u32> {
    (input != NONE).then(|| tick.max(input + 1))
}

/// Whether a pass receives and sends activations, and whether it receives and sends gradients.
fn ways(kind: PassKind) -> (bool, bool) {
    match kind {
        PassKind::Forward => (true, false),
        PassKind::Backward | PassKind::BackwardInput => (false, true),
        PassKind::BackwardWeight => (false, false),
    }
}

fn place(layout: &PipelineLayout, part: Part, kind: PassKind) -> usize {
    let place = match kind {
        PassKind::Forward => 0,
        PassKind::Backward | PassKind::BackwardInput => 1,
        PassKind::BackwardWeight => 2,
    };
    (part.stage as usize * layout.microbatches() + part.microbatch as usize) * PLACES + place
}
