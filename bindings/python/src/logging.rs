//! Sends the events of the crates to the logger `dflop` of Python's `logging`.
//!
//! An event happens on any thread, which must not wait for the interpreter: the caller that holds it may wait
//! for that thread. Events are therefore queued, with the time at which they happened, and logged by the next
//! thread that waits for the package, at the latest when Python ends. Python decides which levels are
//! handled.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use dflop_loader::store::redact;
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Name of the logger.
const LOGGER: &str = "dflop";
/// Maximum number of queued events; later events are counted.
const QUEUED_MAX: usize = 1_000;
/// Start of the targets of all crates here; dependencies log nothing.
const TARGETS: &str = "dflop";

/// Queued events.
static QUEUE: Mutex<Queue> = Mutex::new(Queue { events: VecDeque::new(), lost: 0 });
/// Whether there is an event in the queue.
static HAS_EVENTS: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct Queue {
    events: VecDeque<Logged>,
    /// Number of events that found the queue full.
    lost: u64,
}

/// Event, as a log record has it.
#[derive(Debug)]
struct Logged {
    level: u8,
    message: String,
    /// Seconds since 1970-01-01 UTC.
    seconds: f64,
    file: &'static str,
    line: u32,
    module: &'static str,
}

/// Sends events to `logging` from now on, unless the process has a `tracing` subscriber, as the command line
/// has, which prints them.
pub(crate) fn install(py: Python<'_>) -> PyResult<()> {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    let mut is_first = false;
    let is_installed = INSTALLED.get_or_init(|| {
        is_first = true;
        tracing::subscriber::set_global_default(ToLogging).is_ok()
    });
    if is_first && *is_installed {
        let at_exit = wrap_pyfunction!(log_queued, py)?;
        py.import("atexit")?.call_method1("register", (at_exit,))?;
    }
    Ok(())
}

/// Logs what is queued when Python ends.
#[pyfunction]
fn log_queued(py: Python<'_>) {
    emit(py);
}

/// Logs the queued events. An exception from user code, such as a filter, is reported as unraisable.
pub(crate) fn emit(py: Python<'_>) {
    if !HAS_EVENTS.load(Ordering::Acquire) {
        return;
    }
    // Not held while handlers run: they may call the package.
    let (events, lost) = {
        let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
        HAS_EVENTS.store(false, Ordering::Release);
        (std::mem::take(&mut queue.events), std::mem::take(&mut queue.lost))
    };
    if let Err(error) = log(py, events, lost) {
        error.write_unraisable(py, None);
    }
}

fn log(py: Python<'_>, events: VecDeque<Logged>, lost: u64) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", (LOGGER,))?;
    for event in events {
        if !logger.call_method1("isEnabledFor", (event.level,))?.is_truthy()? {
            continue;
        }
        let (file, line, module) = (event.file, event.line, event.module);
        let record = logger.call_method1(
            "makeRecord",
            (LOGGER, event.level, file, line, event.message, py.None(), py.None(), module),
        )?;
        record.setattr("created", event.seconds)?;
        record.setattr("msecs", event.seconds.fract() * 1e3)?;
        logger.call_method1("handle", (record,))?;
    }
    if lost > 0 {
        logger.call_method1("warning", (format!("{lost} further events were not logged"),))?;
    }
    Ok(())
}

/// Queues the events of the crates.
struct ToLogging;

impl Subscriber for ToLogging {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::DEBUG && metadata.target().starts_with(TARGETS)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::DEBUG)
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut text = EventText::default();
        event.record(&mut text);
        let message = text.message + &text.fields;
        let logged = Logged {
            level: level(*metadata.level()),
            message: redact(&message).into_owned(),
            seconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64()),
            file: metadata.file().unwrap_or_default(),
            line: metadata.line().unwrap_or_default(),
            module: metadata.target(),
        };
        let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.events.len() < QUEUED_MAX {
            queue.events.push_back(logged);
        } else {
            queue.lost += 1;
        }
        HAS_EVENTS.store(true, Ordering::Release);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Returns the level of `logging`.
fn level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        _ => 10,
    }
}

/// The message of an event, and its fields as ` name=value`.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // A string can be written.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
