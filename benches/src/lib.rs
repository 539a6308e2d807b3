//! Creates synthetic benchmark inputs, the same on every machine.
//!
//! Everything is drawn from [`random::Random`] with a fixed seed: sample [`shapes`] for the cost model,
//! [`profiles`] with measured times, partition problem [`instances`] for the balancer, [`archives`] and
//! [`images`] for the loader. Nothing is measured here; the benchmarks are in `benches/`, the loop to compare
//! with in `src/bin/bare_loop.rs`.

pub mod archives;
/// Partition problem families, shared with the balancer tests.
#[path = "../../balancer/tests/families/mod.rs"]
pub mod families;
pub mod images;
pub mod instances;
pub mod profiles;
pub mod random;
pub mod shapes;
