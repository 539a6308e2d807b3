//! Ring collectives: every rank sends to the next rank and receives from the previous rank, at the same time.
//!
//! Part `p` starts at rank `p + 1`, and each rank adds its elements to the incoming elements, so the
//! summation order depends only on `p` and the number of ranks. The received buffer is sent next: only the
//! first part on each rank is copied.
//!
//! # Source
//! Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

use std::ops::Range;

use super::{Call, Group};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::message::{Buffer, Slice, even_parts, ranges};

/// Sums all elements over all ranks.
pub(crate) fn all_reduce(group: &Group, call: Call, values: &mut Slice<'_>) -> Result<()> {
    let parts = even_parts(values.elements(), group.size());
    let parts = ranges(&parts, group.size(), values.elements())?;
    let own = reduce(group, call, values, &parts)?;
    gather(group, call, values, &parts, own)
}

/// Sums, and leaves part `r` of the sum on rank `r`.
///
/// The ring sums even parts, as in [`all_reduce`], so that every element has the same bits. For uneven parts,
/// each rank then sends the summed elements to the ranks that own them.
pub(crate) fn reduce_scatter(
    group: &Group,
    call: Call,
    values: &mut Slice<'_>,
    parts: &[Range<usize>],
) -> Result<()> {
    let even = even_parts(values.elements(), group.size());
    let even = ranges(&even, group.size(), values.elements())?;
    if let Some(own) = reduce(group, call, values, &even)? {
        group.endpoint.mailbox.receive_buffers.give(own);
    }
    if even == parts { Ok(()) } else { exchange(group, call, values, &even, parts) }
}

/// Moves elements from the ranks that hold them to the ranks that own them.
fn exchange(
    group: &Group,
    call: Call,
    values: &mut Slice<'_>,
    have: &[Range<usize>],
    get: &[Range<usize>],
) -> Result<()> {
    let common = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
    let others = || (0..group.size()).filter(|&other| other != group.rank);
    let mut sends = Vec::new();
    for to in others() {
        let part = common(&have[group.rank], &get[to]);
        if !part.is_empty() {
            sends.push(call.start_send(group, to, copied_part(group, values, &part))?);
        }
    }
    for from in others() {
        let part = common(&have[from], &get[group.rank]);
        if !part.is_empty() {
            let incoming = call.recv(group, from, values.dtype(), part.len())?;
            values.copy_in(part, &incoming);
            group.endpoint.mailbox.receive_buffers.give(incoming);
        }
    }
    sends.iter().try_for_each(super::PendingSend::finish)
}

/// Gathers the parts of all ranks on every rank.
pub(crate) fn all_gather(
    group: &Group,
    call: Call,
    values: &mut Slice<'_>,
    parts: &[Range<usize>],
) -> Result<()> {
    let own = copied_part(group, values, &parts[group.rank]);
    gather(group, call, values, parts, Some(own))
}

/// Leaves part `rank` of the sum in `values`; also returns it as a buffer, if there is more than one rank.
fn reduce(
    group: &Group,
    call: Call,
    values: &mut Slice<'_>,
    parts: &[Range<usize>],
) -> Result<Option<Buffer>> {
    let (rank, size) = (group.rank, group.size());
    if matches!(values.dtype(), Dtype::U8 | Dtype::Bf16) {
        return Err(Error::NotSummable { dtype: values.dtype() });
    }
    if size == 1 {
        return Ok(None);
    }
    let mut outgoing = copied_part(group, values, &parts[(rank + size - 1) % size]);
    // in round `r` part `rank - r` passes through, and in the last round the rank's own part
    for round in 2..=size {
        let part = &parts[(rank + size - round % size) % size];
        let sending = call.start_send(group, (rank + 1) % size, outgoing)?;
        let before = (rank + size - 1) % size;
        let mut incoming = call.recv(group, before, values.dtype(), part.len())?;
        values.add_to(part.clone(), &mut incoming)?;
        // at most one message per rank is in flight
        sending.finish()?;
        outgoing = incoming;
    }
    values.copy_in(parts[rank].clone(), &outgoing);
    Ok(Some(outgoing))
}

/// Sends `own`, the part on this rank, around the ring.
fn gather(
    group: &Group,
    call: Call,
    values: &mut Slice<'_>,
    parts: &[Range<usize>],
    own: Option<Buffer>,
) -> Result<()> {
    let (rank, size) = (group.rank, group.size());
    let Some(mut outgoing) = own else { return Ok(()) };
    for round in 1..size {
        let part = &parts[(rank + size - round) % size];
        let sending = call.start_send(group, (rank + 1) % size, outgoing)?;
        let incoming = call.recv(group, (rank + size - 1) % size, values.dtype(), part.len())?;
        values.copy_in(part.clone(), &incoming);
        sending.finish()?;
        outgoing = incoming;
    }
    group.endpoint.mailbox.receive_buffers.give(outgoing);
    Ok(())
}

fn copied_part(group: &Group, values: &Slice<'_>, part: &Range<usize>) -> Buffer {
    let mut copy = group.endpoint.mailbox.receive_buffers.take(values.dtype(), part.len());
    values.copy_out(part.clone(), &mut copy);
    copy
}
