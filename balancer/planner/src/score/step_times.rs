//! Times for passes, messages, gradient sums and weight gathers in a step.

use dflop_balancer::schedule::StepShape;

/// Stage times for a module.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChainTimes {
    /// Number of ranks with separate times: 1 for a shared encoder, otherwise the LLM ranks.
    pub(crate) lanes: usize,
    /// Row in [`ChainTimes::rows_ns`] for each stage.
    pub(crate) stages: Vec<usize>,
    /// Forward and backward times by row, `[slots * lanes]`, slot by slot.
    pub(crate) rows_ns: Vec<[Vec<u64>; 2]>,
    /// Parts of the backward times that compute weight gradients, by row, if the schedule splits backward
    /// passes.
    pub(crate) weights_ns: Vec<Vec<u64>>,
    /// Message times between the chain's stages, `[slots * lanes]`; empty if links are free.
    pub(crate) hop_ns: Vec<u64>,
    /// Message times from the chain's last stage to the LLM, `[slots * lanes]`; empty if links are free.
    pub(crate) out_hop_ns: Vec<u64>,
}

/// Times for every pass in a step, nanoseconds.
#[derive(Debug, Clone)]
pub(crate) struct StepTimes {
    /// Schedule for the stages and slots.
    pub(crate) shape: StepShape,
    /// Number of LLM ranks.
    pub(crate) ranks: usize,
    /// Encoders that are pipeline stages, in shape order.
    pub(crate) encoders: Vec<ChainTimes>,
    pub(crate) llm: ChainTimes,
    /// All-reduce time for each stage's gradients, encoders first; empty if links are free.
    pub(crate) reduce_ns: Vec<u64>,
    /// Gather time for each stage's updated weights, starting with the step; empty without gathers.
    pub(crate) gather_ns: Vec<u64>,
    /// Layers per stage, whose gradients are summed sequentially; empty if links are free.
    pub(crate) layers: Vec<u32>,
}

/// Pass on a lane in a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LanePass {
    /// Stage index in the step.
    pub(crate) stage: usize,
    pub(crate) slot: usize,
    /// LLM rank; 0 for a shared encoder.
    pub(crate) lane: usize,
    pub(crate) is_forward: bool,
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
}

impl ChainTimes {
    /// Creates a chain from stage rows.
    pub(crate) fn new(lanes: usize, (stages, rows_ns): (Vec<usize>, Vec<[Vec<u64>; 2]>)) -> Self {
        Self { lanes, stages, rows_ns, ..Self::default() }
    }

    /// Returns a stage's passes in a direction, `[slots * lanes]`.
    pub(super) fn passes_ns(&self, stage: usize, direction: usize) -> &[u64] {
        &self.rows_ns[self.stages[stage]][direction]
    }

    /// Returns the part of a stage's backward pass that computes weight gradients; 0 if it is unknown.
    ///
    /// - `cell`: slot and lane
    pub(super) fn weight_ns(&self, stage: usize, cell: usize) -> u64 {
        self.weights_ns.get(self.stages[stage]).map_or(0, |row| row[cell])
    }

    /// Lets the passes for weight gradients compute the gradients of rows again.
    pub(super) fn repeat_row_gradients(&mut self) {
        for ([_, backward_ns], weights_ns) in self.rows_ns.iter_mut().zip(&mut self.weights_ns) {
            let trained = backward_ns.iter_mut().zip(weights_ns).filter(|(_, weights_ns)| **weights_ns > 0);
            for (backward_ns, weights_ns) in trained {
                let rows_ns = backward_ns.saturating_sub(*weights_ns);
                *weights_ns = *backward_ns;
                *backward_ns += rows_ns;
            }
        }
    }

    /// Returns the computing time over all passes and stages, summed over lanes.
    pub(crate) fn busy_ns(&self) -> f64 {
        self.stages.iter().map(|row| self.rows_ns[*row].iter().flatten().sum::<u64>() as f64).sum()
    }

    /// Returns each stage's computing time on the slowest rank.
    pub(crate) fn slowest_ns(&self) -> impl Iterator<Item = f64> {
        let of_lane = |row: &[Vec<u64>; 2], lane: usize| {
            row.iter().flat_map(|passes| passes.iter().skip(lane).step_by(self.lanes)).sum::<u64>() as f64
        };
        self.stages.iter().map(move |row| {
            (0..self.lanes).map(|lane| of_lane(&self.rows_ns[*row], lane)).fold(0.0, f64::max)
        })
    }
}

impl StepTimes {
    /// Creates a step without times.
    pub(crate) fn new(shape: StepShape, ranks: usize) -> Self {
        let (encoders, llm) = (Vec::new(), ChainTimes { lanes: ranks, ..ChainTimes::default() });
        let (reduce_ns, gather_ns, layers) = (Vec::new(), Vec::new(), Vec::new());
        Self { shape, ranks, encoders, llm, reduce_ns, gather_ns, layers }
    }

    /// Returns the time from the end of a stage's last backward pass, lasting `backward_ns`, to the end of
    /// the gradient all-reduce: each layer's gradient is summed while earlier layers run backward.
    pub(super) fn exposed_reduce_ns(&self, stage: usize, backward_ns: u64) -> u64 {
        let (all_ns, layers) = (time_at(&self.reduce_ns, stage), self.stage_layers(stage));
        // The sums end one layer sum after the last pass, or start with the first finished layer.
        (all_ns / layers).max(all_ns.saturating_sub(backward_ns - backward_ns / layers))
    }

    /// Returns the earliest start for a stage's first forward pass, lasting `forward_ns`, such that it never
    /// waits afterwards: each layer's weights are gathered while the previous layers run forward.
    pub(super) fn gathered_ns(&self, stage: usize, forward_ns: u64) -> u64 {
        let (all_ns, layers) = (time_at(&self.gather_ns, stage), self.stage_layers(stage));
        // The pass waits for the first layer's weights, or ends one layer after the last weights.
        (all_ns / layers).max((all_ns + forward_ns / layers).saturating_sub(forward_ns))
    }

    fn stage_layers(&self, stage: usize) -> u64 {
        u64::from(self.layers.get(stage).copied().unwrap_or(1).max(1))
    }
}

/// Returns the time for a stage or message; 0 if links are free.
pub(super) fn time_at(times_ns: &[u64], at: usize) -> u64 {
    times_ns.get(at).copied().unwrap_or(0)
}
