//! Rank identity in a job, and the address where ranks meet.

use super::JobToken;
use std::net::IpAddr;

/// Rank identity of this process in a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankIdentity {
    /// This rank, below `size`.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Rank among the processes on this machine; selects a device.
    pub local_rank: usize,
    /// Rendezvous for the ranks; `None` in a single-rank job.
    pub rendezvous: Option<RendezvousConfig>,
}

/// Address and secret with which job ranks find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousConfig {
    /// Host name or address of the rank 0 machine.
    pub host: String,
    /// Rendezvous server port on that machine.
    pub port: u16,
    /// Shared job secret.
    pub token: Option<JobToken>,
    /// Whether the launcher hosts the rendezvous server instead of rank 0.
    pub is_hosted_by_launcher: bool,
    /// Address to listen on; by default the address by which this machine reaches the rendezvous server.
    pub listen: Option<IpAddr>,
}

impl RankIdentity {
    /// Returns the identity in a single-process job.
    #[must_use]
    pub fn single() -> Self {
        Self { rank: 0, size: 1, local_rank: 0, rendezvous: None }
    }
}
