//! Retries requests by what their answers say.
//!
//! Store-level retries are disabled, so attempts and waits are counted only here. Time is the only limit, so
//! that a store that restarts does not end a run; a fault that no further attempt can change is final.

use super::redact::redact;
use super::url::StoreKind;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Error, ErrorKind};
use std::sync::Mutex;
#[cfg(feature = "remote")]
use std::time::SystemTime;
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
mod answer_tests {
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

/// Classifies an error by status, or by kind if no response was seen.
pub(super) fn store_fault(error: &object_store::Error, notes: Notes, store: StoreKind) -> Fault {
    let reason = short_reason(error);
    if let Some(permanent) = permanent_cause(error) {
        return permanent;
    }
    match notes.status {
        Some(412) => replaced(),
        Some(408 | 429 | 500..) => Fault::Transient { reason, retry_after: notes.retry_after },
        Some(404 | 410) => Fault::is_final(ErrorKind::NotFound, reason),
        Some(401 | 403) => {
            let reason = format!("{reason}; {}", store.credentials_hint());
            Fault::is_final(ErrorKind::PermissionDenied, reason)
        }
        Some(416) => Fault::is_final(
            ErrorKind::UnexpectedEof,
            format!("{reason}; the object is shorter than expected"),
        ),
        // The response was successful, but its headers could not be used.
        Some(200..300) => Fault::is_final(ErrorKind::InvalidData, reason),
        Some(_) => Fault::is_final(ErrorKind::Other, reason),
        None if notes.is_sent => Fault::transient(reason),
        None => unsent(error, reason, store),
    }
}

/// Returns the fault for a request that would fail in the same way again, by the error causes: TLS that does
/// not accept the other side, or a redirection that is not followed.
#[cfg(feature = "remote")]
pub(super) fn permanent_cause(error: &(dyn std::error::Error + 'static)) -> Option<Fault> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(tls) = cause.downcast_ref::<rustls::Error>() {
            let advice = "check the host name, and that the certificate and its issuer are trusted here";
            let refused =
                || Fault::is_final(ErrorKind::PermissionDenied, format!("TLS is refused: {tls}; {advice}"));
            return is_refusal(tls).then(refused);
        }
        // An address that allows no request mostly comes from a redirection, too.
        if cause
            .downcast_ref::<reqwest::Error>()
            .is_some_and(|error| error.is_redirect() || error.is_builder())
        {
            let advice = "redirections end after ten, and never lead from https to http";
            return Some(Fault::is_final(ErrorKind::Other, format!("{}; {advice}", short_reason(error))));
        }
        // An I/O error's `source` skips its direct cause.
        let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = inner.map_or_else(|| cause.source(), |inner| Some(inner));
    }
    None
}

#[cfg(not(feature = "remote"))]
pub(super) fn permanent_cause(_error: &(dyn std::error::Error + 'static)) -> Option<Fault> {
    None
}

/// Returns whether a TLS side rejects its peer, and will do so again.
#[cfg(feature = "remote")]
fn is_refusal(error: &rustls::Error) -> bool {
    use rustls::{AlertDescription as Alert, Error as Tls, InvalidMessage};
    match error {
        Tls::InvalidCertificate(_)
        | Tls::InvalidCertRevocationList(_)
        | Tls::NoCertificatesPresented
        | Tls::UnsupportedNameType
        | Tls::PeerIncompatible(_)
        // A server that does not speak TLS.
        | Tls::InvalidMessage(InvalidMessage::InvalidContentType) => true,
        Tls::AlertReceived(alert) => matches!(
            alert,
            Alert::HandshakeFailure
                | Alert::ProtocolVersion
                | Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::CertificateRequired
                | Alert::UnknownCA
                | Alert::AccessDenied
                | Alert::InsufficientSecurity
                | Alert::UnrecognisedName
        ),
        _ => false,
    }
}

/// Classifies the error from an unobserved request: a listing, a write, or an operation without network.
pub(super) fn unwatched(error: &object_store::Error, store: StoreKind) -> Fault {
    if let Some(permanent) = permanent_cause(error) {
        return permanent;
    }
    match error {
        object_store::Error::Generic { .. } => Fault::transient(short_reason(error)),
        _ => unsent(error, short_reason(error), store),
    }
}

fn unsent(error: &object_store::Error, reason: String, store: StoreKind) -> Fault {
    use object_store::Error as Store;
    match error {
        // Requests to registered stores are not observed: they may have been sent.
        Store::Generic { .. } if store == StoreKind::Registered => Fault::transient(reason),
        Store::Generic { .. } => Fault::Unsent { reason: format!("{reason}; {}", store.credentials_hint()) },
        Store::NotFound { .. } => Fault::is_final(ErrorKind::NotFound, reason),
        Store::Precondition { .. } => replaced(),
        Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => {
            Fault::is_final(ErrorKind::PermissionDenied, format!("{reason}; {}", store.credentials_hint()))
        }
        _ => Fault::is_final(ErrorKind::Other, reason),
    }
}

/// Returns the fault for an object that was replaced.
pub(super) fn replaced() -> Fault {
    other_version("the server has another version")
}

/// Returns the fault for an object that was replaced, with the observed difference.
pub(super) fn other_version(difference: &str) -> Fault {
    let reason = format!(
        "the object was replaced while it was read ({difference}); leave shards in place and index them again"
    );
    Fault::is_final(ErrorKind::InvalidData, reason)
}

/// Returns an error with its causes, without credentials, and shortened, because a server may send a whole
/// page.
pub(super) fn short_reason(error: &dyn std::error::Error) -> String {
    const CHARACTERS_MAX: usize = 400;
    let reason = crate::error::error_reason(error);
    let line = redact(&reason).split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(CHARACTERS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Returns whether the error is that of a missing object.
pub(super) fn is_missing(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound
}

#[cfg(all(test, feature = "remote"))]
mod tls_tests {
    use rustls::{CertificateError, Error as Tls};

    use super::*;

    /// Error from a store whose connection fails in TLS.
    fn failed(tls: Tls) -> object_store::Error {
        let connection = io::Error::other(io::Error::new(ErrorKind::InvalidData, tls));
        object_store::Error::Generic { store: "S3", source: Box::new(connection) }
    }

    #[test]
    fn a_certificate_that_is_refused_is_final_and_a_broken_connection_is_not() {
        let sent = Notes { is_sent: true, ..Notes::default() };
        let refused = failed(Tls::InvalidCertificate(CertificateError::UnknownIssuer));
        for fault in [store_fault(&refused, sent, StoreKind::S3), unwatched(&refused, StoreKind::S3)] {
            let Fault::Final { reason, .. } = fault else { panic!("{fault:?}") };
            assert!(reason.starts_with("TLS is refused") && reason.contains("certificate"), "{reason}");
        }
        let broken = failed(Tls::DecryptError);
        assert!(matches!(store_fault(&broken, sent, StoreKind::S3), Fault::Transient { .. }));
    }
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
