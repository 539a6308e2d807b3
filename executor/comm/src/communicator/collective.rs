//! Collectives built from sends and receives, each with a fixed summation order.
//!
//! Sums and parts go around a ring: every rank sends to the next rank and receives from the previous rank,
//! at the same time. Part `p` starts at rank `p + 1`, and each rank adds its elements to the incoming
//! elements, so the summation order depends only on `p` and the number of ranks. The received buffer is sent
//! next: only the first part on each rank is copied.
//!
//! # Source
//! Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

use std::ops::Range;
use std::sync::Arc;

use crate::dtype::Dtype;
use crate::endpoint::{self, Endpoint, PendingSend};
use crate::error::{Error, Result, StepContext};
use crate::message::{Buffer, Header, Op, PayloadShape, Slice, even_parts, ranges};

/// One collective: all ranks use the same number, and receivers check the rest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) op: Op,
    pub(super) number: u64,
    pub(super) at: StepContext,
    /// Whether the collective runs while the caller computes.
    pub(super) is_overlapped: bool,
}

impl Call {
    fn header(&self, group: &Group, dtype: Dtype, elements: usize) -> Header {
        let shape = PayloadShape::flat(dtype, elements);
        Header { comm: group.id, op: self.op, tag: self.number, at: self.at, shape }
    }

    fn start_send(&self, group: &Group, to: usize, buffer: Buffer) -> Result<PendingSend> {
        let header = self.header(group, buffer.dtype(), buffer.elements());
        group.endpoint.start_send(group.members[to], header, buffer, self.is_overlapped)
    }

    /// Sends a few numbers to a neighbor in the job tree.
    fn send_control(&self, group: &Group, to: usize, buffer: Buffer) -> Result<()> {
        let header = self.header(group, buffer.dtype(), buffer.elements());
        group.endpoint.send_control(group.members[to], header, buffer)
    }

    fn recv(&self, group: &Group, from: usize, dtype: Dtype, elements: usize) -> Result<Buffer> {
        group.endpoint.recv(group.members[from], self.header(group, dtype, elements), self.is_overlapped)
    }
}

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
    sends.iter().try_for_each(PendingSend::finish)
}

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
    for child in endpoint::children(rank, size) {
        let ranks = endpoint::subtree(child, size);
        let numbers = receive(group, call, child, width * ranks.len())?;
        for (index, below) in ranks.into_iter().enumerate() {
            all[width * below..][..width].copy_from_slice(&numbers[width * index..][..width]);
        }
    }
    if let Some(parent) = endpoint::parent(rank) {
        let ranks = endpoint::subtree(rank, size);
        let numbers = ranks.into_iter().flat_map(|below| all[width * below..][..width].iter().copied());
        call.send_control(group, parent, Buffer::U64(numbers.collect()))?;
        all = receive(group, call, parent, width * size)?;
    }
    for child in endpoint::children(rank, size) {
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

/// Sums all elements over all ranks.
pub(crate) fn all_reduce(group: &Group, call: Call, values: &mut Slice<'_>) -> Result<()> {
    let parts = even_parts(values.elements(), group.size());
    let parts = ranges(&parts, group.size(), values.elements())?;
    let own = reduce(group, call, values, &parts)?;
    circulate(group, call, values, &parts, own)
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
    sends.iter().try_for_each(PendingSend::finish)
}

/// Gathers the parts of all ranks on every rank.
pub(crate) fn all_gather(
    group: &Group,
    call: Call,
    values: &mut Slice<'_>,
    parts: &[Range<usize>],
) -> Result<()> {
    let own = copied_part(group, values, &parts[group.rank]);
    circulate(group, call, values, parts, Some(own))
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
fn circulate(
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
