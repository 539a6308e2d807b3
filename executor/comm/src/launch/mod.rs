//! Starts the ranks of a job, or finds out which rank this process is.
//!
//! - [`identity_from_environment`] reads the rank that torchrun, Open MPI or Slurm assigned to this process
//! - [`launcher_from_environment`] names the launcher and the number of its ranks on this machine
//! - [`Launcher`] starts all ranks of a job on this machine
//! - [`StopSignals`] lets a rank, or a job in one process, end in order when it is asked to stop

mod environment;
mod host_list;
mod launcher;
mod machine_ranks;
mod orphan;
mod output;
mod signals;
mod status;

pub use environment::{FoundLauncher, identity_from_environment, launcher_from_environment};
pub use launcher::{JobOutcome, Launcher};
pub use orphan::{end_with_launcher, has_launcher};
pub use signals::StopSignals;
pub use status::RankStatus;
