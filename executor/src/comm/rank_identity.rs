//! Which rank this process is, and where the others are.

use super::rendezvous::JobToken;
use std::net::IpAddr;

/// A rank's place in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankIdentity {
    /// This rank, below `size`.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// This rank among those of its machine; chooses a device.
    pub local_rank: usize,
    /// Where the ranks find one another; none in a job of one.
    pub rendezvous: Option<RendezvousConfig>,
}

/// Where and with what secret the ranks of a job find one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousConfig {
    /// Name or address of the machine of rank 0.
    pub host: String,
    /// Port of the job's store there.
    pub port: u16,
    /// Secret of the job.
    pub token: Option<JobToken>,
    /// Whether the launcher hosts the store, not rank 0.
    pub is_hosted_by_launcher: bool,
    /// Address to listen on; by default the one by which this machine reaches the store.
    pub listen: Option<IpAddr>,
}

impl RankIdentity {
    /// A job of one process.
    #[must_use]
    pub fn single() -> Self {
        Self { rank: 0, size: 1, local_rank: 0, rendezvous: None }
    }
}
