//! Communicators for ranks that sum gradients together, created once per job.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::job::Job;
use super::rank_roles::RankRole;
use crate::error::Result;
use dflop_comm::StepContext;
use dflop_device::{Device, DeviceComm};

/// Rank communicators, in addition to the communicator for all ranks.
pub(super) struct GradientGroups<D: Device> {
    /// Replicas of each stage on this rank, if there are several.
    replicas: BTreeMap<u16, Arc<dyn DeviceComm<D>>>,
    /// First and last LLM stage, if they share a parameter and are on two ranks.
    tie: Option<Arc<dyn DeviceComm<D>>>,
}

impl<D: Device> GradientGroups<D> {
    /// Splits the communicators from `world`; every rank in the job takes part.
    pub(super) fn split(job: &Job, roles: &[RankRole], world: &dyn DeviceComm<D>) -> Result<Self> {
        let at = StepContext::step(0, "split communicators");
        let mut replicas = BTreeMap::new();
        // A split is collective: ranks without such a stage also take part, without a color.
        for module in job.modules.iter().filter(|module| module.dp_size > 1) {
            let role = roles.iter().find(|role| role.module == module.module);
            for chunk in 0..job.schedule.chunks() {
                let stage = role.and_then(|role| Some((*role.stages.get(chunk)?, role)));
                let color = stage.map(|(stage, role)| color(usize::from(stage), role.tp_rank));
                let replica = role.map_or(0, |role| role.replica as u64);
                let group = world.split(at, color, replica)?;
                replicas.extend(stage.zip(group).map(|((stage, _), group)| (stage, group)));
            }
        }
        let mut tie = None;
        if let Some(ends) = ends_apart(job) {
            let is_end = |role: &&RankRole| ends.iter().any(|end| role.stages.contains(end));
            let end = roles.iter().find(is_end);
            let color = end.map(|end| color(end.replica, end.tp_rank));
            let order = end.map_or(0, |end| end.pipeline_rank as u64);
            tie = world.split(at, color, order)?;
        }
        Ok(Self { replicas, tie })
    }

    /// Returns the replicas of a stage, if there are several.
    pub(super) fn replicas(&self, stage: u16) -> Option<&dyn DeviceComm<D>> {
        self.replicas.get(&stage).map(|group| &**group)
    }

    /// Returns a shared communicator for the replicas of a stage, if there are several.
    pub(super) fn shared_replicas(&self, stage: u16) -> Option<Arc<dyn DeviceComm<D>>> {
        self.replicas.get(&stage).cloned()
    }

    /// Returns the communicator for the two ranks that share a parameter, if this is one of them.
    pub(super) fn tie(&self) -> Option<&dyn DeviceComm<D>> {
        self.tie.as_deref()
    }
}

fn color(group: usize, tp_rank: usize) -> u64 {
    (group as u64) << 32 | tp_rank as u64
}

/// Returns the first and last LLM stage, if they share a parameter and are on two ranks.
fn ends_apart(job: &Job) -> Option<[u16; 2]> {
    let ends = job.llm_ends().filter(|_| !job.tied.is_empty());
    ends.filter(|_| job.llm().stages.len() > job.schedule.chunks())
}
