//! Stores from user code, by URL scheme.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use object_store::ObjectStore;

use crate::error::{BoxError, Error, Result};

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
        self.stores.get(scheme).map(|store| (&**store, scheme, rest))
    }

    /// Checks the schemes.
    ///
    /// # Errors
    /// [`Error::Config`] if a scheme is not a URL scheme, or is `file`.
    pub(super) fn check(&self) -> Result<()> {
        let is_scheme = |name: &str| {
            name.starts_with(|first: char| first.is_ascii_lowercase())
                && name.chars().all(|next| {
                    next.is_ascii_lowercase() || next.is_ascii_digit() || ['+', '-', '.'].contains(&next)
                })
        };
        match self.stores.keys().find(|name| !is_scheme(name) || *name == "file") {
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
