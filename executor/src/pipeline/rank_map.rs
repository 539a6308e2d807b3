//! Maps module, replica, stage and tensor-parallel coordinates to world ranks.
//!
//! The ranks that share a stage by tensor parallelism are one pipeline rank and run the same action list. A
//! message from a pipeline rank of `n` TP ranks goes to TP rank `t` of the receiver from TP rank `t mod n` of
//! the sender: with equal TP sizes ranks communicate pairwise, and no rank receives anything twice.

use std::ops::Range;

use super::job::Job;
use crate::error::{Error, Result};
use dflop_models::{ModuleKind, StageRange};

/// Role of a world rank in a job: its coordinates and stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlacement {
    /// Index of its pipeline rank.
    pub pipeline_rank: usize,
    /// Index among the ranks that share the pipeline rank.
    pub tp_rank: usize,
    /// The module it runs.
    pub module: ModuleKind,
    /// Its replica of the module: its DP rank.
    pub replica: usize,
    /// Its stages, ascending; several if the schedule has several chunks.
    pub stages: Vec<u16>,
}

impl Job {
    /// Returns the number of world ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        (0..self.modules.len()).map(|module| self.pipeline_ranks(module) * self.modules[module].tp_size).sum()
    }

    /// Returns the role of a world rank.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the job has no such rank.
    pub fn placement(&self, world_rank: usize) -> Result<RankPlacement> {
        let (mut world, mut pipeline) = (0, 0);
        for (index, module) in self.modules.iter().enumerate() {
            let ranks = self.pipeline_ranks(index);
            if world_rank < world + ranks * module.tp_size {
                let (inside, tp_rank) =
                    ((world_rank - world) / module.tp_size, (world_rank - world) % module.tp_size);
                let per_replica = ranks / module.dp_size;
                let first = self.first_stage(index) + inside % per_replica;
                // With several chunks, a rank holds every `per_replica`-th stage, as interleaved schedules
                // expect.
                let held = (first..self.first_stage(index) + module.stages.len()).step_by(per_replica);
                return Ok(RankPlacement {
                    pipeline_rank: pipeline + inside,
                    tp_rank,
                    module: module.module,
                    replica: inside / per_replica,
                    stages: held.map(|stage| stage as u16).collect(),
                });
            }
            world += ranks * module.tp_size;
            pipeline += ranks;
        }
        Err(Error::InvalidSetting {
            setting: "world size",
            reason: format!("expected a rank below {world}, found {world_rank}"),
        })
    }

    /// Returns the layers of a rank's stages, to build them from.
    #[must_use]
    pub fn ranges(&self, placement: &RankPlacement) -> Vec<StageRange> {
        placement.stages.iter().map(|&stage| self.stages[usize::from(stage)].range.clone()).collect()
    }

    /// Returns the number of pipeline ranks of a module.
    pub(super) fn pipeline_ranks(&self, module: usize) -> usize {
        let module = &self.modules[module];
        module.stages.len() / self.schedule.chunks() * module.dp_size
    }

    /// Returns the world ranks of a pipeline rank.
    ///
    /// # Panics
    /// If there is no such pipeline rank.
    pub(super) fn world_ranks(&self, pipeline_rank: usize) -> Range<usize> {
        let (mut world, mut pipeline) = (0, 0);
        for (index, module) in self.modules.iter().enumerate() {
            let ranks = self.pipeline_ranks(index);
            if pipeline_rank < pipeline + ranks {
                let start = world + (pipeline_rank - pipeline) * module.tp_size;
                return start..start + module.tp_size;
            }
            world += ranks * module.tp_size;
            pipeline += ranks;
        }
        panic!("the job has no pipeline rank {pipeline_rank}")
    }

    /// Returns the world ranks of pipeline rank `to` that `from` sends to.
    pub(super) fn targets(&self, from: &RankPlacement, to: usize) -> impl Iterator<Item = usize> + use<> {
        let (senders, tp_rank) = (self.world_ranks(from.pipeline_rank).len(), from.tp_rank);
        self.world_ranks(to).skip(tp_rank).step_by(senders)
    }

    /// Returns the world rank of pipeline rank `from` that sends to `to`.
    pub(super) fn source(&self, from: usize, to: &RankPlacement) -> usize {
        let senders = self.world_ranks(from);
        senders.start + to.tp_rank % senders.len()
    }
}
