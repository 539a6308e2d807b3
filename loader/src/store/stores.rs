//! The handle through which remote shards are reached: settings, connections, the bound on requests, the cache.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use object_store::ObjectStore;
use tokio::sync::Semaphore;

use super::cache::Cache;
use super::connect::{Retries, connect};
use super::object::RemoteObject;
use super::settings::StoresBuilder;
use super::url::RemoteUrl;
use crate::error::{Error, Result};

/// Reaches remote shards; a cheap handle of what all its clones share.
#[derive(Debug, Clone)]
pub struct Stores {
    pub(super) shared: Arc<Shared>,
}

/// What the clones of a handle share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: StoresBuilder,
    pub(super) requests: Semaphore,
    pub(super) cache: Option<Arc<Cache>>,
    /// One store, and so one pool of connections, for each bucket or server; those that retry by themselves apart.
    connected: Mutex<HashMap<(String, bool), Arc<dyn ObjectStore>>>,
    /// Roots whose servers have answered with a range.
    served_ranges: Mutex<HashSet<String>>,
}

impl Shared {
    pub(super) fn has_served_ranges(&self, root: &str) {
        let mut served = self.served_ranges.lock().expect("no holder panics");
        if !served.contains(root) {
            served.insert(root.to_owned());
        }
    }

    pub(super) fn are_ranges_served(&self, root: &str) -> bool {
        self.served_ranges.lock().expect("no holder panics").contains(root)
    }
}

impl Stores {
    pub(super) fn new(settings: StoresBuilder) -> Result<Self> {
        let cache = settings.cache.clone().map(Cache::open).transpose()?.map(Arc::new);
        let requests = Semaphore::new(settings.requests_max);
        let (connected, served_ranges) = Default::default();
        Ok(Self { shared: Arc::new(Shared { settings, requests, cache, connected, served_ranges }) })
    }

    /// Returns the object that a URL names, without asking for it.
    ///
    /// # Errors
    /// [`Error::ShardList`] if the URL is malformed or its store cannot be configured.
    pub(crate) fn object(&self, url: &Arc<str>) -> Result<RemoteObject> {
        let invalid = |reason| Error::ShardList { pattern: url.to_string(), reason };
        let parsed = RemoteUrl::parse(url).map_err(invalid)?;
        let store = self.connect(&parsed, Retries::ByReader).map_err(invalid)?;
        Ok(RemoteObject::new(self.clone(), url.clone(), parsed, store))
    }

    pub(super) fn connect(&self, url: &RemoteUrl, retries: Retries) -> Result<Arc<dyn ObjectStore>, String> {
        let mut connected = self.shared.connected.lock().expect("no holder panics");
        let key = (url.root.clone(), matches!(retries, Retries::ByStore(_)));
        if let Some(store) = connected.get(&key) {
            return Ok(store.clone());
        }
        let store = connect(url, self.shared.settings.request_timeout, retries)?;
        connected.insert(key, store.clone());
        Ok(store)
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

    /// Bytes of one request where a shard is read whole.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.shared.settings.chunk_bytes
    }
}
