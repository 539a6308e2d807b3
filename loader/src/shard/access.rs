//! Decides what names of shards may reach: stores, commands, and files outside a list's directory.

use crate::store::Stores;

/// What the names of shards may reach.
///
/// A name that is given to [`expand_shards_in`](super::expand_shards_in) was chosen by the caller; a name
/// that was read from a shard list was chosen by whoever wrote the list. The default trusts neither with a
/// shell: `pipe:` must be allowed, and holds for given names alone.
#[derive(Debug, Clone, Default)]
pub struct ShardAccess {
    pub(super) stores: Stores,
    pub(super) are_pipes_allowed: bool,
    pub(super) is_outside_allowed: bool,
    pub(super) are_variables_kept: bool,
}

impl ShardAccess {
    /// Reaches remote shards through `stores`.
    #[must_use]
    pub fn new(stores: &Stores) -> Self {
        Self { stores: stores.clone(), ..Self::default() }
    }

    /// Sets whether a given name `pipe:COMMAND` runs the command; without it, such a name is refused. Names
    /// in lists never run commands.
    #[must_use]
    pub fn allow_pipe(self, are_pipes_allowed: bool) -> Self {
        Self { are_pipes_allowed, ..self }
    }

    /// Sets whether the environment is kept from stores, for patterns that were read from a file: one that
    /// puts `${NAME}` into the URL of a store, which would learn the value, is refused. A variable at the
    /// start of a pattern may hold the start of a URL.
    #[must_use]
    pub fn keep_variables(self, are_variables_kept: bool) -> Self {
        Self { are_variables_kept, ..self }
    }

    /// Sets whether a shard list may name shards outside its own directory, and remote ones.
    #[must_use]
    pub fn allow_outside(self, is_outside_allowed: bool) -> Self {
        Self { is_outside_allowed, ..self }
    }
}

impl From<&Stores> for ShardAccess {
    fn from(stores: &Stores) -> Self {
        Self::new(stores)
    }
}
