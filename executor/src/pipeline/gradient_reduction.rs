//! Sums gradients over stage replicas, overlapped with the backward passes.
//!
//! Stage gradients are in buckets, the last parameter first ([`Parameters::buckets`]). A bucket is summed in
//! place, by one all-reduce, which starts as soon as the last backward pass in the stage has finished the
//! layers in the bucket, and is awaited at the end of the step. Bucket contents depend only on sizes, so all
//! replicas start the same collectives in the same order.
//!
//! If replicas share the optimizer state, each replica needs only part of the sum, and the all-reduce is a
//! reduce-scatter with the same parts as the state. A tied parameter on two stages is summed completely.
//!
//! If embedding and tied LM head are on different stages, each stage has a copy of the weights. The two
//! gradients are first summed between the two stages, then over the replicas of each stage. So both copies
//! get the same bits, equal to the bits on a stage that has both.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use dflop_comm::{StepContext, even_parts};
use dflop_device::{Device, DeviceComm, Lane, Tensor, Transfer};
use dflop_models::{ParameterBucket, Parameters, Result, Stage};

use super::job::Job;
use super::timeline::{Awaited, CommunicationKind, CommunicationLane, CommunicationPlace, wait};
use super::topology::RankRole;

/// Bucket gradients that are not in the stage.
struct Taken<D: Device> {
    stage: u16,
    /// Bucket index in the stage.
    bucket: usize,
    /// Lengths of the bucket tensors.
    lens: Vec<usize>,
    /// Elements that are complete on this rank once the sum is done.
    summed: Range<usize>,
    state: State<D>,
}

/// Progress of a bucket sum.
enum State<D: Device> {
    /// A collective is in progress.
    Reducing(CommunicationPlace, Transfer<D>),
    /// Tied parameter: both copies are on this rank and not yet summed, or there is no other replica to sum
    /// with.
    Local(Tensor<D>),
}

/// All gradient sums in a step.
pub(super) struct GradientReduction<'a, D: Device> {
    job: &'a Job,
    groups: &'a GradientGroups<D>,
    step: u64,
    /// Whether each replica gets only part of the sums.
    is_divided: bool,
    /// Index of the first bucket in every stage that is not taken.
    next: BTreeMap<u16, usize>,
    buckets: Vec<Taken<D>>,
    tied: Vec<Taken<D>>,
}

impl<'a, D: Device> GradientReduction<'a, D> {
    /// Prepares the sums for a step.
    ///
    /// - `is_divided`: whether each replica gets only part of the sums
    pub(super) fn new(job: &'a Job, groups: &'a GradientGroups<D>, step: u64, is_divided: bool) -> Self {
        let (next, buckets, tied) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { job, groups, step, is_divided, next, buckets, tied }
    }

    /// Returns step and name for the collectives of a stage. Replicas start them during passes for different
    /// microbatches, so the name has no microbatch.
    fn at(&self, stage: u16) -> StepContext {
        StepContext::step(self.step, &format!("reduce stage {stage}"))
    }

    /// Returns whether stage gradients are summed over replicas.
    pub(super) fn has_replicas(&self, stage: u16) -> bool {
        self.groups.replicas(stage).is_some()
    }

    /// Starts to sum the buckets whose parameters all have an index of at least `first`, which the last
    /// backward pass has completed.
    pub(super) fn advance(
        &mut self,
        stage: u16,
        device: &D,
        parameters: &mut Parameters<D>,
        first: usize,
    ) -> Result<()> {
        self.take(stage, device, parameters, |parameters, bucket| {
            // Parameters used by two blocks wait for `complete`: an earlier block still adds to their
            // gradients.
            let is_done = |&index: &usize| index >= first && !parameters[index].is_tied;
            bucket.parameters.iter().all(is_done)
        })
    }

    /// Starts to sum the next buckets in a stage as long as they are complete.
    fn take(
        &mut self,
        stage: u16,
        device: &D,
        parameters: &mut Parameters<D>,
        is_complete: impl Fn(&[dflop_models::weights::ParameterSpec], &ParameterBucket<D>) -> bool,
    ) -> Result<()> {
        let at = self.at(stage);
        let Some(replicas) = self.groups.replicas(stage) else { return Ok(()) };
        loop {
            let next = self.next.get(&stage).copied().unwrap_or(0);
            let Some(bucket) = parameters.buckets().get(next) else { return Ok(()) };
            if self.is_tied(stage, parameters, bucket) || !is_complete(parameters.specs(), bucket) {
                return Ok(());
            }
            self.next.insert(stage, next + 1);
            let after = device.mark(Lane::Compute)?;
            let (whole, lens) = parameters.buckets_mut()[next].gradients.open();
            let (elements, bytes) = (whole.len(), whole.bytes());
            let (kind, sum, summed) = if self.is_divided {
                let (rank, size) = (replicas.host().rank(), replicas.host().size());
                let parts = even_parts(elements, size);
                let first = parts[..rank].iter().sum();
                let own = first..first + parts[rank];
                let sum = replicas.start_reduce_scatter(at, whole, &parts, &after)?;
                (CommunicationKind::ReduceScatter, sum, own)
            } else {
                let sum = replicas.start_all_reduce(at, whole, &after)?;
                (CommunicationKind::AllReduce, sum, 0..elements)
            };
            let lane = CommunicationLane::Replicas { stage };
            let place = CommunicationPlace { lane, kind, stage, microbatch: None, bytes };
            let state = State::Reducing(place, sum);
            self.buckets.push(Taken { stage, bucket: next, lens, summed, state });
        }
    }

    /// Returns whether a bucket has a parameter that another stage also has.
    fn is_tied(&self, stage: u16, parameters: &Parameters<D>, bucket: &ParameterBucket<D>) -> bool {
        let is_end = self.job.llm_ends().is_some_and(|ends| ends.contains(&stage));
        is_end
            && bucket.parameters.iter().any(|&index| self.job.tied.contains(&parameters.specs()[index].name))
    }

    /// Starts to sum the remaining gradients in a stage, after the last backward pass.
    pub(super) fn complete(&mut self, number: u16, stage: &mut dyn Stage<D>) -> Result<()> {
        let (device, at) = (stage.device().clone(), self.at(number));
        stage.parameters_mut().fold_shared_gradients(&device)?;
        let parameters = stage.parameters_mut();
        self.take(number, &device, parameters, |_, _| true)?;
        for bucket in 0..parameters.buckets().len() {
            if !self.is_tied(number, parameters, &parameters.buckets()[bucket]) {
                continue;
            }
            let (own, lens) = parameters.buckets_mut()[bucket].gradients.open();
            let summed = 0..own.len();
            let state = match self.groups.tie() {
                Some(tie) => {
                    let (bytes, after) = (own.bytes(), device.mark(Lane::Compute)?);
                    let place = all_reduce(CommunicationLane::Tie, number, bytes);
                    State::Reducing(place, tie.start_all_reduce(at, own, &after)?)
                }
                None => State::Local(own),
            };
            self.tied.push(Taken { stage: number, bucket, lens, summed, state });
        }
        Ok(())
    }

    /// Orders the update after all sums, and puts them into the gradients.
    pub(super) fn finish(
        self,
        device: &D,
        stages: &mut BTreeMap<u16, Box<dyn Stage<D>>>,
        awaited: &mut Vec<Awaited<D>>,
    ) -> crate::error::Result<()> {
        let at = StepContext::step(self.step, "reduce tied parameters");
        // Tied parameter sums over replicas start before the wait for buckets, to overlap with it.
        let tied = sum_copies(device, self.tied, (self.groups, at), awaited)?;
        for Taken { stage, bucket, lens, summed, state } in self.buckets.into_iter().chain(tied) {
            let sum = state.wait(device, awaited)?;
            let Some(stage) = stages.get_mut(&stage) else { continue };
            let bucket = &mut stage.parameters_mut().buckets_mut()[bucket];
            bucket.gradients.close(sum, &lens);
            bucket.summed = summed;
        }
        Ok(())
    }
}

impl<D: Device> State<D> {
    fn wait(self, device: &D, awaited: &mut Vec<Awaited<D>>) -> crate::error::Result<Tensor<D>> {
        match self {
            Self::Reducing(place, sum) => {
                Ok(wait(device, (place, sum), awaited)?.expect("a sum returns its tensor"))
            }
            Self::Local(sum) => Ok(sum),
        }
    }
}

/// Describes a gradient all-reduce.
const fn all_reduce(lane: CommunicationLane, stage: u16, bytes: u64) -> CommunicationPlace {
    CommunicationPlace { lane, kind: CommunicationKind::AllReduce, stage, microbatch: None, bytes }
}

/// Waits for the sums over both copies of tied parameters and starts the sums over replicas.
fn sum_copies<D: Device>(
    device: &D,
    tied: Vec<Taken<D>>,
    (groups, at): (&GradientGroups<D>, StepContext),
    awaited: &mut Vec<Awaited<D>>,
) -> crate::error::Result<Vec<Taken<D>>> {
    let (mut sums, mut local) = (Vec::with_capacity(tied.len()), Vec::new());
    for Taken { stage, bucket, lens, state, .. } in tied {
        let into = if matches!(state, State::Local(_)) { &mut local } else { &mut sums };
        into.push((stage, bucket, lens, state.wait(device, awaited)?));
    }
    // Both stages declare their shared parameters in the same order, so sorting pairs the copies.
    local.sort_by_key(|&(stage, bucket, ..)| (stage, bucket));
    let last = local.split_off(local.len() / 2);
    for (mut first, mut last) in local.into_iter().zip(last) {
        device.add(&last.3, &mut first.3)?;
        last.3 = device.copy(&first.3)?;
        sums.extend([first, last]);
    }
    let after = device.mark(Lane::Compute)?;
    let over_replicas = |(stage, bucket, lens, sum): (u16, usize, Vec<usize>, Tensor<D>)| {
        let state = match groups.replicas(stage) {
            Some(replicas) => {
                let place = all_reduce(CommunicationLane::Replicas { stage }, stage, sum.bytes());
                State::Reducing(place, replicas.start_all_reduce(at, sum, &after)?)
            }
            None => State::Local(sum),
        };
        Ok(Taken { stage, bucket, summed: 0..lens.iter().sum(), lens, state })
    };
    sums.into_iter().map(over_replicas).collect()
}

/// Rank communicators, in addition to the communicator for all ranks.
pub(super) struct GradientGroups<D: Device> {
    /// Replicas of each stage on this rank, if there are several.
    replicas: BTreeMap<u16, Arc<dyn DeviceComm<D>>>,
    /// First and last LLM stage, if they share a parameter and are on two ranks.
    tie: Option<Arc<dyn DeviceComm<D>>>,
}

impl<D: Device> GradientGroups<D> {
    /// Splits the communicators from `world`; every rank in the job takes part.
    pub(super) fn split(
        job: &Job,
        roles: &[RankRole],
        world: &dyn DeviceComm<D>,
    ) -> crate::error::Result<Self> {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dflop_balancer::schedule::ScheduleKind;
    use dflop_comm::{Settings, threads};
    use dflop_device::{Cpu, DeviceComm, Staged};
    use dflop_models::weights::Seed;
    use dflop_models::{FrozenModules, ModelConfig, ModuleKind, StageSettings, TextBatch};

    use super::*;
    use crate::pipeline::ModuleParallelism;

    /// Counts collectives in progress after the backward of the last layer, after all layers, and at the end.
    fn collectives(
        job: &Job,
        comm: threads::ThreadComm,
        is_divided: bool,
    ) -> crate::error::Result<[usize; 3]> {
        let device = Cpu::new(1)?;
        let comm = Staged::new(device.clone(), Arc::new(comm));
        let roles = job.roles(comm.host().rank())?;
        let range = &job.ranges(&roles[0])[0];
        let settings = StageSettings { bucket_elements: 1, ..StageSettings::default() };
        let mut stage = job.model.stage_with(&device, range, FrozenModules::default(), settings, &Seed(1))?;
        let batch = TextBatch {
            input_ids: &[1, 2, 3],
            labels: &[1, 2, 3],
            positions: &[0, 1, 2],
            cu_seqlens: &[0, 3],
            media_places: &[],
            loss_scale: 1.0,
        };
        stage.forward(0, Arc::new(job.model.llm.context(&device, &batch)?), None)?;
        let groups = GradientGroups::split(job, &roles, &comm)?;
        let mut reduction = GradientReduction::new(job, &groups, 0, is_divided);
        let mut begun = Vec::new();
        stage.backward_with(0, None, &mut |parameters, first| {
            reduction.advance(0, &device, parameters, first)?;
            begun.push(reduction.buckets.len());
            Ok(())
        })?;
        reduction.complete(0, &mut stage)?;
        let counts = [begun[0], begun[1], reduction.buckets.len()];
        let mut stages = BTreeMap::from([(0, stage.boxed())]);
        let mut awaited = Vec::new();
        reduction.finish(&device, &mut stages, &mut awaited)?;
        assert_eq!(awaited.len(), stages[&0].parameters().buckets().len(), "every sum has its times");
        for bucket in stages[&0].parameters().buckets() {
            let (all, half) = (bucket.len(), bucket.len().div_ceil(2));
            let own = if comm.host().rank() == 0 { 0..half } else { half..all };
            assert_eq!(bucket.summed, if is_divided { own } else { 0..all });
        }
        Ok(counts)
    }

    #[test]
    fn sums_are_under_way_before_the_last_backward_ends() {
        let document = serde_json::json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48,
            "tie_word_embeddings": true});
        let model = ModelConfig::from_config(&document).unwrap();
        let layout = ModuleParallelism::even(ModuleKind::Llm, 2, 1).dp_size(2);
        let schedule = ScheduleKind::OneForwardOneBackward;
        let job = Job::new(model, FrozenModules::default(), vec![layout], schedule).unwrap();
        for is_divided in [false, true] {
            let ranks = threads::world(2, Settings::default()).unwrap();
            let counts = std::thread::scope(|scope| {
                let count = |comm: threads::ThreadComm| collectives(&job, comm, is_divided).unwrap();
                let threads: Vec<_> =
                    ranks.into_iter().map(|comm| scope.spawn(move || count(comm))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            // Twelve tensors per layer, the last norm, and the embedding shared with the LM head.
            assert_eq!(counts, [[13, 25, 26]; 2]);
        }
    }
}
