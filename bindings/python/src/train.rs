//! Runs a training job of the executor from Python.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use dflop_executor::run::{Run, RunConfig, RunEnd, RunOptions, StopRequest, StopRequests};
use dflop_executor::train::{StepReport, StopReason};
use pyo3::prelude::*;
use pythonize::{depythonize, pythonize};

use crate::error::DflopError;
use crate::logging;

/// Interval after which a wait for a step lets Python handle signals.
const SIGNALS_SEEN_AFTER: Duration = Duration::from_millis(50);

/// Runs a job; its ranks are threads of this process, unless a launcher started this process as one of them.
///
/// Args:
///     config (str | dict): file of the configuration, or its tables.
///     until (int | None): step to end before.
///     resume (bool): whether to resume from the last saved state.
///     record (str | os.PathLike | None): file that steps are recorded in.
///     trace (str | os.PathLike | None): file for the timeline.
///     on_step (Callable): called with the report of each step, a ``dict``.
///
/// Raises:
///     ConfigError: the configuration is invalid.
///     Error: the run failed.
#[pyfunction]
#[pyo3(signature = (config, *, until, resume, record, trace, on_step))]
pub(crate) fn train(
    py: Python<'_>,
    config: Bound<'_, PyAny>,
    until: Option<u64>,
    resume: bool,
    record: Option<PathBuf>,
    trace: Option<PathBuf>,
    on_step: Bound<'_, PyAny>,
) -> PyResult<(u64, Option<PathBuf>)> {
    logging::install(py)?;
    let config = match config.extract::<PathBuf>() {
        Ok(file) => RunConfig::read(&file),
        Err(_) => RunConfig::from_json(&depythonize::<serde_json::Value>(&config)?.to_string()),
    };
    let is_stopped = Arc::new(AtomicBool::new(false));
    let stop = StopRequests::Check(stop_check(is_stopped.clone()));
    let options = RunOptions { until, resume, record, trace, stop, ..RunOptions::default() };
    let run = Run::new(config.map_err(DflopError::from)?, options);
    let (sender, steps) = channel();
    let thread = std::thread::Builder::new().name("dflop-train".to_owned()).spawn(move || {
        run.start(&mut |step| match sender.send(step.clone()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        })
    })?;
    follow(py, steps, &is_stopped, &on_step)?;
    let end = joined(py, thread)?;
    Ok((end.steps, end.checkpoint))
}

fn stop_check(is_stopped: Arc<AtomicBool>) -> StopRequest {
    Arc::new(move || is_stopped.load(Ordering::Relaxed).then_some(StopReason::OutputClosed))
}

/// Passes steps on until the run has ended. An exception stops the run after its current step, and is raised
/// when it has ended; one more, as of a second Ctrl-C, is raised at once, and the run ends by itself.
fn follow(
    py: Python<'_>,
    steps: Receiver<StepReport>,
    is_stopped: &AtomicBool,
    on_step: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let steps = std::sync::Mutex::new(steps);
    let mut raised: Option<PyErr> = None;
    loop {
        let next = py.detach(|| {
            steps
                .lock()
                .map_or(Err(RecvTimeoutError::Disconnected), |steps| steps.recv_timeout(SIGNALS_SEEN_AFTER))
        });
        logging::emit(py);
        let outcome = match next {
            Ok(_) if raised.is_some() => Ok(()),
            Ok(step) => {
                pythonize(py, &step).map_err(PyErr::from).and_then(|step| on_step.call1((step,)).map(drop))
            }
            Err(RecvTimeoutError::Timeout) => py.check_signals(),
            Err(RecvTimeoutError::Disconnected) => return raised.map_or(Ok(()), Err),
        };
        if let Err(error) = outcome {
            is_stopped.store(true, Ordering::Relaxed);
            if raised.replace(error).is_some() {
                return raised.map_or(Ok(()), Err);
            }
        }
    }
}

/// Waits for the thread of a run, whose last step was passed on.
fn joined(py: Python<'_>, thread: JoinHandle<dflop_executor::Result<RunEnd>>) -> PyResult<RunEnd> {
    let ended = py.detach(|| thread.join());
    logging::emit(py);
    let ended = ended.unwrap_or(Err(dflop_executor::Error::RankPanicked));
    Ok(ended.map_err(DflopError::from)?)
}
