//! Which rank this process is, and where the others are.

use super::environment;
use crate::comm::{Result, Token};
use std::net::IpAddr;

/// A rank's place in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// This rank, below `size`.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// This rank among those of its machine; chooses a device.
    pub local_rank: usize,
    /// Where the ranks find one another; none in a job of one.
    pub rendezvous: Option<Rendezvous>,
}

/// Where and with what secret the ranks of a job find one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// Name or address of the machine of rank 0.
    pub host: String,
    /// Port of the job's store there.
    pub port: u16,
    /// Secret of the job.
    pub token: Option<Token>,
    /// Whether the launcher hosts the store, not rank 0.
    pub is_hosted_elsewhere: bool,
    /// Address to listen on; by default the one by which this machine reaches the store.
    pub listen: Option<IpAddr>,
}

impl Layout {
    /// A job of one process.
    #[must_use]
    pub fn single() -> Self {
        Self { rank: 0, size: 1, local_rank: 0, rendezvous: None }
    }

    /// Reads the environment of this process.
    ///
    /// The first of these that is there counts; without any, the job has one rank:
    ///
    /// | launcher | variables |
    /// | --- | --- |
    /// | torchrun and alike | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
    /// | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST` |
    ///
    /// `MASTER_ADDR` counts with all of them; without it, Slurm's first host is taken, and 127.0.0.1 where all
    /// ranks of Open MPI are on one machine. The store listens on port `DFLOP_PORT`; without it on
    /// `MASTER_PORT` + 1, because the store of torchrun itself has `MASTER_PORT`; without that on 29501, plus
    /// the last three digits of Slurm's job number. `DFLOP_LISTEN` is an address to listen on (on
    /// the machine of rank 0, whose own name may mean a loopback address there, also that of the store),
    /// `DFLOP_JOB_TOKEN` the secret, and `DFLOP_STORE=launcher` says that the launcher hosts the store.
    ///
    /// # Errors
    /// [`Error::Environment`](crate::comm::Error::Environment) for a variable that is missing beside the others
    /// of its launcher, or makes no sense.
    pub fn from_environment() -> Result<Self> {
        environment::read(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }
}
