//! Reads and prepares the inputs of one rank, step by step, from the balanced loader.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;

use super::predicted_times::PredictedTimes;
use super::replica_share::ReplicaShare;
use super::step_media::StepMedia;
use super::token_counts::{SkippedSample, TokenCounts};
use super::{media_context, text_context};
use crate::error::{Error, Result};
use crate::pipeline::{Job, PipelineStepPlan, RankPlacement, RankStep};
use dflop_comm::Comm;
use dflop_device::Device;
use dflop_loader::flow::start_runtime;
use dflop_loader::inputs::PreparedSample;
use dflop_loader::processors::{Preparer, PreparerBuilder};
use dflop_loader::{
    BalancedLoader, BalancedLoaderBuilder, LoaderState, Microbatch, StepPlan, StepPlanner, StepStream,
};
use dflop_models::{MicrobatchContext, ModuleKind};

/// Inputs of a step that is ready to run.
pub struct StepInputs<D: Device> {
    /// Microbatches that this rank computes.
    pub rank_step: RankStep<D>,
    /// Plan of the loader: samples and predicted times.
    pub plan: Arc<StepPlan>,
    /// Predicted times of the microbatches.
    pub predicted: PredictedTimes,
    /// Tokens of all samples of the step, media included.
    pub tokens: u64,
    /// Samples left out of the step, the same on all ranks.
    pub skipped: Vec<SkippedSample>,
    /// Time that this rank waited for the loader.
    pub wait: Duration,
}

/// Reads, decodes and prepares the microbatches of one rank in advance.
pub struct InputReader<D: Device> {
    device: D,
    job: Arc<Job>,
    placement: RankPlacement,
    planner: StepPlanner,
    preparer: Arc<Preparer>,
    loader: BalancedLoader,
    stream: StepStream,
    /// Dropped after the stream, which runs on it.
    runtime: tokio::runtime::Runtime,
}

impl<D: Device> InputReader<D> {
    /// Starts reading for a rank.
    ///
    /// - `planner`: for the LLM's DP size, the same on all ranks
    /// - `preparer`: of the model; ranks of the LLM count media tokens and make no media tensors
    /// - `configure`: sets further settings of the loader, such as its start
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the planner's DP size is not the LLM's; [`Error::Loader`].
    pub fn new(
        device: D,
        job: Arc<Job>,
        placement: RankPlacement,
        planner: StepPlanner,
        preparer: PreparerBuilder,
        configure: impl FnOnce(BalancedLoaderBuilder) -> BalancedLoaderBuilder,
    ) -> Result<Self> {
        let llm = job.modules().last().map_or(0, |llm| llm.dp_size);
        if planner.dp_size() != llm {
            let problem = format!("is {llm} for the LLM, the loader's plan has {}", planner.dp_size());
            return Err(Error::InvalidSetting { setting: "dp_size", reason: problem });
        }
        let is_llm = placement.module == ModuleKind::Llm;
        let preparer = Arc::new(if is_llm { preparer.counted_media() } else { preparer }.build()?);
        // Encoder ranks select samples by their share, for which the DP rank has no meaning.
        let dp_rank = if is_llm { placement.replica } else { 0 };
        let mut builder =
            BalancedLoader::builder(planner.clone(), dp_rank).preparer(preparer.clone()).unpacked();
        if !is_llm {
            let share = ReplicaShare::new(job.clone(), planner.clone(), placement.module, placement.replica);
            builder = builder.share(Arc::new(share));
        }
        // One worker: it drives the loader's I/O, while the loader decodes on threads of its pool.
        let runtime = start_runtime("dflop-inputs", 1).map_err(Error::Runtime)?;
        let loader = configure(builder).build()?;
        let stream = loader.stream();
        Ok(Self { device, job, placement, planner, preparer, loader, stream, runtime })
    }

    /// Returns the next step; `None` at the end of the run. All ranks call it together.
    ///
    /// # Errors
    /// [`Error::Loader`]; [`Error::Comm`]; [`Error::Plan`] if this rank lacks a sample that others have.
    pub fn next(&mut self, comm: &dyn Comm) -> Result<Option<StepInputs<D>>> {
        // The loader reads ahead, so this measures only the time by which it is late.
        let asked = Instant::now();
        let Some(step) = self.runtime.block_on(self.stream.next()).transpose()? else { return Ok(None) };
        let wait = asked.elapsed();
        // Token counts are summed by sample index, which needs the same samples in the same order on all
        // ranks.
        comm.check_digest(step.plan.step, step.plan.digest.to_u64())?;
        let media = StepMedia::new(&self.job, &self.planner, &step.plan);
        let mut own = prepared(step.microbatches);
        let counted = own.iter().map(|(&place, sample)| (place, sample));
        let samples = step.plan.samples.len();
        let counts = TokenCounts::exchange(comm, &self.job, &self.placement, &media, samples, counted)?;
        let plan = media.plan(
            &self.job,
            counts.target_tokens(&media),
            |sample| counts.tokens(sample),
            |medium| counts.medium_tokens(medium.sample, medium.module),
        )?;
        let contexts = self.contexts(&media, &counts, &plan, &mut own)?;
        let predicted = PredictedTimes::new(&self.job, &self.planner, &media, &plan, &step.plan)?;
        Ok(Some(StepInputs {
            tokens: plan.microbatches().iter().map(|microbatch| microbatch.tokens as u64).sum(),
            rank_step: RankStep { plan: Arc::new(plan), contexts },
            plan: step.plan,
            predicted,
            skipped: counts.skipped(&media),
            wait,
        }))
    }

    /// Returns the contexts of this rank's microbatches, except those with nothing to compute.
    fn contexts(
        &self,
        media: &StepMedia,
        counts: &TokenCounts,
        plan: &PipelineStepPlan,
        own: &mut BTreeMap<u32, PreparedSample>,
    ) -> Result<BTreeMap<u32, Arc<MicrobatchContext<D>>>> {
        let RankPlacement { module, replica, .. } = self.placement;
        let mut contexts = BTreeMap::new();
        let encoded = match module {
            ModuleKind::Llm => None,
            encoder => Some(media.encoded_by(&self.job, encoder, replica)?),
        };
        for (round, microbatch) in plan.microbatches_of(&self.job, module, replica).enumerate() {
            let indices = match &encoded {
                Some(encoded) => &encoded[round],
                None => &media.microbatches[microbatch as usize].samples,
            };
            let mut samples = Vec::with_capacity(indices.len());
            for &index in indices.iter().filter(|&&index| counts.is_kept(index)) {
                let missing = || self.missing(plan, microbatch, index);
                samples.push(own.remove(&index).ok_or_else(missing)?);
            }
            if samples.is_empty() {
                continue;
            }
            let context = match module {
                ModuleKind::Llm => {
                    let llm = &self.job.model().llm;
                    text_context::context(&self.device, llm, &self.preparer, samples, plan.loss_scale())?
                }
                encoder => Some(media_context::context(&self.device, self.encoder()?, encoder, &samples)?),
            };
            contexts.extend(context.map(|context| (microbatch, Arc::new(context))));
        }
        Ok(contexts)
    }

    fn encoder(&self) -> Result<&dflop_models::encoder::EncoderConfig> {
        let model = self.job.model();
        let encoder = if self.placement.module == ModuleKind::Vision { &model.vision } else { &model.audio };
        let problem = || format!("the model has no encoder for {:?}", self.placement.module);
        encoder.as_ref().ok_or_else(|| Error::InvalidSetting { setting: "modules", reason: problem() })
    }

    /// Returns the error for a sample that other ranks could prepare and this one could not.
    fn missing(&self, plan: &PipelineStepPlan, microbatch: u32, index: u32) -> Error {
        let skipped = self.loader.skip_log().last();
        let why = skipped.map_or(String::new(), |skipped| format!(": {}", skipped.reason));
        let module = crate::pipeline::module_name(self.placement.module);
        let problem = format!("sample {index} was prepared on other ranks, but not on this one{why}");
        Error::Plan { step: plan.step(), module, microbatch: microbatch as usize, problem }
    }

    /// Returns the loader, for its metrics and its list of skipped samples.
    #[must_use]
    pub fn loader(&self) -> &BalancedLoader {
        &self.loader
    }

    /// Returns the planner, for corrections.
    #[must_use]
    pub fn planner(&self) -> &StepPlanner {
        &self.planner
    }

    /// Returns the state after the last step that [`next`](Self::next) returned, to resume from; the same on
    /// all ranks.
    ///
    /// # Errors
    /// [`Error::Loader`] if the run has no such step.
    pub fn state(&self) -> Result<LoaderState> {
        Ok(self.loader.state()?)
    }
}

/// Collects prepared samples by their index in the step's plan.
fn prepared(microbatches: Vec<Microbatch>) -> BTreeMap<u32, PreparedSample> {
    let mut all = BTreeMap::new();
    for microbatch in microbatches {
        all.extend(microbatch.places.into_iter().zip(microbatch.prepared));
    }
    all
}
