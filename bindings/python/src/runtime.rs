//! Runs waits on a Tokio runtime, lets Ctrl-C interrupt them, and rejects use after a fork.
//!
//! Reads the settings dataclasses in `dflop.settings`, field by field.
//!
//! Threads do not exist in a forked process, so waiting for a thread that was started before the fork would
//! never end. Every object with threads therefore records the process, and rejects use in any other process.

use super::error::DflopError;
use super::logging;
use dflop_loader::Error;
use dflop_loader::flow::start_runtime;
use dflop_loader::settings::{names, set};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PySequence, PyString};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Number, Value};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

/// Interval after which a wait lets Python handle signals.
const SIGNALS_SEEN_AFTER: Duration = Duration::from_millis(50);

static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();

/// Returns this process's runtime. It does I/O and hands over, so two threads suffice.
fn runtime(py: Python<'_>) -> PyResult<&'static Runtime> {
    if RUNTIME.get().is_none() {
        logging::install(py)?;
        // If two runtimes are started at the same time, one is dropped.
        let _other = RUNTIME.set((std::process::id(), start_runtime("dflop", 2)?));
    }
    match RUNTIME.get() {
        Some((process, runtime)) if *process == std::process::id() => Ok(runtime),
        _ => Err(DflopError::forked().into()),
    }
}

/// Waits for a future with the interpreter released.
///
/// # Errors
/// The exception from a signal handler, such as `KeyboardInterrupt`, which drops the future; `ForkError`
/// after a fork.
pub(crate) fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let runtime = runtime(py)?;
    let mut future = pin!(future);
    loop {
        let waited =
            || runtime.block_on(async { tokio::time::timeout(SIGNALS_SEEN_AFTER, future.as_mut()).await });
        // The interpreter is released during the wait, and held to check for signals.
        let waited = py.detach(waited);
        logging::emit(py);
        match waited {
            Ok(done) => return Ok(done),
            Err(_) => py.check_signals()?,
        }
    }
}

/// Runs blocking work on another thread with the interpreter released. After a signal the work continues
/// unobserved.
///
/// # Errors
/// The errors of [`wait`], and the work's errors.
pub(crate) fn run<T: Send + 'static, E: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> PyResult<T>
where
    PyErr: From<E>,
{
    let working = runtime(py)?.spawn_blocking(work);
    let done = wait(py, working)?;
    match done {
        Ok(done) => done.map_err(PyErr::from),
        Err(_) => Err(DflopError::from(dflop_loader::Error::StageEnded { stage: "background" }).into()),
    }
}

/// Value with threads, which can be closed; after a fork, the value is neither used nor waited for.
#[derive(Debug)]
pub(crate) struct Threaded<T> {
    process: u32,
    /// The value; `None` once closed.
    inner: Mutex<Option<Arc<T>>>,
    /// Wakes waits when the value is closed.
    closing: Notify,
}

impl<T> Threaded<T> {
    pub(crate) fn new(inner: T) -> Self {
        let inner = Mutex::new(Some(Arc::new(inner)));
        Self { process: std::process::id(), inner, closing: Notify::new() }
    }

    /// # Errors
    /// `ForkError` in a fork of the process that created the value; `Error` once the value is closed.
    pub(crate) fn get(&self) -> PyResult<Arc<T>> {
        if self.process != std::process::id() {
            return Err(DflopError::forked().into());
        }
        self.lock().clone().ok_or_else(|| DflopError::closed().into())
    }

    /// Drops the value and the threads, and ends waits for the value.
    pub(crate) fn close(&self, py: Python<'_>)
    where
        T: Send + Sync,
    {
        if self.process == std::process::id() {
            let inner = self.lock().take();
            self.closing.notify_waiters();
            // Threads that end may wait for the interpreter.
            py.detach(|| drop(inner));
        }
    }

    /// Waits for work with the value, with the interpreter released.
    ///
    /// # Errors
    /// The errors of [`Self::get`] and [`wait`].
    pub(crate) fn wait<R: Send, F: Future<Output = R> + Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(Arc<T>) -> F,
    ) -> PyResult<R>
    where
        T: Send + Sync,
    {
        let mut closing = pin!(self.closing.notified());
        // Before the value is looked up, so that no close is missed.
        closing.as_mut().enable();
        let work = work(self.get()?);
        let done = wait(py, async {
            tokio::select! {
                biased;
                () = closing => None,
                done = work => Some(done),
            }
        })?;
        done.ok_or_else(|| DflopError::closed().into())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<T>>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for Threaded<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Dropping would join threads that do not exist in this process.
            std::mem::forget(self.lock().take());
        }
    }
}

/// Module with the dataclasses.
const MODULE: &str = "dflop.settings";

/// A settings dataclass, such as `dflop.Plan`.
pub(crate) struct Group<'py> {
    object: Bound<'py, PyAny>,
    class: &'static str,
}

impl<'py> Group<'py> {
    /// Creates a group from a keyword's argument; without an argument, all fields have the default.
    ///
    /// # Errors
    /// `TypeError` for an object of any other class.
    pub(crate) fn new(
        py: Python<'py>,
        keyword: &str,
        given: Option<&Bound<'py, PyAny>>,
        class: &'static str,
    ) -> PyResult<Self> {
        let of = py.import(MODULE)?.getattr(class)?;
        let Some(object) = given else { return Ok(Self { object: of.call0()?, class }) };
        if !object.is_instance(&of)? {
            let found = object.get_type().name()?;
            let message = format!("expected `{keyword}` to be a `dflop.{class}`, found {found}");
            return Err(PyTypeError::new_err(message));
        }
        Ok(Self { object: object.clone(), class })
    }

    /// Reads a field.
    ///
    /// # Errors
    /// The conversion error, with the field in the message.
    pub(crate) fn get<T: FromPyObjectOwned<'py>>(&self, field: &str) -> PyResult<T> {
        self.object.getattr(field)?.extract::<T>().map_err(|error| self.wrong(field, &error.into()))
    }

    /// Reads all fields that the library declares, with the defaults of the dataclass.
    ///
    /// # Errors
    /// `TypeError` and `OverflowError` for a value of another type, `ConfigError` for a value that the
    /// setting does not have, with the field in the message.
    pub(crate) fn settings<S: Serialize + DeserializeOwned + Default>(&self) -> PyResult<S> {
        let mut settings = S::default();
        for &field in names::<S>() {
            // Settings of commands alone are not in the dataclasses.
            let Some(value) = self.object.getattr_opt(field)? else { continue };
            let value = plain(&value).map_err(|error| self.wrong(field, &error))?;
            if let Err(error) = set(&mut settings, field, value) {
                return Err(match &error {
                    Error::Config { reason, .. } if reason.starts_with("invalid type") => {
                        self.wrong(field, &PyTypeError::new_err(reason.clone()))
                    }
                    Error::Config { reason, .. } if reason.starts_with("invalid value: integer") => {
                        self.wrong(field, &PyOverflowError::new_err(reason.clone()))
                    }
                    _ => DflopError::from(error).into(),
                });
            }
        }
        Ok(settings)
    }

    fn wrong(&self, field: &str, error: &PyErr) -> PyErr {
        let py = self.object.py();
        let message = format!("`{field}` of `dflop.{}`: {}", self.class, error.value(py));
        PyErr::from_type(error.get_type(py), message)
    }
}

/// Converts a number, a text, a path, a list of these, or `None`; NumPy's numbers are numbers.
fn plain(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Null);
    }
    if value.is_instance_of::<PyBool>() || value.is_instance_of::<PyString>() {
        return Ok(pythonize::depythonize(value)?);
    }
    if value.hasattr("__index__")? {
        return match value.extract::<u64>() {
            Ok(number) => Ok(number.into()),
            Err(_) => Ok(value.extract::<i64>()?.into()),
        };
    }
    if value.hasattr("__float__")? {
        let number = value.extract::<f64>()?;
        return Ok(Number::from_f64(number).map_or_else(|| number.to_string().into(), Value::Number));
    }
    if value.hasattr("__fspath__")? {
        return Ok(value.extract::<PathBuf>()?.display().to_string().into());
    }
    if value.cast::<PySequence>().is_ok() {
        return value
            .try_iter()?
            .map(|part| plain(&part?))
            .collect::<PyResult<Vec<Value>>>()
            .map(Value::from);
    }
    Err(PyTypeError::new_err(format!(
        "expected a number, a text or a list, found {}",
        value.get_type().name()?
    )))
}

/// Refuses keywords that a loader or dataset does not have, with the dataclass of the setting if it has one.
pub(crate) fn refuse_keywords(
    py: Python<'_>,
    loader: &str,
    unknown: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let Some(unknown) = unknown else { return Ok(()) };
    py.import(MODULE)?.call_method1("refuse_keywords", (loader, unknown)).map(drop)
}

/// Returns the error for a loader that is indexed.
pub(crate) fn refuse_index(loader: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "a {loader} is iterated, and has no items by index: for a DataLoader wrap it, \
         DataLoader(dflop.torch.IterableDataset(loader), batch_size=None, num_workers=0)"
    ))
}
