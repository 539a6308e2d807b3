//! How the ranks of a job come to be: read from the environment of a launcher, or started here.
//!
//! - [`Layout::from_environment`] says which rank this process is, as torchrun, Open MPI or Slurm set it
//! - [`Launcher`] starts all ranks of a job on this machine

mod environment;
mod host_list;
mod layout;
mod local;
mod orphan;
mod output;
mod status;

pub use layout::{Layout, Rendezvous};
pub use local::{Launcher, Outcome};
pub use orphan::end_with_launcher;
pub use status::{EXIT_SECONDARY, RankStatus};
