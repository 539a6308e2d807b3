//! Sums of gradients over the replicas of a stage, while others still compute.
//!
//! Gradients are put into buckets in the order of their declaration, one collective each, begun as soon as the stage's last
//! backward is done and awaited at the step's end. A tied LM head on another stage than the embedding has a copy of its
//! weights; both gradients are added up between the two stages first, then each over its replicas: so both copies get the
//! same bits, those of a stage that has both.

use std::collections::BTreeMap;

use super::job::Job;
use super::ranks::Place;
use crate::comm::{At, Buffer, Comm, Handle};
use crate::device::{Buffer as _, Device};
use crate::error::Result;
use crate::stage::Stage;

/// Elements of a bucket: 4 MiB. Larger tensors have one of their own.
const BUCKET_ELEMENTS: usize = 1 << 20;

/// Who adds up with whom.
pub(super) struct Groups {
    /// Replicas of a stage of this rank, where there are several.
    replicas: BTreeMap<u16, Box<dyn Comm>>,
    /// The first and the last stage of the LLM, where they share a parameter and are on two ranks.
    tie: Option<Box<dyn Comm>>,
}

impl Groups {
    /// Every rank of the job takes part.
    pub(super) fn split(job: &Job, place: &Place, world: &dyn Comm) -> Result<Self> {
        let at = At::step(0, "split communicators");
        let dp_size =
            job.modules.iter().find(|module| module.module == place.module).map_or(1, |own| own.dp_size);
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
}

fn color(group: usize, tp_rank: usize) -> u64 {
    (group as u64) << 32 | tp_rank as u64
}

/// First and last stage of the LLM, if they share a parameter and are on two ranks.
fn ends_apart(job: &Job) -> Option<[u16; 2]> {
    let ends = job.llm_ends().filter(|_| !job.tied.is_empty());
    ends.filter(|_| job.llm().stages.len() > job.schedule.chunks())
}

/// A parameter of a stage, by its place among those that are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Target {
    stage: u16,
    index: usize,
}

/// A collective under way.
struct Bucket {
    stage: u16,
    /// First parameter and the one behind the last, of those that are not tied.
    parameters: Vec<usize>,
    sum: Handle<Buffer>,
}

/// A tied parameter between the two sums.
enum Tie {
    UnderWay(Handle<Buffer>),
    /// Its other copy is on this rank too.
    Here(Vec<f32>),
}

/// The sums of one step.
#[derive(Default)]
pub(super) struct Reduction {
    buckets: Vec<Bucket>,
    ties: Vec<(Target, Tie)>,
}

impl Reduction {
    /// Begins to add up the gradients of a stage whose last backward is done.
    pub(super) fn start<D: Device>(
        &mut self,
        job: &Job,
        groups: &Groups,
        (number, stage): (u16, &mut Stage<D>),
        at: At,
    ) -> Result<()> {
        let device = stage.device().clone();
        stage.parameters_mut().fold_shared_gradients(&device)?;
        let is_end = job.llm_ends().is_some_and(|ends| ends.contains(&number));
        let mut open = Open::default();
        for (index, (spec, _, gradient)) in stage.parameters_mut().trained_mut().enumerate() {
            if is_end && job.tied.contains(&spec.name) {
                let own = device.download(gradient)?;
                let tie = match &groups.tie {
                    Some(tie) => Tie::UnderWay(tie.start_all_reduce(at, Buffer::F32(own))?),
                    None => Tie::Here(own),
                };
                self.ties.push((Target { stage: number, index }, tie));
            } else if let Some(replicas) = groups.replicas.get(&number) {
                if open.values.len() + gradient.len() > BUCKET_ELEMENTS {
                    self.buckets.extend(open.close(number, replicas.as_ref(), at)?);
                }
                open.parameters.push(index);
                open.values.extend(device.download(gradient)?);
            }
        }
        if let Some(replicas) = groups.replicas.get(&number) {
            self.buckets.extend(open.close(number, replicas.as_ref(), at)?);
        }
        Ok(())
    }

    /// Waits for all sums and puts them where the gradients were.
    pub(super) fn finish<D: Device>(
        self,
        groups: &Groups,
        stages: &mut BTreeMap<u16, Stage<D>>,
        at: At,
    ) -> Result<()> {
        let ties = start_tied(self.ties, groups, at)?;
        for bucket in self.buckets {
            let Buffer::F32(sum) = bucket.sum.wait()? else { continue };
            write(stages, bucket.stage, &bucket.parameters, &sum)?;
        }
        for (target, sum) in ties {
            let sum = match sum {
                Tie::UnderWay(sum) => sum.wait()?,
                Tie::Here(sum) => Buffer::F32(sum),
            };
            let Buffer::F32(sum) = sum else { continue };
            write(stages, target.stage, &[target.index], &sum)?;
        }
        Ok(())
    }
}

/// A bucket that is being filled.
#[derive(Default)]
struct Open {
    parameters: Vec<usize>,
    values: Vec<f32>,
}

impl Open {
    fn close(&mut self, stage: u16, replicas: &dyn Comm, at: At) -> Result<Option<Bucket>> {
        let Self { parameters, values } = std::mem::take(self);
        if parameters.is_empty() {
            return Ok(None);
        }
        let sum = replicas.start_all_reduce(at, Buffer::F32(values))?;
        Ok(Some(Bucket { stage, parameters, sum }))
    }
}

/// Waits for the sums of both copies of tied parameters and begins those over replicas.
fn start_tied(ties: Vec<(Target, Tie)>, groups: &Groups, at: At) -> Result<Vec<(Target, Tie)>> {
    let mut both = Vec::with_capacity(ties.len());
    let mut here = Vec::new();
    for (target, tie) in ties {
        match tie {
            Tie::UnderWay(sum) => {
                if let Buffer::F32(sum) = sum.wait()? {
                    both.push((target, sum));
                }
            }
            Tie::Here(own) => here.push((target, own)),
        }
    }
    // Both stages declare what they share in the same order.
    here.sort_by_key(|(target, _)| (target.stage, target.index));
    let last = here.split_off(here.len() / 2);
    for ((first, mut sum), (last, other)) in here.into_iter().zip(last) {
        sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
        both.extend([(first, sum.clone()), (last, sum)]);
    }
    let reduce = |(target, sum): (Target, Vec<f32>)| {
        let sum = match groups.replicas.get(&target.stage) {
            Some(replicas) => Tie::UnderWay(replicas.start_all_reduce(at, Buffer::F32(sum))?),
            None => Tie::Here(sum),
        };
        Ok((target, sum))
    };
    both.into_iter().map(reduce).collect()
}

/// Replaces the gradients of some parameters, which lie one behind the other in `sum`.
fn write<D: Device>(
    stages: &mut BTreeMap<u16, Stage<D>>,
    stage: u16,
    parameters: &[usize],
    sum: &[f32],
) -> Result<()> {
    let Some(stage) = stages.get_mut(&stage) else { return Ok(()) };
    let device = stage.device().clone();
    let (mut taken, mut next) = (0, parameters.iter().peekable());
    for (index, (_, _, gradient)) in stage.parameters_mut().trained_mut().enumerate() {
        if next.next_if_eq(&&index).is_some() {
            let elements = gradient.len();
            *gradient = device.upload(&sum[taken..taken + elements])?;
            taken += elements;
        }
    }
    Ok(())
}
