//! Which ranks hold what: the one place that maps pipeline ranks to world ranks.
//!
//! The ranks that share a stage by tensor parallelism are one pipeline rank and run the same action list. Of a message, TP
//! rank `t` of the taker gets what TP rank `t mod n` of the giver's `n` sends: ranks of equal TP sizes talk pairwise, and
//! no rank gets anything twice.

use std::ops::Range;

use super::job::Job;
use crate::error::{Error, Result};
use crate::model::model_config::{ModuleKind, StageRange};

/// What a world rank is in a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its pipeline rank.
    pub pipeline_rank: usize,
    /// Its rank among those that share the pipeline rank.
    pub tp_rank: usize,
    /// Its module.
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

    /// Returns what a world rank holds.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the job has no such rank.
    pub fn place(&self, world_rank: usize) -> Result<Place> {
        let (mut world, mut pipeline) = (0, 0);
        for (index, module) in self.modules.iter().enumerate() {
            let ranks = self.pipeline_ranks(index);
            if world_rank < world + ranks * module.tp_size {
                let (inside, tp_rank) =
                    ((world_rank - world) / module.tp_size, (world_rank - world) % module.tp_size);
                let per_replica = ranks / module.dp_size;
                let first = self.first_stage(index) + inside % per_replica;
                let held = (first..self.first_stage(index) + module.stages.len()).step_by(per_replica);
                return Ok(Place {
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
            reason: format!("is {world}, there is no rank {world_rank}"),
        })
    }

    /// Returns the layers of a place's stages, to build them from.
    #[must_use]
    pub fn ranges(&self, place: &Place) -> Vec<StageRange> {
        place.stages.iter().map(|&stage| self.stages[usize::from(stage)].range.clone()).collect()
    }

    /// Pipeline ranks of a module.
    pub(super) fn pipeline_ranks(&self, module: usize) -> usize {
        let module = &self.modules[module];
        module.stages.len() / self.schedule.chunks() * module.dp_size
    }

    /// World ranks of a pipeline rank.
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
        panic!("there is no pipeline rank {pipeline_rank}")
    }

    /// World ranks that a rank sends to, of those of another pipeline rank.
    pub(super) fn targets(&self, from: &Place, to: usize) -> impl Iterator<Item = usize> + use<> {
        let (givers, tp_rank) = (self.world_ranks(from.pipeline_rank).len(), from.tp_rank);
        self.world_ranks(to).skip(tp_rank).step_by(givers)
    }

    /// World rank that sends to a rank, of those of another pipeline rank.
    pub(super) fn source(&self, from: usize, to: &Place) -> usize {
        let givers = self.world_ranks(from);
        givers.start + to.tp_rank % givers.len()
    }
}
