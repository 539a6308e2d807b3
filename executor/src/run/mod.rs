//! A run of training on one rank: feed, pipeline, optimizer, checkpoints, figures, step by step.
//!
//! [`Rank::step`] is called by all ranks together, as are all methods that say so. Reports are equal on all ranks but for
//! their own clocks; rank 0's is the one to print. Measured times of modules are added up over ranks and go into the adaptive
//! correction of the plans ([`dflop_costmodel::correction`]): every rank learns the same tables, without asking.

mod build;
mod correction;
mod forecast;
mod rank;
mod report;
mod told;

pub use build::{build_stages, join};
pub use correction::StepTimes;
pub use forecast::Forecast;
pub use rank::{Rank, RankOptions};
pub use report::StepReport;

/// Configuration of a small run on CPU for `dflop train`, TOML.
pub const EXAMPLE_CONFIG: &str = include_str!("../../examples/train-cpu.toml");
