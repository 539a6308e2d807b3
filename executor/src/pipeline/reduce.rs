//! Sums of gradients over the replicas of a stage, while others still compute.
//!
//! Gradients are put into buckets, the last parameter first, one collective each, begun as soon as the layers of its
//! parameters are done with the stage's last backward and awaited at the step's end. What is in which bucket depends on sizes
//! alone, so replicas begin the same collectives in the same order whatever they compute.
//!
//! A tied LM head on another stage than the embedding has a copy of its weights; both gradients are added up between the two
//! stages first, then each over its replicas: so both copies get the same bits, those of a stage that has both.

use std::collections::BTreeMap;

use super::groups::Groups;
use super::job::Job;
use crate::comm::{Buffer, Comm, Handle, StepContext};
use crate::device::{Buffer as _, Device};
use crate::error::Result;
use crate::model::parameters::Parameters;
use crate::stage::Stage;

/// A collective under way.
struct Bucket {
    stage: u16,
    /// Indices of the parameters whose gradients lie one behind the other.
    parameters: Vec<usize>,
    sum: Handle<Buffer>,
}

/// A tied parameter.
struct Tied {
    stage: u16,
    parameter: usize,
    state: TiedState,
}

/// How far the gradient of a tied parameter is.
enum TiedState {
    /// A collective is under way.
    Summed(Handle<Buffer>),
    /// It is here: before the sum of both copies, because they are both on this rank; behind it, because there is no replica.
    Here(Vec<f32>),
}

/// What of a stage is not yet in a bucket.
#[derive(Default)]
struct Pending {
    /// Trained parameters, the last one first: those of one block before those that two blocks use.
    parameters: Vec<usize>,
    /// How many of them belong to one block.
    in_one_block: usize,
    next: usize,
    open: Vec<usize>,
    values: Vec<f32>,
}

/// The sums of one step.
pub(super) struct Reduction<'a> {
    job: &'a Job,
    groups: &'a Groups,
    /// Elements of a bucket; larger tensors have one of their own.
    bucket_elements: usize,
    step: u64,
    pending: BTreeMap<u16, Pending>,
    buckets: Vec<Bucket>,
    tied: Vec<Tied>,
}

impl<'a> Reduction<'a> {
    pub(super) fn new(job: &'a Job, groups: &'a Groups, bucket_elements: usize, step: u64) -> Self {
        let (pending, buckets, tied) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { job, groups, bucket_elements, step, pending, buckets, tied }
    }

    /// Where the step is in all collectives of a stage: replicas begin them in passes of different microbatches.
    fn at(&self, stage: u16) -> StepContext {
        StepContext::step(self.step, &format!("reduce stage {stage}"))
    }

    /// Whether anything of a stage is added up over replicas.
    pub(super) fn has_replicas(&self, stage: u16) -> bool {
        self.groups.replicas(stage).is_some()
    }

    /// Begins to add up the gradients of the parameters from `first` on: a last backward adds nothing more to them.
    pub(super) fn advance<D: Device>(
        &mut self,
        stage: u16,
        device: &D,
        parameters: &Parameters<D>,
        first: usize,
    ) -> Result<()> {
        let at = self.at(stage);
        let Some(replicas) = self.groups.replicas(stage) else { return Ok(()) };
        let ends = self.job.llm_ends().filter(|ends| ends.contains(&stage));
        let tied: &[String] = if ends.is_some() { &self.job.tied } else { &[] };
        let pending = self.pending.entry(stage).or_insert_with(|| Pending::new(parameters, tied));
        while pending.next < pending.in_one_block && pending.parameters[pending.next] >= first {
            self.buckets.extend(pending.take(
                stage,
                device,
                parameters,
                self.bucket_elements,
                replicas,
                at,
            )?);
        }
        Ok(())
    }

    /// Begins to add up all gradients of a stage that are left, once its last backward is done.
    pub(super) fn complete<D: Device>(&mut self, number: u16, stage: &mut Stage<D>) -> Result<()> {
        let (device, at) = (stage.device().clone(), self.at(number));
        self.advance(number, &device, stage.parameters(), 0)?;
        stage.parameters_mut().fold_shared_gradients(&device)?;
        let parameters = stage.parameters();
        if let (Some(replicas), Some(mut pending)) =
            (self.groups.replicas(number), self.pending.remove(&number))
        {
            while pending.next < pending.parameters.len() {
                let full = pending.take(number, &device, parameters, self.bucket_elements, replicas, at)?;
                self.buckets.extend(full);
            }
            self.buckets.extend(pending.close(number, replicas, at)?);
        }
        if !self.job.llm_ends().is_some_and(|ends| ends.contains(&number)) {
            return Ok(());
        }
        for (parameter, spec, gradient) in parameters.trained() {
            if self.job.tied.contains(&spec.name) {
                let own = device.download(gradient)?;
                let state = match self.groups.tie() {
                    Some(tie) => TiedState::Summed(tie.start_all_reduce(at, Buffer::F32(own))?),
                    None => TiedState::Here(own),
                };
                self.tied.push(Tied { stage: number, parameter, state });
            }
        }
        Ok(())
    }

    /// Waits for all sums and puts them where the gradients were.
    pub(super) fn finish<D: Device>(self, stages: &mut BTreeMap<u16, Stage<D>>) -> Result<()> {
        let at = StepContext::step(self.step, "reduce tied parameters");
        let tied = sum_copies(self.tied, self.groups, at)?;
        for bucket in self.buckets {
            write(stages, bucket.stage, &bucket.parameters, bucket.sum.wait()?)?;
        }
        for Tied { stage, parameter, state } in tied {
            let sum = match state {
                TiedState::Summed(sum) => sum.wait()?,
                TiedState::Here(sum) => Buffer::F32(sum),
            };
            write(stages, stage, &[parameter], sum)?;
        }
        Ok(())
    }
}

impl Pending {
    /// - `tied`: names of parameters that are added up apart
    fn new<D: Device>(parameters: &Parameters<D>, tied: &[String]) -> Self {
        let specs = parameters.specs();
        let is_used_twice =
            |index: usize| specs.iter().any(|spec| spec.shares.is_some_and(|owner| owner.index() == index));
        let all = parameters.trained().filter(|(_, spec, _)| !tied.contains(&spec.name));
        let mut all: Vec<usize> = all.map(|(index, ..)| index).collect();
        all.reverse();
        let (in_two, in_one): (Vec<usize>, Vec<usize>) =
            all.into_iter().partition(|&index| is_used_twice(index));
        Self { in_one_block: in_one.len(), parameters: [in_one, in_two].concat(), ..Self::default() }
    }

    /// Puts the next gradient into the open bucket, and begins the one before if that is full.
    fn take<D: Device>(
        &mut self,
        stage: u16,
        device: &D,
        parameters: &Parameters<D>,
        bucket_elements: usize,
        replicas: &dyn Comm,
        at: StepContext,
    ) -> Result<Option<Bucket>> {
        let index = self.parameters[self.next];
        self.next += 1;
        let Some(gradient) = parameters.gradient_at(index) else { return Ok(None) };
        let is_full = self.values.len() + gradient.len() > bucket_elements;
        let full = if is_full { self.close(stage, replicas, at)? } else { None };
        self.open.push(index);
        self.values.extend(device.download(gradient)?);
        Ok(full)
    }

    /// Begins the open bucket.
    fn close(&mut self, stage: u16, replicas: &dyn Comm, at: StepContext) -> Result<Option<Bucket>> {
        if self.open.is_empty() {
            return Ok(None);
        }
        let (parameters, values) = (std::mem::take(&mut self.open), std::mem::take(&mut self.values));
        let sum = replicas.start_all_reduce(at, Buffer::F32(values))?;
        Ok(Some(Bucket { stage, parameters, sum }))
    }
}

/// Waits for the sums of both copies of tied parameters and begins those over replicas.
fn sum_copies(tied: Vec<Tied>, groups: &Groups, at: StepContext) -> Result<Vec<Tied>> {
    let (mut sums, mut here) = (Vec::with_capacity(tied.len()), Vec::new());
    for Tied { stage, parameter, state } in tied {
        match state {
            TiedState::Summed(sum) => {
                if let Buffer::F32(sum) = sum.wait()? {
                    sums.push((stage, parameter, sum));
                }
            }
            TiedState::Here(own) => here.push((stage, parameter, own)),
        }
    }
    // Both stages declare what they share in the same order.
    here.sort_by_key(|&(stage, parameter, _)| (stage, parameter));
    let last = here.split_off(here.len() / 2);
    for (mut first, mut last) in here.into_iter().zip(last) {
        first.2.iter_mut().zip(&last.2).for_each(|(sum, other)| *sum += other);
        last.2.clone_from(&first.2);
        sums.extend([first, last]);
    }
    let over_replicas = |(stage, parameter, sum): (u16, usize, Vec<f32>)| {
        let state = match groups.replicas(stage) {
            Some(replicas) => TiedState::Summed(replicas.start_all_reduce(at, Buffer::F32(sum))?),
            None => TiedState::Here(sum),
        };
        Ok(Tied { stage, parameter, state })
    };
    sums.into_iter().map(over_replicas).collect()
}

/// Replaces the gradients of some parameters, which lie one behind the other in `sum`.
fn write<D: Device>(
    stages: &mut BTreeMap<u16, Stage<D>>,
    stage: u16,
    parameters: &[usize],
    sum: Buffer,
) -> Result<()> {
    let (Some(stage), Buffer::F32(sum)) = (stages.get_mut(&stage), sum) else { return Ok(()) };
    let device = stage.device().clone();
    let mut taken = 0;
    for &index in parameters {
        let Some(gradient) = stage.parameters_mut().gradient_at_mut(index) else { continue };
        let elements = gradient.len();
        *gradient = device.upload_f32(&sum[taken..taken + elements])?;
        taken += elements;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dflop_balancer::schedule::ScheduleKind;

    use super::*;
    use crate::comm::{Settings, threads};
    use crate::device::Cpu;
    use crate::model::llm::TextBatch;
    use crate::model::model_config::{FrozenModules, ModelConfig, ModuleKind};
    use crate::pipeline::ModuleLayout;
    use crate::stage::Activations;
    use crate::weights::Seed;

    /// Collectives that are under way when the last layer is done, when all layers are done, and at the end.
    fn collectives(job: &Job, comm: &dyn Comm) -> Result<[usize; 3]> {
        let device = Cpu::new(1)?;
        let place = job.place(comm.rank())?;
        let range = &job.ranges(&place)[0];
        let mut stage =
            job.model.stage(&device, range, FrozenModules::default(), Activations::Stored, &Seed(1))?;
        let batch = TextBatch {
            input_ids: &[1, 2, 3],
            labels: &[1, 2, 3],
            positions: &[0, 1, 2],
            cu_seqlens: &[0, 3],
            media_places: &[],
            loss_scale: 1.0,
        };
        stage.forward(0, Arc::new(job.model.llm.context(&device, &batch)?), None)?;
        let groups = Groups::split(job, &place, comm)?;
        let mut reduction = Reduction::new(job, &groups, 1, 0);
        let mut begun = Vec::new();
        stage.backward_with(0, None, |parameters, first| {
            reduction.advance(0, &device, parameters, first)?;
            begun.push(reduction.buckets.len());
            Ok(())
        })?;
        reduction.complete(0, &mut stage)?;
        let counts = [begun[0], begun[1], reduction.buckets.len()];
        reduction.finish(&mut BTreeMap::from([(0, stage)]))?;
        Ok(counts)
    }

    #[test]
    fn sums_are_under_way_before_the_last_backward_ends() {
        let document = serde_json::json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48,
            "tie_word_embeddings": true});
        let model = ModelConfig::from_config(&document).unwrap();
        let layout = ModuleLayout::even(ModuleKind::Llm, 2, 1).dp_size(2);
        let schedule = ScheduleKind::OneForwardOneBackward;
        let job = Job::new(model, FrozenModules::default(), vec![layout], schedule).unwrap();
        let ranks = threads::world(2, Settings::default()).unwrap();
        let counts = std::thread::scope(|scope| {
            let count = |comm: threads::ThreadComm| collectives(&job, &comm).unwrap();
            let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || count(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        // Twelve tensors a layer, the last norm, and the embedding that the LM head shares. One is always being filled.
        assert_eq!(counts, [[12, 24, 26]; 2]);
    }
}
