//! Members of a communicator, with the rank of each in the job.

use super::endpoint::Endpoint;
use super::error::{Error, Result};
use std::sync::Arc;

/// Members of a communicator.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) endpoint: Arc<Endpoint>,
    /// Distinguishes the messages of communicators.
    pub(super) id: u64,
    /// This rank in the communicator.
    pub(super) rank: usize,
    /// World rank of every rank of the communicator.
    pub(super) members: Vec<usize>,
}

impl Group {
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    pub(super) fn member(&self, rank: usize) -> Result<usize> {
        self.members.get(rank).copied().ok_or(Error::Rank { rank, size: self.size() })
    }
}
