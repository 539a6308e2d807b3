//! `dflop.BalancedLoader`: delivers one DP rank's share of every global batch as balanced microbatches.

mod buckets;
mod correction;
mod loader_config;
mod media_shares;
mod microbatch;
mod settings;
mod step_microbatches;
mod steps;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dflop_balancer::Caps;
use dflop_costmodel::correction::CorrectionOptions;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use buckets::buckets;
pub(crate) use correction::Plan;
use correction::{Learner, StageSeconds};
use loader_config::{LoaderConfig, RunningLoader, State};
pub(crate) use settings::strategy;
use settings::{PlanSettings, PrepareSettings, ReadSettings, Settings};
pub(crate) use step_microbatches::{MicrobatchIterator, StepMicrobatches};
use steps::Iteration;
pub(crate) use steps::StepIterator;

use crate::arguments::{Arguments, arguments};
use crate::arrays::framework::Framework;
use crate::convert::{self, Delivery};
use crate::cost::CostedModel;
use crate::dataset::Source;
use crate::error::{DflopError, to_python};
use crate::image::{PyAugment, pixel_type};
use crate::loader::{budget, parse_decode};
use crate::model::ModelSettings;
use crate::names::Names;
use crate::runtime;
use crate::tokenizer::TokenizerSettings;
use crate::transform::UserCode;

#[doc = include_str!("balanced_loader.md")]
#[pyclass(frozen, name = "BalancedLoader", module = "dflop._native")]
pub(crate) struct PyBalancedLoader {
    arguments: Arguments,
    config: Arc<LoaderConfig>,
    delivery: Delivery,
    /// The loader of the current iteration, or of the next one.
    running: Mutex<Arc<RunningLoader>>,
    /// Iterations that have not ended, which are closed with the loader.
    iterations: Mutex<Vec<Weak<Iteration>>>,
    learner: Mutex<Option<Learner>>,
    options: CorrectionOptions,
}

#[pymethods]
impl PyBalancedLoader {
    #[new]
    #[pyo3(signature = (
        dataset, *, model, global_batch_size, microbatches=1, dp_rank=0, dp_size=1, seed=0, filter=None,
        inputs=None, collate=None, input_threads=1, tokenizer=None, chat_template=None, caption_prompt=None, layout="packed", pad_to_tokens=None, length_buckets=None, media_buckets=None, sample_multiple_of=1, long_sample="error",
        sample_tokens_max=None, skip_media_tensors=false, dtype="float32", blank_media="auto", token_counts="exact",
        strategy="search", stages=None, synchronize="step", tokens_max=None, bytes_max=None, search_effort=20_000,
        device="h100", profile=None, profile_tp=None, packed_tokens=None, freeze=None, recompute="none", cost=None,
        tail="carry", repeat_samples=false, shuffle="global", block_samples=None, open_blocks=None, epochs=None, first_epoch=0,
        validation=false, accept_changed_data=false, steps=None,
        transforms=None, transform_threads=1, fields=None, decode="media", augment=None, workers=None,
        steps_ahead=2, buffered_bytes=268_435_456, microbatch_bytes=None, error_budget=0.05, error_count=None, stall_seconds=None,
        correction_interval=32, array_type="auto"
    ))]
    #[expect(
        clippy::too_many_arguments,
        clippy::too_many_lines,
        clippy::fn_params_excessive_bools,
        reason = "one keyword each"
    )]
    fn new<'py>(
        py: Python<'py>,
        dataset: Source<'py>,
        model: Bound<'py, PyAny>,
        global_batch_size: u64,
        microbatches: usize,
        dp_rank: usize,
        dp_size: usize,
        seed: u64,
        filter: Option<Bound<'py, PyAny>>,
        inputs: Option<Bound<'py, PyAny>>,
        collate: Option<Bound<'py, PyAny>>,
        input_threads: usize,
        tokenizer: Option<Bound<'py, PyAny>>,
        chat_template: Option<String>,
        caption_prompt: Option<String>,
        layout: &str,
        pad_to_tokens: Option<u64>,
        length_buckets: Option<Bound<'py, PyAny>>,
        media_buckets: Option<Bound<'py, PyAny>>,
        sample_multiple_of: usize,
        long_sample: &str,
        sample_tokens_max: Option<u64>,
        skip_media_tensors: bool,
        dtype: &str,
        blank_media: &str,
        token_counts: &str,
        strategy: &str,
        stages: Option<Vec<usize>>,
        synchronize: &str,
        tokens_max: Option<u64>,
        bytes_max: Option<u64>,
        search_effort: u64,
        device: &str,
        profile: Option<PathBuf>,
        profile_tp: Option<[u32; 2]>,
        packed_tokens: Option<u64>,
        freeze: Option<String>,
        recompute: &str,
        cost: Option<Py<PyAny>>,
        tail: &str,
        repeat_samples: bool,
        shuffle: &str,
        block_samples: Option<u64>,
        open_blocks: Option<u64>,
        epochs: Option<u64>,
        first_epoch: u64,
        validation: bool,
        accept_changed_data: bool,
        steps: Option<u64>,
        transforms: Option<Bound<'py, PyAny>>,
        transform_threads: usize,
        fields: Option<Names>,
        decode: &str,
        augment: Option<PyRef<'py, PyAugment>>,
        workers: Option<usize>,
        steps_ahead: usize,
        buffered_bytes: u64,
        microbatch_bytes: Option<u64>,
        error_budget: f64,
        error_count: Option<u64>,
        stall_seconds: Option<f64>,
        correction_interval: u64,
        array_type: &str,
    ) -> PyResult<Self> {
        let (source, fields) = (dataset.resolved(py)?, fields.map(|names| names.0));
        let dataset = source.object();
        let arguments = arguments! {
            py, dataset, model, global_batch_size, microbatches, dp_rank, dp_size, seed, filter, inputs, collate, input_threads, tokenizer, chat_template,
            caption_prompt, layout, pad_to_tokens, length_buckets, media_buckets, sample_multiple_of, long_sample, sample_tokens_max, skip_media_tensors, dtype, blank_media,
            token_counts, strategy, stages, synchronize, tokens_max, bytes_max, search_effort, device, profile,
            profile_tp, packed_tokens, freeze, recompute, cost, tail, repeat_samples, shuffle, block_samples,
            open_blocks, epochs, first_epoch, validation, accept_changed_data, steps, transforms, transform_threads,
            fields, decode, augment, workers, steps_ahead, buffered_bytes, microbatch_bytes, error_budget,
            error_count, stall_seconds, correction_interval, array_type,
        };
        let framework = Framework::parse(array_type)?;
        let inputs = own_inputs(py, inputs, collate, input_threads)?;
        let CostedModel { names, custom, cost } = CostedModel::new(&model, device, cost)?;
        let model = ModelSettings {
            names,
            custom,
            device: device.to_owned(),
            profile,
            profile_tp,
            packed_tokens,
            freeze,
            recompute: recompute.to_owned(),
        };
        let plan = PlanSettings {
            global_batch_size,
            microbatches,
            dp_rank,
            dp_size,
            stages,
            synchronize: synchronize.to_owned(),
            strategy: strategy.to_owned(),
            caps: Caps { tokens_max, bytes_max },
            search_effort,
            seed,
            tail: tail.to_owned(),
            repeats_samples: repeat_samples,
            shuffle: shuffle.to_owned(),
            block_samples,
            open_blocks,
            epochs,
            first_epoch,
            is_validation: validation,
            accepts_changed_data: accept_changed_data,
            cost,
        };
        let prepare = PrepareSettings {
            tokenizer: TokenizerSettings::new(tokenizer.as_ref(), chat_template, caption_prompt)?,
            layout: layout.to_owned(),
            pad_to_tokens,
            length_buckets: buckets(length_buckets.as_ref(), "length_buckets")?,
            media_buckets: buckets(media_buckets.as_ref(), "media_buckets")?,
            sample_multiple: sample_multiple_of,
            long_sample: long_sample.to_owned(),
            sample_tokens_max,
            skip_media_tensors,
            pixels: pixel_type(dtype, framework)?,
            blank_media: blank_media.to_owned(),
            token_counts: token_counts.to_owned(),
        };
        let user_code = UserCode::new(transform_threads, seed, Delivery::new(framework, decode), true);
        let read = ReadSettings {
            decode: parse_decode(decode, None)?,
            fields,
            augment: augment.map(|augment| augment.settings.clone()),
            workers,
            steps,
            steps_ahead,
            buffered_bytes,
            microbatch_bytes,
            error_budget: budget(error_budget, error_count)?,
            stall_seconds: stall_seconds.unwrap_or(f64::INFINITY),
            first_exception: user_code.first_exception.clone(),
            transforms: user_code.transforms(transforms.as_ref())?,
        };
        let config = Settings { filter, inputs, model, plan, prepare, read }.loader_config(py, source)?;
        Self::start(py, arguments, config, correction_interval, Delivery::new(framework, decode))
    }

    /// Resumes after the last delivered step; restarts if the run has ended.
    fn __iter__(&self, py: Python<'_>) -> PyResult<StepIterator> {
        let running = self.running().clone();
        let mut step = running.loader.get()?.state().map_err(DflopError::from)?.step;
        // At the end of a run a new iteration restarts it, at its first step.
        if running.planner.steps().len() == Some(step) {
            step = running.planner.first_step().min(step);
            step = if step == running.planner.steps().len().unwrap_or(u64::MAX) { 0 } else { step };
        }
        let config = self.config.clone();
        config.first_exception.forget();
        let restarted = Arc::new(runtime::run(py, move || config.restart(&running, step))?);
        *self.running() = restarted.clone();
        let iterator = StepIterator::new(self.config.clone(), restarted, self.delivery)?;
        let mut iterations = self.iterations.lock().unwrap_or_else(PoisonError::into_inner);
        iterations.retain(|iteration| iteration.strong_count() > 0);
        iterations.push(Arc::downgrade(&iterator.iteration));
        Ok(iterator)
    }

    /// Number of steps of the whole run, as planned; only for a run that ends, with ``epochs``.
    fn __len__(&self) -> PyResult<usize> {
        let steps = self.running().planner.steps().len();
        let endless = "the run has no end: set `epochs`, or count steps";
        Ok(steps.ok_or_else(|| pyo3::exceptions::PyTypeError::new_err(endless))? as usize)
    }

    /// The next step, after the last delivered one.
    #[getter]
    fn step(&self) -> PyResult<u64> {
        Ok(self.running().loader.get()?.state().map_err(DflopError::from)?.step)
    }

    /// Number of steps that start in one epoch.
    #[getter]
    fn steps_per_epoch(&self) -> u64 {
        self.running().planner.steps().per_epoch()
    }

    /// Number of microbatches per rank.
    #[getter]
    fn microbatches(&self) -> usize {
        self.running().planner.microbatches()
    }

    /// Names of the model's modules, in the order of their times.
    #[getter]
    fn modules(&self) -> Vec<&'static str> {
        self.running().planner.model().modules().iter().map(|module| module.name()).collect()
    }

    /// Number of data-parallel ranks.
    #[getter]
    fn dp_size(&self) -> usize {
        self.running().planner.dp_size()
    }

    /// Data-parallel rank of this loader.
    #[getter]
    fn dp_rank(&self) -> usize {
        self.config.dp_rank
    }

    /// Corrects later plans by measured times of the model's modules; call it on every rank with the same
    /// times.
    ///
    /// Args: step: the delivered step. seconds: by module name, forward and backward of the whole module, in
    /// seconds: a list by DP rank of lists by microbatch; NaN if not measured.
    ///
    /// Returns:
    ///     a report at the end of an interval, with errors as fractions of measured time; otherwise ``None``.
    ///
    /// Raises:
    ///     ConfigError: modules, ranks or microbatches do not match, or the loader has a cost function.
    fn report_stage_seconds<'py>(
        &self,
        py: Python<'py>,
        step: &Bound<'py, PyAny>,
        seconds: StageSeconds,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let plan = step.getattr("plan")?.cast_into::<Plan>()?.get().plan.clone();
        let running = self.running().clone();
        let mut learner = self.learner.lock().unwrap_or_else(PoisonError::into_inner);
        let learner = match &mut *learner {
            Some(learner) => learner,
            none => none.insert(Learner::new(self.options)?),
        };
        let report = py.detach(|| learner.learn(&running, &plan, &seconds))?;
        report.map(|report| to_python(py, &report)).transpose()
    }

    /// Shares the media of one of this rank's microbatches between the ranks of a tensor-parallel group,
    /// where each of them holds the encoder: the longest medium first, to the rank with the least predicted
    /// time. The same on all ranks.
    ///
    /// Args: step: a delivered step. microbatch: its index in the step. ranks: of the group, at least 1.
    ///
    /// Returns:
    ///     lists of `dflop.batches.Medium`, one for each rank of the group.
    ///
    /// Raises:
    ///     ConfigError: the step has no such microbatch, or there is no rank.
    fn media_shares<'py>(
        &self,
        py: Python<'py>,
        step: &Bound<'py, PyAny>,
        microbatch: usize,
        ranks: usize,
    ) -> PyResult<Vec<Vec<Bound<'py, PyAny>>>> {
        let plan = step.getattr("plan")?.cast_into::<Plan>()?.get().plan.clone();
        let running = self.running().clone();
        media_shares::media_shares(py, &running, &plan, [self.config.dp_rank, microbatch], ranks)
    }

    /// Returns the state of the run: small, and equal on all ranks at the same step.
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let running = self.running().clone();
        convert::json(py, &running.state()?)
    }

    /// Resumes exactly from a state, with any number of ranks and, with ``tail="carry"``, any global batch.
    ///
    /// Raises:
    ///     StateError: the state belongs to another dataset, mixture, seed or shuffle.
    fn load_state_dict(&self, py: Python<'_>, state_dict: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = State::parse(&convert::json_text(state_dict)?)?;
        let config = self.config.clone();
        self.restart(py, move || config.build(Some(state)))
    }

    /// Restarts the run at the first sample of an epoch, counted from 0, as a loader with this
    /// ``first_epoch`` does; corrections that were learned from measured times are dropped.
    fn set_epoch(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        let config = self.config.clone();
        self.restart(py, move || config.build_at_epoch(epoch))
    }

    /// Ends the threads of the loader and its iterators; neither can be used afterwards.
    fn close(&self, py: Python<'_>) {
        let running = self.running().clone();
        let iterations = std::mem::take(&mut *self.iterations.lock().unwrap_or_else(PoisonError::into_inner));
        iterations.iter().filter_map(Weak::upgrade).for_each(|iteration| iteration.close(py));
        running.loader.close(py);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    /// Pickles the arguments and the state.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (), Bound<'py, PyAny>)> {
        let (py, this) = (slf.py(), slf.get());
        Ok((this.arguments.constructor(&slf.get_type())?, (), this.state_dict(py)?))
    }

    fn __setstate__(&self, py: Python<'_>, state: &Bound<'_, PyAny>) -> PyResult<()> {
        self.load_state_dict(py, state)
    }

    /// The first 1,000 skipped samples, including those that indexing found: dictionaries with ``shard``,
    /// ``offset``, ``key``, ``field``, ``reason``.
    #[getter]
    fn skipped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let running = self.running().clone();
        convert::skipped(py, &running.loader.get()?.skipped())
    }

    /// Number of samples that ``filter`` left out, of all datasets.
    #[getter]
    fn filtered_samples(&self) -> u64 {
        self.running().planner.datasets().iter().map(dflop_loader::dataset::Dataset::filtered).sum()
    }

    /// Number of skipped samples, summed over epochs.
    #[getter]
    fn skipped_samples(&self) -> PyResult<u64> {
        let running = self.running().clone();
        Ok(running.loader.get()?.skip_log().skipped_samples())
    }

    /// Returns the metrics of every stage since the last ``iter``: items, bytes, busy and waiting seconds,
    /// the bottleneck.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let running = self.running().clone();
        to_python(py, &running.loader.get()?.metrics())
    }

    /// Returns the account of preparing samples for the model since the last ``iter``: counted and planned
    /// tokens, truncated and dropped samples.
    fn prepare_report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let running = self.running().clone();
        to_python(py, &running.loader.get()?.prepare_report())
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().arguments.repr(&slf.get_type())
    }
}

impl PyBalancedLoader {
    /// Builds the loader of the first iteration.
    fn start(
        py: Python<'_>,
        arguments: Arguments,
        config: LoaderConfig,
        interval_steps: u64,
        delivery: Delivery,
    ) -> PyResult<Self> {
        let options = CorrectionOptions { interval_steps, ..CorrectionOptions::default() };
        // Checks the options now rather than in the middle of a run.
        Learner::new(options)?;
        let config = Arc::new(config);
        let making = config.clone();
        let running = Mutex::new(Arc::new(runtime::run(py, move || making.build(None))?));
        let (learner, iterations) = (Mutex::new(None), Mutex::default());
        Ok(Self { arguments, config, delivery, running, iterations, learner, options })
    }

    /// Replaces the loader by one of another run, or of another state of the run.
    fn restart(
        &self,
        py: Python<'_>,
        build: impl FnOnce() -> Result<RunningLoader, DflopError> + Send + 'static,
    ) -> PyResult<()> {
        // A closed loader stays closed.
        self.running().loader.get()?;
        let running = runtime::run(py, build)?;
        *self.running() = Arc::new(running);
        // Observations before belong to other plans.
        *self.learner.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }

    fn running(&self) -> MutexGuard<'_, Arc<RunningLoader>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the user's own processor, a `dflop.inputs.Inputs`.
fn own_inputs<'py>(
    py: Python<'py>,
    inputs: Option<Bound<'py, PyAny>>,
    collate: Option<Bound<'py, PyAny>>,
    threads: usize,
) -> PyResult<Option<Py<PyAny>>> {
    if inputs.is_none() && collate.is_none() {
        return Ok(None);
    }
    let class = py.import("dflop.inputs")?.getattr("Inputs")?;
    Ok(Some(class.call1((inputs, collate, threads))?.unbind()))
}
