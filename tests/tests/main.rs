//! Runs all end-to-end tests, in a single program so that it links once.

mod balanced;
mod executor;
mod fuzz;
mod index;
mod inputs;
mod media;
mod order;
mod plan;
mod repo;
mod shard;
mod store;
mod stream;
