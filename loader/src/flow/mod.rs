//! Bounds and counts what flows through a loader: bytes in memory, stage work, skipped samples, progress.

mod byte_budget;
mod job_queue;
mod memory;
mod metrics;
mod prepare_report;
mod progress;
mod runtime;
mod skip_log;
mod source_meter;
mod sync;

pub(crate) use self::byte_budget::{ByteBudget, ByteLease, run_ahead};
pub(crate) use self::job_queue::{JobQueue, Jobs, Room};
pub(crate) use self::memory::memory_available;
pub(crate) use self::metrics::metered;
pub use self::metrics::{LoaderStage, Metrics, MetricsSnapshot, StageSnapshot};
pub(crate) use self::prepare_report::PrepareLog;
pub use self::prepare_report::{PrepareReport, TruncatedSample};
pub use self::progress::{NoProgress, Progress};
pub(crate) use self::runtime::cores;
pub use self::runtime::{in_parallel, on_threads, start_runtime};
pub use self::skip_log::{ErrorBudget, SkipCount, SkipListener, SkipLog};
pub(crate) use self::source_meter::SourceMeter;
pub use self::source_meter::SourceSnapshot;
