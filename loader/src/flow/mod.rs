//! Bounds and counts what flows through a loader: bytes in memory, stage work, skipped samples, progress.

mod byte_budget;
mod job_queue;
mod metrics;
mod runtime;
mod skip_log;
mod source_meter;
mod sync;

pub(crate) use self::byte_budget::{ByteBudget, ByteLease, run_ahead};
pub(crate) use self::job_queue::{JobQueue, Jobs, Room};
pub(crate) use self::metrics::metered;
pub use self::metrics::{LoaderStage, Metrics, MetricsSnapshot, StageSnapshot};
pub(crate) use self::runtime::{cores, memory_available};
pub use self::runtime::{in_parallel, on_threads, start_runtime};
pub(crate) use self::skip_log::PrepareLog;
pub use self::skip_log::{ErrorBudget, PrepareReport, SkipCount, SkipListener, SkipLog, TruncatedSample};
pub(crate) use self::source_meter::SourceMeter;
pub use self::source_meter::SourceSnapshot;

/// Listener for progress; every method does nothing by default.
pub trait Progress: Send + Sync + std::fmt::Debug {
    /// Starts work on `total` units of `what`; 0 if the number is unknown.
    fn begin(&self, what: &str, total: u64) {
        let _ = (what, total);
    }

    /// Reports `units` more as done.
    fn advance(&self, units: u64) {
        let _ = units;
    }

    /// Ends the work, whether it is done or was abandoned.
    fn end(&self) {}
}

/// Listener that ignores all progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {}
