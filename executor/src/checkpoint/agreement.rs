//! Lets all ranks of a job succeed or fail together.

use crate::error::{Error, Result};
use dflop_comm::{Comm, StepContext};

/// Number of words in which a rank reports its outcome: 0 for success, then the reported values.
pub(super) const WORDS: usize = 6;

/// Returns this rank's value if all ranks succeeded; fails on all ranks if any rank failed.
pub(super) fn agree_on_success<T>(comm: &dyn Comm, step: u64, action: &str, own: Result<T>) -> Result<T> {
    let mut value = None;
    let words = own.map(|own| {
        value = Some(own);
        [0; WORDS]
    });
    agree(comm, step, action, words)?;
    Ok(value.unwrap_or_else(|| unreachable!("ranks agree only if this one succeeded")))
}

/// Exchanges the words of all ranks, which start with 0 for success; fails on all ranks if any rank failed.
pub(super) fn agree(
    comm: &dyn Comm,
    step: u64,
    action: &str,
    own: Result<[u64; WORDS]>,
) -> Result<Vec<[u64; WORDS]>> {
    let mut words = vec![0; WORDS * comm.size()];
    let row = &mut words[WORDS * comm.rank()..][..WORDS];
    match &own {
        Ok(own) => row.copy_from_slice(own),
        Err(_) => row[0] = 1,
    }
    let gathered = comm.all_gather(
        StepContext::step(step, action),
        words.as_mut_slice().into(),
        &vec![WORDS; comm.size()],
    );
    own?;
    gathered?;
    let all = words.as_chunks::<WORDS>().0.to_vec();
    match all.iter().position(|row| row[0] != 0) {
        Some(rank) => Err(Error::NotSaved { step, rank }),
        None => Ok(all),
    }
}
