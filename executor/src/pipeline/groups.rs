//! Who adds up gradients with whom: communicators, made once.

use std::collections::BTreeMap;

use super::job::Job;
use super::ranks::Place;
use crate::comm::{Comm, StepContext};
use crate::error::Result;

/// Communicators of one rank, besides that of all ranks.
pub(super) struct Groups {
    /// Replicas of a stage of this rank, where there are several.
    replicas: BTreeMap<u16, Box<dyn Comm>>,
    /// The first and the last stage of the LLM, where they share a parameter and are on two ranks.
    tie: Option<Box<dyn Comm>>,
}

impl Groups {
    /// Makes them; every rank of the job takes part.
    pub(super) fn split(job: &Job, place: &Place, world: &dyn Comm) -> Result<Self> {
        let at = StepContext::step(0, "split communicators");
        let own = job.modules.iter().find(|module| module.module == place.module);
        let dp_size = own.map_or(1, |own| own.dp_size);
        let mut replicas = BTreeMap::new();
        for chunk in 0..job.schedule.chunks() {
            let stage = place.stages.get(chunk).copied();
            let color = stage.filter(|_| dp_size > 1).map(|stage| color(usize::from(stage), place.tp_rank));
            let group = world.split(at, color, place.replica as u64)?;
            replicas.extend(stage.zip(group));
        }
        let mut tie = None;
        if let Some(ends) = ends_apart(job) {
            let is_end = ends.iter().any(|end| place.stages.contains(end));
            let color = is_end.then(|| color(place.replica, place.tp_rank));
            tie = world.split(at, color, place.pipeline_rank as u64)?;
        }
        Ok(Self { replicas, tie })
    }

    /// The replicas of a stage, if there are several.
    pub(super) fn replicas(&self, stage: u16) -> Option<&dyn Comm> {
        self.replicas.get(&stage).map(AsRef::as_ref)
    }

    /// The two ranks that share a parameter, if this is one of them.
    pub(super) fn tie(&self) -> Option<&dyn Comm> {
        self.tie.as_deref()
    }
}

fn color(group: usize, tp_rank: usize) -> u64 {
    (group as u64) << 32 | tp_rank as u64
}

/// First and last stage of the LLM, if they share a parameter and are on two ranks.
fn ends_apart(job: &Job) -> Option<[u16; 2]> {
    let ends = job.llm_ends().filter(|_| !job.tied.is_empty());
    ends.filter(|_| job.llm().stages.len() > job.schedule.chunks())
}
