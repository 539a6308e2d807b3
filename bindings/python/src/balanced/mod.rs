//! `dflop.BalancedLoader`: delivers a DP rank's share of every global batch as balanced microbatches.

mod correction;
mod loader_config;
mod role;
mod role_step;
mod settings;
mod step_microbatches;
mod steps;

use std::ffi::{CStr, CString};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dflop_costmodel::correction::{IntervalReport, SlowRank};
use dflop_loader::StepPlan;
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

pub(crate) use correction::PyStepPlan;
use correction::{Learner, StageSeconds};
use loader_config::{LoaderConfig, RunningLoader, State};
use role::Role;
pub(crate) use role_step::RoleStep;
use settings::{RunSettings, Settings, cost, processor as processor_settings};
pub(crate) use step_microbatches::{MicrobatchIterator, StepMicrobatches};
use steps::Iteration;
pub(crate) use steps::StepIterator;

use super::convert::{Arguments, arguments};
use super::filter::{ReadArguments, ReadSettings, python_threads};
use super::runtime::{Group, refuse_index, refuse_keywords};
use crate::arrays::framework::Framework;
use crate::cost::CostedModel;
use crate::dataset::Source;
use crate::error::{DflopError, to_python};
use crate::tokenizer::TokenizerSettings;
use crate::{convert, runtime};

/// Warning for an iteration that delivers nothing.
const RUN_IS_OVER: &CStr =
    c"the loaded state is that of a run that has ended: this iteration delivers nothing, and the next one \
    starts the run again; to train on, raise `epochs` or `steps`";

#[doc = include_str!("balanced_loader.md")]
#[pyclass(frozen, name = "BalancedLoader", module = "dflop._native")]
pub(crate) struct PyBalancedLoader {
    arguments: Arguments,
    config: Arc<LoaderConfig>,
    /// The loader for the current iteration, or for the next iteration.
    running: Mutex<Arc<RunningLoader>>,
    /// Iterations in progress, which are closed with the loader.
    iterations: Mutex<Vec<Weak<Iteration>>>,
    learner: Mutex<Option<Learner>>,
}

#[pymethods]
impl PyBalancedLoader {
    #[new]
    #[pyo3(
        signature = (
            dataset, *, model, global_batch_size, microbatches=1, dp_rank=0, dp_size=1, seed=0, epochs=None,
            steps=None, tokenizer=None, processor=None, plan=None, order=None, read=None, transforms=None,
            filter=None, array_type="auto", role=None, **unknown
        ),
        // The same without the rejected keywords.
        text_signature = "(dataset, *, model, global_batch_size, microbatches=1, dp_rank=0, dp_size=1, seed=0, \
                          epochs=None, steps=None, tokenizer=None, processor=None, plan=None, order=None, read=None, \
                          transforms=None, filter=None, array_type='auto', role=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "one keyword each")]
    fn new<'py>(
        py: Python<'py>,
        dataset: Source<'py>,
        model: Bound<'py, PyAny>,
        global_batch_size: u64,
        microbatches: usize,
        dp_rank: usize,
        dp_size: usize,
        seed: u64,
        epochs: Option<u64>,
        steps: Option<u64>,
        tokenizer: Option<Bound<'py, PyAny>>,
        processor: Option<Bound<'py, PyAny>>,
        plan: Option<Bound<'py, PyAny>>,
        order: Option<Bound<'py, PyAny>>,
        read: Option<Bound<'py, PyAny>>,
        transforms: Option<Bound<'py, PyAny>>,
        filter: Option<Bound<'py, PyAny>>,
        array_type: &str,
        role: Option<Bound<'py, PyAny>>,
        unknown: Option<Bound<'py, PyDict>>,
    ) -> PyResult<Self> {
        refuse_keywords(py, "BalancedLoader", unknown.as_ref())?;
        let source = dataset.resolved(py)?;
        let dataset = source.object();
        let arguments = arguments! {
            py, dataset, model, global_batch_size, microbatches, dp_rank, dp_size, seed, epochs, steps,
            tokenizer, processor, plan, order, read, transforms, filter, array_type, role,
        };
        let framework = Framework::parse(array_type)?.resolved(py)?;
        let of_read = ReadArguments {
            seed,
            framework,
            transforms: transforms.as_ref(),
            image: None,
            is_prepared: true,
        };
        let plan = Group::new(py, "plan", plan.as_ref(), "Plan")?;
        let read = Group::new(py, "read", read.as_ref(), "Read")?;
        let (built_in, own_processor) = processors(py, processor, python_threads(&read)?)?;
        let role = role.as_ref().map(Role::new).transpose()?;
        let run = RunSettings { global_batch_size, microbatches, dp_rank, dp_size, seed, epochs, steps };
        let run = match &role {
            Some(role) => run.with_role(role)?,
            None => run,
        };
        let (chat_template, caption_prompt) =
            (built_in.get("chat_template")?, built_in.get("caption_prompt")?);
        let settings = Settings {
            filter,
            inputs: own_processor,
            model: CostedModel::new(&model, cost(&plan)?)?,
            run,
            role,
            plan: plan.settings()?,
            order: Group::new(py, "order", order.as_ref(), "Order")?.settings()?,
            tokenizer: TokenizerSettings::new(tokenizer.as_ref(), chat_template, caption_prompt)?,
            processor: processor_settings(&built_in, framework)?,
            read: ReadSettings::new(&read, &of_read)?,
        };
        Self::start(py, arguments, settings, source)
    }

    /// Resumes after the last delivered step; restarts if the run has ended. If the loaded state belongs to a
    /// run that has ended, the first iteration delivers nothing.
    fn __iter__(&self, py: Python<'_>) -> PyResult<StepIterator> {
        let running = self.running().clone();
        let next_step = running.loader.get()?.state().map_err(DflopError::from)?.step;
        if running.is_restored_at_end() {
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), RUN_IS_OVER, 1)?;
        }
        let config = self.config.clone();
        config.read.first_exception.forget();
        let restarted = Arc::new(runtime::run(py, move || config.restart(&running, next_step))?);
        *self.running() = restarted.clone();
        let iterator = StepIterator::new(self.config.clone(), restarted)?;
        let mut iterations = self.iterations.lock().unwrap_or_else(PoisonError::into_inner);
        iterations.retain(|iteration| iteration.strong_count() > 0);
        iterations.push(Arc::downgrade(&iterator.iteration));
        Ok(iterator)
    }

    /// Number of steps in the whole run, as planned; only for a run that ends, with ``epochs`` or ``steps``.
    fn __len__(&self) -> PyResult<usize> {
        let steps = self.config.end(&self.running().planner);
        let endless = "the run has no end: set `epochs` or `steps`; in a DataLoader, wrap the loader: \
                       DataLoader(dflop.torch.IterableDataset(loader), batch_size=None)";
        Ok(steps.ok_or_else(|| pyo3::exceptions::PyTypeError::new_err(endless))? as usize)
    }

    /// Rejects an index, which PyTorch's ``DataLoader`` asks for without the wrapper.
    #[expect(clippy::unused_self, reason = "a method of the class")]
    fn __getitem__(&self, _index: &Bound<'_, PyAny>) -> PyResult<()> {
        Err(refuse_index("BalancedLoader"))
    }

    /// Number of the next step, after the last delivered step.
    #[getter]
    fn step(&self) -> PyResult<u64> {
        Ok(self.running().loader.get()?.state().map_err(DflopError::from)?.step)
    }

    /// Number of steps that start in an epoch.
    #[getter]
    fn steps_per_epoch(&self) -> u64 {
        self.running().planner.steps_per_epoch()
    }

    /// Number of microbatches per rank.
    #[getter]
    fn microbatches(&self) -> usize {
        self.running().planner.microbatches()
    }

    /// Number of samples per step, over all ranks; of rows with the layouts ``split:N`` and ``fit:N``.
    #[getter]
    fn global_batch_size(&self) -> u64 {
        self.running().planner.steps().global_batch()
    }

    /// Module names in the model, in the order of module times.
    #[getter]
    fn modules(&self) -> Vec<&'static str> {
        self.running().planner.model().modules().iter().map(|module| module.name()).collect()
    }

    /// Number of data-parallel ranks.
    #[getter]
    fn dp_size(&self) -> usize {
        self.running().planner.dp_size()
    }

    /// Data-parallel rank that this loader serves.
    #[getter]
    fn dp_rank(&self) -> usize {
        self.config.dp_rank
    }

    /// Corrects later plans by measured module times; call it on every rank with the same times.
    ///
    /// `dflop.torch.StageTimer` measures the times and calls this method.
    ///
    /// Args:
    ///     step (Step): the delivered step.
    ///     seconds (Mapping): by module name, forward and backward time for the whole module, in seconds: a
    ///         list by DP rank with lists by microbatch; NaN if not measured.
    ///     interval (int): steps after which the times change later plans; the same on all ranks, in all
    ///         calls. Default: 32.
    ///
    /// Returns:
    ///     dict | None: a report at the end of an interval, with errors as fractions of the measured time;
    ///     otherwise ``None``.
    ///
    /// Raises:
    ///     ConfigError: modules, ranks, microbatches or the interval do not match, or the loader has a cost
    ///         function.
    ///
    /// Examples:
    ///     >>> loader = dflop.BalancedLoader(
    ///     ...     "shards/", model="model/", global_batch_size=16, microbatches=2, steps=2
    ///     ... )
    ///     >>> for step in loader:
    ///     ...     seconds = {"vision": [[0.02, 0.03]], "llm": [[0.08, 0.07]]}  # one rank, two microbatches
    ///     ...     report = loader.report_stage_seconds(step, seconds, interval=2)
    ///     >>> report["steps"], report["observations"]
    ///     (2, 8)
    #[pyo3(signature = (step, seconds, *, interval=32))]
    fn report_stage_seconds<'py>(
        &self,
        py: Python<'py>,
        step: &Bound<'py, PyAny>,
        seconds: StageSeconds,
        interval: u64,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.report(py, step, interval, |learner, running, plan| learner.learn(running, plan, &seconds))
    }

    /// Corrects later plans by measured times for whole microbatches: forward and backward for all modules
    /// together, which any training loop can measure with two events. Corrects as ``report_stage_seconds``
    /// does, which separates modules; a run uses only one of the two methods.
    ///
    /// Args:
    ///     step (Step): the delivered step.
    ///     seconds (Sequence): forward and backward time, in seconds: a list by DP rank with lists by
    ///         microbatch; NaN if not measured.
    ///     interval (int): as in ``report_stage_seconds``. Default: 32.
    ///
    /// Returns:
    ///     dict | None: as ``report_stage_seconds``.
    ///
    /// Raises:
    ///     ConfigError: ranks, microbatches or the interval do not match, or the loader has a cost function.
    ///
    /// Examples:
    ///     >>> loader = dflop.BalancedLoader(
    ///     ...     "shards/", model="model/", global_batch_size=16, microbatches=2, steps=2
    ///     ... )
    ///     >>> for step in loader:
    ///     ...     report = loader.report_microbatch_seconds(step, [[0.10, 0.11]], interval=2)
    ///     >>> report["observations"], report["slow_ranks"]
    ///     (4, [])
    #[pyo3(signature = (step, seconds, *, interval=32))]
    fn report_microbatch_seconds<'py>(
        &self,
        py: Python<'py>,
        step: &Bound<'py, PyAny>,
        seconds: Vec<Vec<f64>>,
        interval: u64,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.report(py, step, interval, |learner, running, plan| learner.learn_whole(running, plan, &seconds))
    }

    /// Divides the media in a microbatch of this rank between the ranks in a tensor-parallel group, if each
    /// rank holds the encoder: the longest medium first, to the rank with the least predicted time. The
    /// result is the same on all ranks.
    ///
    /// Args:
    ///     step (Step): a delivered step.
    ///     microbatch (int): microbatch index in the step.
    ///     ranks (int): number of ranks in the group, at least 1.
    ///
    /// Returns:
    ///     list[list[Medium]]: media for each rank in the group.
    ///
    /// Raises:
    ///     ConfigError: the step has no such microbatch, or there is no rank.
    ///
    /// Examples:
    ///     >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8)
    ///     >>> step = next(iter(loader))
    ///     >>> for rank, media in enumerate(loader.media_shares(step, 0, ranks=2)):
    ///     ...     print(rank, [(medium.key, medium.kind, medium.index) for medium in media])
    ///     0 [('000138', 'image', 0), ('000109', 'image', 0), ('000109', 'image', 1), ('000011', 'image', 0)]
    ///     1 [('000122', 'image', 0), ('000047', 'image', 0)]
    fn media_shares<'py>(
        &self,
        py: Python<'py>,
        step: &Bound<'py, PyAny>,
        microbatch: usize,
        ranks: usize,
    ) -> PyResult<Vec<Vec<Bound<'py, PyAny>>>> {
        let plan = step.getattr("plan")?.cast_into::<PyStepPlan>()?.get().plan.clone();
        refuse_slices(&plan, "media_shares")?;
        let running = self.running().clone();
        step_microbatches::media_shares(py, &running, &plan, [self.config.dp_rank, microbatch], ranks)
    }

    /// Assigns the media in a microbatch of all ranks to the ranks that encode them, if ranks send media to
    /// each other before the encoder: each rank has about an equal share by predicted time, and as many
    /// media as that permits stay where they are. The result is the same on all ranks.
    ///
    /// `dflop.torch.BalancedEncoder` does the exchange.
    ///
    /// Args:
    ///     step (Step): a delivered step.
    ///     microbatch (int): microbatch index in the step.
    ///     module (str): encoder, ``vision`` or ``audio``.
    ///     group_size (int): number of consecutive ranks that exchange media. Default: all ranks.
    ///
    /// Returns:
    ///     list[ExchangedMedium]: media by rank, and then in microbatch order, of this rank's group.
    ///
    /// Raises:
    ///     ConfigError: the step has no such microbatch, the model no such encoder, or the number of ranks is
    ///         not a multiple of ``group_size``.
    ///
    /// Examples:
    ///     >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, dp_size=2)
    ///     >>> media = loader.media_exchange(next(iter(loader)), 0)
    ///     >>> {medium.rank for medium in media} == {medium.encoder_rank for medium in media} == {0, 1}
    ///     True
    #[pyo3(signature = (step, microbatch, *, module="vision", group_size=None))]
    fn media_exchange<'py>(
        &self,
        py: Python<'py>,
        step: &Bound<'py, PyAny>,
        microbatch: usize,
        module: &str,
        group_size: Option<usize>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let plan = step.getattr("plan")?.cast_into::<PyStepPlan>()?.get().plan.clone();
        refuse_slices(&plan, "media_exchange")?;
        let running = self.running().clone();
        let place = [self.config.dp_rank, microbatch];
        step_microbatches::media_exchange(py, &running, &plan, place, group_size, module)
    }

    /// Returns the run state: small, and equal on all ranks at the same step.
    ///
    /// Returns:
    ///     dict: a mapping that JSON can hold, for a checkpoint.
    ///
    /// Examples:
    ///     >>> settings = {"model": "model/", "global_batch_size": 16}
    ///     >>> loader = dflop.BalancedLoader("shards/", microbatches=2, **settings)
    ///     >>> steps = iter(loader)
    ///     >>> first, state = next(steps), loader.state_dict()
    ///     >>> state["step"]
    ///     1
    ///     >>> resumed = dflop.BalancedLoader("shards/", dp_size=4, **settings)
    ///     >>> resumed.load_state_dict(state)
    ///     >>> next(iter(resumed)).target_tokens == next(steps).target_tokens
    ///     True
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let running = self.running().clone();
        convert::json(py, &running.state()?)
    }

    /// Resumes exactly from a state, with any number of ranks and, with ``tail="carry"``, any global batch.
    ///
    /// Args:
    ///     state_dict (Mapping): state that ``state_dict`` returned.
    ///     accept_changed_data (bool): resumes even if a dataset has changed; that dataset continues with its
    ///         next epoch. Default: ``False``.
    ///
    /// Raises:
    ///     StateError: the state has a different dataset, mixture, seed or shuffle.
    #[pyo3(signature = (state_dict, *, accept_changed_data=false))]
    fn load_state_dict(
        &self,
        py: Python<'_>,
        state_dict: &Bound<'_, PyAny>,
        accept_changed_data: bool,
    ) -> PyResult<()> {
        let mut state = State::parse(&convert::json_text(state_dict)?)?;
        state.accepts_changed_data = accept_changed_data;
        let config = self.config.clone();
        self.restart(py, move || config.build(Some(state)))
    }

    /// Starts the run again at the first sample of an epoch, counted from 0; corrections that were learned
    /// from measured times are dropped.
    ///
    /// Examples:
    ///     >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16)
    ///     >>> loader.set_epoch(3)
    ///     >>> next(iter(loader)).microbatches[0].samples[0].epoch
    ///     3
    fn set_epoch(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        let config = self.config.clone();
        self.restart(py, move || config.build_at_epoch(epoch))
    }

    /// Ends the threads of the loader and the iterators; neither can be used afterwards.
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
        self.load_state_dict(py, state, false)
    }

    /// The first 1,000 skipped samples, including samples skipped by indexing: dictionaries with ``shard``,
    /// ``offset``, ``key``, ``field``, ``reason``. ``skipped_samples`` is the total number.
    #[getter]
    fn skipped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let running = self.running().clone();
        convert::skipped(py, &running.loader.get()?.skipped())
    }

    /// Number of samples that ``filter`` excluded, over all datasets.
    #[getter]
    fn filtered_samples(&self) -> u64 {
        self.running().planner.datasets().iter().map(dflop_loader::Dataset::filtered).sum()
    }

    /// Number of skipped samples, summed over epochs.
    #[getter]
    fn skipped_samples(&self) -> PyResult<u64> {
        let running = self.running().clone();
        Ok(running.loader.get()?.skip_log().skipped_samples())
    }

    /// Returns the stage metrics since the last ``iter``.
    ///
    /// Returns:
    ///     dict: ``stages``, each with ``stage``, ``items``, ``bytes``, ``busy_seconds``, waiting seconds, …;
    ///     the ``bottleneck``, the stage that limits the throughput; ``seconds`` and
    ///     ``consumer_wait_seconds``; ``sources``, samples and tokens for each dataset; waiting bytes.
    ///
    /// Examples:
    ///     >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16, steps=2)
    ///     >>> for step in loader:
    ///     ...     microbatches = list(step.microbatches)
    ///     >>> loader.metrics()["sources"]
    ///     [{'source': 'shards', 'samples': 32, 'tokens': 2086, 'skipped_samples': 0}]
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let running = self.running().clone();
        to_python(py, &running.loader.get()?.metrics())
    }

    /// Returns the sample preparation report since the last ``iter``.
    ///
    /// Returns:
    ///     dict: counted and planned tokens, truncated and dropped samples. With a `CustomProcessor`, since
    ///     the start of the loader: ``microbatches`` with all planned samples, with ``tokens`` and
    ///     ``planned_tokens``, and ``differing``, the first 100 microbatches where the two are not equal,
    ///     with ``keys``.
    ///
    /// Examples:
    ///     >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16, steps=1)
    ///     >>> step = next(iter(loader)).hold()
    ///     >>> report = loader.prepare_report()
    ///     >>> report["samples"], report["tokens"] == report["planned_tokens"]
    ///     (16, True)
    fn prepare_report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(inputs) = &self.config.inputs {
            return inputs.bind(py).call_method0("report");
        }
        let running = self.running().clone();
        to_python(py, &running.loader.get()?.prepare_report())
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().arguments.repr(&slf.get_type())
    }
}

impl PyBalancedLoader {
    /// Builds the loader for the first iteration.
    fn start<'py>(
        py: Python<'py>,
        arguments: Arguments,
        settings: Settings<'py>,
        data: Source<'py>,
    ) -> PyResult<Self> {
        let config = Arc::new(settings.loader_config(py, data)?);
        let making = config.clone();
        let running = Mutex::new(Arc::new(runtime::run(py, move || making.build(None))?));
        let (learner, iterations) = (Mutex::new(None), Mutex::default());
        Ok(Self { arguments, config, running, iterations, learner })
    }

    /// Passes the times for a step to the learner.
    fn report<'py>(
        &self,
        py: Python<'py>,
        step: &Bound<'py, PyAny>,
        interval: u64,
        learn: impl FnOnce(&mut Learner, &RunningLoader, &StepPlan) -> Result<Option<IntervalReport>, DflopError>
        + Send,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let plan = step.getattr("plan")?.cast_into::<PyStepPlan>()?.get().plan.clone();
        refuse_slices(&plan, "corrections")?;
        let running = self.running().clone();
        let mut learner = self.learner.lock().unwrap_or_else(PoisonError::into_inner);
        let learner = match &mut *learner {
            Some(learner) => learner,
            none => none.insert(Learner::new(interval)?),
        };
        learner.check_interval(interval)?;
        let report = py.detach(|| learn(learner, &running, &plan))?;
        for SlowRank { rank, factor } in report.iter().flat_map(|report| learner.newly_slow(report)) {
            let message =
                format!("rank {rank} takes {factor:.2} times as long as the others for the same work");
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &CString::new(message)?, 1)?;
        }
        report.map(|report| to_python(py, &report)).transpose()
    }

    /// Replaces the loader by a loader for another run, or for another state of the run.
    fn restart(
        &self,
        py: Python<'_>,
        build: impl FnOnce() -> Result<RunningLoader, DflopError> + Send + 'static,
    ) -> PyResult<()> {
        // A closed loader stays closed.
        self.running().loader.get()?;
        let running = runtime::run(py, build)?;
        *self.running() = Arc::new(running);
        // Earlier observations belong to other plans.
        *self.learner.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }

    fn running(&self) -> MutexGuard<'_, Arc<RunningLoader>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses a plan in which ranks share samples.
fn refuse_slices(plan: &StepPlan, method: &str) -> Result<(), DflopError> {
    if plan.context.is_none() {
        return Ok(());
    }
    let reason = format!("{method} are for whole samples: plan without `context`");
    Err(DflopError::config("context", reason))
}

/// Returns the settings for the built-in processor, and the user's own processor, a `dflop.inputs.Inputs`.
///
/// - `threads`: number of threads that call the user's functions
fn processors<'py>(
    py: Python<'py>,
    given: Option<Bound<'py, PyAny>>,
    threads: usize,
) -> PyResult<(Group<'py>, Option<Py<PyAny>>)> {
    let own = py.import("dflop.settings")?.getattr("CustomProcessor")?;
    let (built_in, own) = match given {
        Some(processor) if processor.is_instance(&own)? => (None, Some(processor)),
        built_in => (built_in, None),
    };
    let inputs = |own| py.import("dflop.inputs")?.getattr("Inputs")?.call1((own, threads)).map(Bound::unbind);
    Ok((Group::new(py, "processor", built_in.as_ref(), "Processor")?, own.map(inputs).transpose()?))
}
