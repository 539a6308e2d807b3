//! Broadcast over a binomial tree.

use super::Call;
use crate::communicator::group::Group;
use crate::error::Result;
use crate::message::{Buffer, Slice};

/// Copies the values on `root` to every rank, in `ceil(log2(ranks))` rounds.
pub(crate) fn broadcast(group: &Group, call: Call, root: usize, values: &mut Slice<'_>) -> Result<()> {
    let size = group.size();
    let place = (group.rank + size - root) % size;
    // positions are ranks rotated so that the root is 0
    let rank_of = |place: usize| (place + root) % size;
    // a position's lowest set bit is the round in which it receives; the root never receives
    let received_bit = if place == 0 { size.next_power_of_two() } else { 1 << place.trailing_zeros() };
    if place != 0 {
        let from = rank_of(place - received_bit);
        let buffer = call.recv(group, from, values.dtype(), values.elements())?;
        values.copy_in(0..values.elements(), &buffer);
        group.endpoint.mailbox.receive_buffers.give(buffer);
    }
    let mut sends = Vec::new();
    let mut bit = received_bit >> 1;
    while bit > 0 {
        if place + bit < size {
            let mut buffer = Buffer::zeros(values.dtype(), values.elements());
            values.copy_out(0..values.elements(), &mut buffer);
            sends.push(call.start_send(group, rank_of(place + bit), buffer)?);
        }
        bit >>= 1;
    }
    sends.iter().try_for_each(super::PendingSend::finish)
}
