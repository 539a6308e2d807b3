//! Makes synthetic inputs for the benchmarks, the same on every machine.
//!
//! Everything is drawn from [`random::Random`] with a fixed seed: [`shapes`] of samples for the cost model,
//! [`profiles`] of measured times, [`instances`] of partition problems for the balancer, [`archives`] and
//! [`images`] for the loader. Nothing is measured here; the benchmarks are in `benches/`, the loop to compare
//! with in `src/bin/bare_loop.rs`.

pub mod archives;
/// Families of partition problems that the balancer's tests share.
#[path = "../../balancer/tests/families/mod.rs"]
pub mod families;
pub mod images;
pub mod instances;
pub mod profiles;
pub mod random;
pub mod shapes;
