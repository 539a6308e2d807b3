//! Starts job ranks, or finds the rank of this process.
//!
//! - [`identity_from_environment`] reads the rank that torchrun, Open MPI or Slurm assigned to this process
//! - [`launcher_from_environment`] names the launcher and the number of launcher ranks on this machine
//! - [`Launcher`] starts all ranks in a job on this machine
//! - [`StopSignals`] lets a rank, or a single-process job, end in order when it is asked to stop

mod environment;
mod launcher;

pub use environment::{FoundLauncher, identity_from_environment, launcher_from_environment};
pub use launcher::{JobOutcome, Launcher, RankStatus, StopSignals, end_with_launcher, has_launcher};
