//! Module parallelism: stages, replicas and tensor-parallel degree.

use std::ops::Range;

use dflop_models::ModuleKind;

/// Parallelism for a module in a job: stages, replicas and tensor-parallel degree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleParallelism {
    /// The module.
    pub module: ModuleKind,
    /// Transformer layers in every stage, in order, at least one each; lengths may differ. In joint placement
    /// an entry without layers skips a chain stage.
    pub stages: Vec<Range<usize>>,
    /// Number of replicas, at least 1.
    pub dp_size: usize,
    /// Number of world ranks that share a pipeline rank by tensor parallelism, at least 1.
    pub tp_size: usize,
}

impl ModuleParallelism {
    /// Describes a single replica on separate ranks, without tensor parallelism.
    #[must_use]
    pub fn new(module: ModuleKind, stages: Vec<Range<usize>>) -> Self {
        Self { module, stages, dp_size: 1, tp_size: 1 }
    }

    /// Cuts `layers` into stages that differ by at most one layer, the longer stages first.
    ///
    /// # Panics
    /// If there is no stage.
    #[must_use]
    pub fn even(module: ModuleKind, layers: usize, stages: usize) -> Self {
        let mut start = 0;
        let cut = |length: usize| {
            start += length;
            start - length..start
        };
        Self::new(module, dflop_comm::even_parts(layers, stages).into_iter().map(cut).collect())
    }

    /// Sets the number of replicas. Default: 1.
    #[must_use]
    pub fn dp_size(mut self, replicas: usize) -> Self {
        self.dp_size = replicas;
        self
    }

    /// Sets the number of world ranks per pipeline rank. Default: 1.
    #[must_use]
    pub fn tp_size(mut self, ranks: usize) -> Self {
        self.tp_size = ranks;
        self
    }
}
