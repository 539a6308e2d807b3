//! What a request and its response were like, noted below the store that hides it.

use std::sync::Mutex;
use std::time::Duration;

/// Longest wait that a server may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_mins(2);

/// Notes of the last request that carried this.
#[derive(Debug, Default)]
pub(super) struct Observed(Mutex<Notes>);

/// What was noted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Notes {
    /// Whether a request was sent at all.
    pub(super) is_sent: bool,
    /// Status of the response.
    pub(super) status: Option<u16>,
    /// How long the server asks to wait.
    pub(super) retry_after: Option<Duration>,
    /// Whether the server sent the whole object instead of a range.
    pub(super) is_range_ignored: bool,
}

#[cfg_attr(not(feature = "remote"), expect(dead_code, reason = "without HTTP nothing is observed"))]
impl Observed {
    pub(super) fn sent(&self) {
        self.update(|notes| notes.is_sent = true);
    }

    pub(super) fn answered(&self, status: u16, retry_after: Option<&str>) {
        let wait = retry_after.and_then(|value| value.trim().parse().ok()).map(Duration::from_secs);
        self.update(|notes| {
            notes.status = Some(status);
            notes.retry_after = wait.map(|wait| wait.min(RETRY_AFTER_MAX));
        });
    }

    pub(super) fn range_was_ignored(&self) {
        self.update(|notes| notes.is_range_ignored = true);
    }

    fn update(&self, change: impl FnOnce(&mut Notes)) {
        change(&mut self.0.lock().expect("no holder panics"));
    }
}

impl Observed {
    pub(super) fn notes(&self) -> Notes {
        *self.0.lock().expect("no holder panics")
    }
}
