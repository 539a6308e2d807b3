//! Reports the progress of long work to a listener.

/// Listens to progress; every method does nothing by default.
pub trait Progress: Send + Sync + std::fmt::Debug {
    /// Work on `total` units of `what` begins; 0 if their number is not known.
    fn begin(&self, what: &str, total: u64) {
        let _ = (what, total);
    }

    /// `units` more are done.
    fn advance(&self, units: u64) {
        let _ = units;
    }

    /// The work is done, or was given up.
    fn end(&self) {}
}

/// Listens to nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {}
