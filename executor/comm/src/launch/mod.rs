//! Starts the ranks of a job, or finds out which rank this process is.
//!
//! - [`identity_from_environment`] reads the rank that torchrun, Open MPI or Slurm assigned to this process
//! - [`Launcher`] starts all ranks of a job on this machine

mod environment;
mod host_list;
mod launcher;
mod orphan;
mod output;
mod status;

pub use environment::identity_from_environment;
pub use launcher::{JobOutcome, Launcher};
pub use orphan::end_with_launcher;
pub use status::RankStatus;
