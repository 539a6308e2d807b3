//! Test case inputs and expected results.

use crate::api::Comm;
use crate::error::StepContext;
use crate::message::{Payload, even_parts};

pub(super) fn at(step: u64) -> StepContext {
    StepContext::step(step, "conformance")
}

/// Returns floats whose sum depends on the order, different on every rank.
#[must_use]
pub fn floats(rank: usize, elements: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32.wrapping_mul(rank as u32 + 1) | 1;
    let mut float = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state as f32 / u32::MAX as f32 - 0.5) * 10_f32.powi((state % 7) as i32 - 3)
    };
    (0..elements).map(|_| float()).collect()
}

/// Sums [`floats`] over all ranks in ring order: part `p` from rank `p + 1` on.
#[must_use]
pub fn ring_sum(size: usize, elements: usize) -> Vec<f32> {
    let inputs: Vec<_> = (0..size).map(|rank| floats(rank, elements)).collect();
    let parts = even_parts(elements, size);
    let owner = parts.iter().enumerate().flat_map(|(part, &length)| std::iter::repeat_n(part, length));
    let sum = |(index, part): (usize, usize)| {
        let term = |round: usize| inputs[(part + round) % size][index];
        (2..=size).map(term).fold(term(1), |sum, term| sum + term)
    };
    owner.enumerate().map(sum).collect()
}

/// Creates a message with one row.
///
/// # Panics
/// Never: one row can have any number of elements.
pub(super) fn row(elements: &[f32]) -> Payload {
    Payload::flat(elements.to_vec().into())
}

/// Keeps a rank in the job until all ranks are done.
pub(super) fn stay(comm: &dyn Comm) {
    comm.barrier(at(99)).expect("all ranks reach the end of the case");
}
