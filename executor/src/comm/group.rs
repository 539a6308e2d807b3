//! Members of a communicator, with the rank of each in the job.

use super::endpoint::Endpoint;
use super::error::{Error, Result};
use std::sync::Arc;

/// Who belongs to a communicator.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) endpoint: Arc<Endpoint>,
    /// Tells the messages of communicators apart.
    pub(super) id: u64,
    /// This rank, in the communicator.
    pub(super) rank: usize,
    /// Rank here to rank of the job.
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
