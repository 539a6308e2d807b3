//! One rank's end of the loader.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflop_loader::loader::{BalancedLoader, BalancedLoaderBuilder, Microbatch, StepStream};
use dflop_loader::order::LoaderState;
use dflop_loader::plan::{StepPlan as LoaderPlan, StepPlanner};
use dflop_loader::prepare::{PreparedSample, Preparer, PreparerBuilder};
use futures::StreamExt;

use super::dealt::Dealt;
use super::figures::{Dropped, Figures};
use super::planned::PlannedTimes;
use super::share::EncoderShare;
use super::{media, text};
use crate::comm::Comm;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::context::MicrobatchContext;
use crate::model::model_config::ModuleKind;
use crate::pipeline::{Job, Place, StepPlan, StepWork};

/// A step that is ready to run.
pub struct FedStep<D: Device> {
    /// What this rank computes.
    pub work: StepWork<D>,
    /// The loader's plan: samples, predicted times.
    pub plan: Arc<LoaderPlan>,
    /// Predicted times of the microbatches.
    pub planned: PlannedTimes,
    /// Tokens of all samples of the step, media included.
    pub tokens: u64,
    /// Samples that were left out, on all ranks alike.
    pub dropped: Vec<Dropped>,
    /// How long this rank waited for the loader.
    pub waited: Duration,
}

/// Reads, decodes and prepares what one rank computes, ahead of it.
pub struct Feed<D: Device> {
    device: D,
    job: Arc<Job>,
    place: Place,
    planner: StepPlanner,
    preparer: Arc<Preparer>,
    loader: BalancedLoader,
    stream: StepStream,
    /// Dropped after the stream, which lives on it.
    runtime: tokio::runtime::Runtime,
}

impl<D: Device> Feed<D> {
    /// Starts reading for a rank.
    ///
    /// - `planner`: of the LLM's DP size, the same on all ranks
    /// - `preparer`: of the model; ranks of the LLM count media and make no tensors of them
    /// - `configure`: further settings of the loader, as where it begins
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the planner's DP size is not the LLM's; [`Error::Loader`].
    pub fn new(
        device: D,
        job: Arc<Job>,
        place: Place,
        planner: StepPlanner,
        preparer: PreparerBuilder,
        configure: impl FnOnce(BalancedLoaderBuilder) -> BalancedLoaderBuilder,
    ) -> Result<Self> {
        let llm = job.modules().last().map_or(0, |llm| llm.dp_size);
        if planner.dp_size() != llm {
            let problem = format!("of the LLM is {llm}, that of the loader's plan {}", planner.dp_size());
            return Err(Error::InvalidSetting { setting: "dp_size", reason: problem });
        }
        let is_llm = place.module == ModuleKind::Llm;
        let preparer = Arc::new(if is_llm { preparer.counted_media() } else { preparer }.build()?);
        let dp_rank = if is_llm { place.replica } else { 0 };
        let mut builder =
            BalancedLoader::builder(planner.clone(), dp_rank).preparer(preparer.clone()).unpacked();
        if !is_llm {
            let share = EncoderShare::new(job.clone(), planner.clone(), place.module, place.replica);
            builder = builder.share(Arc::new(share));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(Error::Runtime)?;
        let loader = configure(builder).build()?;
        let stream = loader.stream();
        Ok(Self { device, job, place, planner, preparer, loader, stream, runtime })
    }

    /// Returns the next step; `None` at the end of the run. All ranks call it together.
    ///
    /// # Errors
    /// [`Error::Loader`]; [`Error::Comm`]; [`Error::Plan`] if this rank lacks a sample that others have.
    pub fn next(&mut self, comm: &dyn Comm) -> Result<Option<FedStep<D>>> {
        let asked = Instant::now();
        let Some(step) = self.runtime.block_on(self.stream.next()).transpose()? else { return Ok(None) };
        let waited = asked.elapsed();
        // Figures are added up by place: they mean nothing unless all ranks have the same samples in the same places.
        comm.check_digest(step.plan.step, step.plan.digest.to_u64())?;
        let dealt = Dealt::new(&self.job, &self.planner, &step.plan);
        let mut own = prepared(step.microbatches);
        let counted = own.iter().map(|(&place, sample)| (place, sample));
        let samples = step.plan.samples.len();
        let figures = Figures::exchange(comm, &self.job, &self.place, &dealt, samples, counted)?;
        let plan = dealt.plan(
            &self.job,
            figures.target_tokens(&dealt),
            |place| figures.tokens(place),
            |medium| figures.medium_tokens(medium.place, medium.module),
        )?;
        let contexts = self.contexts(&dealt, &figures, &plan, &mut own)?;
        let planned = PlannedTimes::new(&self.job, &self.planner, &dealt, &plan, &step.plan)?;
        Ok(Some(FedStep {
            tokens: plan.microbatches().iter().map(|microbatch| microbatch.tokens as u64).sum(),
            work: StepWork { plan: Arc::new(plan), contexts },
            plan: step.plan,
            planned,
            dropped: figures.dropped(&dealt),
            waited,
        }))
    }

    /// Contexts of this rank's microbatches, without those that have nothing to compute.
    fn contexts(
        &self,
        dealt: &Dealt,
        figures: &Figures,
        plan: &StepPlan,
        own: &mut BTreeMap<u32, PreparedSample>,
    ) -> Result<BTreeMap<u32, Arc<MicrobatchContext<D>>>> {
        let Place { module, replica, .. } = self.place;
        let mut contexts = BTreeMap::new();
        let encoded = match module {
            ModuleKind::Llm => None,
            encoder => Some(dealt.encoded_by(&self.job, encoder, replica)?),
        };
        for (round, microbatch) in plan.microbatches_of(&self.job, module, replica).enumerate() {
            let places = match &encoded {
                Some(encoded) => &encoded[round],
                None => &dealt.microbatches[microbatch as usize].places,
            };
            let mut samples = Vec::with_capacity(places.len());
            for &place in places.iter().filter(|&&place| figures.is_kept(place)) {
                let missing = || self.missing(plan, microbatch, place);
                samples.push(own.remove(&place).ok_or_else(missing)?);
            }
            if samples.is_empty() {
                continue;
            }
            let context = match module {
                ModuleKind::Llm => {
                    let llm = &self.job.model().llm;
                    text::context(&self.device, llm, &self.preparer, samples, plan.loss_scale())?
                }
                encoder => Some(media::context(&self.device, self.encoder()?, encoder, &samples)?),
            };
            contexts.extend(context.map(|context| (microbatch, Arc::new(context))));
        }
        Ok(contexts)
    }

    fn encoder(&self) -> Result<&crate::model::encoder::EncoderConfig> {
        let model = self.job.model();
        let encoder = if self.place.module == ModuleKind::Vision { &model.vision } else { &model.audio };
        let problem = || format!("have {:?}, which the model does not have", self.place.module);
        encoder.as_ref().ok_or_else(|| Error::InvalidSetting { setting: "modules", reason: problem() })
    }

    /// Others could prepare a sample, this rank could not.
    fn missing(&self, plan: &StepPlan, microbatch: u32, place: u32) -> Error {
        let skipped = self.loader.skipped().pop();
        let why = skipped.map_or(String::new(), |skipped| format!(": {}", skipped.reason));
        let module = crate::pipeline::module_name(self.place.module);
        let problem = format!("sample {place} is there on other ranks and not here{why}");
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

    /// Returns where the run stands behind the last step that [`next`](Self::next) returned; the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Loader`] if the run has no such step.
    pub fn state(&self) -> Result<LoaderState> {
        Ok(self.loader.state()?)
    }
}

/// Samples by place.
fn prepared(microbatches: Vec<Microbatch>) -> BTreeMap<u32, PreparedSample> {
    let mut all = BTreeMap::new();
    for microbatch in microbatches {
        all.extend(microbatch.places.into_iter().zip(microbatch.prepared));
    }
    all
}
