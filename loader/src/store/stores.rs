//! Provides access to remote shards: holds settings, connections, the request limit and the cache.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use object_store::ObjectStore;
use tokio::sync::Semaphore;

use super::cache::Cache;
#[cfg(feature = "remote")]
use super::connect::hub_token;
use super::connect::{Retries, connect};
#[cfg(feature = "remote")]
use super::http::HttpServer;
use super::local::ReadMode;
use super::redact::redact_name;
use super::retry::Wait;
use super::settings::StoresBuilder;
#[cfg(feature = "remote")]
use super::url::ObjectName;
use super::url::{RemoteUrl, StoreKind, is_remote};
use crate::error::Result;

/// Time for which a store may fail before a report.
const UNTIL_REPORT: Duration = Duration::from_secs(10);
/// Minimum time between two such reports.
const BETWEEN_REPORTS: Duration = Duration::from_secs(30);

/// Cheap handle to remote stores; clones share connections, limits and cache.
#[derive(Debug, Clone)]
pub struct Stores {
    pub(super) shared: Arc<Shared>,
}

/// State shared by all clones of a handle.
pub(super) struct Shared {
    pub(super) settings: StoresBuilder,
    pub(super) requests: Semaphore,
    pub(super) cache: Option<Arc<Cache>>,
    /// Store, and thus connection pool, per bucket or server; separate for stores that retry themselves.
    connected: Mutex<HashMap<(String, bool), Arc<dyn ObjectStore>>>,
    /// HTTP client per server and user.
    #[cfg(feature = "remote")]
    servers: Mutex<HashMap<String, Arc<HttpServer>>>,
    /// Commit per repository and revision on a hub.
    #[cfg(feature = "remote")]
    pub(super) commits: Mutex<HashMap<String, String>>,
    /// Roots whose servers have answered with a range.
    served_ranges: Mutex<HashSet<String>>,
    /// Time of the last report about a store that does not answer.
    reported: Mutex<Option<Instant>>,
}

impl fmt::Debug for Shared {
    /// Omits the store roots, which contain credentials.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Shared").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn has_served_ranges(&self, root: &str) {
        let mut served = self.served_ranges.lock().expect("no holder panics");
        if !served.contains(root) {
            served.insert(root.to_owned());
        }
    }

    /// Warns about a store that has not answered for a while, but not about every request that waits for it.
    pub(super) fn report_wait(&self, url: &str, wait: &Wait) {
        let mut reported = self.reported.lock().expect("no holder panics");
        if wait.elapsed < UNTIL_REPORT || reported.is_some_and(|time| time.elapsed() < BETWEEN_REPORTS) {
            return;
        }
        *reported = Some(Instant::now());
        let (reason, seconds) = (&wait.reason, self.settings.retry.retry_seconds);
        tracing::warn!("`{}` is asked again, for {seconds} s in all: {reason}", redact_name(url));
    }

    pub(super) fn are_ranges_served(&self, root: &str) -> bool {
        self.served_ranges.lock().expect("no holder panics").contains(root)
    }
}

impl StoresBuilder {
    /// Checks the settings; opens the cache's directory. No store is contacted.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if a number is zero or too large,
    /// [`Error::Storage`](crate::Error::Storage) if the cache's directory cannot be used.
    pub fn build(self) -> Result<Stores> {
        self.check()?;
        Stores::new(self)
    }
}

impl Stores {
    /// Creates a builder with default settings.
    #[must_use]
    pub fn builder() -> StoresBuilder {
        StoresBuilder::default()
    }

    pub(super) fn new(settings: StoresBuilder) -> Result<Self> {
        let cache =
            settings.cache.clone().map(|cache| Cache::open(cache, settings.read)).transpose()?.map(Arc::new);
        let requests = Semaphore::new(settings.requests_max);
        let shared = Shared {
            settings,
            requests,
            cache,
            connected: Mutex::default(),
            #[cfg(feature = "remote")]
            servers: Mutex::default(),
            #[cfg(feature = "remote")]
            commits: Mutex::default(),
            served_ranges: Mutex::default(),
            reported: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the client for a server and a user.
    #[cfg(feature = "remote")]
    pub(super) fn server(&self, url: &RemoteUrl) -> Result<Arc<HttpServer>, String> {
        let ObjectName::Address(address) = &url.object else {
            return Err(format!("`{}` is no server", redact_name(&url.root)));
        };
        let mut servers = self.shared.servers.lock().expect("no holder panics");
        if let Some(server) = servers.get(&url.root) {
            return Ok(server.clone());
        }
        let token = if url.kind == StoreKind::Hub { hub_token() } else { None };
        let timeout = self.shared.settings.request_timeout;
        let server = Arc::new(HttpServer::new(address, url.kind, timeout, token.as_deref())?);
        Ok(servers.entry(url.root.clone()).or_insert(server).clone())
    }

    /// Returns whether a name is the URL of a remote shard.
    pub(crate) fn is_remote(&self, url: &str) -> bool {
        is_remote(url) || self.shared.settings.registry.store_for_url(url).is_some()
    }

    /// Parses a remote shard URL.
    ///
    /// # Errors
    /// The reason why the URL is invalid.
    pub(super) fn parse(&self, url: &str) -> Result<RemoteUrl, String> {
        match self.shared.settings.registry.store_for_url(url) {
            Some((_, scheme, rest)) => RemoteUrl::parse_bucket(StoreKind::Registered, scheme, rest),
            None => RemoteUrl::parse(url),
        }
    }

    pub(super) fn connect(&self, url: &RemoteUrl, retries: Retries) -> Result<Arc<dyn ObjectStore>, String> {
        let registered = self.shared.settings.registry.store_for_url(&url.root);
        let key = (url.root.clone(), matches!(retries, Retries::ByStore(_)) && registered.is_none());
        let connected = || self.shared.connected.lock().expect("no holder panics");
        if let Some(store) = connected().get(&key) {
            return Ok(store.clone());
        }
        // No lock is held meanwhile: user code may panic, or use other stores.
        let store = match registered {
            Some((registered, ..)) => registered.open(&url.root).map_err(|error| error.to_string())?,
            None => connect(url, self.shared.settings.request_timeout, retries)?,
        };
        // If several threads connected at the same time, all use the first thread's store.
        Ok(connected().entry(key).or_insert(store).clone())
    }

    /// Uses `store` for everything below `root`.
    #[cfg(test)]
    pub(crate) fn insert(&self, root: &str, store: &Arc<dyn ObjectStore>) {
        for has_retries in [false, true] {
            self.shared.connected.lock().unwrap().insert((root.to_owned(), has_retries), store.clone());
        }
    }

    pub(crate) fn cache(&self) -> Option<&Arc<Cache>> {
        self.shared.cache.as_ref()
    }

    /// Returns how local and cached shards are read.
    pub(crate) fn read_mode(&self) -> ReadMode {
        self.shared.settings.read
    }

    /// Returns the number of bytes per request when a whole shard is read.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.shared.settings.chunk_bytes
    }
}

impl PartialEq for Stores {
    /// Returns whether both handles share the same state.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for Stores {}

impl Default for Stores {
    /// Returns the default stores, which all shards share unless other stores are set: default settings, no
    /// cache.
    fn default() -> Self {
        static SHARED: OnceLock<Stores> = OnceLock::new();
        SHARED.get_or_init(|| StoresBuilder::default().build().expect("the defaults are valid")).clone()
    }
}
