//! Builds the remote store handle from settings.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::coalesce::CoalesceLimits;
use super::local::ReadMode;
use super::registry::{ShardStore, StoreRegistry};
use super::retry::RetryConfig;
use crate::error::{Error, Result, check_at_most};

/// Maximum number of requests that may be in flight.
const REQUESTS_MAX: u64 = 1 << 16;

/// Directory in which whole remote shards are cached, shared by all processes on a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardCache {
    /// Directory path; created if missing.
    pub directory: PathBuf,
    /// Maximum size of cached shards in bytes; exceeded at most by the reservations for running downloads.
    pub bytes_max: u64,
}

/// Builder of [`Stores`](super::Stores).
#[derive(Debug, Clone)]
pub struct StoresBuilder {
    pub(super) retry: RetryConfig,
    pub(super) requests_max: usize,
    pub(super) request_timeout: Duration,
    pub(super) coalesce: CoalesceLimits,
    pub(super) chunk_bytes: u64,
    pub(super) cache: Option<ShardCache>,
    pub(super) read: ReadMode,
    /// User code stores.
    pub(super) registry: StoreRegistry,
}

impl Default for StoresBuilder {
    fn default() -> Self {
        Self {
            retry: RetryConfig::default(),
            requests_max: 256,
            request_timeout: Duration::from_secs(30),
            coalesce: CoalesceLimits { gap_bytes_max: 256 << 10, request_bytes_max: 16 << 20 },
            chunk_bytes: 8 << 20,
            cache: None,
            read: ReadMode::Auto,
            registry: StoreRegistry::default(),
        }
    }
}

impl StoresBuilder {
    /// Sets the retry policy.
    #[must_use]
    pub fn retry(mut self, config: RetryConfig) -> Self {
        self.retry = config;
        self
    }

    /// Sets the maximum number of requests in flight. Default: 256.
    #[must_use]
    pub fn requests_max(mut self, requests: usize) -> Self {
        self.requests_max = requests;
        self
    }

    /// Sets how long a failing store is retried, in seconds per 16 MiB of a read; 0 disables retries.
    /// Default: 300.
    #[must_use]
    pub fn retry_seconds(mut self, seconds: u64) -> Self {
        self.retry.retry_seconds = seconds;
        self
    }

    /// Sets the timeout for a request, including its body; bytes received until then are kept and the rest is
    /// requested again. Default: 30 s.
    #[must_use]
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Sets the maximum number of unwanted bytes between two fields that are read to save a request. Default:
    /// 256 KiB.
    #[must_use]
    pub fn gap_bytes_max(mut self, bytes: u64) -> Self {
        self.coalesce.gap_bytes_max = bytes;
        self
    }

    /// Sets the maximum size of a request for several fields. Default: 16 MiB.
    #[must_use]
    pub fn request_bytes_max(mut self, bytes: u64) -> Self {
        self.coalesce.request_bytes_max = bytes;
        self
    }

    /// Sets the number of bytes per request when a whole shard is read. Default: 8 MiB.
    #[must_use]
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = bytes;
        self
    }

    /// Caches whole shards on a local disk. Default: no cache.
    #[must_use]
    pub fn cache(mut self, cache: ShardCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Sets how local and cached shards are read. Default: [`ReadMode::Auto`].
    #[must_use]
    pub fn read(mut self, read: ReadMode) -> Self {
        self.read = read;
        self
    }

    /// Adds a user code store for all URLs `SCHEME://BUCKET/KEY`; it also replaces a built-in store. Default:
    /// S3, Google Cloud Storage, Azure and HTTP.
    ///
    /// [`Self::build`] returns [`Error::Config`] if `scheme` is not a URL scheme, or is `file`.
    #[must_use]
    pub fn store(mut self, scheme: impl Into<String>, store: Arc<dyn ShardStore>) -> Self {
        self.registry.insert(scheme.into(), store);
        self
    }

    /// Checks the settings.
    pub(super) fn check(&self) -> Result<()> {
        let zero = |setting| Err(Error::Config { setting, reason: "must be at least 1".into() });
        if self.requests_max == 0 {
            return zero("requests_max");
        }
        if self.chunk_bytes == 0 || self.coalesce.request_bytes_max == 0 {
            return zero("chunk_bytes and request_bytes_max");
        }
        if self.request_timeout.is_zero() {
            return zero("request_timeout");
        }
        self.registry.check()?;
        check_at_most("requests_max", self.requests_max as u64, REQUESTS_MAX)?;
        Ok(())
    }
}
