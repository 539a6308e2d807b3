//! Decides what shard names may reach: stores, commands, and files outside a list's directory.

use crate::store::Stores;

/// Access permissions for shard names.
///
/// A name that is passed to [`expand_shards_in`](super::expand_shards_in) was chosen by the caller; a name
/// that was read from a shard list was chosen by whoever wrote the list. The default trusts neither with a
/// shell: `pipe:` must be allowed explicitly, and only applies to passed names.
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

    /// Sets whether a passed name `pipe:COMMAND` runs the command; by default such a name is rejected. Names
    /// in lists never run commands.
    #[must_use]
    pub fn allow_pipe(self, are_pipes_allowed: bool) -> Self {
        Self { are_pipes_allowed, ..self }
    }

    /// Sets whether environment variables are hidden from stores, for patterns that were read from a file. A
    /// pattern that puts `${NAME}` into a store URL is then rejected, because the store would learn the
    /// value. A variable at the start of a pattern may contain the start of a URL.
    #[must_use]
    pub fn keep_variables(self, are_variables_kept: bool) -> Self {
        Self { are_variables_kept, ..self }
    }

    /// Sets whether a shard list may name remote shards and shards outside the list's directory.
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
