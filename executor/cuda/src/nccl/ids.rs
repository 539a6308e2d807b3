//! Passes new communicator ids to the member ranks, over the job's control plane.

use dflop_comm::{Comm, StepContext};

use super::functions::{ID_BYTES, UniqueId};

/// Number of words in an id.
const NUMBERS: usize = ID_BYTES / 8;

/// Exchanges ids: every rank contributes `count` slots and receives the ids from all ranks.
///
/// - `own`: ids from this rank, at most `count`
/// - returns a function that looks up an id by rank and index
pub(super) fn exchange(
    host: &dyn Comm,
    at: StepContext,
    own: &[UniqueId],
    count: usize,
) -> dflop_comm::Result<impl Fn(usize, usize) -> UniqueId + use<>> {
    let mut numbers = vec![0_u64; NUMBERS * count];
    for (id, place) in own.iter().zip(numbers.chunks_mut(NUMBERS)) {
        for (bytes, number) in id.0.chunks(8).zip(place) {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            *number = u64::from_le_bytes(word);
        }
    }
    let all = host.gather(at, &numbers)?;
    Ok(move |rank: usize, index: usize| {
        let mut id = UniqueId([0; ID_BYTES]);
        let place = &all[NUMBERS * (count * rank + index)..][..NUMBERS];
        for (bytes, number) in id.0.chunks_mut(8).zip(place) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        id
    })
}
