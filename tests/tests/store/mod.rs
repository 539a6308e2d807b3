//! Tests local shards that change, remote stores and the shard cache.

mod cache_processes;
mod changed_shards;
mod odd_servers;
mod own_store;
mod remote;
mod s3;
