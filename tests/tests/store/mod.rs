//! Tests remote stores and the shard cache.

mod cache_processes;
mod remote;
mod s3;
