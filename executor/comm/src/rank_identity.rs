//! Identity of a rank in its job, and the address where the ranks meet.

use super::rendezvous::JobToken;
use std::net::IpAddr;

/// Rank of this process in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankIdentity {
    /// This rank, below `size`.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Rank among the processes of this machine; selects a device.
    pub local_rank: usize,
    /// Meeting point of the ranks; `None` in a job of one rank.
    pub rendezvous: Option<RendezvousConfig>,
}

/// Address and secret with which the ranks of a job find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousConfig {
    /// Name or address of the machine of rank 0.
    pub host: String,
    /// Port of the rendezvous server on that machine.
    pub port: u16,
    /// Shared secret of the job.
    pub token: Option<JobToken>,
    /// Whether the launcher hosts the rendezvous server instead of rank 0.
    pub is_hosted_by_launcher: bool,
    /// Address to listen on; by default the one by which this machine reaches the rendezvous server.
    pub listen: Option<IpAddr>,
}

impl RankIdentity {
    /// Identity in a job of one process.
    #[must_use]
    pub fn single() -> Self {
        Self { rank: 0, size: 1, local_rank: 0, rendezvous: None }
    }
}
