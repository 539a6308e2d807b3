//! Divides the elements in a collective into a part per rank.

use crate::error::{Error, Result};
use std::ops::Range;

/// Divides `elements` into a part per rank; the first parts are longer by one if the division has a
/// remainder.
///
/// # Panics
/// If there are no ranks.
///
/// # Examples
/// ```
/// assert_eq!(dflop_comm::even_parts(7, 3), [3, 2, 2]);
/// ```
#[must_use]
pub fn even_parts(elements: usize, ranks: usize) -> Vec<usize> {
    assert!(ranks > 0, "no ranks");
    (0..ranks).map(|rank| elements / ranks + usize::from(rank < elements % ranks)).collect()
}

/// Returns the range for every part.
pub(crate) fn ranges(parts: &[usize], ranks: usize, elements: usize) -> Result<Vec<Range<usize>>> {
    // parts come from the caller: an overflow must not pass as a valid sum
    let sum = parts.iter().try_fold(0_usize, |sum, &part| sum.checked_add(part)).unwrap_or(usize::MAX);
    if parts.len() != ranks || sum != elements {
        return Err(Error::Parts { parts: parts.len(), sum, size: ranks, elements });
    }
    let mut begin = 0;
    let range = |&part: &usize| {
        begin += part;
        begin - part..begin
    };
    Ok(parts.iter().map(range).collect())
}
