//! Configures remote stores.

use std::path::PathBuf;
use std::time::Duration;

use super::coalesce::CoalesceLimits;
use super::retry::RetryConfig;
use super::stores::Stores;
use crate::error::{Error, Result, check_at_most};

/// Most requests that may be in flight.
const REQUESTS_MAX: u64 = 1 << 16;

/// A directory in which whole remote shards are kept, shared by all processes of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardCache {
    /// The directory; made if it is not there.
    pub directory: PathBuf,
    /// Most bytes that the kept shards take; exceeded by no more than what running downloads have reserved.
    pub bytes_max: u64,
}

/// Settings of [`Stores`].
#[derive(Debug, Clone)]
pub struct StoresBuilder {
    pub(super) retry: RetryConfig,
    pub(super) requests_max: usize,
    pub(super) request_timeout: Duration,
    pub(super) coalesce: CoalesceLimits,
    pub(super) chunk_bytes: u64,
    pub(super) cache: Option<ShardCache>,
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
        }
    }
}

impl StoresBuilder {
    /// Sets how failed requests are tried again.
    #[must_use]
    pub fn retry(mut self, config: RetryConfig) -> Self {
        self.retry = config;
        self
    }

    /// Sets how many requests may be in flight. Default: 256.
    #[must_use]
    pub fn requests_max(mut self, requests: usize) -> Self {
        self.requests_max = requests;
        self
    }

    /// Sets how long one request may take, its body included; what came until then is kept and the rest asked
    /// for again. Default: 30 s.
    #[must_use]
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Sets how many unwanted bytes between two fields are read to save a request. Default: 256 KiB.
    #[must_use]
    pub fn gap_bytes_max(mut self, bytes: u64) -> Self {
        self.coalesce.gap_bytes_max = bytes;
        self
    }

    /// Sets the largest request that several fields share. Default: 16 MiB.
    #[must_use]
    pub fn request_bytes_max(mut self, bytes: u64) -> Self {
        self.coalesce.request_bytes_max = bytes;
        self
    }

    /// Sets how many bytes of a shard one request reads where it is read whole. Default: 8 MiB.
    #[must_use]
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = bytes;
        self
    }

    /// Keeps whole shards on a local disk. Default: no cache.
    #[must_use]
    pub fn cache(mut self, cache: ShardCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Checks the settings; opens the cache's directory. No store is contacted.
    ///
    /// # Errors
    /// [`Error::Config`] if a number is zero or absurdly large, [`Error::File`] if the cache's directory
    /// cannot be used.
    pub fn build(self) -> Result<Stores> {
        let zero = |setting| Err(Error::Config { setting, reason: "must be at least 1".into() });
        if self.requests_max == 0 {
            return zero("requests_max");
        }
        if self.retry.attempts_max == 0 {
            return zero("attempts_max");
        }
        if self.chunk_bytes == 0 || self.coalesce.request_bytes_max == 0 {
            return zero("chunk_bytes and request_bytes_max");
        }
        if self.request_timeout.is_zero() {
            return zero("request_timeout");
        }
        check_at_most("requests_max", self.requests_max as u64, REQUESTS_MAX)?;
        Stores::new(self)
    }
}
