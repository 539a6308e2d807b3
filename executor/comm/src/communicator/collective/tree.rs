//! Gathers a few numbers from every rank over the job tree, on the control connections.

use super::Call;
use crate::communicator::group::Group;
use crate::dtype::Dtype;
use crate::endpoint::tree;
use crate::error::Result;
use crate::message::Buffer;

/// Maximum number of values that a rank contributes to a message.
pub(crate) const NUMBERS_MAX: usize = 16;

/// Returns the numbers of all ranks, in rank order. No rank returns before all ranks have called it.
///
/// Every rank sends the numbers in its subtree to its parent, and the root sends all numbers back: two
/// messages per connection, each with at most [`NUMBERS_MAX`] numbers per rank in the job. The group must be
/// the complete job.
pub(crate) fn gather(group: &Group, call: Call, own: &[u64]) -> Result<Vec<u64>> {
    let (rank, size, width) = (group.rank, group.size(), own.len());
    let mut all = vec![0; width * size];
    all[width * rank..][..width].copy_from_slice(own);
    for child in tree::children(rank, size) {
        let ranks = tree::subtree(child, size);
        let numbers = receive(group, call, child, width * ranks.len())?;
        for (index, below) in ranks.into_iter().enumerate() {
            all[width * below..][..width].copy_from_slice(&numbers[width * index..][..width]);
        }
    }
    if let Some(parent) = tree::parent(rank) {
        let ranks = tree::subtree(rank, size);
        let numbers = ranks.into_iter().flat_map(|below| all[width * below..][..width].iter().copied());
        call.send_control(group, parent, Buffer::U64(numbers.collect()))?;
        all = receive(group, call, parent, width * size)?;
    }
    for child in tree::children(rank, size) {
        call.send_control(group, child, Buffer::U64(all.clone()))?;
    }
    Ok(all)
}

fn receive(group: &Group, call: Call, from: usize, elements: usize) -> Result<Vec<u64>> {
    match call.recv(group, from, Dtype::U64, elements)? {
        Buffer::U64(numbers) => Ok(numbers),
        _ => unreachable!("the header was checked"),
    }
}
