//! Sums gradients over the replicas of a stage, overlapped with the backward passes.
//!
//! Gradients are put into buckets, the last parameter first, with one all-reduce each. It starts as soon as
//! the last backward pass of the stage has finished the layers of its parameters, and is awaited at the end
//! of the step. Bucket contents depend on sizes alone, so all replicas start the same collectives in the same
//! order.
//!
//! If embedding and tied LM head are on different stages, each stage has a copy of the weights. The two
//! gradients are first summed between the two stages, then over the replicas of each. So both copies get the
//! same bits, and the same as on a stage that has both.

use std::collections::BTreeMap;

use super::gradient_groups::GradientGroups;
use super::job::Job;
use dflop_comm::{Buffer, Comm, Handle, StepContext};
use dflop_device::{Buffer as _, Device};
use dflop_models::{Parameters, Result, Stage};

/// An all-reduce in progress.
struct Bucket {
    stage: u16,
    /// Indices of the parameters whose gradients follow each other in the bucket.
    parameters: Vec<usize>,
    sum: Handle<Buffer>,
}

/// A tied parameter.
struct Tied {
    stage: u16,
    parameter: usize,
    state: TiedState,
}

/// Progress of the gradient of a tied parameter.
enum TiedState {
    /// An all-reduce is in progress.
    Reducing(Handle<Buffer>),
    /// The gradient is here: both copies are on this rank and not yet summed, or there is no other replica to
    /// sum with.
    Local(Vec<f32>),
}

/// Parameters of a stage whose gradients are not yet in a started bucket.
#[derive(Default)]
struct PendingGradients {
    /// Trained parameters, the last one first; parameters that two blocks share come after all others.
    parameters: Vec<usize>,
    /// Number of parameters that a single block uses, at the start of `parameters`.
    in_one_block: usize,
    next: usize,
    open: Vec<usize>,
    values: Vec<f32>,
}

/// All gradient sums of one step.
pub(super) struct GradientReduction<'a> {
    job: &'a Job,
    groups: &'a GradientGroups,
    /// Elements of a bucket; a larger tensor has a bucket to itself.
    bucket_elements: usize,
    step: u64,
    pending: BTreeMap<u16, PendingGradients>,
    buckets: Vec<Bucket>,
    tied: Vec<Tied>,
}

impl<'a> GradientReduction<'a> {
    pub(super) fn new(job: &'a Job, groups: &'a GradientGroups, bucket_elements: usize, step: u64) -> Self {
        let (pending, buckets, tied) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { job, groups, bucket_elements, step, pending, buckets, tied }
    }

    /// Returns step and name of the collectives of a stage. Replicas start them during passes of different
    /// microbatches, so the name has no microbatch.
    fn at(&self, stage: u16) -> StepContext {
        StepContext::step(self.step, &format!("reduce stage {stage}"))
    }

    /// Returns whether gradients of a stage are summed over replicas.
    pub(super) fn has_replicas(&self, stage: u16) -> bool {
        self.groups.replicas(stage).is_some()
    }

    /// Starts to sum the gradients of the parameters from index `first` on, which the last backward pass has
    /// completed.
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
        let pending = self.pending.entry(stage).or_insert_with(|| PendingGradients::new(parameters, tied));
        // Parameters of two blocks wait for `complete`: an earlier block still adds to their gradients.
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

    /// Starts to sum all remaining gradients of a stage, after its last backward pass.
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
                    Some(tie) => TiedState::Reducing(tie.start_all_reduce(at, Buffer::F32(own))?),
                    None => TiedState::Local(own),
                };
                self.tied.push(Tied { stage: number, parameter, state });
            }
        }
        Ok(())
    }

    /// Waits for all sums and writes them over the gradients.
    pub(super) fn finish<D: Device>(self, stages: &mut BTreeMap<u16, Stage<D>>) -> Result<()> {
        let at = StepContext::step(self.step, "reduce tied parameters");
        // Sums of tied parameters over replicas start before the wait for buckets, to overlap with it.
        let tied = sum_copies(self.tied, self.groups, at)?;
        for bucket in self.buckets {
            write(stages, bucket.stage, &bucket.parameters, bucket.sum.wait()?)?;
        }
        for Tied { stage, parameter, state } in tied {
            let sum = match state {
                TiedState::Reducing(sum) => sum.wait()?,
                TiedState::Local(sum) => Buffer::F32(sum),
            };
            write(stages, stage, &[parameter], sum)?;
        }
        Ok(())
    }
}

impl PendingGradients {
    /// - `tied`: names of parameters that are summed separately
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

    /// Adds the next gradient to the open bucket; starts the sum of the bucket before if that is full.
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
        // A tensor larger than a bucket closes the one before and is followed by a new one.
        let is_full = self.values.len() + gradient.len() > bucket_elements;
        let full = if is_full { self.close(stage, replicas, at)? } else { None };
        self.open.push(index);
        self.values.extend(device.download(gradient)?);
        Ok(full)
    }

    /// Starts to sum the open bucket.
    fn close(&mut self, stage: u16, replicas: &dyn Comm, at: StepContext) -> Result<Option<Bucket>> {
        if self.open.is_empty() {
            return Ok(None);
        }
        let (parameters, values) = (std::mem::take(&mut self.open), std::mem::take(&mut self.values));
        let sum = replicas.start_all_reduce(at, Buffer::F32(values))?;
        Ok(Some(Bucket { stage, parameters, sum }))
    }
}

/// Waits for the sums over both copies of tied parameters and starts those over replicas.
fn sum_copies(tied: Vec<Tied>, groups: &GradientGroups, at: StepContext) -> Result<Vec<Tied>> {
    let (mut sums, mut local) = (Vec::with_capacity(tied.len()), Vec::new());
    for Tied { stage, parameter, state } in tied {
        match state {
            TiedState::Reducing(sum) => {
                if let Buffer::F32(sum) = sum.wait()? {
                    sums.push((stage, parameter, sum));
                }
            }
            TiedState::Local(own) => local.push((stage, parameter, own)),
        }
    }
    // Both stages declare their shared parameters in the same order, so sorting pairs the copies.
    local.sort_by_key(|&(stage, parameter, _)| (stage, parameter));
    let last = local.split_off(local.len() / 2);
    for (mut first, mut last) in local.into_iter().zip(last) {
        first.2.iter_mut().zip(&last.2).for_each(|(sum, other)| *sum += other);
        last.2.clone_from(&first.2);
        sums.extend([first, last]);
    }
    let over_replicas = |(stage, parameter, sum): (u16, usize, Vec<f32>)| {
        let state = match groups.replicas(stage) {
            Some(replicas) => TiedState::Reducing(replicas.start_all_reduce(at, Buffer::F32(sum))?),
            None => TiedState::Local(sum),
        };
        Ok(Tied { stage, parameter, state })
    };
    sums.into_iter().map(over_replicas).collect()
}

/// Replaces the gradients of some parameters, which follow each other in `sum`.
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
        // Gradients are f32 on every device, also where weights are bf16.
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
    use crate::pipeline::ModuleParallelism;
    use dflop_comm::{Settings, threads};
    use dflop_device::Cpu;
    use dflop_models::weights::Seed;
    use dflop_models::{Activations, FrozenModules, ModelConfig, ModuleKind, TextBatch};

    /// Counts collectives in progress after the backward of the last layer, after all layers, and at the end.
    fn collectives(job: &Job, comm: &dyn Comm) -> crate::Result<[usize; 3]> {
        let device = Cpu::new(1)?;
        let placement = job.placement(comm.rank())?;
        let range = &job.ranges(&placement)[0];
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
        let groups = GradientGroups::split(job, &placement, comm)?;
        let mut reduction = GradientReduction::new(job, &groups, 1, 0);
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
        let layout = ModuleParallelism::even(ModuleKind::Llm, 2, 1).dp_size(2);
        let schedule = ScheduleKind::OneForwardOneBackward;
        let job = Job::new(model, FrozenModules::default(), vec![layout], schedule).unwrap();
        let ranks = threads::world(2, Settings::default()).unwrap();
        let counts = std::thread::scope(|scope| {
            let count = |comm: threads::ThreadComm| collectives(&job, &comm).unwrap();
            let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || count(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        // Twelve tensors per layer, the last norm, and the embedding shared with the LM head. One is always
        // being filled.
        assert_eq!(counts, [[12, 24, 26]; 2]);
    }
}
