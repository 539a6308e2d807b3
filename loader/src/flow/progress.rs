//! Reports the progress of long work to a listener.

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
