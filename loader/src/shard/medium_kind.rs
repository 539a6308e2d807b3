//! TODO shard::medium_kind.

