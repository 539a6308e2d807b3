//! Bounds and counts what flows through a loader: bytes in memory, work of each stage, skipped samples,
//! progress.

mod byte_budget;
mod metrics;
mod progress;
mod skip_log;

pub(crate) use self::byte_budget::{ByteBudget, ByteLease, run_ahead};
pub(crate) use self::metrics::metered;
pub use self::metrics::{LoaderStage, Metrics, MetricsSnapshot, StageSnapshot};
pub use self::progress::{NoProgress, Progress};
pub use self::skip_log::{ErrorBudget, SkipCount, SkipListener, SkipLog};
