//! Hashes a plan to 64 bits for comparison between ranks.
//!
//! Every rank computes the whole plan independently; equal digests mean that all ranks computed the same
//! plan. The algorithm never changes: FNV-1a with 64 bits over little-endian words.

use std::fmt;

const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// Digest of a plan: step, DP rank, microbatch and item ids, in order.
///
/// Displayed as 16 hexadecimal digits.
///
/// # Source
/// FNV-1a: Fowler, Noll, Vo and Eastlake, "The FNV Non-Cryptographic Hash Algorithm", IETF
/// draft-eastlake-fnv, 64-bit parameters.
///
/// # Examples
/// ```
/// let mut digest = dflop_balancer::PlanDigest::new();
/// digest.add(0, 0, 0, [4, 8, 15]);
/// digest.add(0, 0, 1, [16, 23, 42]);
/// assert_eq!(digest.to_string(), "122afd806c22f68a");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct PlanDigest(u64);

impl PlanDigest {
    /// Starts with an empty plan.
    #[must_use]
    pub fn new() -> Self {
        Self(OFFSET_BASIS)
    }

    /// Adds a microbatch: the words `step, dp_rank, microbatch, number of items`, then the item ids.
    ///
    /// The number of items distinguishes plans that differ only in where a microbatch ends.
    pub fn add<I>(&mut self, step: u64, dp_rank: usize, microbatch: usize, items: I)
    where
        I: IntoIterator<Item = u64, IntoIter: ExactSizeIterator>,
    {
        let items = items.into_iter();
        for word in [step, dp_rank as u64, microbatch as u64, items.len() as u64] {
            self.add_word(word);
        }
        items.for_each(|item| self.add_word(item));
    }

    /// Returns the digest as a number.
    #[must_use]
    pub fn to_u64(self) -> u64 {
        self.0
    }

    fn add_word(&mut self, word: u64) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(PRIME);
        }
    }
}

impl Default for PlanDigest {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for PlanDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_hash_as_the_standard_says() {
        let mut digest = PlanDigest::new();
        assert_eq!(digest.to_u64(), 0xcbf2_9ce4_8422_2325);
        digest.add_word(u64::from_le_bytes(*b"foobar\0\0"));
        let expected =
            b"foobar\0\0".iter().fold(OFFSET_BASIS, |h, b| (h ^ u64::from(*b)).wrapping_mul(PRIME));
        assert_eq!(digest.to_u64(), expected);
    }

    #[test]
    fn a_moved_boundary_changes_the_digest() {
        let digest = |sizes: [usize; 2]| {
            let mut digest = PlanDigest::new();
            digest.add(3, 1, 0, vec![7; sizes[0]]);
            digest.add(3, 1, 1, vec![7; sizes[1]]);
            digest
        };
        assert_ne!(digest([1, 2]), digest([2, 1]));
    }

    /// Digests are compared between versions: this value never changes.
    #[test]
    fn digest_of_a_plan_is_the_recorded_one() {
        let mut digest = PlanDigest::new();
        digest.add(1000, 3, 1, [u64::MAX, 0, 1 << 40]);
        digest.add(1000, 3, 2, []);
        assert_eq!(digest.to_string(), "88b47c60325dc586");
    }

    #[test]
    fn an_empty_microbatch_counts() {
        let mut digest = PlanDigest::new();
        digest.add(0, 0, 0, []);
        assert_ne!(digest, PlanDigest::new());
    }
}
