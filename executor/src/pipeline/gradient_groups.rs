//! Communicators of the ranks that sum gradients together, created once per job.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::job::Job;
use super::rank_map::RankPlacement;
use crate::error::Result;
use dflop_comm::{Comm, StepContext};
use dflop_device::{Device, DeviceComm, Staged};

/// Communicators of one rank, in addition to the one of all ranks.
pub(super) struct GradientGroups<D: Device> {
    /// Replicas of each stage of this rank, if there are several.
    replicas: BTreeMap<u16, Arc<Staged<D>>>,
    /// First and last stage of the LLM, if they share a parameter and are on two ranks.
    tie: Option<Staged<D>>,
}

impl<D: Device> GradientGroups<D> {
    /// Splits the communicators from `world`; every rank of the job takes part.
    pub(super) fn split(job: &Job, placement: &RankPlacement, world: &dyn Comm, device: &D) -> Result<Self> {
        let at = StepContext::step(0, "split communicators");
        let own = job.modules.iter().find(|module| module.module == placement.module);
        let dp_size = own.map_or(1, |own| own.dp_size);
        let tensors = |group| Staged::new(device.clone(), Arc::from(group));
        let mut replicas = BTreeMap::new();
        // A split is collective: ranks without such a stage take part, too, without a color.
        for chunk in 0..job.schedule.chunks() {
            let stage = placement.stages.get(chunk).copied();
            let color =
                stage.filter(|_| dp_size > 1).map(|stage| color(usize::from(stage), placement.tp_rank));
            let group = world.split(at, color, placement.replica as u64)?;
            replicas.extend(stage.zip(group.map(tensors).map(Arc::new)));
        }
        let mut tie = None;
        if let Some(ends) = ends_apart(job) {
            let is_end = ends.iter().any(|end| placement.stages.contains(end));
            let color = is_end.then(|| color(placement.replica, placement.tp_rank));
            tie = world.split(at, color, placement.pipeline_rank as u64)?.map(tensors);
        }
        Ok(Self { replicas, tie })
    }

    /// Returns the replicas of a stage, if there are several.
    pub(super) fn replicas(&self, stage: u16) -> Option<&dyn DeviceComm<D>> {
        self.replicas.get(&stage).map(|group| &**group as &dyn DeviceComm<D>)
    }

    /// Returns the replicas of a stage to share, if there are several.
    pub(super) fn shared_replicas(&self, stage: u16) -> Option<Arc<dyn DeviceComm<D>>> {
        self.replicas.get(&stage).map(|group| Arc::clone(group) as Arc<dyn DeviceComm<D>>)
    }

    /// Returns the communicator of the two ranks that share a parameter, if this is one of them.
    pub(super) fn tie(&self) -> Option<&dyn DeviceComm<D>> {
        self.tie.as_ref().map(|group| group as &dyn DeviceComm<D>)
    }
}

fn color(group: usize, tp_rank: usize) -> u64 {
    (group as u64) << 32 | tp_rank as u64
}

/// Returns the first and last stage of the LLM, if they share a parameter and are on two ranks.
fn ends_apart(job: &Job) -> Option<[u16; 2]> {
    let ends = job.llm_ends().filter(|_| !job.tied.is_empty());
    ends.filter(|_| job.llm().stages.len() > job.schedule.chunks())
}
