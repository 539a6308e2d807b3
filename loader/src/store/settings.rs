//! Builds the remote store handle from settings.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use object_store::ObjectStore;

use super::answer::CoalesceLimits;
use super::local::ReadMode;
use super::retry::RetryConfig;
use super::url::is_remote;
use crate::error::{BoxError, Error, Result, check_at_most};

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

/// Shard store provided by user code, for URLs with a specific scheme.
///
/// Reads keep the [`Stores`](super::Stores) settings: a failed read is retried from the last received byte,
/// requests are limited and coalesced, and whole shards are cached, so the store need not retry reads.
/// Uploads are not retried here: a store that accepts uploads retries them itself.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use dflop_loader::store::{ShardStore, Stores, object_store};
/// use object_store::{ObjectStore, memory::InMemory};
///
/// /// Shards in memory, `memory://NAME/shard.tar`; one store for all names.
/// struct Memory(Arc<InMemory>);
///
/// impl ShardStore for Memory {
///     fn open(&self, _root: &str) -> Result<Arc<dyn ObjectStore>, dflop_loader::error::BoxError> {
///         Ok(self.0.clone())
///     }
/// }
///
/// # fn main() -> dflop_loader::Result<()> {
/// let stores = Stores::builder().store("memory", Arc::new(Memory(Arc::default()))).build()?;
/// # Ok(())
/// # }
/// ```
pub trait ShardStore: Send + Sync {
    /// Opens the store that contains all objects below a root, without contacting it. The store is kept for
    /// further shards below the root; threads that need it at the same time may open it more than once.
    ///
    /// - `root`: scheme and bucket, `memory://NAME`
    ///
    /// # Errors
    /// The reason why the store is not configured.
    fn open(&self, root: &str) -> Result<Arc<dyn ObjectStore>, BoxError>;
}

/// Store for schemes that no other store has.
static OTHER_SCHEMES: OnceLock<Arc<dyn ShardStore>> = OnceLock::new();

/// Lets a store serve the URLs in this process whose scheme is neither built in nor registered by
/// [`StoresBuilder::store`]. The first store of a process stays.
pub fn serve_other_schemes(store: Arc<dyn ShardStore>) {
    let _kept = OTHER_SCHEMES.set(store);
}

/// User code stores, by scheme.
#[derive(Clone, Default)]
pub(super) struct StoreRegistry {
    stores: BTreeMap<String, Arc<dyn ShardStore>>,
}

impl fmt::Debug for StoreRegistry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_set().entries(self.stores.keys()).finish()
    }
}

impl StoreRegistry {
    pub(super) fn insert(&mut self, scheme: String, store: Arc<dyn ShardStore>) {
        self.stores.insert(scheme, store);
    }

    /// Returns the store for a URL, with the scheme and the rest after `://`.
    pub(super) fn store_for_url<'a>(&self, url: &'a str) -> Option<(&dyn ShardStore, &'a str, &'a str)> {
        let (scheme, rest) = url.split_once("://")?;
        let other = || OTHER_SCHEMES.get().filter(|_| is_scheme(scheme) && !is_remote(url));
        self.stores.get(scheme).or_else(other).map(|store| (&**store, scheme, rest))
    }

    /// Checks the schemes.
    ///
    /// # Errors
    /// [`Error::Config`] if a scheme is not a URL scheme, or is `file`.
    pub(super) fn check(&self) -> Result<()> {
        match self.stores.keys().find(|name| !is_scheme(name)) {
            None => Ok(()),
            Some(name) => {
                let reason = format!(
                    "`{name}` is not the scheme of a store; expected lower-case letters, digits, `+`, `-` and `.`, \
                     other than `file`"
                );
                Err(Error::Config { setting: "store", reason })
            }
        }
    }
}

/// Returns whether a name is the scheme of a store.
fn is_scheme(name: &str) -> bool {
    let is_part = |next: char| next.is_ascii_lowercase() || next.is_ascii_digit() || "+-.".contains(next);
    name.starts_with(|first: char| first.is_ascii_lowercase()) && name.chars().all(is_part) && name != "file"
}
