//! Decides when a failed request is retried: a common policy for everything that uses a network.
//!
//! Store-level retries are disabled, so attempts and waits are counted only here. Time is the only limit, so
//! that a store that restarts does not end a run; a fault that no further attempt can change is final.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Error, ErrorKind};
use std::time::{Duration, Instant};

/// Number of bytes per deadline; longer reads have a proportionally longer deadline.
const DEADLINE_BYTES: u64 = 16 << 20;
/// Maximum number of attempts if not even a request could be sent, for example without credentials.
const UNSENT_ATTEMPTS_MAX: u32 = 3;

/// Waits between attempts: random between zero and a bound that doubles with every attempt ("full jitter").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Upper bound for the first wait.
    pub first: Duration,
    /// Upper bound for all waits, unless the server requests a longer wait.
    pub most: Duration,
}

/// Retry policy.
///
/// Rejected and reset connections, timeouts, bodies that end early, and the statuses 408, 425, 429 and 5xx
/// are retried; a `Retry-After` is honored. Any other 4xx, a rejected certificate and a redirection that is
/// not followed are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryConfig {
    /// Time in seconds for which requests in a read are retried, per 16 MiB of the read; 0 disables retries.
    /// Default: 300.
    pub retry_seconds: u64,
    /// Waits between attempts. Default: up to 100 ms, doubled up to 10 s.
    pub backoff: Backoff,
}

impl Default for RetryConfig {
    fn default() -> Self {
        let backoff = Backoff { first: Duration::from_millis(100), most: Duration::from_secs(10) };
        Self { retry_seconds: 300, backoff }
    }
}

/// Reason why an attempt failed.
#[derive(Debug)]
pub(crate) enum Fault {
    /// A further attempt may succeed.
    Transient { reason: String, retry_after: Option<Duration> },
    /// No request was sent, mostly for lack of credentials.
    Unsent { reason: String },
    /// A further attempt would fail in the same way.
    Final { kind: ErrorKind, reason: String },
}

impl Fault {
    pub(crate) fn transient(reason: impl Into<String>) -> Self {
        Self::Transient { reason: reason.into(), retry_after: None }
    }

    pub(crate) fn is_final(kind: ErrorKind, reason: impl Into<String>) -> Self {
        Self::Final { kind, reason: reason.into() }
    }
}

/// Wait before the next attempt.
#[derive(Debug)]
pub(crate) struct Wait {
    /// Wait duration.
    pub(crate) time: Duration,
    /// Time since the start of the read.
    pub(crate) elapsed: Duration,
    /// Reason for the last failure.
    pub(crate) reason: String,
}

/// Attempts during one read.
#[derive(Debug)]
pub(crate) struct Attempts {
    config: RetryConfig,
    started: Instant,
    deadline: Duration,
    /// Number of failed attempts since the last progress.
    failed: u32,
    total: u32,
}

impl Attempts {
    /// Starts the clock for a read with `bytes` bytes.
    pub(crate) fn new(config: RetryConfig, bytes: u64) -> Self {
        let parts = u32::try_from(bytes.div_ceil(DEADLINE_BYTES).max(1)).unwrap_or(u32::MAX);
        let deadline = Duration::from_secs(config.retry_seconds).saturating_mul(parts);
        Self { config, started: Instant::now(), deadline, failed: 0, total: 0 }
    }

    /// Resets the failed attempts, because bytes arrived.
    pub(crate) fn progress(&mut self) {
        self.failed = 0;
    }

    /// Returns the wait before the next attempt.
    ///
    /// # Errors
    /// The error to report if there must be no further attempt.
    pub(crate) fn next_wait(&mut self, fault: Fault) -> Result<Wait, Error> {
        self.failed += 1;
        self.total += 1;
        let (reason, retry_after, is_over) = match fault {
            Fault::Final { kind, reason } => return Err(Error::new(kind, reason)),
            Fault::Transient { reason, retry_after } => (reason, retry_after, false),
            Fault::Unsent { reason } => (reason, None, self.failed >= UNSENT_ATTEMPTS_MAX),
        };
        let time = self.backoff().max(retry_after.unwrap_or_default());
        let elapsed = self.started.elapsed();
        if is_over || elapsed + time > self.deadline {
            let (seconds, attempts) = (elapsed.as_secs_f64(), self.total);
            let given_up = if attempts == 1 {
                "at the first attempt".to_owned()
            } else {
                format!("after {attempts} attempts")
            };
            let reason =
                format!("{reason} (given up {given_up} in {seconds:.1} s; `retry_seconds` is the limit)");
            return Err(Error::new(ErrorKind::TimedOut, reason));
        }
        Ok(Wait { time, elapsed, reason })
    }

    fn backoff(&self) -> Duration {
        let Backoff { first, most } = self.config.backoff;
        let doublings = self.failed.saturating_sub(1).min(20);
        let bound = first.saturating_mul(1 << doublings).min(most);
        bound.mul_f64(random_fraction())
    }
}

/// Returns a random number from 0 to 1, so that ranks that failed together do not retry together.
fn random_fraction() -> f64 {
    (RandomState::new().build_hasher().finish() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(retry_seconds: u64) -> RetryConfig {
        RetryConfig { retry_seconds, ..RetryConfig::default() }
    }

    #[test]
    fn a_store_is_tried_for_minutes_and_not_at_all_without_time() {
        let mut attempts = Attempts::new(RetryConfig::default(), 1);
        for _ in 0..100 {
            assert!(attempts.next_wait(Fault::transient("refused")).is_ok());
        }
        let error = Attempts::new(config(0), 1).next_wait(Fault::transient("reset")).unwrap_err().to_string();
        assert!(error.contains("reset") && error.contains("at the first attempt"), "{error}");
    }

    #[test]
    fn a_request_that_is_never_sent_is_tried_three_times() {
        let mut attempts = Attempts::new(config(100), 1);
        let unsent = || Fault::Unsent { reason: "no credentials".into() };
        assert!(attempts.next_wait(unsent()).is_ok() && attempts.next_wait(unsent()).is_ok());
        let error = attempts.next_wait(unsent()).unwrap_err().to_string();
        assert!(error.contains("credentials") && error.contains("after 3 attempts"), "{error}");
    }

    #[test]
    fn waits_grow_are_random_and_bounded_and_honor_the_server() {
        let mut attempts = Attempts::new(config(100), 1);
        let mut next = || attempts.next_wait(Fault::transient("slow down")).unwrap().time;
        let waits: Vec<_> = (0..50).map(|_| next()).collect();
        assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(10)));
        assert!(waits[0] <= Duration::from_millis(100));
        assert!(waits[10..].iter().max().unwrap() > &Duration::from_secs(2));
        assert!(waits[10..].windows(2).any(|pair| pair[0] != pair[1]));
        attempts.progress();
        assert!(attempts.next_wait(Fault::transient("reset")).unwrap().time <= Duration::from_millis(100));
        let asked = Duration::from_secs(30);
        let fault = Fault::Transient { reason: String::new(), retry_after: Some(asked) };
        assert!(attempts.next_wait(fault).unwrap().time >= asked);
    }

    #[test]
    fn a_wait_beyond_the_deadline_is_not_begun() {
        let mut attempts = Attempts::new(config(180), 1);
        let retry_after = Some(Duration::from_secs(181));
        let error = attempts.next_wait(Fault::Transient { reason: "busy".into(), retry_after });
        assert!(error.unwrap_err().to_string().contains("busy"));
        let mut longer = Attempts::new(config(180), 17 << 20);
        assert!(longer.next_wait(Fault::Transient { reason: "busy".into(), retry_after }).is_ok());
    }

    #[test]
    fn what_is_final_is_not_tried_again() {
        let mut attempts = Attempts::new(config(100), 1);
        let error = attempts.next_wait(Fault::is_final(ErrorKind::NotFound, "gone")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
}
