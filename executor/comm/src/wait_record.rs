//! Waits outside of messages, on record as long as they last.

use std::any::Any;
use std::fmt;

/// Wait outside of messages, on record until it is dropped ([`Comm::record_wait`](crate::Comm::record_wait)).
#[must_use = "a wait is on record as long as this lives"]
pub struct WaitRecord {
    /// Ends the wait when it is dropped.
    end: Option<Box<dyn Any + Send + Sync>>,
}

impl WaitRecord {
    /// Makes a record that lasts as long as a value, which ends the wait when it is dropped.
    pub fn new(end: impl Any + Send + Sync) -> Self {
        Self { end: Some(Box::new(end)) }
    }

    /// Makes a record of nothing, for communicators that are never asked.
    pub const fn empty() -> Self {
        Self { end: None }
    }
}

impl fmt::Debug for WaitRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WaitRecord({})", if self.end.is_some() { "open" } else { "empty" })
    }
}
