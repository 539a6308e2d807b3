//! Dissemination barrier.

use super::Call;
use crate::communicator::group::Group;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::message::Buffer;

/// Waits until every rank has entered, in `ceil(log2(ranks))` rounds.
///
/// # Source
/// Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
pub(crate) fn barrier(group: &Group, call: Call) -> Result<()> {
    let (rank, size) = (group.rank, group.size());
    let mut distance = 1;
    while distance < size {
        let sending = call.start_send(group, (rank + distance) % size, Buffer::U8(Vec::new()))?;
        call.recv(group, (rank + size - distance) % size, Dtype::U8, 0)?;
        sending.finish()?;
        distance *= 2;
    }
    Ok(())
}
