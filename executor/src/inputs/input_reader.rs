//! Reads and prepares the inputs of one rank, step by step, from the balanced loader.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflop_comm::Comm;
use dflop_device::Device;
use dflop_loader::flow::start_runtime;
use dflop_loader::processors::PreparerBuilder;
use dflop_loader::{BalancedLoader, BalancedLoaderBuilder, LoaderState, StepPlan, StepPlanner};

use super::module_reader::{ModuleReader, ModuleSamples};
use super::predicted_times::{PredictedTimes, SkippedSample, TokenCounts};
use super::step_media::StepMedia;
use super::{Stop, check_agreement};
use crate::error::{Error, Result};
use crate::pipeline::{Job, RankRole, RankStep};

/// Inputs for a step that is ready to run.
pub struct StepInputs<D: Device> {
    /// Microbatches that this rank computes.
    pub rank_step: RankStep<D>,
    /// Loader plan: samples and predicted times.
    pub plan: Arc<StepPlan>,
    /// Predicted microbatch times.
    pub predicted: PredictedTimes,
    /// Number of tokens in all samples, including media.
    pub tokens: u64,
    /// Samples left out of the step, the same on all ranks.
    pub skipped: Vec<SkippedSample>,
    /// Time that this rank waited for the loader.
    pub wait: Duration,
}

/// Samples that this rank has read for a step.
pub(super) struct RankSamples {
    pub(super) plan: Arc<StepPlan>,
    media: StepMedia,
    /// By module.
    own: Vec<ModuleSamples>,
}

/// Reads, decodes and prepares microbatches for a rank in advance, for each module of the rank.
pub struct InputReader<D: Device> {
    device: D,
    job: Arc<Job>,
    planner: StepPlanner,
    modules: Vec<ModuleReader>,
    /// Whether all ranks are known to have the same planner settings.
    is_agreed: bool,
    /// Dropped after the streams, which run on it.
    runtime: tokio::runtime::Runtime,
}

impl<D: Device> InputReader<D> {
    /// Starts reading for a rank.
    ///
    /// - `roles`: rank roles ([`JobLayout::roles`](crate::pipeline::JobLayout::roles)); an encoder for the
    ///   media in the rank's own texts reads them together with the LLM
    /// - `planner`: for the LLM's DP size, the same on all ranks
    /// - `preparer`: preparer for the model; for the LLM it counts media tokens without creating media
    ///   tensors
    /// - `configure`: sets further loader settings, such as the start
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if planner and LLM have different DP sizes; [`Error::Loader`].
    pub fn new(
        device: D,
        job: Arc<Job>,
        roles: Vec<RankRole>,
        planner: StepPlanner,
        preparer: &PreparerBuilder,
        configure: impl Fn(BalancedLoaderBuilder) -> BalancedLoaderBuilder,
    ) -> Result<Self> {
        let llm = job.modules().last().map_or(0, |llm| llm.dp_size);
        if planner.dp_size() != llm {
            let problem = format!("is {llm} for the LLM, the loader's plan has {}", planner.dp_size());
            return Err(Error::InvalidSetting { setting: "dp_size", reason: problem });
        }
        if planner.context().is_some() {
            let reason = "the executor runs whole samples, without context parallelism".to_owned();
            return Err(Error::InvalidSetting { setting: "context", reason });
        }
        // One worker: it drives the loaders' I/O, while they decode on threads of their pools.
        let runtime = start_runtime("dflop-inputs", 1).map_err(Error::Runtime)?;
        let modules = ModuleReader::all(&job, roles, &planner, preparer, configure)?;
        if modules.is_empty() {
            let reason = "expected at least one, found none".to_owned();
            return Err(Error::InvalidSetting { setting: "roles", reason });
        }
        Ok(Self { device, job, planner, modules, is_agreed: false, runtime })
    }

    /// Returns the next step; `None` at the end of the run. All ranks call it together.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if planner settings differ between ranks; [`Error::Loader`]; [`Error::Comm`];
    /// [`Error::Plan`] if this rank lacks a sample that other ranks have.
    pub fn next(&mut self, comm: &dyn Comm) -> Result<Option<StepInputs<D>>> {
        self.agree(comm)?;
        // The loaders read ahead, so this measures only the delay.
        let asked = Instant::now();
        let Some(samples) = self.read(&mut Stop::never())? else { return Ok(None) };
        let wait = asked.elapsed();
        // Token counts are summed by sample index, which needs the same samples in the same order on all
        // ranks.
        comm.check_digest(samples.plan.step, samples.plan.digest.to_u64())?;
        let mut counts = self.count(&samples);
        comm.all_reduce(TokenCounts::at(samples.plan.step), counts.as_mut_slice().into())?;
        Ok(Some(StepInputs { wait, ..self.build(samples, counts)? }))
    }

    /// Checks before the first step that all ranks have the same planner settings; all ranks call it
    /// together.
    pub(super) fn agree(&mut self, comm: &dyn Comm) -> Result<()> {
        if !self.is_agreed {
            check_agreement(comm, &self.planner.settings())?;
            self.is_agreed = true;
        }
        Ok(())
    }

    /// Reads the samples for the next step; `None` at the end of the run, and after a stop.
    pub(super) fn read(&mut self, stop: &mut Stop) -> Result<Option<RankSamples>> {
        let mut own = Vec::with_capacity(self.modules.len());
        for module in &mut self.modules {
            let Some(samples) = module.next(&self.runtime, stop)? else { return Ok(None) };
            own.push(samples);
        }
        let plan = own.first().map(|samples| samples.plan.clone());
        Ok(plan.map(|plan| RankSamples { media: StepMedia::new(&self.job, &self.planner, &plan), plan, own }))
    }

    /// Counts tokens in the samples of this rank, in a table that is summed over ranks.
    pub(super) fn count(&self, samples: &RankSamples) -> Vec<u64> {
        let by_reader = self.modules.iter().zip(&samples.own);
        let prepared =
            by_reader.flat_map(|(module, own)| module.roles.iter().map(move |role| (role, &own.samples)));
        TokenCounts::own(&self.job, samples.plan.samples.len(), prepared)
    }

    /// Builds the inputs for a step from samples and the counts summed over all ranks.
    pub(super) fn build(&self, samples: RankSamples, counts: Vec<u64>) -> Result<StepInputs<D>> {
        let RankSamples { plan: step_plan, media, own } = samples;
        let counts = TokenCounts::from_sum(&self.job, counts);
        let plan = media.plan(
            &self.job,
            counts.target_tokens(&media),
            |sample| counts.tokens(sample),
            |medium| counts.medium_tokens(medium.sample, medium.module),
        )?;
        let mut contexts = BTreeMap::new();
        for (module, own) in self.modules.iter().zip(own) {
            contexts.extend(module.contexts(&self.device, &media, &counts, &plan, own.samples)?);
        }
        let predicted = PredictedTimes::new(&self.job, &self.planner, &media, &plan, &step_plan)?;
        Ok(StepInputs {
            tokens: plan.microbatches().iter().map(|microbatch| microbatch.tokens as u64).sum(),
            rank_step: RankStep { plan: Arc::new(plan), contexts },
            plan: step_plan,
            predicted,
            skipped: counts.skipped(&media),
            wait: Duration::ZERO,
        })
    }

    /// Copies inputs to the device in parallel with other device work from now on.
    pub(super) fn copy_beside(&mut self) -> Result<()> {
        self.device = self.device.beside()?;
        Ok(())
    }

    /// Iterates over the loaders of this rank, for metrics and lists of skipped samples.
    pub fn loaders(&self) -> impl Iterator<Item = &Arc<BalancedLoader>> {
        self.modules.iter().map(|module| &module.loader)
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
        Ok(self.modules[0].loader.state()?)
    }
}
