//! Delivers steps, whose microbatches are delivered one by one.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dflop_loader::{Error, EventStream, Microbatch, Step, StepEvent, StepPlan};
use futures::StreamExt;
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tokio::sync::Mutex;

use super::correction::PyStepPlan;
use super::loader_config::{LoaderConfig, RunningLoader};
use super::role::Role;
use super::role_step::RoleStep;
use super::step_microbatches::StepMicrobatches;
use crate::convert::class;
use crate::runtime::Threaded;

/// State shared by all steps in an iteration.
pub(super) struct Iteration {
    pub(super) config: Arc<LoaderConfig>,
    pub(super) running: Arc<RunningLoader>,
    pub(super) live: Threaded<Mutex<Live>>,
    /// Whether there was a warning about launches.
    pub(super) is_warned: AtomicBool,
}

/// A step stream, and the position in the stream.
pub(super) struct Live {
    events: EventStream,
    /// Number of the last started step.
    pub(super) step: Option<u64>,
    /// Number of delivered microbatches in that step.
    pub(super) delivered: usize,
}

impl Live {
    pub(super) fn new(events: EventStream) -> Self {
        Self { events, step: None, delivered: 0 }
    }

    /// Starts the next step; undelivered microbatches from the last step are skipped.
    pub(super) async fn next_step(&mut self) -> Result<Option<(Arc<StepPlan>, usize)>, Error> {
        while let Some(event) = self.events.next().await.transpose()? {
            if let StepEvent::Start { plan, microbatches } = event {
                (self.step, self.delivered) = (Some(plan.step), 0);
                return Ok(Some((plan, microbatches)));
            }
        }
        self.step = None;
        Ok(None)
    }

    /// Returns the next microbatch in the last started step.
    pub(super) async fn next_microbatch(&mut self) -> Result<Microbatch, Error> {
        let event = self.events.next().await.transpose()?;
        let Some(StepEvent::Microbatch(microbatch)) = event else {
            return Err(Error::StageEnded { stage: "collate" });
        };
        self.delivered += 1;
        Ok(microbatch)
    }
}

impl Iteration {
    fn new(config: Arc<LoaderConfig>, running: Arc<RunningLoader>) -> PyResult<Self> {
        let events = running.loader.get()?.events();
        let live = Threaded::new(Mutex::new(Live::new(events)));
        Ok(Self { config, running, live, is_warned: AtomicBool::new(false) })
    }

    /// Warns once if launches take most of the step time.
    fn warn_of_launches(&self, py: Python<'_>, plan: &StepPlan) -> PyResult<()> {
        let limit = plan.launch_limit(&self.running.planner.model().launch_limits());
        let Some(limit) = limit.filter(|_| !self.is_warned.swap(true, Ordering::Relaxed)) else {
            return Ok(());
        };
        let share = 100.0 * plan.launch_limited_share();
        let message = format!(
            "{limit}, {share:.0} % of the predicted time of step {}: use fewer, larger microbatches",
            plan.step
        );
        PyErr::warn(py, &py.get_type::<PyUserWarning>(), &CString::new(message)?, 1)
    }

    /// Ends the stream, and waits for the end.
    pub(super) fn close(&self, py: Python<'_>) {
        self.live.close(py);
    }
}

/// Iterator over the steps in a run, returned by ``iter`` on a `BalancedLoader`.
///
/// Examples:
///     >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16)
///     >>> with iter(loader) as steps:
///     ...     print(next(steps).step, next(steps).step)
///     0 1
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct StepIterator {
    pub(super) iteration: Arc<Iteration>,
}

impl StepIterator {
    pub(super) fn new(config: Arc<LoaderConfig>, running: Arc<RunningLoader>) -> PyResult<Self> {
        Ok(Self { iteration: Arc::new(Iteration::new(config, running)?) })
    }
}

#[pymethods]
impl StepIterator {
    /// Ends the iterator's stream, and waits for the end.
    fn close(&self, py: Python<'_>) {
        self.iteration.close(py);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Returns the next step, whose microbatches are decoded on demand; other Python threads run meanwhile.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let next = self.iteration.live.wait(py, async |live| live.lock().await.next_step().await)?;
        let next = next.map_err(|error| self.iteration.config.read.first_exception.explain(py, error))?;
        let Some((plan, microbatches)) = next else {
            self.iteration.running.end_seen();
            return Ok(None);
        };
        self.iteration.warn_of_launches(py, &plan)?;
        if let Some(role) = &self.iteration.config.role {
            return role_step(py, &self.iteration, role, plan, microbatches).map(Some);
        }
        step(py, &self.iteration, plan, microbatches).map(Some)
    }
}

/// Waits for all samples of a step, and creates a `RoleStep`.
fn role_step<'py>(
    py: Python<'py>,
    iteration: &Arc<Iteration>,
    role: &Arc<Role>,
    plan: Arc<StepPlan>,
    len: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let read = iteration.live.wait(py, async |live| {
        let mut live = live.lock().await;
        let mut microbatches = Vec::with_capacity(len);
        while microbatches.len() < len {
            microbatches.push(live.next_microbatch().await?);
        }
        Ok(microbatches)
    })?;
    let microbatches = read.map_err(|error| iteration.config.read.first_exception.explain(py, error))?;
    let step = Step { step: plan.step, microbatches, target_tokens: plan.target_tokens, plan };
    let step = RoleStep::new(py, &iteration.config, &iteration.running, role, step)?;
    Ok(Bound::new(py, step)?.into_any())
}

/// Creates a `dflop.batches.Step`.
fn step<'py>(
    py: Python<'py>,
    iteration: &Arc<Iteration>,
    plan: Arc<StepPlan>,
    len: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let (makespan, bound) = (seconds(plan.makespan_ns), seconds(plan.bound.ns));
    let (digest, target_tokens) = (plan.digest.to_string(), plan.target_tokens);
    let step = plan.step;
    let microbatches = StepMicrobatches::new(py, Arc::clone(iteration), Arc::clone(&plan), len)?;
    let plan = PyStepPlan { plan };
    class(py, "Step")?.call1((step, microbatches, target_tokens, digest, makespan, bound, plan))
}
