//! Records response status and headers below the store, which hides them.

use std::sync::Mutex;
use std::time::Duration;
#[cfg(feature = "remote")]
use std::time::SystemTime;

/// Maximum wait that a server may request.
#[cfg(feature = "remote")]
const RETRY_AFTER_MAX: Duration = Duration::from_mins(2);

/// Record for the last request that carried it.
#[derive(Debug, Default)]
pub(super) struct Observed(Mutex<Notes>);

/// Status and headers recorded for the last response.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Notes {
    /// Whether a request was sent at all.
    pub(super) is_sent: bool,
    /// Response status.
    pub(super) status: Option<u16>,
    /// Wait that the server requests.
    pub(super) retry_after: Option<Duration>,
    /// Whether the server sent the whole object instead of a range.
    pub(super) is_range_ignored: bool,
}

#[cfg(feature = "remote")]
impl Observed {
    pub(super) fn sent(&self) {
        self.update(|notes| notes.is_sent = true);
    }

    pub(super) fn answered(&self, status: u16, retry_after: Option<&str>) {
        let retry_after = retry_after.and_then(wait_asked_for);
        self.update(|notes| (notes.status, notes.retry_after) = (Some(status), retry_after));
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

/// Returns the wait that a `Retry-After` value requests, if valid, at most [`RETRY_AFTER_MAX`].
#[cfg(feature = "remote")]
pub(super) fn wait_asked_for(value: &str) -> Option<Duration> {
    wait_from(value, SystemTime::now()).map(|wait| wait.min(RETRY_AFTER_MAX))
}

/// Parses `Retry-After`: a number of seconds, or the date for the next attempt (RFC 9110, section 10.2.3).
#[cfg(feature = "remote")]
fn wait_from(value: &str, now: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = value.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value.trim()).ok()?;
    // A date in the past requests no wait.
    Some(date.duration_since(now).unwrap_or(Duration::ZERO))
}

#[cfg(all(test, feature = "remote"))]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        let wait = |value: &str| wait_from(value, now).map(|wait| wait.as_secs());
        assert_eq!(wait(" 120 "), Some(120));
        assert_eq!(wait("Sun, 06 Nov 1994 08:50:07 GMT"), Some(30));
        assert_eq!(wait("Sun, 06 Nov 1994 08:00:00 GMT"), Some(0));
        assert_eq!(wait("soon"), None);
        assert_eq!(wait("-3"), None);
    }
}
