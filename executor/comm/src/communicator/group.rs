//! Communicator members, with world ranks.

use crate::endpoint::Endpoint;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Communicator members.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) endpoint: Arc<Endpoint>,
    /// Distinguishes messages in different communicators.
    pub(super) id: u64,
    /// This rank in the communicator.
    pub(super) rank: usize,
    /// World rank for every rank in the communicator.
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
