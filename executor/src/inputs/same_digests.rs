//! Compares digests from all ranks by sums, so that every rank finds the same answer with one exchange.
//!
//! Numbers are equal if and only if the square of their sum equals their count times the sum of their squares
//! (Cauchy and Schwarz). Digests are compared in 16-bit parts, whose sums stay exact.

/// Number of parts in a digest.
const PARTS: usize = 4;

/// Whether all ranks have the same digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SameDigests {
    Yes,
    No,
    /// A rank has none.
    Missing,
}

impl SameDigests {
    /// Returns the numbers that a rank contributes to the sum.
    pub(super) fn words(digest: Option<u64>) -> Vec<u64> {
        let mut words = vec![u64::from(digest.is_some())];
        let parts: [u64; PARTS] = std::array::from_fn(|part| digest.unwrap_or(0) >> (16 * part) & 0xffff);
        words.extend(parts);
        words.extend(parts.map(|part| part * part));
        words
    }

    /// Reads the sums over a number of ranks.
    pub(super) fn from_sums(sums: &[u64], ranks: usize) -> Self {
        let Some((&present, sums)) = sums.split_first() else { return Self::Missing };
        if present < ranks as u64 {
            return Self::Missing;
        }
        let (parts, squares) = sums.split_at(sums.len() / 2);
        let is_same = |(&sum, &square): (&u64, &u64)| {
            u128::from(sum) * u128::from(sum) == ranks as u128 * u128::from(square)
        };
        if parts.iter().zip(squares).all(is_same) { Self::Yes } else { Self::No }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(digests: &[Option<u64>]) -> SameDigests {
        let mut sums = vec![0; 1 + 2 * PARTS];
        for &digest in digests {
            sums.iter_mut().zip(SameDigests::words(digest)).for_each(|(sum, word)| *sum += word);
        }
        SameDigests::from_sums(&sums, digests.len())
    }

    #[test]
    fn digests_of_any_number_of_ranks_are_compared_bit_by_bit() {
        for digest in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef] {
            for ranks in [1, 2, 3, 1000] {
                let mut all = vec![Some(digest); ranks];
                assert_eq!(compare(&all), SameDigests::Yes);
                for bit in 0..64 {
                    all[ranks - 1] = Some(digest ^ (1 << bit));
                    let expected = if ranks == 1 { SameDigests::Yes } else { SameDigests::No };
                    assert_eq!(compare(&all), expected, "bit {bit} of {ranks} ranks");
                }
                all[0] = None;
                assert_eq!(compare(&all), SameDigests::Missing);
            }
        }
        // Sums that equal the sums of equal digests.
        assert_eq!(compare(&[Some(1), Some(3), Some(2)]), SameDigests::No);
        assert_eq!(compare(&vec![Some(u64::MAX); 1 << 16]), SameDigests::Yes, "no sum overflows");
    }
}
