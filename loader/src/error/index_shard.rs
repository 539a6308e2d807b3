//! TODO error::index_shard.

