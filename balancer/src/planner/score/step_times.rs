//! Times of the passes, messages, sums and gathers of a step.

use crate::schedule::StepShape;

/// Times of the stages of a module.
#[derive(Debug, Clone, Default)]
pub(in crate::planner) struct ChainTimes {
    /// Ranks with times of their own: 1 of a shared encoder, else the LLM's.
    pub(in crate::planner) lanes: usize,
    /// Row of [`ChainTimes::rows_ns`] of each stage.
    pub(in crate::planner) stages: Vec<usize>,
    /// Forward and backward times by row, `[slots * lanes]`, slot by slot.
    pub(in crate::planner) rows_ns: Vec<[Vec<u64>; 2]>,
    /// Times of messages between its stages, `[slots * lanes]`; empty if links are free.
    pub(in crate::planner) hop_ns: Vec<u64>,
    /// Times of messages from its last stage to the LLM, `[slots * lanes]`; empty if links are free.
    pub(in crate::planner) out_hop_ns: Vec<u64>,
}

/// Times of every pass of one step, nanoseconds.
#[derive(Debug, Clone)]
pub(in crate::planner) struct StepTimes {
    /// Schedule of the stages and slots.
    pub(in crate::planner) shape: StepShape,
    /// LLM ranks.
    pub(in crate::planner) ranks: usize,
    /// Encoders that are pipeline stages, in the order of the shape.
    pub(in crate::planner) encoders: Vec<ChainTimes>,
    pub(in crate::planner) llm: ChainTimes,
    /// All-reduce of each stage's gradients, the encoders' first; empty if links are free.
    pub(in crate::planner) reduce_ns: Vec<u64>,
    /// Gather of each stage's updated weights, which starts with the step; empty without one.
    pub(in crate::planner) gather_ns: Vec<u64>,
    /// Layers of each stage, whose gradients are summed one after another; empty if links are free.
    pub(in crate::planner) layers: Vec<u32>,
}

impl ChainTimes {
    /// Takes rows of times of the stages.
    pub(in crate::planner) fn new(lanes: usize, (stages, rows_ns): (Vec<usize>, Vec<[Vec<u64>; 2]>)) -> Self {
        Self { lanes, stages, rows_ns, ..Self::default() }
    }

    /// Returns the passes of a stage in one direction, `[slots * lanes]`.
    pub(super) fn passes_ns(&self, stage: usize, direction: usize) -> &[u64] {
        &self.rows_ns[self.stages[stage]][direction]
    }

    /// Returns the computing time of all passes of all stages, summed over lanes.
    pub(in crate::planner) fn busy_ns(&self) -> f64 {
        self.stages.iter().map(|row| self.rows_ns[*row].iter().flatten().sum::<u64>() as f64).sum()
    }

    /// Returns the computing time of each stage on its slowest rank.
    pub(in crate::planner) fn slowest_ns(&self) -> impl Iterator<Item = f64> {
        let of_lane = |row: &[Vec<u64>; 2], lane: usize| {
            row.iter().flat_map(|passes| passes.iter().skip(lane).step_by(self.lanes)).sum::<u64>() as f64
        };
        self.stages.iter().map(move |row| {
            (0..self.lanes).map(|lane| of_lane(&self.rows_ns[*row], lane)).fold(0.0, f64::max)
        })
    }
}

impl StepTimes {
    /// Starts a step without times.
    pub(in crate::planner) fn new(shape: StepShape, ranks: usize) -> Self {
        let (encoders, llm) = (Vec::new(), ChainTimes { lanes: ranks, ..ChainTimes::default() });
        let (reduce_ns, gather_ns, layers) = (Vec::new(), Vec::new(), Vec::new());
        Self { shape, ranks, encoders, llm, reduce_ns, gather_ns, layers }
    }

    /// Returns the time between the end of a stage's last backward pass, of `backward_ns`, and the end of the
    /// all-reduce of its gradients: each layer's gradient is summed while earlier layers run backward.
    pub(super) fn exposed_reduce_ns(&self, stage: usize, backward_ns: u64) -> u64 {
        let (all_ns, layers) = (time_of(&self.reduce_ns, stage), self.layers_of(stage));
        // The sums end a layer's sum after the last pass, or start with the first layer that is done.
        (all_ns / layers).max(all_ns.saturating_sub(backward_ns - backward_ns / layers))
    }

    /// Returns the earliest start of a stage's first forward pass, of `forward_ns`, if it then waits no more:
    /// each layer's weights are gathered while the layers before run forward.
    pub(super) fn gathered_ns(&self, stage: usize, forward_ns: u64) -> u64 {
        let (all_ns, layers) = (time_of(&self.gather_ns, stage), self.layers_of(stage));
        // The pass waits for the first layer's weights, or ends a layer after the last ones.
        (all_ns / layers).max((all_ns + forward_ns / layers).saturating_sub(forward_ns))
    }

    fn layers_of(&self, stage: usize) -> u64 {
        u64::from(self.layers.get(stage).copied().unwrap_or(1).max(1))
    }
}

/// Returns the time of a stage or message; 0 if links are free.
pub(super) fn time_of(times_ns: &[u64], at: usize) -> u64 {
    times_ns.get(at).copied().unwrap_or(0)
}
