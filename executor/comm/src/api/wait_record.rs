//! Recorded waits outside the message layer.

use std::any::Any;
use std::fmt;

/// Guard that records a wait outside the message layer until it is dropped
/// ([`Comm::record_wait`](crate::Comm::record_wait)).
#[must_use = "a wait is on record as long as this lives"]
pub struct WaitRecord {
    /// Ends the wait when it is dropped.
    end: Option<Box<dyn Any + Send + Sync>>,
}

impl WaitRecord {
    /// Creates a record that lasts as long as a value, whose drop ends the wait.
    pub fn new(end: impl Any + Send + Sync) -> Self {
        Self { end: Some(Box::new(end)) }
    }

    /// Creates an empty record, for communicators whose status is never requested.
    pub const fn empty() -> Self {
        Self { end: None }
    }
}

impl fmt::Debug for WaitRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WaitRecord({})", if self.end.is_some() { "open" } else { "empty" })
    }
}
