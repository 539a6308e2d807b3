//! How the ranks of a job come to be: read from the environment of a launcher, or started here.
//!
//! - [`identity_from_environment`] says which rank this process is, as torchrun, Open MPI or Slurm set it
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
